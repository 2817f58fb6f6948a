"""The trainer's loader: what it serves, in which order, and how it resumes and ends."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.synthetic import random_store
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import make_images, make_store

from pipeline.errors import UsageError
from pipeline.store.maps import ChunkMaps
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.order import window_bounds
from trainer.reading import copy_crops as kernel
from trainer.reading import prefetcher as prefetcher_module
from trainer.reading import read_ahead as readahead

NUM, BAD = 131, [0, 64, 130]
IMAGES = make_images(NUM, 12)
LABELS = np.arange(NUM) % 7


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = {"train": (IMAGES, LABELS), "val": (IMAGES[:29], LABELS[:29])}
    return make_store(tmp_path_factory.mktemp("data") / "s.zarr", splits, bad={"train": BAD}, chunk_images=8)


def make(
    store: Path, batch_size: int = 8, split: str = "train", *, loader: dict[str, Any] | None = None, **data: Any
) -> Loader:
    return Loader(RankPartitionedDataset(store, split, **data), batch_size, **(loader or {}))


def served(loader: Loader) -> list[list[int]]:
    """The slots of each batch of one iteration."""
    return [loader.indices.tolist() for _ in loader]


# What it serves


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("crop", [None, 8, 7])
def test_batches_are_the_datasets_samples(store, crop, threads):
    loader = make(store, crop=crop, loader={"threads": threads})
    data = loader.data
    size = crop or 12
    for epoch in range(3):
        assert loader.epoch == epoch
        samples = [data[i] for i in range(len(data))]
        slots = [data.slot(i) for i in range(len(data))]
        for k, (images, labels) in enumerate(loader):
            mine = samples[8 * k : 8 * k + 8]
            assert images.dtype == torch.uint8
            assert images.shape == (8, 3, size, size)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert labels.dtype == torch.int64
            assert torch.equal(images, torch.stack([image for image, _ in mine]))
            assert labels.tolist() == [label for _, label in mine]
            assert loader.indices.tolist() == slots[8 * k : 8 * k + 8]
        assert k + 1 == len(loader) == 16


def test_evaluation_keeps_the_last_partial_batch(store):
    loader = make(store, 8, "val", rank=1, world_size=2)
    assert served(loader) == [list(range(1, 17, 2)), list(range(17, 29, 2))]
    assert len(loader) == 2
    images, labels = list(loader)[-1]
    assert images.shape == (6, 3, 12, 12)
    assert labels.tolist() == LABELS[17:29:2].tolist()
    assert torch.equal(images[0], torch.from_numpy(IMAGES[17].transpose(2, 0, 1).copy()))


def test_evaluation_with_more_ranks_than_samples(store):
    counts = [sum(map(len, served(make(store, 2, "val", rank=rank, world_size=40)))) for rank in range(40)]
    assert counts == [1] * 29 + [0] * 11


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_global_batch_is_the_same_set_at_any_world_size(store, data):
    global_batch = data.draw(st.sampled_from([1, 4, 12, 24, 60, 128]))
    order = data.draw(st.sampled_from(["random", "windowed"]))
    seed, epoch = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 5))
    whole = RankPartitionedDataset(store, seed=seed, order=order, window=3)
    steps = whole.epoch_slots(epoch)[: 128 // global_batch * global_batch].reshape(-1, global_batch)
    world_size = data.draw(st.sampled_from([p for p in range(1, 13) if global_batch % p == 0]))
    share = global_batch // world_size
    batch_size = data.draw(st.sampled_from([b for b in range(1, share + 1) if share % b == 0]))
    micro_steps = []
    for rank in range(world_size):
        loader = make(
            store,
            batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            order=order,
            window=3,
            loader={"global_batch": global_batch},
        )
        loader.set_epoch(epoch)
        micro_steps.append(served(loader))
        assert len(micro_steps[-1]) == len(loader) == 128 // global_batch * global_batch // (batch_size * world_size)
        assert loader.accumulation == share // batch_size
    # (ranks, steps, micro-steps, batch)
    slots = np.array(micro_steps).reshape(world_size, len(steps), -1, batch_size)
    for k, step in enumerate(steps):
        assert sorted(slots[:, k].ravel().tolist()) == sorted(step.tolist())
    assert not set(slots.ravel().tolist()) & set(BAD)


def test_epochs_go_on_by_themselves(store):
    loader = make(store)
    by_itself = [served(loader) for _ in range(3)]
    assert by_itself[0] != by_itself[1] != by_itself[2]
    for epoch in (2, 0):
        loader.set_epoch(epoch)
        assert served(loader) == by_itself[epoch]


def test_labels_and_pixels_stay_those_of_the_epoch_that_began(store):
    loader = make(store, crop=5)
    want = [images.clone() for images, _ in loader]
    loader.set_epoch(0)
    got = []
    for images, _ in loader:
        loader.data.set_epoch(9)
        got.append(images.clone())
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


# Memory


def test_a_batch_in_use_is_never_overwritten(store):
    loader = make(store, loader={"threads": 2})
    want = [images.clone() for images, _ in loader]
    loader.set_epoch(0)
    everything = list(loader)
    assert all(torch.equal(a, b) for a, (b, _) in zip(want, everything, strict=True))
    # also not while only a view, an array or a storage of it is left
    loader.set_epoch(0)
    kept: list[Any] = []
    for k, (images, _) in enumerate(loader):
        kept.append(
            [images[3:4], images.numpy()[3:4], images.permute(0, 2, 3, 1).flatten()[:9], images.untyped_storage()][
                k % 4
            ]
        )
        del images
    assert torch.equal(kept[0], want[0][3:4])
    assert np.array_equal(kept[1], want[1][3:4].numpy())
    assert torch.equal(kept[2], want[2].permute(0, 2, 3, 1).flatten()[:9])
    assert bytes(kept[3]) == want[3].permute(0, 2, 3, 1).contiguous().numpy().tobytes()


def test_dropped_batches_memory_is_used_again(store):
    loader = make(store, loader={"threads": 2})
    for _ in range(3):
        addresses = {images.data_ptr() for images, _ in loader}
    assert len(addresses) <= loader.threads + 4
    held = list(loader)
    del held
    gc.collect()
    assert len(loader._pool._free) <= loader.threads + 4  # what `list` needed beyond that is freed


def test_batches_are_writable_and_apart_from_the_store(store):
    loader = make(store, 8, "val")
    for images, _ in loader:
        images.zero_()
    assert torch.equal(next(iter(loader))[0][0], torch.from_numpy(IMAGES[0].transpose(2, 0, 1).copy()))


# State


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_resume_serves_exactly_what_is_left(store, data):
    order = data.draw(st.sampled_from(["random", "windowed"]))
    options: dict[str, Any] = {"seed": 3, "order": order, "window": 2}
    epoch, steps = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5))
    old_world, new_world = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 3, 4]))
    states = []
    for rank in range(old_world):
        loader = make(store, 12 // old_world, rank=rank, world_size=old_world, loader={"global_batch": 24}, **options)
        loader.set_epoch(epoch)
        for _ in itertools.islice(loader, 2 * steps):
            pass
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    left = RankPartitionedDataset(store, **options).epoch_slots(epoch)[24 * steps : 120].reshape(-1, 24)
    got = []
    for rank in range(new_world):
        loader = make(store, 24 // new_world, rank=rank, world_size=new_world, loader={"global_batch": 24}, **options)
        loader.load_state_dict(pickle.loads(pickle.dumps(states[0])))
        if steps < 5:
            assert loader.epoch == epoch
            loader.set_epoch(epoch)  # what a training loop does next
        assert loader.state_dict() == states[0]
        got.append(served(loader) if steps < 5 else [])
        if steps < 5:
            assert loader.state_dict()["epoch"] == epoch + 1
        assert len(served(loader)) == len(loader) == 5  # the epoch after it is whole
    for k, step in enumerate(left):
        assert sorted(slot for rank in got for slot in rank[k]) == sorted(step.tolist())
    assert all(len(rank) == len(left) for rank in got)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_subsets_and_weights_keep_global_batches_resume_and_evaluation(store, data):
    valid = [slot for slot in range(NUM) if slot not in BAD]
    indices = np.array(data.draw(st.lists(st.sampled_from(valid), min_size=12, max_size=60)))
    weights = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(indices), max_size=len(indices)))
    options: dict[str, Any] = {"indices": indices, "seed": data.draw(st.integers(0, 9))}
    if weights is not None and sum(weights):
        options["weights"] = weights
    elif data.draw(st.booleans()):
        options |= {"order": "windowed", "window": 2}
    old_world, new_world = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 3, 4]))
    steps = len(indices) // 12
    done = data.draw(st.integers(0, steps - 1))
    batches = RankPartitionedDataset(store, **options).epoch_slots(0)[: steps * 12].reshape(steps, 12)
    before = []
    for rank in range(old_world):
        loader = make(store, 12 // old_world, rank=rank, world_size=old_world, **options)
        before.append([loader.indices.tolist() for _ in itertools.islice(loader, done)])
        state = loader.state_dict()
    after = []
    for rank in range(new_world):
        loader = make(store, 12 // new_world, rank=rank, world_size=new_world, **options)
        loader.load_state_dict(state)
        after.append(served(loader))
    for k, batch in enumerate(batches):
        ranks = [part[k] for part in before] if k < done else [part[k - done] for part in after]
        assert sorted(itertools.chain(*ranks)) == sorted(batch.tolist())
    whole = make(store, 12)
    with pytest.raises(UsageError, match="another store"):
        whole.load_state_dict(state)

    parts = [make(store, 5, train=False, indices=indices, rank=r, world_size=new_world) for r in range(new_world)]
    evaluated = [slot for part in parts for batch in served(part) for slot in batch]
    assert sorted(evaluated) == sorted(indices.tolist())


def test_the_state_counts_what_was_yielded(store):
    loader = make(store, 8, world_size=2, rank=1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (0, 0)
    iterator = iter(loader)
    for k in range(1, 9):
        next(iterator)
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == ((0, 16 * k) if k < 8 else (1, 0))
    with pytest.raises(StopIteration):
        next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 0)
    with pytest.raises(StopIteration):
        next(iterator)
    assert loader.epoch == 1


def test_a_broken_off_epoch_starts_again_unless_loaded(store):
    loader = make(store)
    whole = served(loader)
    loader.set_epoch(0)
    for _ in itertools.islice(loader, 3):
        pass
    state = loader.state_dict()
    assert served(loader) == whole
    loader.load_state_dict(state)
    assert served(loader) == whole[3:]
    loader.load_state_dict(state)
    loader.set_epoch(5)  # another epoch: the position is dropped
    assert len(served(loader)) == 16


def test_another_epoch_or_state_ends_a_running_iteration(store):
    loader = make(store)
    state = loader.state_dict()
    for change in (lambda: loader.set_epoch(4), lambda: loader.load_state_dict(state)):
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(loader.epoch)  # the same: nothing happens
        next(iterator)
        change()
        with pytest.raises(UsageError, match="closed"):
            next(iterator)
        assert loader.state_dict()["samples"] == 0
        assert loader.state_dict()["epoch"] == loader.epoch


def test_evaluation_resumes_at_another_world_size(store):
    loader = make(store, 4, "val")
    for _ in itertools.islice(loader, 3):
        pass
    state = loader.state_dict()
    slots = []
    for rank in range(3):
        other = make(store, 2, "val", rank=rank, world_size=3, seed=8)
        other.load_state_dict(state)
        slots += itertools.chain(*served(other))
    assert sorted(slots) == list(range(12, 29))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 1, this run's 0"),
        ({"global_batch": 16}, "global batch is 16, this run's 8"),
        ({"order_version": 99}, "order version is 99, this run's 1"),
        ({"order": "windowed 16 x 8"}, "order is windowed 16 x 8, this run's random"),
        ({"fingerprint": "0123456789"}, "another store .its samples differ: 01234567, this run's [0-9a-f]{8}.;"),
    ],
)
def test_a_foreign_state_is_refused_by_name(store, change, message):
    loader = make(store)
    with pytest.raises(UsageError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(UsageError, match="holds no position"):
        loader.load_state_dict({})


def test_a_state_between_the_new_batches_is_refused(store):
    loader = make(store, 2, loader={"global_batch": 8})
    for _ in itertools.islice(loader, 1):
        pass
    state = loader.state_dict()
    with pytest.raises(UsageError, match="2 samples into its epoch, between batches of 4 x 1"):
        make(store, 4, loader={"global_batch": 8}).load_state_dict(state)
    same = make(store, 2, loader={"global_batch": 8})
    same.load_state_dict(state)
    assert len(served(same)) == len(same) - 1


# Wrong use


@pytest.mark.parametrize(
    ("batch_size", "world_size", "options", "message"),
    [
        (0, 1, {}, "batch size 0"),
        (8, 1, {"threads": 0}, "threads 0"),
        (129, 1, {}, "global batch 129 .* larger than the 128 samples"),
        (1024, 4, {}, "global batch 4096 .* larger than the 128 samples"),
        (8, 2, {"global_batch": 24}, "global batch 24: must be a multiple of batch size 8 x world size 2 = 16"),
        (8, 1, {"global_batch": 0}, "global batch 0"),
        (8, 4, {"local_world_size": 3}, "3 local ranks"),
    ],
)
def test_wrong_sizes_are_one_line_on_every_rank(store, batch_size, world_size, options, message):
    for rank in range(world_size):
        with pytest.raises(UsageError, match=message) as caught:
            make(store, batch_size, rank=rank, world_size=world_size, loader=options)
        assert "\n" not in str(caught.value)


def test_training_on_unlabelled_samples_is_refused(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES[:5], [0, 1, -2, -2, 0])})
    with pytest.raises(UsageError, match="2 samples have no label"):
        make(path, 1)
    assert sorted(itertools.chain(*served(make(path, 1, train=False)))) == list(range(5))


@pytest.mark.parametrize("name", ["data", "batch_size", "global_batch", "threads", "device", "local_world_size"])
def test_what_it_was_made_from_cant_be_changed(store, name):
    loader = make(store)
    with pytest.raises(AttributeError, match=f"{name} can't be changed"):
        setattr(loader, name, getattr(loader, name))
    assert len(served(loader)) == 16


def test_numpy_integers_are_integers(store):
    sizes: dict[str, Any] = {"global_batch": np.int16(32), "threads": np.int8(2), "local_world_size": np.int64(1)}
    loader = make(store, np.int8(8), seed=np.int16(5), loader=sizes)
    assert loader.accumulation == 4
    loader.set_epoch(np.int64(2))
    state = loader.state_dict()
    assert all(type(state[name]) is int for name in ("epoch", "samples", "seed", "global_batch"))
    plain = make(store, 8, seed=5, loader={"global_batch": 32})
    plain.set_epoch(2)
    assert served(loader) == served(plain)
    with pytest.raises(TypeError):
        make(store, 8.0)


# Endings


def test_an_error_in_a_thread_reaches_the_caller(store, monkeypatch):
    calls = itertools.count()

    def copy_crops(*args: object) -> None:
        if next(calls) == 5:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(prefetcher_module, "copy_crops", copy_crops)
    loader = make(store, loader={"threads": 2})
    iterator = iter(loader)
    with pytest.raises(OSError, match="Input/output error"):
        for _ in range(16):
            next(iterator)
    with pytest.raises(UsageError, match="closed"):
        next(iterator)
    assert loader.state_dict()["samples"] in (32, 40, 48)  # batches before the broken one arrived
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def running() -> int:
    return len([thread for thread in threading.enumerate() if thread.name.startswith("loader-")])


def test_threads_end_with_the_loop(store):
    loader = make(store, loader={"threads": 3})
    for _ in loader:
        assert running() <= 3
    assert running() == 0
    for _ in loader:
        break
    assert running() == 0
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert running() == 0
    with pytest.raises(RuntimeError, match="mine"):
        for _ in loader:
            raise RuntimeError("mine")
    gc.collect()
    assert running() == 0


def test_close_at_any_moment(store):
    loader = make(store, loader={"threads": 2})
    loader.close()
    whole = served(loader)
    for steps in range(4):
        loader.set_epoch(0)
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        loader.close()
        loader.close()
        assert running() == 0
        with pytest.raises(UsageError, match="closed"):
            next(iterator)
    loader.set_epoch(0)
    assert served(loader) == whole
    kept = next(iter(loader))[0]
    loader.close()
    del kept
    gc.collect()
    assert len(loader._pool._free) == 0


def test_a_new_iteration_ends_the_one_before(store):
    loader = make(store)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert len(list(second)) == 16
    with pytest.raises(UsageError, match="iterated anew"):
        next(first)


def test_close_wakes_a_waiting_caller(store, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(prefetcher_module, "copy_crops", lambda *args: held.wait(60))
    loader = make(store)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            next(iter(loader))
        except UsageError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while loader._prefetcher is None:
        pass
    closing = threading.Thread(target=loader.close)
    closing.start()
    waiting.join(60)
    assert len(errors) == 1
    held.set()
    closing.join(60)
    assert running() == 0


END_SCRIPT = """
import os, signal, sys, threading
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
for how in ("end", "error", "interrupt", "kept", "thread"):  # forks: torch is imported once
    if not (child := os.fork()):
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
os.dup2(os.open(how, os.O_CREAT | os.O_WRONLY), 2)
loader = Loader(RankPartitionedDataset(sys.argv[1]), 4, threads=2)
iterator = iter(loader)
next(iterator)
if how == "error":
    raise SystemExit(3)
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    for batch in iterator:
        pass
if how == "kept":
    import builtins
    builtins.kept = [iterator, loader, list(loader)]
if how == "thread":
    threading.Thread(target=lambda: [None for _ in range(9) for _ in loader]).start()
"""


def test_the_interpreter_ends_cleanly(store, tmp_path):
    command = [sys.executable, "-c", END_SCRIPT, str(store)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n") == ["end 0", "error 3", f"interrupt {-signal.SIGINT}", "kept 0", "thread 0", ""]
    written = {how: (tmp_path / how).read_text() for how in ("end", "error", "kept", "thread")}
    assert set(written.values()) == {""}, written


def test_a_fork_iterates_anew_and_harms_nothing(store):
    loader = make(store, loader={"threads": 2})
    whole = served(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            try:
                next(iterator)
            except UsageError as error:
                if "after the fork" in str(error) and served(loader) == whole:
                    loader.close()
                    del iterator
                    gc.collect()
                    status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sum(1 for _ in iterator) == 15


def _serve_in_child(loader: Loader, queue: multiprocessing.Queue) -> None:
    queue.put(served(loader))


def test_a_loader_travels_to_a_spawned_process(store):
    loader = make(store)
    loader.set_epoch(2)
    context = multiprocessing.get_context("forkserver")  # which pickles as spawn does
    queue = context.Queue()
    child = context.Process(target=_serve_in_child, args=(loader, queue))
    child.start()
    got = queue.get(timeout=120)
    child.join()
    loader.set_epoch(2)  # the Dataset's epoch is shared, and the child's loader went on to the next
    assert got == served(loader)
    assert len(pickle.dumps(loader)) < 4_000


def test_a_deleted_store_is_served_on(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, LABELS)})
    loader = make(path)
    iterator = iter(loader)
    next(iterator)
    shutil.rmtree(path)
    make_store(path, {"train": (IMAGES[::-1], LABELS)})
    rest = [(images, loader.indices) for images, _ in iterator]
    rest += [(images, loader.indices) for images, _ in loader]
    for images, slots in rest:
        assert torch.equal(images, torch.from_numpy(IMAGES[slots].transpose(0, 3, 1, 2).copy()))


def test_waiting_is_counted(store, monkeypatch):
    loader = make(store)
    assert loader.wait_seconds == 0
    served(loader)
    assert loader.wait_seconds > 0


# Reading ahead


class Recorder:
    """Stands for `will_need`: which ranges were asked for, as (address, length)."""

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []

    def __call__(self, addresses: np.ndarray, extent: int, gap: int = 0) -> None:
        self.asked.append(addresses)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Everything seems to come from disk, and what is asked for is recorded."""
    recorder, counter = Recorder(), itertools.count()
    monkeypatch.setattr(readahead, "will_need", recorder)
    monkeypatch.setattr(readahead, "disk_reads", lambda: next(counter))
    return recorder


def test_cold_crops_are_asked_for_once_and_before_they_are_copied(store, recorder, monkeypatch):
    monkeypatch.setattr(readahead, "AHEAD_BYTES", 1)
    copied: list[np.ndarray] = []
    real = prefetcher_module.copy_crops

    def copy_crops(chunks: ChunkMaps, positions: np.ndarray, *args: Any) -> None:
        addresses = chunks.locate(positions, 1)
        asked = np.concatenate(recorder.asked[1:])
        assert set(addresses.tolist()) <= set(asked.tolist())
        assert len(asked) <= (len(copied) + 2) * 8  # no more than a batch ahead
        copied.append(addresses)
        real(chunks, positions, *args)

    monkeypatch.setattr(prefetcher_module, "copy_crops", copy_crops)
    served(make(store, crop=8))
    assert np.array_equal(np.concatenate(recorder.asked[1:]), np.concatenate(copied))
    assert len(recorder.asked[0]) <= 2 * 16  # the samples tried first


def test_warm_data_is_not_asked_for(store, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(readahead, "will_need", recorder)
    monkeypatch.setattr(readahead, "disk_reads", lambda: 17)
    served(make(store))
    assert len(recorder.asked) == 1  # the samples tried first


def test_where_reads_are_not_counted_everything_is_asked_for(store, recorder, monkeypatch):
    monkeypatch.setattr(readahead, "disk_reads", lambda: None)
    served(make(store))
    assert sum(map(len, recorder.asked[1:])) >= 128


@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (2, 2), (4, 2), (4, 1)])
def test_windowed_reading_is_sequential_and_shared_by_a_machines_ranks(store, recorder, world_size, local):
    whole = RankPartitionedDataset(store, order="windowed", window=4)
    bounds = window_bounds(0, 0, 128, 8, 4)
    order = whole.epoch_slots(0)
    machine_of = np.arange(128) % world_size // local
    for machine in range(world_size // local):
        per_rank = []
        for rank in range(machine * local, (machine + 1) * local):
            recorder.asked.clear()
            loader = make(
                store,
                4,
                rank=rank,
                world_size=world_size,
                order="windowed",
                window=4,
                loader={"local_world_size": local},
            )
            served(loader)
            maps = loader.data.split.maps
            addresses = np.concatenate(recorder.asked[1:])
            chunk = np.searchsorted(np.sort(maps.addresses), addresses, "right") - 1
            chunk = np.argsort(maps.addresses)[chunk]
            slots = chunk * 8 + (addresses - maps.addresses[chunk]) // 432
            per_rank.append(slots)
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            window = np.sort(order[begin:end][machine_of[begin:end] == machine])
            shares = [slots[np.isin(slots, window)] for slots in per_rank]
            for share in shares:
                assert (np.diff(share) > 0).all()  # in the store's sequence
            assert np.array_equal(np.concatenate(shares), window)  # each once, whole runs


def test_a_cold_cache_is_read_right(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, LABELS)})
    for file in (path / "train" / "images").glob("c.*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    for order in ("random", "windowed"):
        loader = make(path, order=order)
        for images, _ in loader:
            assert torch.equal(images, torch.from_numpy(IMAGES[loader.indices].transpose(0, 3, 1, 2).copy()))


def test_without_a_compiler_the_same_comes_out(store, monkeypatch):
    loader = make(store, crop=7)
    want = [images.clone() for images, _ in loader]
    monkeypatch.setattr(kernel, "compiled", lambda: None)
    loader.set_epoch(0)
    for (images, _), other in zip(loader, want, strict=True):
        assert torch.equal(images, other)


# Memory


LIMIT_SCRIPT = """
import resource, sys
import numpy as np, torch
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
torch.set_num_threads(1)
data = RankPartitionedDataset({store!r}, crop=112)
split_bytes = data.num_samples * 128 * 128 * 3
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
budget = int(status["VmData"].split()[0]) * 1024 + split_bytes // 2
resource.setrlimit(resource.RLIMIT_DATA, (budget, budget))
try:
    np.ones(split_bytes, np.uint8)
except MemoryError:
    pass
else:
    sys.exit("the limit does not work")
for order in ("random", "windowed"):
    loader = Loader(RankPartitionedDataset({store!r}, crop=112, order=order), 32, threads=2)
    for epoch in range(2):
        assert sum(len(labels) for _, labels in loader) == 4000
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts maps elsewhere")
def test_data_twice_the_size_of_memory(tmp_path):
    random_store(tmp_path / "s", 4_000, size=128, chunk_bytes=2_000_000, sparse=True)  # 197 MB
    subprocess.run([sys.executable, "-c", LIMIT_SCRIPT.format(store=str(tmp_path / "s"))], check=True)


FLAT_SCRIPT = """
import torch
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader

def private() -> int:
    # not psutil's USS, which counts pages of the store that happen to be mapped here alone
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) * 1024

torch.set_num_threads(1)
before = private()
loader = Loader(RankPartitionedDataset({store!r}, crop=224), 256, threads=2)
used = []
for epoch in range(20):
    for batch in loader:
        pass
    used.append(private() - before)
print(max(used), max(used[3:]) - used[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_private_memory_is_bounded_and_flat_over_twenty_epochs(tmp_path):
    random_store(tmp_path / "s", 2_560, sparse=True)
    script = FLAT_SCRIPT.format(store=str(tmp_path / "s"))
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    most, growth = map(int, done.stdout.split())
    assert most < 300_000_000
    assert growth < 80_000_000  # two batches, which a slow moment may add to the ring; an epoch has ten


def test_a_copy_of_a_loader_is_its_own(store):
    loader = make(store)
    iterator = iter(loader)
    next(iterator)
    other = copy.deepcopy(loader)
    assert len(served(other)) == 16
    assert len(list(iterator)) == 15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_device(store):
    loader, host = make(store, crop=8, loader={"device": "cuda", "threads": 2}), make(store, crop=8)
    for _ in range(2):
        for (images, labels), (images_host, labels_host) in zip(loader, host, strict=True):
            assert images.is_cuda
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images.cpu(), images_host)
            assert torch.equal(labels.cpu(), labels_host)


@pytest.mark.parametrize(
    "changes",
    [{"samples": -8}, {"samples": 8.0}, {"samples": 136}, {"samples": None}, {"epoch": -1}, {"epoch": 1.5}],
    ids=str,
)
def test_states_that_are_no_position_are_refused(store, changes):
    loader = make(store)
    with pytest.raises(
        UsageError, match="checkpoint is .* samples into epoch .*: must be whole numbers, of at most 128"
    ):
        loader.load_state_dict({**loader.state_dict(), **changes})
    with pytest.raises(UsageError, match="holds no position"):
        loader.load_state_dict([1])
    assert len(served(loader)) == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_a_missing_cuda_device_is_named_at_once(store):
    with pytest.raises(UsageError, match="device cuda: there are 0 here"):
        make(store, loader={"device": "cuda"})
