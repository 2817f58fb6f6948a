import json
import subprocess
import sys
from pathlib import Path

import pytest
from folders import make_folder, same_tree

from pipeline.cli import main


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
    assert "train: 10 samples" in capsys.readouterr().out
    assert main(["info", str(store), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["splits"]["train"]["bytes"] == 10 * 16 * 16 * 3
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
        (["convert"], 2, "required: src, dst; see `python -m pipeline convert --help`"),
        (["convert", "nowhere", "x.zarr"], 2, "nowhere"),
        (["convert", "{folder}", "x.zarr", "--sise", "5"], 2, "--sise"),
        (["convert", "{folder}", "x.zarr", "--size", "big"], 2, "--size big: must be whole numbers of pixels"),
        (["convert", "{folder}", "x.zarr", "--fit", "zoom"], 2, "zoom"),
        (["convert", "{folder}", "x.zarr", "--n-jobs", "many"], 2, "--n-jobs"),
        (["convert", "{folder}", "x.zarr", "--source", "zip"], 2, "zip"),
        (["convert", "{folder}", "x.zarr", "--split", "test"], 2, "test"),
        (["transmogrify"], 2, "transmogrify"),
        ([], 2, "see `python -m pipeline --help`"),
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
    for flag in ("--size", "--on-error", "--part", "--limit-per-class", "example: "):
        assert flag in text
