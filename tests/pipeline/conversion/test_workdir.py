"""Where a conversion may write: nothing that it didn't make is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import make_folder, tree

from pipeline import convert
from pipeline.conversion.names import store_paths
from pipeline.conversion.workdir import Workspace
from pipeline.errors import UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path, {"photos": {"cat": 3, "dog": 2}}) / "photos"


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(UsageError) as caught:
        convert(*args, size=16, n_jobs=1, quiet=True, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_foreign_work_folder_is_left_alone(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "a.zarr.work" / "mine" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("keep")
    assert "a.zarr.work: exists and is not a work folder" in refusal(source, tmp_path / "a.zarr")
    assert mine.read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr.work", "photos"]


def test_a_source_named_like_the_work_folder_is_kept(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    named = source.rename(tmp_path / "a.zarr.work")
    assert "in its work folder" in refusal(named, tmp_path / "a.zarr")
    assert tree(named) == before


def test_an_empty_work_folder_is_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.zarr.work").mkdir()
    convert(source, tmp_path / "a.zarr", size=16, n_jobs=1, quiet=True)
    assert not (tmp_path / "a.zarr.work").exists()


def test_overwrite_deletes_no_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("keep")
    assert "a.txt: exists and is not a folder" in refusal(source, tmp_path / "a.txt", overwrite=True)
    assert (tmp_path / "a.txt").read_text() == "keep"


def test_overwrite_deletes_nothing_through_a_link(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a.zarr", size=16, n_jobs=1, quiet=True)
    (tmp_path / "link.zarr").symlink_to("a.zarr")
    assert "a link, through which --overwrite deletes nothing" in refusal(
        source, tmp_path / "link.zarr", overwrite=True
    )
    assert (tmp_path / "a.zarr" / "train").exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../../evil", "/evil", ".hidden", "__x", "runs", "lock", "a\0b"]
)
def test_names_that_are_no_split(source: Path, tmp_path: Path, name: str) -> None:
    assert "can't be a split's name" in refusal(source, tmp_path / "a.zarr", split=name)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("dst", "words"),
    [
        ("s3://bucket/x.zarr", "convert to a local folder"),
        ("/", "not a usable name"),
        ("photos/cat/0.jpg/x.zarr", "is not a folder"),
        ("nowhere.zarr", "a link that leads nowhere"),
    ],
)
def test_unusable_destinations(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dst: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere.zarr").symlink_to("gone")
    next((source / "cat").iterdir()).rename(source / "cat" / "0.jpg")
    assert words in refusal(source, dst)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nowhere.zarr", "photos"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"chunk_mb": 0}, "--chunk-mb 0"),
        ({"chunk_mb": float("inf")}, "--chunk-mb inf: must be more than 0"),
        ({"chunk_mb": float("nan")}, "--chunk-mb nan: must be more than 0"),
        ({"max_pixels": 0}, "--max-pixels 0"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
    ],
)
def test_the_wrong_flag_is_named(source: Path, tmp_path: Path, flags: dict[str, float], words: str) -> None:
    assert words in refusal(source, tmp_path / "a.zarr", **flags)


def test_an_empty_src_is_not_the_current_folder(tmp_path: Path) -> None:
    assert "SRC is empty" in refusal("", tmp_path / "a.zarr")


@pytest.mark.parametrize(
    ("name", "works"),
    [("n" * 225, True), ("n" * 226, False), ("é" * 113, False), ("n" * 256 + "/a", False), ("n/" * 1900 + "a", False)],
)
def test_names_that_would_be_too_long_are_refused_at_the_start(tmp_path: Path, name: str, works: bool) -> None:
    if works:
        (path,) = store_paths(tmp_path / name, [8])
        Workspace(path).errors.with_name(f"{path.name}.errors.jsonl.tmp-0123456789ab").touch()
    else:
        with pytest.raises(UsageError, match="too long; choose a shorter DST"):
            store_paths(tmp_path / name, [8])
