"""Killing conversions at random moments: the rerun finishes, redoes only what wasn't finished, and no byte differs."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from folders import make_image, same_tree

from pipeline import convert, open_store
from pipeline.conversion.workdir import Workspace

NUM_IMAGES = 1200
SIZE = 48


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough work for two workers to be killed in: 12 different JPEGs of 400 x 500 under many names."""
    folder = tmp_path_factory.mktemp("source")
    originals = []
    for seed in range(12):
        originals.append(folder / f"{seed}.jpg")
        make_image(seed, 400, 500).save(originals[-1])
    for i in range(NUM_IMAGES):
        path = folder / "set" / "train" / f"class{i % 7}" / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(originals[i % 12], path)
    return folder / "set"


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("reference") / "a.zarr"
    convert(source, store, size=SIZE, quiet=True)
    return store


def start(source: Path, store: Path, *flags: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "convert",
        str(source),
        str(store),
        "--size",
        str(SIZE),
        "--n-jobs",
        "2",
    ]
    return subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def receipts(store: Path) -> dict[str, int]:
    folder = Workspace(store).split("train").receipts
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")} if folder.exists() else {}


def wait_for_receipts(store: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(receipts(store)) < count and process.poll() is None:
        time.sleep(0.005)


def tokens(store: Path) -> set[str]:
    return {path.name for path in Workspace(store).path.glob("runs/*")}


def wait_for_start(store: Path, process: subprocess.Popen[str], stale: set[str]) -> None:
    """Until Python has started, its imports are done and the lock is taken."""
    while not tokens(store) - stale and process.poll() is None:
        time.sleep(0.005)


def kill_parent(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)


def kill_worker(process: subprocess.Popen[str]) -> None:
    workers = [child for child in psutil.Process(process.pid).children() if "loky" in " ".join(child.cmdline())]
    workers = [child for child in workers if "tracker" not in " ".join(child.cmdline())]
    if workers:
        random.choice(workers).kill()


def terminate(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGTERM)


def interrupt_twice(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("signum", "word", "code"), [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupted", 130)]
)
def test_a_stopped_conversion_says_what_is_kept(
    source: Path, tmp_path: Path, signum: int, word: str, code: int
) -> None:
    for attempt in range(5):
        store = tmp_path / f"{attempt}.zarr"
        process = start(source, store)
        wait_for_receipts(store, 2, process)
        os.kill(process.pid, signum)
        returned, stderr = finish(process)
        if returned == 0:  # it was faster
            continue
        assert returned == code
        assert "Traceback" not in stderr
        kept = len(receipts(store))
        assert kept >= 2
        last = stderr.strip().splitlines()[-1]
        assert last == f"{word}; {kept} finished chunks are kept: rerun the same command to go on"
        return
    pytest.fail("every conversion finished before it could be stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "codes", "times"),
    [
        (kill_parent, {-9}, 10),
        (kill_worker, {0}, 6),
        (terminate, {143}, 6),
        (interrupt_twice, {130, -2}, 6),
    ],
    ids=["SIGKILL the parent", "SIGKILL a worker", "SIGTERM", "Ctrl-C twice"],
)
def test_stopped_conversions_lose_nothing(
    source: Path,
    reference: Path,
    tmp_path: Path,
    stop: Callable[[subprocess.Popen[str]], None],
    codes: set[int],
    times: int,
) -> None:
    rng = random.Random(stop.__name__)
    store = tmp_path / "a.zarr"
    num_chunks = open_store(reference)["train"].num_chunks
    seen_codes = set()
    for attempt in range(times):
        before, stale = receipts(store), tokens(store)
        process = start(source, store)
        wait_for_start(store, process, stale)
        wait_for_receipts(store, min(num_chunks - 1, len(before) + rng.randrange(0, 8)), process)
        time.sleep(rng.random() * 0.05)
        stop(process)
        code, stderr = finish(process)
        seen_codes.add(code)
        assert code in codes | {0}, stderr
        assert "Traceback" not in stderr
        if code == 0:  # it was faster: start again
            assert same_tree(reference, store)
            shutil.rmtree(store)
            continue
        assert not (store / "train").exists(), attempt
        after = receipts(store)
        assert {name: after.get(name) for name in before} == before, "a finished chunk was lost or done again"
    assert seen_codes & codes, "every conversion finished before it could be stopped"
    code, stderr = finish(start(source, store))
    assert code == 0, stderr
    assert same_tree(reference, store)
    assert [child.name for child in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.slow
def test_orphaned_workers_stop_writing(source: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    process = start(source, store)
    wait_for_receipts(store, 3, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    kill_parent(process)
    finish(process)
    done = len(receipts(store))
    for _ in range(40):  # the job in hand notices within one image
        time.sleep(0.1)
    assert len(receipts(store)) <= done + 2
    assert len(receipts(store)) < open_store(reference)["train"].num_chunks
    assert finish(start(source, store))[0] == 0
    assert same_tree(reference, store)
    assert not [worker for worker in workers if worker.is_running() and worker.status() == psutil.STATUS_RUNNING]


@pytest.mark.slow
def test_removed_work_folder_is_one_line(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    process = start(source, store)
    wait_for_receipts(store, 3, process)
    shutil.rmtree(tmp_path / "a.zarr.work", ignore_errors=True)
    shutil.rmtree(tmp_path / "a.zarr.work", ignore_errors=True)
    code, stderr = finish(process)
    assert code == 1
    assert stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in stderr
    assert not store.exists()


@pytest.mark.slow
def test_vanishing_source_files_are_bad_samples(source: Path, reference: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "set", tmp_path / "a.zarr"
    shutil.copytree(source, folder, copy_function=os.link)
    process = start(folder, store)
    wait_for_receipts(store, 3, process)
    shutil.move(folder / "train" / "class3", tmp_path / "class3")
    code, stderr = finish(process)
    assert code == 1
    assert "nothing committed" in stderr
    assert "Traceback" not in stderr
    assert not store.exists()
    shutil.move(tmp_path / "class3", folder / "train" / "class3")
    assert finish(start(folder, store))[0] == 0
    assert same_tree(reference, store)


@pytest.mark.slow
def test_two_at_once_into_one_destination(source: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    first = start(source, store)
    wait_for_receipts(store, 1, first)
    code, stderr = finish(start(source, store))
    assert code == 1
    assert "another conversion into it is running" in stderr
    assert finish(first)[0] == 0
    assert same_tree(reference, store)


@pytest.mark.slow
def test_concurrent_parts(source: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    parts = [start(source, store, "--part", f"{i}/3") for i in (1, 2, 3)]
    for part in parts:
        code, stderr = finish(part)
        assert code == 0, stderr
    assert same_tree(reference, store)
    assert [child.name for child in tmp_path.iterdir()] == ["a.zarr"]


def small_disk(tmp_path: Path, megabytes: int) -> Path | None:
    """A mounted tmpfs of that size, or None where mounting isn't allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    return folder if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


@pytest.mark.slow
def test_full_disk_and_read_only_destination(source: Path, reference: Path, tmp_path: Path) -> None:
    disk = small_disk(tmp_path, 12)
    if disk is None:
        pytest.skip("mounting a tmpfs isn't permitted here")
    store = disk / "a.zarr"
    try:
        # 12 MB hold the store's 8.3 MB, so the preflight passes; then another process takes the space away.
        process = start(source, store)
        wait_for_receipts(store, 5, process)
        with open(disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(100_000))
        code, stderr = finish(process)
        assert code == 1, stderr
        assert "No space left on device" in stderr
        assert "Traceback" not in stderr
        assert not store.exists()
        (disk / "ballast").unlink(missing_ok=True)
        assert finish(start(source, store))[0] == 0
        assert same_tree(reference, store)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, stderr = finish(start(source, disk / "b.zarr"))
        assert code == 1
        assert "Traceback" not in stderr
        assert stderr.strip().splitlines()[-1].startswith("error: ")
        assert "Read-only file system" in stderr or "not writable" in stderr
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
