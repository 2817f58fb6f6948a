"""Reading ahead by the known order, so that a disk works at its full depth, at no cost once the data is in memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from trainer.dataset import RankPartitionedDataset
from trainer.kernel import will_need
from trainer.order import window_bounds

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

_resource: Any
try:
    import resource as _resource

    _resource.getrusage(_resource.RUSAGE_THREAD)
except (ImportError, AttributeError):  # not Linux
    _resource = None


def disk_reads() -> int | None:
    """Blocks that this thread had to read from disk so far, page faults that waited for one included; None: unknown."""
    if _resource is None:
        return None
    usage = _resource.getrusage(_resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


class ReadAhead:
    """Asks the kernel for the bytes of coming batches; shared by the threads of one epoch.

    Random order: batch b asks for the crops of the batches after it. Windowed order: it asks for a
    part of the next window, in the store's sequence. There, the ranks of one machine divide the window's samples that
    any of them needs, each reading one run of it for all (the page cache is common).

    Args:
        data: the Dataset.
        epoch: the epoch.
        order: int64 (N,), the store slots of all ranks in the epoch's order.
        first: position in `order` of the first batch.
        addresses: int64 (S,), where the crops of this rank's samples begin, from the first batch on.
        batch_size: samples per batch.
        local_world_size: ranks on this machine, consecutive ones.
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
        self._data, self._order, self._first, self._addresses = data, order, first, addresses
        self._batch_size, self._local = batch_size, local_world_size
        self._bounds: np.ndarray | None = None
        if data.train and data.order == "windowed":
            self._bounds = window_bounds(data.seed, epoch, data.num_samples, data.split.chunk_images, data.window)
        self._distance = max(batch_size, AHEAD_BYTES // data.crop_extent)  # samples
        self._asked = 0  # samples of `slots`, or windows-and-fraction in the windowed order
        self._asked_window = 0.0 if self._bounds is None else float(np.searchsorted(self._bounds, first, "right") - 1)
        self._lock = threading.Lock()
        before = disk_reads()
        will_need(addresses[:: -(-len(addresses) // _SAMPLES) or 1], data.crop_extent)
        self._quiet = QUIET_BATCHES if before is not None and before == disk_reads() else 0

    def before(self, batch: int) -> int | None:
        """Ask for what is due when the batch's copy begins; returns a token for `after`."""
        reads = disk_reads()
        if self._quiet >= QUIET_BATCHES:
            return reads
        if self._bounds is None:
            end = (batch + 1) * self._batch_size + self._distance
            with self._lock:
                begin = max(self._asked, batch * self._batch_size)
                self._asked = max(end, begin)
            will_need(self._addresses[begin:end], self._data.crop_extent)
        else:
            self._ask_window(batch)
        return reads

    def after(self, token: int | None) -> None:
        """Learn from the batch's copy whether the data still comes from disk."""
        self._quiet = self._quiet + 1 if token is not None and disk_reads() == token else 0

    def _ask_window(self, batch: int) -> None:
        """Keep asking one window ahead: at a window's k-th batch for the k-th part of the next window."""
        assert self._bounds is not None
        position = min(self._first + (batch + 1) * self._batch_size * self._data.world_size, self._bounds[-1])
        window = int(np.searchsorted(self._bounds, position, "left")) - 1
        part = (position - self._bounds[window]) / (self._bounds[window + 1] - self._bounds[window])
        with self._lock:
            begin, end = max(self._asked_window, window), window + 1 + part
            self._asked_window = max(begin, end)
        for w in range(int(begin), min(int(np.ceil(end)), len(self._bounds) - 1)):
            mine = self._window_share(w)
            cut = [round(min(max(x - w, 0.0), 1.0) * len(mine)) for x in (begin, end)]
            image_bytes = self._data.split.image_bytes
            addresses = self._data.split.maps.locate(mine[cut[0] : cut[1]] * image_bytes, image_bytes)
            will_need(addresses, image_bytes, _WINDOW_GAP)

    def _window_share(self, window: int) -> np.ndarray:
        """int64 (n,): the slots of a window that this rank reads for its machine, ascending."""
        assert self._bounds is not None
        rank, world_size = self._data.rank, self._data.world_size
        places = np.arange(self._bounds[window], self._bounds[window + 1])
        node = places % world_size // self._local == rank // self._local
        slots = np.sort(self._order[places[node]])
        return np.array_split(slots, self._local)[rank % self._local]
