"""The ring of batches: memory that is filled, lent to the caller, and filled again."""

from __future__ import annotations

import collections
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.reading.copy_crops import aligned_empty


class Memory(NamedTuple):
    """One batch's memory in the pool."""

    array: np.ndarray
    """uint8 (B, H, W, C)"""
    pinned: torch.Tensor | None
    copied: Any
    """CUDA event: the last copy from here to the device is done."""


class BatchPool:
    """Batch memory that is used again once nothing refers to it: allocating it anew costs more than the copy does."""

    def __init__(self, batch_size: int, crop_shape: tuple[int, int, int], device: torch.device, threads: int) -> None:
        self.shape = (batch_size, *crop_shape)
        self.device = device
        self.depth = threads + 1  # batches that are filled or being filled, and not yet yielded
        self._free: collections.deque[Memory] = collections.deque()  # its methods are atomic: finalizers call them
        self._made = 0

    def take(self) -> Memory:
        cuda = self.device.type == "cuda"
        # On CUDA the caller never holds host memory, so that a fixed number does, used in turn.
        if self._free and not (cuda and self._made <= self.depth):
            try:
                memory = self._free.popleft()
            except IndexError:
                return self.take()  # another thread was faster
            if memory.copied is not None:
                memory.copied.synchronize()
            return memory
        self._made += 1
        if cuda:
            pinned = torch.empty(self.shape, dtype=torch.uint8, pin_memory=True)
            return Memory(pinned.numpy(), pinned, torch.cuda.Event())
        return Memory(aligned_empty(int(np.prod(self.shape))).reshape(self.shape), None, None)

    def give_back(self, memory: Memory) -> None:
        _give_back(self._free, self.depth + 2, memory)

    def lend(self, memory: Memory, count: int) -> torch.Tensor:
        """uint8 (count, H, W, C): a tensor on the memory, which returns to the ring when its storage is dropped."""
        view = memory.array[:count]  # the storage refers to this array object, and nothing else does
        weakref.finalize(view, _give_back, self._free, self.depth + 2, memory).atexit = False
        return torch.from_numpy(view)

    def clear(self) -> None:
        """Free all memory; what is lent is freed when it comes back."""
        self._free = collections.deque()
        self._made = 0


def _give_back(free: collections.deque[Memory], most: int, memory: Memory) -> None:
    if len(free) < most:
        free.append(memory)
