"""What the documents show works: Python blocks are run, command lines are parsed by the parsers that they are for."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from folders import make_folder

from pipeline.cli import make_parser
from trainer.config import parse as parse_training

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "data" / "README.md"]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Words of every command line in the documents' bash blocks."""
    for document in DOCUMENTS:
        for block in blocks(document, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield [word for word in words if word != "..."]


def test_the_documents_have_commands() -> None:
    assert len(list(commands())) >= 15


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    if words[0] == "sbatch":
        words = shlex.split(words[-1].replace("$SLURM_ARRAY_TASK_ID", "1"))
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        variables = re.findall(r"^([A-Z]+) +\?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word.split("=")[0] in variables for word in words[2:])
    elif "trainer/main.py" in words:
        arguments = words[words.index("trainer/main.py") + 1 :]
        config = parse_training([*arguments, *([] if "--data" in arguments else ["--data", "data/x.zarr"])])
        assert config.data
    elif program.startswith("python") and words[1:3] == ["-m", "pipeline"]:
        make_parser().parse_args(words[3:])
    elif program.startswith("python") and words[1] == "-m":
        assert (ROOT / (words[2].replace(".", "/") + ".py")).exists()
    elif program.startswith("python"):
        assert (ROOT / words[1]).exists()
    else:
        assert program in ("git", "pip", "source", "torchrun"), words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the blocks expect in the folder where they run."""
    make_folder(tmp_path, {"photos": {"cat": 70, "dog": 70}})
    np.savez(tmp_path / "x.npz", images=np.zeros((5, 30, 40, 3), np.uint8), labels=np.array([0, 1, 0, 1, -2]))
    return tmp_path


def run(code: str, folder: Path) -> str:
    (folder / "block.py").write_text(code)
    command = [sys.executable, "block.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_python_blocks_run(folder: Path) -> None:
    convert, train, source = blocks(ROOT / "README.md", "python")
    run(convert, folder)
    run(train, folder)
    run(source, folder)
    assert (folder / "x.zarr" / "train" / "zarr.json").exists()


def test_the_reader_in_the_specification_runs(folder: Path) -> None:
    from pipeline import convert

    convert(folder / "photos", folder / "data" / "digits-32.zarr", size=32, n_jobs=1, quiet=True)
    code, _ = blocks(ROOT / "docs" / "format.md", "python")
    assert "140 samples" in run(code, folder)
    assert "has shape (32, 32, 3)" in run(code, folder)


def test_the_commands_for_own_images_run(folder: Path) -> None:
    """As they stand there, with SRC and DST replaced."""
    text = (ROOT / "README.md").read_text()
    block = re.findall(r"^```bash\n(.*?)^```$", text.partition("## Your own images")[2], re.MULTILINE | re.DOTALL)[0]
    lines = [
        shlex.split(line, comments=True)
        for line in block.replace("SRC", "photos").replace("DST", "own.zarr").splitlines()
    ]
    assert [words[3] for words in lines] == ["convert", "info", "report", "verify"]
    for words in lines:
        done = subprocess.run([sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)
    assert "every check passed" in done.stdout
    assert (folder / "own.html").exists()
