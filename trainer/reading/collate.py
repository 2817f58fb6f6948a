"""A DataLoader's batches without a second copy: samples that lie in one batch already, in memory that is used again.

A worker sends a batch in shared memory. Fresh pages of that cost several times what copying the crops does, so a worker
fills the same memory again as soon as the process that received it has dropped the batch: that one then clears the
byte behind the pixels.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

KEPT_BATCHES = 8
"""Batches in shared memory that a worker keeps for use again; DataLoader prefetches two by default."""


class Memory(NamedTuple):
    """One batch's memory."""

    images: torch.Tensor
    """uint8 (n, H, W, C)"""
    shared: torch.Tensor | None
    """uint8 (bytes + 1,), where it is shared: the pixels, and 1 while they are in use."""


class BatchMemory:
    """Gives memory for batches: in a DataLoader's worker shared memory, some of it used again."""

    def __init__(self) -> None:
        self._shared: collections.deque[torch.Tensor] = collections.deque(maxlen=KEPT_BATCHES)

    def take(self, shape: tuple[int, ...]) -> Memory:
        """Memory of this shape that nobody uses."""
        if get_worker_info() is None:
            return Memory(torch.empty(shape, dtype=torch.uint8), None)
        count = math.prod(shape)
        free = (shared for shared in self._shared if len(shared) == count + 1 and not shared[-1])
        shared = next(free, None)
        if shared is None:
            shared = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count + 1))
            self._shared.append(shared)  # and the oldest is forgotten
        shared[-1] = 1
        return Memory(shared[:-1].view(shape), shared)


class Sample(tuple[torch.Tensor, int]):
    """(image, label). A type of its own, so that DataLoader's default collate function calls ours."""


class Samples(list[tuple[torch.Tensor, int]]):
    """The samples of a batch; labels int64 (n,)."""

    def __init__(self, memory: Memory, labels: torch.Tensor) -> None:
        images = memory.images.permute(0, 3, 1, 2)
        super().__init__(map(Sample, zip(images, labels.tolist(), strict=True)))
        self.batch = images if memory.shared is None else SharedImages(memory.shared, memory.images.shape), labels
        self._whole = tuple(self)

    @property
    def is_whole(self) -> bool:
        """No sample was taken out, put in or moved."""
        return len(self) == len(self._whole) and all(a is b for a, b in zip(self, self._whole, strict=True))


def collate(samples: list[tuple[torch.Tensor, int]], **_: Any) -> tuple[Any, torch.Tensor]:
    """A DataLoader's collate function: (images, labels), which are not copied where they are a batch already."""
    if isinstance(samples, Samples) and samples.is_whole:
        return samples.batch
    images, labels = zip(*samples, strict=True)
    return torch.stack(images).contiguous(memory_format=torch.channels_last), torch.tensor(labels)


default_collate_fn_map[Sample] = collate  # as the documentation of `default_collate` has it


class SharedImages:
    """Images on their way from a worker; it arrives as a tensor, uint8 (n, C, H, W)."""

    def __init__(self, shared: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._shared, self._shape = shared, tuple(shape)

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _receive, (self._shared, self._shape)


def _receive(shared: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    view = shared.numpy()[:-1]  # the tensor's storage refers to this array object, and nothing else does
    weakref.finalize(view, _release, shared.numpy()).atexit = False
    return torch.from_numpy(view).view(shape).permute(0, 3, 1, 2)


def _release(shared: np.ndarray) -> None:
    shared[-1] = 0
