"""What a conversion that skips bad samples says about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import make_folder

from pipeline import convert
from pipeline.conversion.commit import BadSamplesError, commit


def convert_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, truncated: int, empty: int, quiet: bool
) -> tuple[list[str], str]:
    """The lines about bad samples of a split of five images, and the end of such a line."""
    source, store = make_folder(tmp_path / "source", {"train": {"cat": 5}}), tmp_path / "a.zarr"
    images = sorted((source / "train" / "cat").iterdir())
    for path in images[:truncated]:
        path.write_bytes(path.read_bytes()[:-45])
    for path in images[truncated : truncated + empty]:
        path.write_bytes(b"")
    convert(source, store, size=8, n_jobs=1, on_error="skip", quiet=quiet)
    lines = [line for line in capsys.readouterr().err.splitlines() if "errors.jsonl" in line]
    return lines, f"; listed in {store}.errors.jsonl)"


def test_skipped_samples_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, end = convert_some(tmp_path, capsys, truncated=2, empty=1, quiet=False)
    assert lines == [f"train: 3 of 5 images are bad and left out (2 truncated, 1 empty{end}"]


def test_quiet_means_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = convert_some(tmp_path, capsys, truncated=0, empty=1, quiet=True)
    assert lines == []


def test_nothing_readable_is_a_warning_always(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, end = convert_some(tmp_path, capsys, truncated=1, empty=4, quiet=True)
    assert lines == [f"warning: train: none of 5 images could be read (4 empty, 1 truncated{end}"]


def test_commit_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store = make_folder(tmp_path / "source", {"train": {"cat": 5}}), tmp_path / "a.zarr"
    next(iter((source / "train" / "cat").iterdir())).write_bytes(b"")
    with pytest.raises(BadSamplesError):
        convert(source, store, size=8, n_jobs=1, quiet=True)
    commit(store, on_error="skip")
    said = capsys.readouterr().err
    assert f"train: 1 of 5 images is bad and left out (1 empty; listed in {store}.errors.jsonl)" in said
