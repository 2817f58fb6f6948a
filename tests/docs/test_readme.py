"""The Python blocks of the README and of the specification run; help for tests of other pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from folders import make_folder

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "data" / "README.md"]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


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
