"""Reading ahead by the known order, so that a disk works at its full depth, at no cost once the data is in memory."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trainer.order import window_bounds
from trainer.reading.copy_crops import will_need

if TYPE_CHECKING:
    from trainer.dataset import RankPartitionedDataset

AHEAD_BYTES = 64_000_000
"""Bytes, but at least one batch, that a rank asks for beyond the batch being copied: enough that a disk's queue never
runs empty between two batches."""

QUIET_BATCHES = 8
"""Batches in a row without any read from disk after which nothing more is asked for, until a copy has to wait for the
disk again: asking for what is in memory already costs a third of the copy."""

_SAMPLES = 16
"""Samples that are asked for first, to see whether they are in memory."""

_WINDOW_GAP = 1_000_000
"""Windowed order: a gap of at most this many bytes is read through."""


def disk_reads() -> int | None:
    """Blocks that this thread had to read from disk so far, page faults that waited for one included; None: unknown."""
    if sys.platform != "linux":
        return None
    import resource

    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


class DiskWatch:
    """Tells from the reading thread's own counters whether data still comes from disk."""

    def __init__(self) -> None:
        self._quiet = 0

    @property
    def cold(self) -> bool:
        return self._quiet < QUIET_BATCHES

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Learn from the reading of one batch, inside the `with` block and in one thread."""
        reads = disk_reads()
        yield
        self._quiet = self._quiet + 1 if reads is not None and disk_reads() == reads else 0

    def try_samples(self, addresses: np.ndarray, extent: int) -> None:
        """Ask for a few of the samples, to begin with a guess."""
        reads = disk_reads()
        will_need(addresses[:: max(1, len(addresses) // _SAMPLES)], extent)
        self._quiet = QUIET_BATCHES if reads is not None and disk_reads() == reads else 0


class ReadAhead:
    """Asks the kernel for the bytes of coming batches; shared by the threads of one epoch.

    Random order: a batch asks for the crops of the batches after it. Windowed order: it asks for a part of the next
    window, in the store's sequence. There, the ranks of one machine divide the window's samples that any of them
    needs, each reading one run of it for all (the page cache is common).

    Args:
        data: the Dataset.
        epoch: the epoch.
        order: int64 (N,), the store slots of all ranks in the epoch's order.
        first: position in `order` of the first batch.
        addresses: int64 (S,), where the crops of this rank's samples begin, from the first batch on.
        batch_size: samples per batch.
        local_world_size: ranks on this machine, consecutive ones.

    Attributes:
        disk: tells whether asking is worth its time.
    """

    def __init__(
        self,
        data: RankPartitionedDataset,
        epoch: int,
        order: np.ndarray,
        first: int,
        addresses: np.ndarray,
        batch_size: int,
        local_world_size: int = 1,
    ) -> None:
        self._data, self._first, self._addresses = data, first, addresses
        self._batch_size, self._local = batch_size, local_world_size
        self._bounds: np.ndarray | None = None
        if data.train and data.order == "windowed":
            self._bounds = window_bounds(data.seed, epoch, data.num_samples, data.split.chunk_images, data.window)
            self._order = order
        self._ahead = max(batch_size, AHEAD_BYTES // data.crop_extent)  # samples
        self._asked = 0.0  # samples of `addresses`, or windows and parts of a window
        self._share: tuple[int, np.ndarray] = -1, order[:0]
        self._lock = threading.Lock()
        self.disk = DiskWatch()
        self.disk.try_samples(addresses, data.crop_extent)

    def ask(self, batch: int) -> None:
        """Ask for what is due when the batch's copy begins."""
        if not self.disk.cold:
            return
        if self._bounds is not None:
            with self._lock:  # others wait: what they would copy is just being read
                self._ask_window(batch)
            return
        with self._lock:
            begin = max(int(self._asked), batch * self._batch_size)
            end = max((batch + 1) * self._batch_size + self._ahead, begin)
            self._asked = end
        if begin < len(self._addresses):
            will_need(self._addresses[begin:end], self._data.crop_extent)

    def _ask_window(self, batch: int) -> None:
        """Keep asking one window ahead: at the k-th part of a window for the k-th part of the next one."""
        assert self._bounds is not None
        position = min(self._first + (batch + 1) * self._batch_size * self._data.world_size, self._bounds[-1])
        window = int(np.searchsorted(self._bounds, position, "left")) - 1
        part = (position - self._bounds[window]) / (self._bounds[window + 1] - self._bounds[window])
        begin, end = max(self._asked, window), window + 1 + part
        self._asked = max(begin, end)
        for w in range(int(begin), min(int(np.ceil(end)), len(self._bounds) - 1)):
            share = self._window_share(w)
            cut = [round(min(max(edge - w, 0.0), 1.0) * len(share)) for edge in (begin, end)]
            image_bytes = self._data.split.image_bytes
            addresses = self._data.split.maps.locate(share[cut[0] : cut[1]] * image_bytes, image_bytes)
            will_need(addresses, image_bytes, _WINDOW_GAP)

    def _window_share(self, window: int) -> np.ndarray:
        """int64 (n,): the slots of a window that this rank reads for its machine, ascending."""
        assert self._bounds is not None
        if self._share[0] != window:
            rank, world_size = self._data.rank, self._data.world_size
            places = np.arange(self._bounds[window], self._bounds[window + 1])
            machine = places % world_size // self._local == rank // self._local
            slots = np.sort(self._order[places[machine]])
            self._share = window, np.array_split(slots, self._local)[rank % self._local]
        return self._share[1]
