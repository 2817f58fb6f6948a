"""The loader and its pool on CUDA's streams: simulated ones, in many timings, with and without planted faults."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from cuda_double import Double, cuda_double
from stores import make_images, make_store

from trainer import loader as loader_module
from trainer.dataset import RankPartitionedDataset
from trainer.reading import batch_pool, prefetcher
from trainer.reading.waits import Waits

NUM, BATCH, EPOCHS = 130, 8, 3
IMAGES, LABELS = make_images(NUM, 6), np.arange(NUM) * 7 % 101
DEVICE = torch.device("cuda", 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("data") / "s.zarr", {"train": (IMAGES, LABELS)}, chunk_images=8)


@pytest.fixture(autouse=True)
def _new_streams() -> Iterator[None]:
    prefetcher.copy_stream.cache_clear()
    yield
    prefetcher.copy_stream.cache_clear()


def read(address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Device memory as a kernel reads it: by its address, whoever owns it by then."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype).reshape(shape).copy()


def train(store: Path, double: Double, threads: int = 2, epochs: int = EPOCHS) -> int:
    """Serve some epochs to a compute stream; returns how many of its batches were wrong."""
    loader = loader_module.Loader(RankPartitionedDataset(store), BATCH, threads=threads, device=DEVICE)
    torch.accelerator.set_device_index(DEVICE)
    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    stream = double.current_stream(DEVICE)
    for _ in range(epochs):
        for images, labels in loader:

            def compute(
                slots: np.ndarray = loader.indices, image: int = images.data_ptr(), label: int = labels.data_ptr()
            ) -> None:
                pixels = read(image, (BATCH, 6, 6, 3), np.uint8)
                seen.append((slots, pixels, read(label, (BATCH,), np.int64)))

            stream.put(compute)
            del images, labels
            double.run()
        with double.lock:
            stream.advance(len(stream.jobs))  # what an epoch's end waits for
    loader.close()
    double.finish()
    gc.collect()
    assert len(seen) == epochs * (NUM // BATCH)
    return sum(
        not (np.array_equal(pixels, IMAGES[slots]) and np.array_equal(labels, LABELS[slots]))
        for slots, pixels, labels in seen
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_every_batch_is_whole_in_all_timings(store, monkeypatch, seed, threads):
    with cuda_double(monkeypatch, seed) as double:
        assert train(store, double, threads) == 0
    assert double.faults == set()


def test_device_memory_does_not_grow_with_the_epochs(store, monkeypatch):
    used = []
    for epochs in (3, 40):
        with cuda_double(monkeypatch, seed=5) as double:
            train(store, double, epochs=epochs)
            used.append(double.allocated)
        prefetcher.copy_stream.cache_clear()
    assert used[1] <= 2 * used[0]


def test_pinned_memory_is_one_block_that_is_used_again(store, monkeypatch):
    with cuda_double(monkeypatch, seed=0) as double:
        train(store, double)
        pinned = [tensor.shape for tensor in double.pinned.values() if tensor.ndim == 5]
    assert pinned == [(4, BATCH, 6, 6, 3)]


@pytest.mark.parametrize(("host", "step", "idle"), [(0.04, 0.01, 0.03), (0.004, 0.01, 0.0)])
def test_only_the_devices_idle_time_counts_as_waiting(monkeypatch, host, step, idle):
    with cuda_double(monkeypatch, seed=0) as double:
        waits, stream = Waits(DEVICE), double.current_stream(DEVICE)
        for _ in range(10):
            with waits:
                double.now += host  # the caller waits for a batch
            stream.put(lambda: None, step)
        assert waits.seconds() == 0  # nothing has run
        double.finish()
        assert waits.seconds() == pytest.approx(host + 9 * idle)
        assert waits.seconds() == pytest.approx(host + 9 * idle)


COPY = "images = memory.pinned[: len(slots)].to(device, non_blocking=True).permute(0, 3, 1, 2)"
COPIED = "memory.copied.record(stream)"
LABELS_COPY = "labels = labels.pin_memory().to(device, non_blocking=True)"
EVENT = "arrived = torch.Event(device)"
RECORD = "arrived.record(stream)"
FAULTS = {
    "no wait_event": (loader_module, "stream.wait_event(batch.arrived)", "pass"),
    "event before the labels' copy": (
        prefetcher,
        f"{LABELS_COPY}\n            {EVENT}\n            {RECORD}",
        f"{EVENT}\n            {RECORD}\n            {LABELS_COPY}",
    ),
    "no synchronize before reuse": (batch_pool, "memory.copied.synchronize()", "pass"),
    "copied recorded before the copy": (
        prefetcher,
        f"{COPY}\n            {COPIED}",
        f"{COPIED}\n            {COPY}",
    ),
    "no record_stream of images": (loader_module, "batch.images.record_stream(stream)", "pass"),
    "no record_stream of labels": (loader_module, "batch.labels.record_stream(stream)", "pass"),
    "no device set in threads": (prefetcher, "torch.accelerator.set_device_index(self._pool.device)", "pass"),
    "labels not pinned": (prefetcher, "labels.pin_memory()", "labels"),
    "a new stream for each iteration": (prefetcher, "@functools.cache\n", ""),
}


def altered(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with other source text."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1
    spec = importlib.util.spec_from_loader(f"{module.__name__}_altered", loader=None)
    assert spec is not None
    other = importlib.util.module_from_spec(spec)
    sys.modules[other.__name__] = other
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), other.__dict__)
    return other


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(store, monkeypatch, name):
    module, old, new = FAULTS[name]
    other = altered(module, old, new)
    if module is loader_module:
        monkeypatch.setattr(loader_module, "Loader", other.Loader)
    else:
        kind = "Prefetcher" if module is prefetcher else "BatchPool"
        monkeypatch.setattr(loader_module, kind, getattr(other, kind))
    with cuda_double(monkeypatch, seed=0) as double:  # all as late as possible
        wrong = train(store, double)
    leaked = double.allocated > 2 * (NUM // BATCH) * BATCH * (6 * 6 * 3 + 8)  # an epoch waits on the device here
    assert wrong or double.faults or leaked
