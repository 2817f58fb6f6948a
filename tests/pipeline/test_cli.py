import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from folders import make_folder, same_tree

from pipeline import convert
from pipeline.arguments import parse
from pipeline.cli import _what_is_left, main
from pipeline.errors import Error, UsageError


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"), {"train": {"a": 6, "b": 4}, "val": {"a": 3, "b": 2}})


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store") / "a.zarr"
    done = run("convert", str(folder), str(store), "--size", "16", "--n-jobs", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{store}: train, val\n"
    assert "train: 10 images in" in done.stderr
    assert "images/s" in done.stderr
    return store


def test_commands_succeed(folder: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(store), "--against", str(folder), "--quiet"]) == 0
    assert "every check passed" in capsys.readouterr().out
    assert main(["info", str(store)]) == 0
    output = capsys.readouterr().out
    assert "train: 10 samples" in output
    assert "small, so that 64 jobs" in output
    assert main(["info", str(store), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["splits"]["train"]["bytes"] == 10 * (16 * 16 * 3 + 16 + 4)  # each image is a chunk with an index
    assert info["splits"]["train"]["resizer"] == info["splits"]["val"]["resizer"]
    assert main(["info"]) == 0
    assert "resizer: " in capsys.readouterr().out


def test_several_sizes(folder: Path, tmp_path: Path, store: Path) -> None:
    arguments = ["convert", str(folder), str(tmp_path / "{size}.zarr"), "--size", "8", "--size", "16", "--quiet"]
    assert main([*arguments, "--n-jobs", "1"]) == 0
    assert sorted(child.name for child in tmp_path.iterdir()) == ["16.zarr", "8.zarr"]
    assert same_tree(store, tmp_path / "16.zarr")


def test_relative_paths(folder: Path, store: Path, tmp_path: Path) -> None:
    assert run("convert", str(folder), "a.zarr", "--size", "16", "--n-jobs", "2", cwd=tmp_path).returncode == 0
    assert same_tree(store, tmp_path / "a.zarr")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["convert"], 2, "required: SRC, DST; see `python -m pipeline convert --help`"),
        (["convert", "{folder}"], 2, "required: DST; see `python -m pipeline convert --help`"),
        (["verify"], 2, "required: STORE; see `python -m pipeline verify --help`"),
        (["copy", "x.zarr"], 2, "required: DST; see `python -m pipeline copy --help`"),
        (["convert", "nowhere", "x.zarr"], 2, "nowhere"),
        (
            ["convert", "{folder}", "x.zarr", "--sise", "5"],
            2,
            "arguments: --sise 5 (did you mean --size?)",
        ),
        (["convert", "{folder}", "x.zarr", "--siz", "5"], 2, "--size"),
        (["convert", "{folder}", "x.zarr", "--n_jobs=5"], 2, "--n-jobs"),
        (["--quiet", "verify", "x.zarr", "--sampel", "5"], 2, "--sample"),
        (["verify", "x.zarr", "--source", "tar"], 2, "--source tar: the kind of what --against SRC compares with"),
        (["convert", "{folder}", "x.zarr", "--size", "big"], 2, "--size: invalid int value: 'big'"),
        (["convert", "{folder}", "x.zarr", "--fit", "zoom"], 2, "zoom"),
        (["convert", "{folder}", "x.zarr", "--n-jobs", "many"], 2, "--n-jobs"),
        (["convert", "{folder}", "x.zarr", "--source", "zip"], 2, "zip"),
        (["convert", "{folder}", "x.zarr", "--split", "test"], 2, "test"),
        (["convert", "{folder}", "x.zarr", "--part", "0/4"], 2, "--part 0/4: I must be from 1 to N"),
        (["convert", "{folder}", "x.zarr", "--quiet", "--verbose"], 2, "--quiet and --verbose contradict each other"),
        (["transmogrify"], 2, "transmogrify"),
        (["--size", "8", "convert", "{folder}", "x.zarr"], 2, "--size: flags stand after the command"),
        (["verify", "x.zarr"], 2, "no store there"),
        (["info", "{folder}"], 2, "not a store"),
        (["commit", "x.zarr"], 2, "nothing to commit there"),
    ],
)
def test_errors_are_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([argument.format(folder=folder) for argument in arguments]) == code
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert list(tmp_path.iterdir()) == []


def test_a_bad_sample_ends_with_one(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "source", {"train": {"a": 3}})
    good = (source / "train" / "a" / "001.jpg").read_bytes()
    (source / "train" / "a" / "001.jpg").write_bytes(good[:-45])
    arguments = ["convert", str(source), str(tmp_path / "a.zarr"), "--size", "8", "--n-jobs", "1", "--quiet"]
    assert main(arguments) == 1
    assert (
        "1 bad sample, nothing committed (first: train/a/001.jpg: the image data ends too early"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--on-error", "skip"]) == 0


def test_commit_names_missing_parts(
    folder: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = str(tmp_path / "a.zarr")
    arguments = ["convert", str(folder), dst, "--size", "16", "--n-jobs", "1", "--quiet"]
    assert main([*arguments, "--part", "2/3"]) == 0
    assert main(["commit", dst]) == 1
    assert "of --part 1/3, 3/3; run that again" in capsys.readouterr().err
    for part in ("1/3", "3/3"):
        assert main([*arguments, "--part", part]) == 0
    assert same_tree(store, tmp_path / "a.zarr")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run("verify", str(tmp_path / "x"), "--debug")
    assert done.returncode == 2 or done.returncode == 1
    assert "Traceback" in done.stderr


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("python -m pipeline 0.")
    text = run("convert", "--help").stdout
    for flag in ("--size", "--on-error", "--part", "--limit-per-class", "--quiet", "--verbose", "--debug"):
        assert flag in text


@pytest.mark.parametrize("command", ["info", "verify"])
def test_nobody_reads_the_output(store: Path, command: str) -> None:
    """As in `verify STORE | true`: what wasn't said is no success."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", command, str(store)], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 141
    assert "Error" not in done.stderr


@pytest.mark.parametrize("command", ["convert", "commit", "info", "verify", "copy", "report", "warm", "bench"])
def test_every_command_explains_itself(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert f"examples:\n  python -m pipeline {command} " in text
    assert "--quiet" in text
    assert "--debug" in text


def test_the_installed_command_names_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/efficient-imagenet", "verify"])
    assert main() == 2
    assert "required: STORE; see `efficient-imagenet verify --help`" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["commit", "--help"])
    assert "  efficient-imagenet commit data/" in capsys.readouterr().out


def test_shells_complete_commands_flags_and_paths(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = run("--print_completion", "shtab-bash").stdout
    (tmp_path / "complete.bash").write_text(script)
    (tmp_path / "photos").mkdir()
    asking = f"""
    source {tmp_path / "complete.bash"}
    ask() {{
      COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
      _shtab_efficient_imagenet
      echo "${{COMPREPLY[@]}}"
    }}
    ask efficient-imagenet ver
    ask efficient-imagenet convert --exif
    ask efficient-imagenet convert --fit st
    ask efficient-imagenet convert pho
    """
    done = subprocess.run(["bash", "-c", asking], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split("\n") == ["verify", "--exif-transpose", "stretch", "photos", ""], done.stderr


def test_completion_without_its_package() -> None:
    hidden = "import sys; sys.modules['shtab'] = None; from pipeline.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", hidden, "--print_completion", "shtab-bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("needs a package: pip install shtab\n")


def test_quiet_says_nothing_but_errors(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(folder), str(tmp_path / "a.zarr"), "--size", "8", "--n-jobs", "1", "--quiet"]
    (folder / "readme.txt").touch()
    assert main(arguments) == 0
    assert main(arguments) == 0
    assert main(["copy", str(tmp_path / "a.zarr"), str(tmp_path / "b.zarr"), "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert main([*arguments, "--fit", "pad"]) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_verbose_names_chunks_and_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "source", {"val": {"a": 3}})
    (source / "val" / "a" / "001.jpg").write_bytes(b"")
    arguments = ["convert", str(source), str(tmp_path / "a.zarr"), "--size", "8", "--n-jobs", "1", "--on-error", "skip"]
    assert main([*arguments, "--verbose"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("val: chunk", "val: bad"))]
    assert len(lines) == 4
    for number, bad in enumerate((0, 1, 0)):
        pattern = rf"val: chunk {number} of 3: 1 image in [\d.]+ s \([\d,]+ images/s\), {bad} bad"
        assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1
    (named,) = (line for line in lines if ": bad:" in line)
    assert named == f"val: bad: a/001.jpg: the file has no bytes ({source}/val/a/001.jpg)"


def test_a_stopped_command_says_what_is_left(folder: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        return _what_is_left(parse(arguments))

    convert = ["convert", str(folder), str(tmp_path / "a.zarr"), "--size", "8", "--n-jobs", "1"]
    assert said(*convert) == "no chunk was finished yet: rerun the same command"
    assert said("verify", str(tmp_path / "a.zarr")) == "run the same command again"
    assert said(*convert, "--dry-run") == "run the same command again"
    assert said(*convert, "--size", "0") == "run the same command again"
    assert _what_is_left(None) == "run the same command again"
    assert main([*convert, "--part", "1/16", "--split", "train", "--quiet"]) == 0
    assert said(*convert) == "1 finished chunk is kept: rerun the same command to go on"
    assert main([*convert, "--part", "2/16", "--split", "train", "--quiet"]) == 0
    assert said(*convert) == "2 finished chunks are kept: rerun the same command to go on"
    several = [*convert, "--size", "16"]
    several[2] = str(tmp_path / "{size}.zarr")
    assert said(*several) == "no chunk was finished yet: rerun the same command"
    assert main([*convert, "--quiet"]) == 0
    assert said(*convert) == "finished splits are kept: rerun the same command to go on"


def test_nothing_asked_for_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    text = capsys.readouterr().err
    for command in ("convert", "verify", "train", "report-runs"):
        assert f"    {command} " in text


def test_quiet_and_debug_may_stand_before_the_command(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [str(folder), str(tmp_path / "a.zarr"), "--size", "8", "--n-jobs", "1"]
    assert main(["--quiet", "convert", *options]) == 0
    assert capfd.readouterr() == ("", "")
    with pytest.raises(Error):
        main(["--debug", "convert", *options, "--fit", "pad"])


def test_the_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: python -m pipeline convert SRC DST [options]")
    for default in ("256", "crop", "bicubic", "loky", "stop", "100.0"):
        assert f"(default: {default})" in text


@pytest.mark.parametrize(
    ("command", "module"),
    [("train", "trainer.main"), ("predict", "trainer.predict"), ("report-runs", "trainer.report.__main__")],
)
def test_commands_of_the_trainer_get_their_arguments(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=lambda arguments: seen.append(arguments) or 7))
    assert main(["--debug", command, "x", "--lr", "1"]) == 7
    assert seen == [["--debug", "x", "--lr", "1"]]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([command, "x"]) == (7 if command == "report-runs" else 2)
    if command != "report-runs":
        assert "efficient-imagenet[train]" in capsys.readouterr().err


def test_every_option_is_a_flag_and_a_keyword(tmp_path: Path) -> None:
    """The flags, the help and the keyword arguments have one source, and numpy's integers are integers."""
    text = run("convert", "--help").stdout
    keywords = [*inspect.signature(convert).parameters][2:]
    assert len(keywords) > 25
    for name in keywords:
        assert f"--{name.replace('_', '-')}" in text
    samples = [(np.full((4, 4, 3), i, np.uint8), i % 2) for i in range(6)]
    for name, number in (("a", int), ("b", np.int16)):
        convert(
            samples,
            tmp_path / f"{name}-{{size}}.zarr",
            size=[number(4), number(2)],
            n_jobs=number(1),
            seed=number(3),
            max_pixels=number(99),
            limit_per_class=number(2),
            val_per_class=number(1),
            val_fraction=np.float32(0.125) if name == "b" else 0.125,
            exif_transpose=np.bool_(True) if name == "b" else True,
            quiet=True,
        )
    assert same_tree(tmp_path / "a-4.zarr", tmp_path / "b-4.zarr")
    with pytest.raises(UsageError, match="--seed 1.5: must be a whole number"):
        convert(samples, tmp_path / "c.zarr", seed=1.5)
    with pytest.raises(UsageError, match="--chunk-mb big: must be a number"):
        convert(samples, tmp_path / "c.zarr", chunk_mb="big")
    with pytest.raises(UsageError, match="--size 8: must be a whole number"):
        convert(samples, tmp_path / "c.zarr", size="8")
    with pytest.raises(TypeError, match="sise"):
        convert(samples, tmp_path / "c.zarr", sise=8)


def test_names_from_elsewhere_never_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Class names, keys and the store's own path with escape codes, a bell and a newline: all that is said of them."""
    odd = "a\x1b[2J\x07\nb\u202e"
    source = make_folder(tmp_path / odd / "source", {odd: {"c": 3, odd: 3}})
    (source / odd / odd / "001.jpg").write_bytes(b"")
    store = tmp_path / odd / f"{odd}.zarr"
    convert_it = ["convert", str(source), str(store), "--size", "8", "--n-jobs", "1", "--verbose"]
    assert main(convert_it) == 1
    assert main([*convert_it, "--on-error", "skip"]) == 0
    assert main(["info", str(store)]) == 0
    assert main(["info", str(store), "--json"]) == 0
    assert main(["verify", str(store), "--against", str(source)]) == 0
    next((source / odd / odd).glob("*0.jpg")).unlink()
    assert main(["verify", str(store), "--against", str(source)]) == 1
    assert main(["report", str(store)]) == 0
    assert main(["copy", str(store), f"{store}.copy"]) == 0
    assert main(["copy", str(store), f"{store}.copy"]) == 2
    output = capsys.readouterr()
    for text in (output.out, output.err):
        assert set("\x1b\x07\u202e").isdisjoint(text)
    assert not [line for line in (output.out + output.err).splitlines() if line.startswith("b\\u202e")]
