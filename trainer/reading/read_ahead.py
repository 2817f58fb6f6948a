"""Reading ahead by the known order, so that a disk works at its full depth, at no cost once the data is in memory."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeline.store.maps import ChunkMaps
from trainer.reading.copy_crops import will_need

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


class ReadingPlan(NamedTuple):
    """What a rank reads in an epoch, and when."""

    positions: np.ndarray
    """int64 (n,), where what is read begins, in the order of reading: bytes counted through all chunks end to end."""
    extent: int
    """Bytes read at each."""
    begin: np.ndarray
    """int64 (batches,): how many of the positions are past when a batch's copy begins."""
    end: np.ndarray
    """int64 (batches,): how many must have been asked for then."""
    gap: int = 0
    """Ranges at most so many bytes apart are read as one."""


def random_plan(positions: np.ndarray, extent: int, batch_size: int) -> ReadingPlan:
    """Each batch asks for the crops of the batches after it.

    Args:
        positions: int64 (n,), where this rank's crops begin, in the order in which they are served.
        extent: bytes of a crop in the store.
    """
    begin = np.arange(0, len(positions), batch_size)
    return ReadingPlan(positions, extent, begin, begin + batch_size + max(batch_size, AHEAD_BYTES // extent))


def windowed_plan(
    order: np.ndarray,
    bounds: np.ndarray,
    first: int,
    batch_size: int,
    image_bytes: int,
    *,
    rank: int,
    world_size: int,
    local_world_size: int,
) -> ReadingPlan:
    """Each batch asks for a part of the next window, in the store's sequence.

    The ranks of one machine divide a window's samples that any of them needs: each reads one run of it for all (the
    page cache is common).

    Args:
        order: int64 (N,), the store slots of all ranks in the epoch's order.
        bounds: int64 (windows + 1,), where its windows begin and end.
        first: position in `order` of the first batch.
        local_world_size: ranks on this machine, consecutive ones.
    """
    machine_of = np.arange(len(order)) % world_size // local_world_size
    shares = []  # for each window int64 (n,), the slots that this rank reads
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        slots = np.sort(order[start:stop][machine_of[start:stop] == rank // local_world_size])
        shares.append(np.array_split(slots, local_world_size)[rank % local_world_size])
    read = np.cumsum([0, *map(len, shares)])  # (windows + 1,), before each window
    batches = len(range(first + rank, len(order), world_size * batch_size))
    served = np.minimum(first + np.arange(1, batches + 1) * batch_size * world_size, bounds[-1])
    window = np.searchsorted(bounds, served) - 1
    # at the k-th part of a window, the k-th part of the next one
    windows = np.arange(len(bounds))
    end = np.interp(np.interp(served, bounds, windows) + 1, windows, read).astype(np.int64)
    return ReadingPlan(np.concatenate(shares) * image_bytes, image_bytes, read[window], end, _WINDOW_GAP)


class ReadAhead:
    """Asks the kernel for the bytes of coming batches; shared by the threads of one epoch.

    Attributes:
        disk: tells whether asking is worth its time.
    """

    def __init__(self, chunks: ChunkMaps, plan: ReadingPlan) -> None:
        self._chunks, self._plan = chunks, plan
        self._asked = 0
        self._lock = threading.Lock()
        self.disk = DiskWatch()
        self.disk.try_samples(chunks.locate(plan.positions, plan.extent), plan.extent)

    def ask(self, batch: int) -> None:
        """Ask for what is due when the batch's copy begins; others wait, as what they would copy is just being read."""
        plan = self._plan
        if not self.disk.cold:
            return
        with self._lock:
            begin = max(self._asked, int(plan.begin[batch]))
            self._asked = max(begin, int(plan.end[batch]))
            positions = plan.positions[begin : self._asked]
            if len(positions):
                will_need(self._chunks.locate(positions, plan.extent), plan.extent, plan.gap)
