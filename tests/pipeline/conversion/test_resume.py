"""Going on with what was begun: nothing finished is done again, and nothing stale is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from folders import make_folder, make_image, same_tree

from pipeline import convert, open_store
from pipeline.conversion import commit as committing
from pipeline.conversion import jobs
from pipeline.conversion.commit import BadSamplesError, commit
from pipeline.conversion.names import Part
from pipeline.conversion.plan import SplitPlan
from pipeline.conversion.workdir import Liveness, Workspace
from pipeline.errors import Error, UsageError
from pipeline.store import atomic
from pipeline.store.locks import flock


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "source", {"train": {"cat": 40, "dog": 30}})


def run(source: Any, store: Path, **options: Any) -> Any:
    return convert(source, store, **{"size": 16, "n_jobs": 1, "quiet": True, **options})


def chunk_jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes that each chunk is converted in, as the jobs are run."""
    sizes: list[tuple[int, ...]] = []
    run_jobs = jobs.run_jobs

    def listen(name: str, n_jobs: int, function: Any, todo: list[int]) -> Iterator[Any]:
        sizes.extend(tuple(geometry.size for geometry in function.args[0].geometries) for _ in todo)
        return run_jobs(name, n_jobs, function, todo)

    monkeypatch.setattr(jobs, "run_jobs", listen)
    return sizes


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Let that call of a function end the run, before it does anything, and all that would follow."""
    function, calls = getattr(owner, name), iter(range(1, 1000))

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= call:
            raise Killed
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, killed)


def test_a_size_added_to_a_finished_store(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (12, 16):
        run(source, tmp_path / f"alone-{size}.zarr", size=size)
    run(source, tmp_path / "s-16.zarr")
    converted = chunk_jobs(monkeypatch)
    run(source, tmp_path / "s-{size}.zarr", size=[12, 16])
    assert set(converted) == {(12,)}
    for size in (12, 16):
        assert same_tree(tmp_path / f"s-{size}.zarr", tmp_path / f"alone-{size}.zarr")
        assert not Workspace(tmp_path / f"s-{size}.zarr").path.exists()


def test_killed_between_the_commits_of_two_sizes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "s-{size}.zarr", size=[12, 16])
    with monkeypatch.context() as patch:
        kill_at(patch, committing, "publish", 2)
        with pytest.raises(Killed):
            run(source, tmp_path / "t-{size}.zarr", size=[12, 16])
    assert (tmp_path / "t-12.zarr" / "train").exists()
    assert not (tmp_path / "t-16.zarr" / "train").exists()
    assert run(source, tmp_path / "t-{size}.zarr", size=[12, 16]).num_images == 0
    for size in (12, 16):
        assert same_tree(tmp_path / f"s-{size}.zarr", tmp_path / f"t-{size}.zarr")
        assert not Workspace(tmp_path / f"t-{size}.zarr").path.exists()


@pytest.mark.parametrize("command", ["convert", "commit"])
def test_killed_between_the_rename_and_the_clean_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    store = tmp_path / "a.zarr"
    run(source, tmp_path / "b.zarr")
    with monkeypatch.context() as patch:
        kill_at(patch, committing.shutil, "rmtree", 2)  # the first is of the root group's folder
        with pytest.raises(Killed):
            run(source, store)
    assert (store / "train").exists()
    assert (tmp_path / "a.zarr.work" / "train" / "plan.json").exists()
    if command == "convert":
        assert run(source, store).committed == ["train"]
    else:
        with pytest.raises(UsageError, match="nothing to commit"):
            commit(store)
    assert not (tmp_path / "a.zarr.work").exists()
    assert same_tree(store, tmp_path / "b.zarr")


def test_bad_samples_are_tried_again_only_where_that_may_help(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cats = tmp_path / "a.zarr", sorted((source / "train" / "cat").iterdir())
    cats[3].write_bytes(cats[3].read_bytes()[:-45])
    cats[9].write_bytes(b"")
    cats[20].rename(tmp_path / "away.jpg")
    cats[20].symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(BadSamplesError, match="3 bad samples"):
        run(source, store)
    converted = chunk_jobs(monkeypatch)
    with pytest.raises(BadSamplesError, match="3 bad samples"):
        run(source, store)
    assert len(converted) == 1  # the missing one's
    (tmp_path / "away.jpg").rename(tmp_path / "gone.jpg")
    with pytest.raises(BadSamplesError, match="2 bad samples"):
        run(source, store)
    assert len(converted) == 2
    run(source, store, on_error="skip")
    assert len(converted) == 2
    assert {bad["reason"] for bad in open_store(store)["train"].attrs["bad_samples"]} == {"empty", "truncated"}


def test_bad_samples_of_a_sequence_are_tried_again(tmp_path: Path) -> None:
    """Whether its images have changed can't be seen."""

    class Samples:
        def __init__(self, broken: bytes) -> None:
            self.images = [broken, *[make_image(1)] * 3]

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Any, int]:
            return self.images[i], 0

    with pytest.raises(BadSamplesError):
        run(Samples(b"broken"), tmp_path / "a.zarr")
    make_image(2).save(tmp_path / "a.jpg")
    assert run(Samples((tmp_path / "a.jpg").read_bytes()), tmp_path / "a.zarr").bad == []


def test_a_part_names_no_mended_file_of_another(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    good = {path: path.read_bytes() for path in sorted((source / "train").rglob("*.jpg"))}
    for path, data in good.items():
        path.write_bytes(data[:-45])
    run(source, store, part="1/2")
    with pytest.raises(BadSamplesError, match="70 bad samples"):
        run(source, store, part="2/2")
    for path, data in good.items():
        path.write_bytes(data)
    assert run(source, store, part="1/2").committed == []  # part 2's receipts tell of files that have changed
    assert run(source, store, part="2/2").committed == ["train"]
    run(source, tmp_path / "b.zarr")
    assert same_tree(store, tmp_path / "b.zarr")


def test_a_part_that_is_rerun_while_another_commits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of part 1 changes while part 2 runs. Part 1 is rerun, and before it is done nobody can commit."""
    store = tmp_path / "a.zarr"
    run(source, store, part="1/2")
    with np.load(Workspace(store).split("train").samples) as samples:
        first = source / "train" / samples["keys"][: samples["key_offsets"][1]].tobytes().decode()
    run_jobs = jobs.run_jobs

    def part_2_then_part_1(*args: Any) -> Iterator[Any]:
        yield from run_jobs(*args)
        make_image(999).save(first)
        monkeypatch.setattr(jobs, "run_jobs", commit_then_part_1)
        assert run(source, store, part="1/2").committed == ["train"]

    def commit_then_part_1(*args: Any) -> Iterator[Any]:
        with pytest.raises(Error, match="1 of 35 chunks is missing, of --part 1/2"):
            commit(store)
        yield from run_jobs(*args)

    monkeypatch.setattr(jobs, "run_jobs", part_2_then_part_1)
    run(source, store, part="2/2")
    monkeypatch.undo()
    run(source, tmp_path / "b.zarr")
    assert same_tree(store, tmp_path / "b.zarr")


def test_the_plan_is_prepared_under_the_commit_lock(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held = tmp_path / "a.zarr", []

    def free(self: Any, *args: Any) -> None:
        with open(Workspace(store).path / "commit.lock") as file:
            held.append(not flock(file))
        save(self, *args)

    save = SplitPlan.save
    monkeypatch.setattr(SplitPlan, "save", free)
    run(source, store, part="1/2")
    assert held == [True]


def test_temp_files_of_killed_parts_are_deleted(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    run(source, store, part="1/3")
    workspace = Workspace(store)
    work = workspace.split("train")
    with workspace.run(Part(2, 3)) as prefix:
        name = Liveness([workspace], prefix).name
        dead = [
            folder / f"{file}.tmp-part-1-of-3.0123456789abcdef"
            for folder, file in ((work.images, "c.0.0.0.0"), (work.receipts, "0.json"), (work.path, "samples.npz"))
        ]
        living = work.images / f"c.1.0.0.0.tmp-{name}"
        for path in (*dead, living):
            path.write_bytes(b"half")
        make_image(999).save(source / "train" / "cat" / "000.jpg")
        run(source, store, part="1/3")
        assert not any(path.exists() for path in dead)
        assert living.exists()


def test_every_temp_file_carries_the_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever comes next knows which are of dead runs."""
    names: list[str] = []
    replace = os.replace

    def listen(temp: Any, path: Any) -> None:
        if ".work" in os.fspath(path):
            names.append(os.path.basename(os.fspath(temp)))
        replace(temp, path)

    monkeypatch.setattr(atomic.os, "replace", listen)
    run(source, tmp_path / "a.zarr", part="1/2")
    assert len(names) > 30
    assert all(".tmp-part-1-of-2." in name for name in names), names


def test_leftovers_of_a_network_file_system_are_no_work(source: Path, tmp_path: Path) -> None:
    """NFS keeps a deleted file that is still open as .nfs..., until the process that has it ends."""
    work = tmp_path / "a.zarr.work"
    (work / "train").mkdir(parents=True)
    (work / "train" / ".nfs0001").write_bytes(b"x")
    run(source, tmp_path / "a.zarr")
    assert open_store(tmp_path / "a.zarr")["train"].num_valid == 70
    (work / "train").mkdir(parents=True)
    (work / "train" / ".nfs0001").write_bytes(b"x")
    with pytest.raises(UsageError, match="nothing to commit"):
        commit(tmp_path / "a.zarr")


def test_workers_are_gone_before_the_clean_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They map a file in the work folder, which NFS couldn't delete then."""
    seen = []

    def look(*args: Any, **kwargs: Any) -> Any:
        me = psutil.Process()
        seen.append([child for child in me.children() if "loky.backend.popen" in " ".join(child.cmdline())])
        seen.append([m.path for m in me.memory_maps() if m.path.startswith(str(tmp_path))])
        return publish(*args, **kwargs)

    publish = committing.publish
    monkeypatch.setattr(committing, "publish", look)
    for n_jobs in (1, 2):
        run(source, tmp_path / f"{n_jobs}.zarr", n_jobs=n_jobs)
    assert seen == [[], [], [], []]
