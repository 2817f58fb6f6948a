"""The passes of `python -m pipeline bench`: loader and ceilings, from memory and from disk, interleaved."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.store.reader import Split
from trainer.bench.machine import bytes_read, cores, evict, on_cores, run_threads

if TYPE_CHECKING:
    from trainer.dataset import RankPartitionedDataset

REPEATS = 3
PASS_SECONDS = 0.7
"""A pass goes on over further epochs until this is over; the threads' start is then below a hundredth."""

MAX_IMAGES = 20_480
COLD_IMAGES = 8_192
_READ_BYTES = 8_000_000
_READ_THREADS = 16


class Measurement:
    """Measures the first samples of a split, as many as fit into memory.

    Args:
        split: a raw split with at least one served sample.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.count = count = _images_in_memory(split)
        self.batch_size = min(256, count)
        self.threads = [n for n in (1, 2, 4, 8) if n < cores()] + [min(cores(), 16)]
        last = int(split.valid_slots[count - 1])
        self.paths = [split.chunk_path(chunk) for chunk in range(last // split.chunk_images + 1)]
        self.window = max(1, len(self.paths) // 20)  # the reading runs a window ahead, which a short pass pays for

    def data(self, crop: int, order: str = "random") -> RankPartitionedDataset:
        """A Dataset of those samples alone, with maps of its own."""
        from trainer.dataset import RankPartitionedDataset

        slots = self.split.valid_slots[: self.count]
        store, name = self.split.store_path, self.split.name
        data = RankPartitionedDataset(
            store, name, crop=crop, train=True, order=order, window=self.window, indices=slots
        )
        data.split.labels = np.zeros_like(data.split.labels)  # an unlabelled split is as fast
        return data

    def warm(self, crops: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of bare copy and loader, by crop, order and threads, with everything in memory."""
        from trainer.loader import Loader

        passes: list[tuple[dict[str, Any], Callable[[], float]]] = []
        for crop, threads in itertools.product(crops, self.threads):
            row = {"crop": crop, "threads": threads}
            passes.append(({"what": "bare copy", **row}, self._copy_pass(crop, threads)))
            for order in ("random", "windowed"):
                loader = Loader(self.data(crop, order), self.batch_size, threads=threads)
                passes.append(({"what": "loader", "order": order, **row}, self._loader_pass(loader, threads)))
        for path in self.paths:
            with open(path, "rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass
        for _, measure in passes:
            measure()  # touches each map once
        rates: list[list[float]] = [[] for _ in passes]
        for _ in range(REPEATS):
            for measured, (_, measure) in zip(rates, passes, strict=True):
                measured.append(measure())
        rows = [
            {**row, "images_per_second": statistics.median(measured)}
            for (row, _), measured in zip(passes, rates, strict=True)
        ]
        bare = {(row["crop"], row["threads"]): row["images_per_second"] for row in rows if row["what"] == "bare copy"}
        for row in rows:
            row["of_ceiling"] = row["images_per_second"] / bare[row["crop"], row["threads"]]
        return rows

    def _copy_pass(self, crop: int, threads: int) -> Callable[[], float]:
        """The ceiling: the same crops copied by bare calls."""
        data = self.data(crop)
        return lambda: bare_copy(data, self.batch_size, threads, PASS_SECONDS)

    def _loader_pass(self, loader: Any, threads: int) -> Callable[[], float]:
        def measure() -> float:
            with on_cores(threads):
                images = sum(len(labels) for _, labels in loader)  # fills the ring, which a long run does once
                start, images = time.perf_counter(), 0
                while (elapsed := time.perf_counter() - start) < PASS_SECONDS:
                    images += sum(len(labels) for _, labels in loader)
            loader.close()
            return images / elapsed

        return measure

    def cold(self, crop: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows with an emptied page cache, and notes."""
        if not hasattr(os, "posix_fadvise"):
            return [], ["this system can't empty its page cache: no cold figures"]
        batches = max(1, min(self.count, COLD_IMAGES) // self.batch_size)
        count = batches * self.batch_size
        kinds: dict[str, Callable[[], tuple[float, int]]] = {
            "sequential read": lambda: self._sequential(count),
            "16-thread random read": lambda: self._random_reads(crop, count),
            "plain memory map, random": lambda: self._map_reads(crop, min(count, 1024)),
            "loader, random": lambda: self._cold_loader(crop, "random", batches),
            "loader, windowed": lambda: self._cold_loader(crop, "windowed", batches),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(REPEATS):
            for kind, measure in kinds.items():
                gc.collect()  # unmaps the files
                evict(self.paths)
                read = bytes_read()
                seconds, images = measure()
                if bytes_read() - read < images * self.split.image_bytes // 2 and bytes_read() >= 0:
                    return [], ["the page cache could not be emptied (files in use, or no local disk): no cold figures"]
                if kind == "loader, windowed":  # it reads a window ahead, of which a short pass serves only a part
                    images = max(images, (bytes_read() - read) // self.split.image_bytes)
                rates[kind].append(images / seconds)
        rows: list[dict[str, Any]] = [
            {
                "what": kind,
                "images_per_second": statistics.median(measured),
                "bytes_per_second": statistics.median(measured) * self._bytes_each(kind, crop),
            }
            for kind, measured in rates.items()
        ]
        ceilings = {"plain memory map, random": 1, "loader, random": 1, "loader, windowed": 0}
        for row in rows:
            if row["what"] in ceilings:
                row["of_ceiling"] = row["images_per_second"] / rows[ceilings[row["what"]]]["images_per_second"]
        return rows, []

    def _bytes_each(self, kind: str, crop: int) -> int:
        width, channels = self.split.image_shape[1:]
        crop_extent = (crop - 1) * width * channels + crop * channels
        return self.split.image_bytes if kind in ("sequential read", "loader, windowed") else crop_extent

    def _sequential(self, count: int) -> tuple[float, int]:
        """Seconds for reading about `count` images' bytes of the files one after the other, and the images."""
        wanted = count * self.split.image_bytes
        buffer, done = bytearray(_READ_BYTES), 0
        start = time.perf_counter()
        for path in self.paths:
            with open(path, "rb", buffering=0) as file:
                while done < wanted and (length := file.readinto(buffer)):
                    done += length
        return time.perf_counter() - start, max(1, done // self.split.image_bytes)

    def _random_reads(self, crop: int, count: int) -> tuple[float, int]:
        data = self.data(crop)
        positions = iter(data.crop_positions(data.epoch_slots(0)[:count], 0).tolist())
        lock = threading.Lock()
        files = [os.open(path, os.O_RDONLY) for path in self.paths]

        def work(_: int) -> None:
            buffer = bytearray(data.crop_extent)
            while True:
                with lock:
                    position = next(positions, None)
                if position is None:
                    return
                os.preadv(files[position // self.split.chunk_bytes], [buffer], position % self.split.chunk_bytes)

        start = time.perf_counter()
        run_threads(_READ_THREADS, work)
        seconds = time.perf_counter() - start
        for file in files:
            os.close(file)
        return seconds, count

    def _map_reads(self, crop: int, count: int) -> tuple[float, int]:
        """What a memory map gives without asking ahead."""
        from trainer.reading.copy_crops import copy_crops_numpy

        data = self.data(crop)
        positions = data.crop_positions(data.epoch_slots(0)[:count], 0)
        out = np.empty((1, *data.crop_shape), np.uint8)
        start = time.perf_counter()
        for i in range(count):
            copy_crops_numpy(data.split.maps, positions[i : i + 1], out, data.row_stride)
        return time.perf_counter() - start, count

    def _cold_loader(self, crop: int, order: str, batches: int) -> tuple[float, int]:
        from trainer.loader import Loader

        loader = Loader(self.data(crop, order), self.batch_size)
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in itertools.islice(loader, batches))
        seconds = time.perf_counter() - start
        loader.close()
        return seconds, images


def bare_copy(data: RankPartitionedDataset, batch_size: int, threads: int, seconds: float) -> float:
    """Images per second of bare copies of an epoch's crops into batches that exist already; what a loader can reach."""
    from trainer.reading.batch_pool import aligned_empty
    from trainer.reading.copy_crops import copy_crops

    shape = (batch_size, *data.crop_shape)
    batches = data.num_samples // batch_size
    positions = data.crop_positions(data.epoch_slots(0), 0)[: batches * batch_size].reshape(batches, batch_size)
    outs = [[aligned_empty(int(np.prod(shape))).reshape(shape) for _ in range(3)] for _ in range(threads)]
    for out in itertools.chain(*outs):
        out[:] = 0
    counts = [0] * threads
    start = time.perf_counter()

    def work(thread: int) -> None:
        for k in itertools.count(thread, threads):
            copy_crops(data.split.maps, positions[k % batches], outs[thread][k % 3], data.row_stride)
            counts[thread] += batch_size
            if time.perf_counter() - start > seconds:
                return

    run_threads(threads, work)
    return sum(counts) / (time.perf_counter() - start)


def _images_in_memory(split: Split) -> int:
    """Images to measure: at most `MAX_IMAGES`, the split, and what fits into a third of the free memory."""
    free = 4_000_000_000
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = next(int(x.split()[1]) * 1024 for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable"))
    return min(MAX_IMAGES, split.num_valid, max(1, free // 3 // split.image_bytes))
