"""Training from a URL: fsspec's memory, or its local files for other processes, stands for a bucket."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from folders import same_tree
from training_runs import ROOT, metrics, quadrant_store, refusal, run_here, torchrun, wait_until

from pipeline import open_store
from pipeline.commands.copy_store import copy_store
from pipeline.errors import Error, StoreError, StoreNotFoundError, UsageError
from pipeline.store.format import chunk_name
from pipeline.store.locks import flock
from pipeline.store.remote import RemotePath
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.reading import cache as cache_module
from trainer.reading.cache import Cache, needed_chunks

TRAIN, VAL, K, WINDOW = 130, 37, 8, 3


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return quadrant_store(tmp_path / "a.zarr", TRAIN, VAL, chunk_images=K)


@pytest.fixture
def remote(store: Path, url: str) -> str:
    copy_store(store, url, quiet=True)
    return url


class Reads:
    """Notes the chunks that are read from URLs, and lets a test stand in their way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.hook: Callable[[str], None] = lambda name: None
        read_bytes = RemotePath.read_bytes

        def counted(path: RemotePath) -> bytes:
            if path.name.startswith("c.") and path.parent.name == "images":
                name = f"{path.parent.parent.name}/{path.name}"
                self.hook(name)
                self.names.append(name)
            return read_bytes(path)

        monkeypatch.setattr(RemotePath, "read_bytes", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setattr(cache_module, "RETRY_SECONDS", 0.0)
    return Reads(monkeypatch)


class Run:
    """A rank's cache and loader, as the trainer sets them up."""

    def __init__(self, url: str, folder: Path, leader: bool = True, start: bool = True) -> None:
        self.said: list[str] = []
        self.cache = Cache(str(folder), leader, self.said.append)
        self.store = self.cache.open(url)
        self.data = RankPartitionedDataset(self.store, "train", order="windowed", window=WINDOW, crop=6)
        self.loader = Loader(self.data, 10)
        if start:
            self.cache.start([(self.data.split, self.loader.coming_slots(0))])

    def batches(self, epochs: int = 1) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return [
            (self.loader.indices, images.numpy().copy(), labels.numpy())
            for _ in range(epochs)
            for images, labels in self.loader
        ]

    def close(self) -> None:
        self.loader.close()
        self.cache.close()


def local_batches(store: Path, epochs: int = 1) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    loader = Loader(RankPartitionedDataset(store, "train", order="windowed", window=WINDOW, crop=6), 10)
    return [(loader.indices, images.numpy().copy(), labels.numpy()) for _ in range(epochs) for images, labels in loader]


def same_batches(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


def joined(run: Run) -> None:
    assert run.cache._thread is not None
    run.cache._thread.join(60)
    assert not run.cache._thread.is_alive()


@pytest.mark.quick
def test_needed_chunks() -> None:
    assert needed_chunks(np.array([9, 8, 3, 11, 2, 0, 5]), 4).tolist() == [2, 0, 1]
    assert needed_chunks(np.array([], np.int64), 4).tolist() == []


def test_batches_are_those_of_a_local_run(remote: str, store: Path, tmp_path: Path, reads: Reads) -> None:
    run = Run(remote, tmp_path / "cache")
    assert same_batches(run.batches(2), local_batches(store, 2))
    joined(run)
    run.close()
    cached = tmp_path / "cache" / RemotePath(remote).name
    assert same_tree(cached, store)
    assert max(Counter(reads.names).values()) == 1
    assert not run.cache.is_complete
    later = Run(remote, tmp_path / "cache")
    assert later.cache.is_complete
    assert type(later.store) is type(open_store(cached))
    assert len(reads.names) == len(set(reads.names))
    later.close()


def test_the_first_batch_needs_the_first_window_alone(remote: str, tmp_path: Path, reads: Reads) -> None:
    gate = threading.Event()
    first: set[str] = set()
    reads.hook = lambda name: None if name in first else (gate.wait(60), None)[1]
    run = Run(remote, tmp_path / "cache", start=False)
    order = run.loader.coming_slots(0)
    needed = needed_chunks(order, K).tolist()
    first.update(f"train/{chunk_name(chunk)}" for chunk in needed[:WINDOW])
    run.cache.start([(run.data.split, order)])
    next(iter(run.loader))
    wait_until(lambda: len(reads.names) == WINDOW)
    assert set(reads.names) == first
    gate.set()
    run.batches()
    joined(run)
    run.close()
    # up to as many as there are threads may overtake one another
    place = {name: i for i, name in enumerate(reads.names)}
    late = [abs(place[f"train/{chunk_name(chunk)}"] - i) for i, chunk in enumerate(needed)]
    assert max(late) < cache_module.THREADS + WINDOW
    assert all(place[f"val/{chunk_name(0)}"] > place[f"train/{chunk_name(chunk)}"] for chunk in needed[:-4])


def test_a_broken_off_run_is_taken_up(remote: str, store: Path, tmp_path: Path, reads: Reads) -> None:
    def vanish(name: str) -> None:
        if len(reads.names) >= 6:
            raise ConnectionError("gone")

    reads.hook = vanish
    run = Run(remote, tmp_path / "cache")
    with pytest.raises(Error, match=r"gone|cache keeps what is there: run it again"):
        run.batches()
    run.close()
    cached = tmp_path / "cache" / RemotePath(remote).name
    with pytest.raises(StoreNotFoundError, match="isn't complete; train with the same --data and --cache"):
        open_store(cached)
    (cached / "train" / "images" / "c.0.0.0.0.tmp-killed").write_bytes(b"half")
    got = {file.name for file in (cached / "train" / "images").glob("c.*.0.0.0")}
    reads.hook, reads.names = lambda name: None, []
    run = Run(remote, tmp_path / "cache")
    assert same_batches(run.batches(), local_batches(store))
    joined(run)
    run.close()
    assert not {name.partition("/")[2] for name in reads.names if name.startswith("train")} & got
    assert same_tree(cached, store)


def test_passing_trouble_of_the_network_is_tried_again(remote: str, store: Path, tmp_path: Path, reads: Reads) -> None:
    seen: Counter[str] = Counter()

    def trouble(name: str) -> None:
        seen[name] += 1
        if seen[name] < cache_module.TRIES:
            raise OSError(errno.EIO, "reset")

    reads.hook = trouble
    run = Run(remote, tmp_path / "cache")
    assert same_batches(run.batches(), local_batches(store))
    run.close()


def test_two_runs_share_a_cache(remote: str, store: Path, tmp_path: Path, reads: Reads) -> None:
    reads.hook = lambda name: time.sleep(0.005)
    runs = [Run(remote, tmp_path / "cache"), Run(remote, tmp_path / "cache"), Run(remote, tmp_path / "cache", False)]
    wanted = local_batches(store)
    assert all(same_batches(run.batches(), wanted) for run in runs)
    for run in runs[:2]:
        joined(run)
    for run in runs:
        run.close()
    assert max(Counter(reads.names).values()) == 1
    assert same_tree(tmp_path / "cache" / RemotePath(remote).name, store)


def test_before_the_first_step_pictures_are_brought_one_chunk_at_a_time(
    remote: str, store: Path, tmp_path: Path, reads: Reads
) -> None:
    run = Run(remote, tmp_path / "cache", start=False)
    assert np.array_equal(run.store["train"].image(K + 1), open_store(store)["train"].image(K + 1))
    assert reads.names == [f"train/{chunk_name(1)}"]
    run.close()


def test_a_complete_cache_needs_no_bucket(remote: str, tmp_path: Path, reads: Reads) -> None:
    run = Run(remote, tmp_path / "cache")
    joined(run)
    run.close()
    root = RemotePath(remote) / "zarr.json"
    data = root.read_bytes()
    root.write_bytes(b"{")
    later = Run(remote, tmp_path / "cache")
    assert any("can't be read" in line and "as it is" in line for line in later.said)
    later.batches()
    later.close()
    root.write_bytes(data)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("file", [f"images/{chunk_name(1)}", "labels/c.0", "zarr.json"])
@pytest.mark.parametrize("keep", [None, 10])
def test_what_a_cache_has_lost_is_brought_again(
    remote: str, store: Path, tmp_path: Path, reads: Reads, complete: bool, file: str, keep: int | None
) -> None:
    run = Run(remote, tmp_path / "cache", start=False)
    if complete:
        run.cache.start([])
        joined(run)
    else:
        run.store["train"].image(K + 1)
    run.close()
    here = tmp_path / "cache" / RemotePath(remote).name / "train" / file
    here.unlink() if keep is None else os.truncate(here, keep)
    reads.names = []
    root = RemotePath(remote) / "zarr.json"
    data = root.read_bytes()
    root.write_bytes(b"{")
    said: list[str] = []
    with pytest.raises(Error, match=r"can't be read .*; run it again"):  # the bucket can't be read just now
        Cache(str(tmp_path / "cache"), True, said.append).open(remote)
    assert not said
    root.write_bytes(data)
    again = Run(remote, tmp_path / "cache")
    assert same_batches(again.batches(), local_batches(store))
    joined(again)
    again.close()
    assert same_tree(tmp_path / "cache" / RemotePath(remote).name, store)
    if complete:
        assert reads.names == ([f"train/{chunk_name(1)}"] if "images" in file else [])


def test_a_split_that_a_cache_has_lost_is_brought_again(remote: str, store: Path, tmp_path: Path) -> None:
    run = Run(remote, tmp_path / "cache")
    joined(run)
    run.close()
    cached = tmp_path / "cache" / RemotePath(remote).name
    shutil.rmtree(cached / "val")
    again = Run(remote, tmp_path / "cache")
    joined(again)
    again.close()
    assert same_tree(cached, store)


def test_a_bucket_with_one_of_the_splits(store: Path, url: str, tmp_path: Path) -> None:
    shutil.rmtree(store / "val")
    for file in store.rglob("*"):
        if file.is_file():
            RemotePath(f"{url}/{file.relative_to(store)}").write_bytes(file.read_bytes())
    run = Run(url, tmp_path / "cache")
    joined(run)
    run.close()
    assert same_tree(tmp_path / "cache" / RemotePath(url).name, store)


def test_what_another_run_has_mended_meanwhile_is_kept(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(remote, tmp_path / "cache")
    joined(run)
    run.close()
    chunk = tmp_path / "cache" / RemotePath(remote).name / "train" / "images" / chunk_name(1)
    aside = chunk.rename(tmp_path / "aside")

    def mended(fd: int) -> bool:
        aside.rename(chunk)
        return flock(fd)

    monkeypatch.setattr(cache_module, "flock", mended)
    run = Run(remote, tmp_path / "cache")
    assert run.cache.is_complete
    assert not run.said
    run.close()


def test_chunks_of_another_store_are_not_taken(remote: str, store: Path, tmp_path: Path) -> None:
    cached = quadrant_store(tmp_path / "cache" / RemotePath(remote).name, TRAIN + 1, VAL, chunk_images=K)
    for file in ("zarr.json", "train/zarr.json"):
        (cached / file).unlink()
    run = Run(remote, tmp_path / "cache")
    assert same_batches(run.batches(), local_batches(store))
    joined(run)
    run.close()
    assert same_tree(cached, store)


@pytest.mark.parametrize("complete", [True, False])
def test_a_cache_of_another_store_is_refused(remote: str, tmp_path: Path, reads: Reads, complete: bool) -> None:
    run = Run(remote, tmp_path / "cache", start=complete)
    if complete:
        joined(run)
    run.close()
    other = quadrant_store(tmp_path / "other.zarr", TRAIN + 1, VAL, chunk_images=K)
    for file in other.rglob("*"):
        if file.is_file():
            RemotePath(f"{remote}/{file.relative_to(other)}").write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="holds another store than"):
        Run(remote, tmp_path / "cache")


@pytest.mark.parametrize("damage", ["pixels", "index", "truncated", "missing"])
def test_a_damaged_chunk_ends_the_run(remote: str, tmp_path: Path, reads: Reads, damage: str) -> None:
    chunk = RemotePath(remote) / "train" / "images" / chunk_name(1)
    data = chunk.read_bytes()
    run = Run(remote, tmp_path / "cache", start=False)
    if damage == "missing":
        with chunk._opened() as (system, path):
            system.rm(path)
    else:
        flipped = bytes([data[0] ^ 1]) + data[1:]
        changed = {"pixels": flipped, "index": data[:-1] + bytes([data[-1] ^ 1]), "truncated": data[:-9]}
        chunk.write_bytes(changed[damage])
    run.cache.start([(run.data.split, run.loader.coming_slots(0))])
    with pytest.raises(Error, match=re.escape(str(chunk))):
        run.batches()
    run.close()
    assert not run.data.split.chunk_path(1).exists()


def test_a_full_disk(remote: str, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1))
        with pytest.raises(Error, match=r"bytes are to come and 1 are free; make room"):
            Run(remote, tmp_path / "cache")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run = Run(remote, tmp_path / "cache", start=False)
    monkeypatch.setattr(cache_module, "write_bytes", full)
    run.cache.start([(run.data.split, run.loader.coming_slots(0))])
    with pytest.raises(Error, match=r"No space left on device; make room; .* keeps what is there: run it again"):
        run.batches()
    run.close()


def test_stores_that_cannot_be_cached(store: Path, url: str, tmp_path: Path) -> None:
    copy_store(store, url, codec="zstd", quiet=True)
    with pytest.raises(UsageError, match=r"compressed \(bytes\+zstd|compressed \(.*zstd"):
        Run(url, tmp_path / "cache")
    with pytest.raises(StoreNotFoundError, match="no store there"):
        Run("memory://nothing.zarr", tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--cache .*/file"):
        Run(url, tmp_path / "file")


def test_altered_small_arrays_are_refused(remote: str, tmp_path: Path) -> None:
    labels = RemotePath(remote) / "train" / "labels" / "c.0"
    labels.write_bytes(bytes(reversed(labels.read_bytes())))
    with pytest.raises(StoreError, match="labels: altered"):
        Run(remote, tmp_path / "cache")


def test_flags_that_do_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path, store: Path) -> None:
    url = "s3://bucket/a.zarr"
    assert "--cache DIR" in refusal(capsys, data=url, order="windowed")
    assert "needs --order windowed" in refusal(capsys, data=url, cache=tmp_path / "cache")
    assert "only for --data at a URL" in refusal(capsys, data=store, cache=tmp_path / "cache")
    assert "--out s3://b/run: a URL" in refusal(capsys, data=store, out="s3://b/run")
    assert "--cache s3://b/c: a URL" in refusal(capsys, data=url, cache="s3://b/c", order="windowed")
    assert "without a bucket" in refusal(capsys, data="s3:/a.zarr", cache=tmp_path / "c", order="windowed")
    assert "no store there" in refusal(capsys, data="memory://x.zarr", cache=tmp_path / "c", order="windowed")


def test_a_run_of_the_trainer(remote: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"order": "windowed", "window": WINDOW, "crop": 6}
    assert run_here(data=remote, cache=tmp_path / "cache", out=tmp_path / "one", **common) == 0
    assert run_here(data=store, out=tmp_path / "two", **common) == 0
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert [one[key] for key in ("train_loss", "val_loss", "val_top1")] == [
            two[key] for key in ("train_loss", "val_loss", "val_top1")
        ]
    cached = tmp_path / "cache" / RemotePath(remote).name  # as the run says; --cache may stand in its config
    assert run_here(data=cached, cache=tmp_path / "cache", out=tmp_path / "three", **common) == 0
    assert metrics(tmp_path / "three")[-1]["train_loss"] == metrics(tmp_path / "two")[-1]["train_loss"]
    weights = tmp_path / "one" / "best.pt"
    fields = {"weights": weights, "crop": 6}
    capsys.readouterr()
    assert run_here(data=remote, cache=tmp_path / "eval", eval_only=True, **fields) == 0
    assert run_here(data=store, eval_only=True, **fields) == 0
    figures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("flatten_linear on")]
    assert len(figures) == 2
    assert figures[0] == figures[1]


KILLED = """
import sys, time
from pipeline.store.remote import RemotePath
read = RemotePath.read_bytes
def slow(path):
    if path.parent.name == "images":
        time.sleep(0.2)
    return read(path)
RemotePath.read_bytes = slow
sys.argv = ["main.py", *sys.argv[1:]]
from trainer.main import main
sys.exit(main())
"""


@pytest.fixture
def in_another_place(store: Path) -> str:
    """A URL that other processes can read, too."""
    return f"local://{store}"


@pytest.mark.slow
def test_a_killed_run_is_taken_up(in_another_place: str, store: Path, tmp_path: Path, reads: Reads) -> None:
    cached = tmp_path / "cache" / "a.zarr"
    images = cached / "train" / "images"
    fields = [f"--data={in_another_place}", f"--cache={tmp_path / 'cache'}", "--order=windowed", "--device=cpu"]
    fields += ["--model=flatten_linear", "--global-batch=16", "--epochs=1", f"--out={tmp_path / 'out'}"]
    run = subprocess.Popen([sys.executable, "-c", KILLED, *fields], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: images.is_dir() and len(list(images.glob("c.*.0.0.0"))) >= 3)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    got = {file.name for file in images.glob("c.*.0.0.0")}
    assert len(got) < len(list((store / "train" / "images").glob("c.*")))
    again = Run(in_another_place, tmp_path / "cache")
    assert same_batches(again.batches(), local_batches(store))
    joined(again)
    again.close()
    assert not {name.partition("/")[2] for name in reads.names if name.startswith("train")} & got
    assert same_tree(cached, store)


def test_sigterm_while_another_run_brings_the_store(
    in_another_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(fd: int) -> bool:
        held = flock(fd)
        os.kill(os.getpid(), signal.SIGTERM)
        return held

    cache = tmp_path / "cache"
    other = Cache(str(cache), True, lambda line: None)
    with other._lock(cache / "a.zarr") as held:
        assert held
        monkeypatch.setattr(cache_module, "flock", killed)
        line = refusal(capsys, 143, data=in_another_place, cache=cache, order="windowed")
    assert "stopped by SIGTERM" in line


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("call", ["info", "cat_file"])
def test_sigterm_while_the_bucket_is_read(
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    complete: bool,
    call: str,
) -> None:
    if complete:
        run = Run(remote, tmp_path / "cache")
        joined(run)
        run.close()
    system = type(fsspec.filesystem("memory"))
    ask = getattr(system, call)

    def killed(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(system, call, ask)
        os.kill(os.getpid(), signal.SIGTERM)
        return ask(*args, **options)

    monkeypatch.setattr(system, call, killed)
    line = refusal(capsys, 143, data=remote, cache=tmp_path / "cache", order="windowed")
    assert "stopped by SIGTERM" in line


@pytest.mark.slow
def test_two_ranks_under_torchrun(in_another_place: str, store: Path, tmp_path: Path) -> None:
    common = {"order": "windowed", "window": WINDOW, "crop": 6}
    result = torchrun(2, {**common, "data": in_another_place, "cache": tmp_path / "cache", "out": tmp_path / "one"})
    assert result.returncode == 0, result.stderr
    result = torchrun(2, {**common, "data": store, "out": tmp_path / "two"})
    assert result.returncode == 0, result.stderr
    losses = [[line["train_loss"] for line in metrics(tmp_path / out)] for out in ("one", "two")]
    assert losses[0] == losses[1]
    assert same_tree(tmp_path / "cache" / "a.zarr", store)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of botocore's own
def test_a_bucket_with_a_rate_limit(store: Path, bucket: str, tmp_path: Path, reads: Reads) -> None:
    copy_store(store, f"{bucket}/a.zarr", quiet=True)
    line = threading.Lock()

    def limited(name: str) -> None:
        with line:  # one after another, as over a line of 10 chunks/s
            time.sleep(0.1)

    reads.hook = limited
    begun = time.monotonic()
    run = Run(f"{bucket}/a.zarr", tmp_path / "cache", start=False)
    opened = time.monotonic()
    run.cache.start([(run.data.split, run.loader.coming_slots(0))])
    batches = iter(run.loader)
    first = (run.loader.indices, *(tensor.numpy().copy() for tensor in next(batches)))
    waited = time.monotonic() - opened
    del batches
    joined(run)
    whole = time.monotonic() - opened
    run.close()
    assert waited < 0.6 * whole, (opened - begun, waited, whole)
    assert np.array_equal(first[1], local_batches(store)[0][1])
