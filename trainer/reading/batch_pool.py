"""The pool of batches: memory that is filled, lent to the caller or copied to the device, and filled again."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import NamedTuple

import numpy as np
import torch

ALIGN = 64
"""Alignment in bytes of a batch's memory, for the copy's vector stores; a cache line."""


class Memory(NamedTuple):
    """One batch's memory in the pool."""

    array: np.ndarray
    """uint8 (B, H, W, C)"""
    pinned: torch.Tensor | None
    """The same memory as a tensor, where the device copies from it by itself."""
    copied: torch.Event | None
    """The last copy from here to the device is done."""


class BatchPool:
    """Batch memory that is used again once nothing refers to it: allocating it anew costs more than the copy does.

    Args:
        shape: (B, H, W, C) of a batch.
        device: where batches go.
        threads: threads that fill batches.

    Attributes:
        depth: batches that are filled or being filled, and not yet yielded.
        pinned: the memory is pinned, and the device copies from it while the threads go on.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, threads: int) -> None:
        self.shape, self.device = shape, device
        self.depth = threads + 1
        self.pinned = device.type in ("cuda", "xpu")
        self._free: collections.deque[Memory] = collections.deque()  # its methods are atomic: finalizers call them
        self._lock = threading.Lock()

    def take(self) -> Memory:
        """Memory that nothing uses any more."""
        with self._lock:
            if not self._free and not self.pinned:
                return Memory(aligned_empty(int(np.prod(self.shape))).reshape(self.shape), None, None)
            if not self._free:
                self._pin(self.depth + 1)
            memory = self._free.popleft()
        if memory.copied is not None:
            memory.copied.synchronize()
        return memory

    def _pin(self, count: int) -> None:
        """Make so many pinned batches as one block: torch rounds each block up to a power of two."""
        for pinned in torch.empty((count, *self.shape), dtype=torch.uint8, pin_memory=True):
            self._free.append(Memory(pinned.numpy(), pinned, torch.Event(self.device)))

    def give_back(self, memory: Memory) -> None:
        _give_back(self._free, self.depth + 2, memory)

    def lend(self, memory: Memory, count: int) -> torch.Tensor:
        """uint8 (count, H, W, C): a tensor on the memory, which returns to the pool when its storage is dropped."""
        view = memory.array[:count]  # the storage refers to this array object, and nothing else does
        weakref.finalize(view, _give_back, self._free, self.depth + 2, memory).atexit = False
        return torch.from_numpy(view)

    def clear(self) -> None:
        """Free all memory; what is lent is freed when it comes back."""
        self._free = collections.deque()


def _give_back(free: collections.deque[Memory], most: int, memory: Memory) -> None:
    if len(free) < most:
        free.append(memory)


def aligned_empty(count: int) -> np.ndarray:
    """uint8 (count,) of uninitialised memory that begins on a cache line (in huge pages where numpy asks for them)."""
    memory = np.empty(count + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + count]
