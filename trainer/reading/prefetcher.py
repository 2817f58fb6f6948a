"""The threads that fill batches ahead of the training loop."""

from __future__ import annotations

import functools
import os
import threading
from typing import NamedTuple

import numpy as np
import torch

from pipeline.errors import UsageError
from pipeline.store.maps import ChunkMaps
from trainer.reading.batch_pool import BatchPool, Memory
from trainer.reading.copy_crops import copy_crops
from trainer.reading.read_ahead import ReadAhead


class Batch(NamedTuple):
    """A batch on the device."""

    images: torch.Tensor
    """uint8 (n, C, H, W), channels_last"""
    labels: torch.Tensor
    """int64 (n,)"""
    slots: np.ndarray
    """int64 (n,)"""
    arrived: torch.Event | None = None
    """The copies to the device are done; None where they are already."""


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream:
    """The device's one stream for copies: torch keeps freed memory for the stream that it was made on."""
    return torch.Stream(device)


class Prefetcher:
    """The threads and queues of one iteration. The threads refer to this, and not to the loader or its iterator.

    Args:
        chunks: the maps.
        positions: int64 (n,), where each sample's crop begins, in the order to serve.
        row_stride: bytes from one row of a stored image to the next.
        slots: int64 (n,), each sample's slot.
        labels: int32, by slot.
        ahead: reads ahead by the same order.
        pool: gives the batches' memory.
        threads: threads that copy.
    """

    def __init__(
        self,
        chunks: ChunkMaps,
        positions: np.ndarray,
        row_stride: int,
        slots: np.ndarray,
        labels: np.ndarray,
        ahead: ReadAhead,
        pool: BatchPool,
        threads: int,
    ) -> None:
        self._chunks, self._positions, self._row_stride = chunks, positions, row_stride
        self._slots, self._labels, self._ahead, self._pool = slots, labels, ahead, pool
        self._batch_size = pool.shape[0]
        self.num_batches = -(-len(slots) // self._batch_size)
        self._stream = copy_stream(pool.device) if pool.pinned else None
        self._condition = threading.Condition()
        self._results: dict[int, Batch | BaseException] = {}
        self._next = self.yielded = 0
        self.stopped = False
        self._pid = os.getpid()
        count = min(threads, self.num_batches)
        self._threads = [threading.Thread(target=self._work, name=f"loader-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        if self._stream is not None:
            torch.accelerator.set_device_index(self._pool.device)  # each thread begins with the first device
        while True:
            with self._condition:
                while not self.stopped and self._next < self.num_batches:
                    if self._next - self.yielded < self._pool.depth:
                        break
                    self._condition.wait()
                if self.stopped or self._next >= self.num_batches:
                    return
                batch = self._next
                self._next += 1
            result: Batch | BaseException
            try:
                result = self._fill(batch)
            except BaseException as error:  # handed to the caller, who raises it
                result = error
            with self._condition:
                self._results[batch] = result
                self._condition.notify_all()
            del result  # the caller alone decides how long a batch lives

    def _fill(self, batch: int) -> Batch:
        part = slice(batch * self._batch_size, (batch + 1) * self._batch_size)
        slots = self._slots[part]
        self._chunks.arrive(self._positions[part], lambda: self.stopped)
        memory = self._pool.take()
        with self._ahead.disk.watch():
            self._ahead.ask(batch)
            copy_crops(self._chunks, self._positions[part], memory.array[: len(slots)], self._row_stride)
        labels = torch.from_numpy(self._labels[slots].astype(np.int64))
        if self._stream is not None:
            return self._send(memory, labels, slots, self._stream)
        images = self._pool.lend(memory, len(slots)).permute(0, 3, 1, 2)
        return Batch(images.to(self._pool.device), labels.to(self._pool.device), slots)

    def _send(self, memory: Memory, labels: torch.Tensor, slots: np.ndarray, stream: torch.Stream) -> Batch:
        """Start the copies to the device."""
        assert memory.pinned is not None
        assert memory.copied is not None
        device = self._pool.device
        with stream:
            images = memory.pinned[: len(slots)].to(device, non_blocking=True).permute(0, 3, 1, 2)
            memory.copied.record(stream)
            labels = labels.pin_memory().to(device, non_blocking=True)
            arrived = torch.Event(device)
            arrived.record(stream)
        self._pool.give_back(memory)
        return Batch(images, labels, slots, arrived)

    def take(self) -> Batch:
        """The next batch, in order; waits for it.

        Raises:
            UsageError: the iteration was ended, or began in another process.
        """
        if self._pid != os.getpid():
            raise UsageError("this iteration began in another process: call iter(loader) after the fork")
        with self._condition:
            while self.yielded not in self._results:
                if self.stopped:
                    raise UsageError("the loader was closed, or iterated anew, during this iteration")
                self._condition.wait()
            result = self._results.pop(self.yielded)
            self.yielded += 1
            self._condition.notify_all()
        if isinstance(result, BaseException):
            self.close()
            raise result
        return result

    def close(self) -> None:
        """Stop the threads, at most one batch's copy later."""
        if self._pid != os.getpid():
            return  # a forked child has no such threads, and perhaps a lock that one of them held
        with self._condition:
            self.stopped = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._results.clear()
