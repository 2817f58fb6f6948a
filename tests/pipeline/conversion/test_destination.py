"""What is at DST and beside it: nothing foreign is deleted or run; what can't work is found before the first image."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import make_folder, same_tree, tree

from pipeline import convert, open_store
from pipeline.conversion import chunk_writer, preflight, workdir, worker
from pipeline.conversion.commit import commit
from pipeline.conversion.names import Part
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, UsageError
from pipeline.store import atomic
from pipeline.store.writer import publish


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "source", {"train": {"cat": 3, "dog": 2}, "val": {"cat": 1, "dog": 1}})


def run(source: Any, store: Path, **options: Any) -> Any:
    return convert(source, store, **{"size": 16, "n_jobs": 1, "quiet": True, **options})


# Overwriting


@pytest.mark.parametrize("root", ["{", "{}", '{"attributes": {"format": "efficient-imagenet", "format_version": 99}}'])
def test_overwrite_under_a_damaged_root_keeps_other_splits(source: Path, tmp_path: Path, root: str) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    (store / "zarr.json").write_text(root)
    before = tree(store)
    with pytest.raises(Error):
        run(source, store, split="val", overwrite=True)
    assert tree(store) == before
    (store / "train" / "zarr.json").unlink()  # a split nevertheless
    before = tree(store)
    with pytest.raises(Error):
        run(source, store, split="val", overwrite=True)
    assert tree(store) == before


def test_overwrite_beside_a_damaged_split(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    good = tree(store)
    (store / "train" / "zarr.json").write_text("{")
    run(source, store, split="val", overwrite=True)
    assert {**tree(store), "train/zarr.json": good["train/zarr.json"]} == good


def test_overwrite_of_all_splits_takes_a_damaged_root(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    good = tree(store)
    (store / "zarr.json").write_text("{")
    run(source, store, overwrite=True)
    assert tree(store) == good


def test_foreign_files_in_a_store_stay(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    (store / "notes.txt").write_text("keep")
    make_folder(store, {"photos": {"mine": 2}})
    run(source, store, size=24, overwrite=True)
    assert open_store(store).geometry["size"] == 24
    assert (store / "notes.txt").read_text() == "keep"
    assert len(list((store / "photos" / "mine").iterdir())) == 2
    (store / "val" / "notes.txt").write_text("keep")
    before = tree(store)
    with pytest.raises(UsageError, match=r"val/notes.txt: no conversion wrote that"):
        run(source, store, size=24, overwrite=True)
    assert tree(store) == before


def test_a_split_that_was_none_is_not_deleted(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    run(source, store, split="train")
    make_folder(store, {"val": {"mine": 2}})
    before = tree(store)
    with pytest.raises(UsageError, match="no conversion wrote that"):
        run(source, store, overwrite=True)
    assert tree(store) == before


@pytest.mark.parametrize("inside", ["photos", "train", "a.tar"])
def test_a_source_in_dst_is_refused(source: Path, tmp_path: Path, inside: str) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    if inside == "a.tar":
        shutil.make_archive(str(store / "a"), "tar", source)
    elif inside == "photos":
        shutil.copytree(source, store / "photos")
    before = tree(store)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(UsageError, match="inside DST"):
            run(store / inside, store, **options)
    assert tree(store) == before


def test_other_software_is_found_before_the_deletion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    before = tree(store)
    monkeypatch.setattr("pipeline.conversion.api.software_versions", lambda: {"numpy": "0.1"})
    with pytest.raises(Error, match="train was made with"):
        run(source, store, split="val", overwrite=True)
    assert tree(store) == before


def test_room_is_checked_before_the_deletion(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    before = tree(store)
    monkeypatch.setattr(preflight, "free_space", lambda folder: (20_000, 10_000))
    with pytest.raises(Error, match="are needed and 20,000 are free"):
        run(source, store, size=256, overwrite=True)
    assert tree(store) == before
    with pytest.raises(Error, match="are needed and 20,000 are free"):
        run(source, tmp_path / "b.zarr")
    monkeypatch.setattr(preflight, "folder_bytes", lambda folder: 10**6)  # what is deleted makes room
    with pytest.raises(Error, match="are needed and 20,000 are free"):  # but not on this disk
        run(source, store, overwrite=True)
    assert not (store / "train").exists()


def test_a_dry_run_says_when_it_will_not_fit(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "free_space", lambda folder: (20_000, 10_000))
    run(source, tmp_path / "a.zarr", dry_run=True)
    assert "are needed and 20,000 are free" in capsys.readouterr().err
    assert not (tmp_path / "a.zarr.work").exists()


# Room


def test_a_part_counts_the_chunks_of_all_parts(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def listen(wanted: Any) -> None:
        asked.append(sum(need.num_files for need in wanted))

    monkeypatch.setattr("pipeline.conversion.run.check_space", listen)
    run(source, tmp_path / "a.zarr")
    run(source, tmp_path / "b.zarr", part="1/2")
    run(source, tmp_path / "b.zarr", part="2/2")
    assert asked[0] == asked[1] > asked[2]


@pytest.mark.parametrize("count", [3, 300])
def test_the_room_that_is_asked_for_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Blocks on the disk while the split is committed, when most is there: chunks, receipts, arrays twice."""
    source = make_folder(tmp_path / "source", {"train": {"cat": count, "dog": 2}})
    asked, used = [], []

    def listen(wanted: Any) -> None:
        asked.append(sum(need.num_bytes for need in wanted))

    def measure(staged: Path, final: Path) -> None:
        paths = list((tmp_path / "a.zarr.work").rglob("*"))
        used.append(sum(path.lstat().st_blocks * 512 for path in paths))
        publish(staged, final)

    monkeypatch.setattr("pipeline.conversion.run.check_space", listen)
    monkeypatch.setattr("pipeline.conversion.commit.publish", measure)
    run(source, tmp_path / "a.zarr")
    assert used[0] <= asked[0] < 3 * used[0]


def test_the_room_for_images_in_memory_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get them by a file."""
    asked = []
    monkeypatch.setattr("pipeline.conversion.run.check_space", lambda wanted: asked.extend(wanted))
    run([(np.zeros((400, 500, 3), np.uint8), 0)] * 10, tmp_path / "a.zarr", size=4)
    assert sum(need.num_bytes for need in asked) > 10 * 400 * 500 * 3


# Another file system


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a tmpfs isn't permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_mounted_or_linked_dst_is_refused_at_once(source: Path, tmp_path: Path, disk: Path) -> None:
    (disk / "store").mkdir()
    (tmp_path / "link").symlink_to(disk / "store")
    for dst in (disk, tmp_path / "link"):
        with pytest.raises(UsageError, match="on another file system"):
            run(source, dst)
        assert not (tmp_path / f"{dst.name}.work").exists()
    assert list((disk / "store").iterdir()) == []
    run(source, disk / "a.zarr")
    (tmp_path / "here").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "here")
    run(source, tmp_path / "near")
    assert same_tree(tmp_path / "here", disk / "a.zarr")


def test_a_bind_mount_of_the_same_disk_is_refused_at_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "dst").mkdir()
    command = ["mount", "--bind", tmp_path / "elsewhere", tmp_path / "dst"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting isn't permitted here")
    try:
        with pytest.raises(UsageError, match="on another file system"):
            run(source, tmp_path / "dst")
    finally:
        subprocess.run(["umount", "-l", tmp_path / "dst"], check=True)


# The work folder


def begin(source: Path, store: Path) -> Path:
    run(source, store, part="1/2")
    return Workspace(store).path


def test_work_folders_are_private(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        work = begin(source, tmp_path / "a.zarr")
        assert work.stat().st_mode & 0o777 == 0o700
        work.chmod(0o755)  # as earlier versions made them
        run(source, tmp_path / "a.zarr", part="1/2")
        assert work.stat().st_mode & 0o777 == 0o700
        run(source, tmp_path / "a.zarr", part="2/2")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a.zarr").rglob("*") if path.is_dir()} == {0o775}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to give a folder away")
@pytest.mark.parametrize("command", ["convert", "part", "commit"])
def test_a_work_folder_of_somebody_else_is_refused(source: Path, tmp_path: Path, command: str) -> None:
    work = begin(source, tmp_path / "a.zarr")
    os.chown(work, 12345, 12345)
    refused(source, tmp_path / "a.zarr", command, "belongs to another user")


@pytest.mark.parametrize("command", ["convert", "part", "commit"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_work_folder_that_others_may_write_is_refused(source: Path, tmp_path: Path, command: str, mode: int) -> None:
    begin(source, tmp_path / "a.zarr").chmod(mode)
    refused(source, tmp_path / "a.zarr", command, "others may write there")


@pytest.mark.parametrize("command", ["convert", "part", "commit"])
@pytest.mark.parametrize("place", ["new", "train/receipts/0.json", "train/split", "commit.lock", ".root"])
def test_links_in_a_work_folder_are_refused(source: Path, tmp_path: Path, command: str, place: str) -> None:
    target = make_folder(tmp_path / "precious", {"a": {"b": 1}})
    work = begin(source, tmp_path / "a.zarr")
    if (work / place).is_dir():
        shutil.rmtree(work / place)
    (work / place).unlink(missing_ok=True)
    (work / place).symlink_to(target)
    before = tree(target)
    refused(source, tmp_path / "a.zarr", command, "a link in a work folder")
    assert tree(target) == before


def refused(source: Path, store: Path, command: str, words: str) -> None:
    before = sorted(str(path) for path in Workspace(store).path.rglob("*"))
    with pytest.raises(UsageError, match=words):
        if command == "commit":
            commit(store)
        else:
            run(source, store, part="2/2" if command == "part" else None)
    assert sorted(str(path) for path in Workspace(store).path.rglob("*")) == before
    assert not store.exists()


def test_a_file_system_that_keeps_no_modes_is_taken(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as exFAT: every folder looks as if all may write there, also a new one."""
    stat = os.stat

    def all_the_same(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = stat(path, *args, **kwargs)
        if ".work" not in os.fspath(path) and not os.path.basename(os.fspath(path)).startswith("tmp"):
            return found
        return os.stat_result((found.st_mode | 0o777, *found[1:4], 12345, *found[5:]))

    work = begin(source, tmp_path / "a.zarr")
    work.chmod(0o777)
    monkeypatch.setattr(workdir.os, "stat", all_the_same)
    workspace = Workspace(tmp_path / "a.zarr")
    with workspace.hold(shared=False, needs_locks=False):
        pass


def test_nothing_of_an_earlier_run_is_unpickled(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers load has the name of their own run, which nobody else knows."""
    loaded = []
    load = worker.joblib.load

    def listen(path: str, **options: Any) -> Any:
        loaded.append(Path(path))
        return load(path, **options)

    monkeypatch.setattr(worker.joblib, "load", listen)
    work = begin(source, tmp_path / "a.zarr")
    (work / "train" / "inputs-part-1-of-2.0123456789abcdef").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    run(source, tmp_path / "a.zarr")
    assert len({path.name for path in loaded}) == 2  # one name a run
    assert all(len(path.name.split(".")[1]) == 16 for path in loaded)
    assert not any("0123456789abcdef" in path.name for path in loaded)


@pytest.mark.parametrize("name", ["root", "overwritten", "copied", "x" * 255])
def test_splits_may_have_nearly_any_name(source: Path, tmp_path: Path, name: str) -> None:
    run(source / "train", tmp_path / "a.zarr", split=name)
    run(source / "train", tmp_path / "a.zarr", split=name, overwrite=True)
    assert open_store(tmp_path / "a.zarr")[name].num_valid == 5


@pytest.mark.parametrize("name", ["runs", "lock", "commit.lock", "copy", "classes.json", "zarr.json", "x" * 256])
def test_own_names_are_refused_from_a_manifest(source: Path, tmp_path: Path, name: str) -> None:
    file = next((source / "train" / "cat").iterdir())
    (tmp_path / "list.csv").write_text(f"path,label,split\n{file},cat,{name}\n")
    with pytest.raises(UsageError, match="can't be a split's name"):
        run(tmp_path / "list.csv", tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr.work").exists()


# What the file system says


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def no_locks(*args: Any, **kwargs: Any) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(workdir, "flock", no_locks)
    with pytest.raises(Error, match=r"a\.zarr\.work/lock: no file locks here .*--part needs them"):
        run(source, tmp_path / "a.zarr", part="1/2")
    capsys.readouterr()
    run(source, tmp_path / "a.zarr")
    assert capsys.readouterr().err.count("no file locks here") == 1
    assert open_store(tmp_path / "a.zarr")["train"].num_valid == 5
    assert not (tmp_path / "a.zarr.work").exists()


def test_an_error_of_a_lock_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(workdir, "flock", broken)
    with pytest.raises(OSError, match=r"a\.zarr\.work/lock"), Workspace(tmp_path / "a.zarr").run(Part(1, 2)):
        pass


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """write(2) and fsync(2) know no path."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os if call == "fsync" else chunk_writer.os, call, full)
    with pytest.raises(Error, match=r"^/.*a\.zarr\.work/.*: No space left on device"):
        run(source, tmp_path / "a.zarr")
