"""The trainer's loader: threads copy crops from the memory maps into a ring of batches, ahead of the training loop."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.errors import UsageError
from pipeline.store.format import UNLABELLED
from trainer.dataset import RankPartitionedDataset
from trainer.order import ORDER_VERSION
from trainer.reading.batch_pool import BatchPool
from trainer.reading.copy_crops import compiled, copy_crops, copy_crops_numpy
from trainer.reading.read_ahead import ReadAhead


class Loader:
    """Batches of one rank, filled ahead by threads.

    In training the k-th global batch is the set `order[kG : (k+1)G]` for every world size P that divides G; the
    N mod G last samples of the order are left out. In evaluation every sample is served exactly once over all ranks
    and the last batch may be smaller. At an epoch's end the loader goes on to the next one by itself.

    Args:
        data: the Dataset; its rank, seed, crop, order and epoch are used.
        batch_size: samples per rank and micro-step, B.
        global_batch: samples per optimizer step, G, a multiple of B * P (gradient accumulation); B * P by default.
        threads: threads that copy. One feeds several GPUs.
        device: where batches go. On CUDA the ring is pinned and copies run on a stream of their own.
        local_world_size: ranks on this machine, for the windowed order's reading.

    Attributes:
        global_batch: G.
        accumulation: micro-steps per optimizer step, G / (B * P).
        indices: int64 (B,), store slots of the batch last yielded.
        wait_seconds: seconds that the caller has waited for batches so far.

    Iterating yields (images, labels): uint8 (B, C, H, W), channels_last, and int64 (B,). A batch keeps its memory for
    as long as any tensor or array on it is alive, so `list(loader)` is right; a loop that drops batches reuses a few.
    One iteration at a time: a new `iter` ends the previous one.

    Raises:
        UsageError: sizes that don't fit together or to the data, training on unlabelled samples, or a CUDA device that
            isn't there.
    """

    def __init__(
        self,
        data: RankPartitionedDataset,
        batch_size: int,
        global_batch: int | None = None,
        threads: int = 1,
        device: str | torch.device = "cpu",
        *,
        local_world_size: int = 1,
    ) -> None:
        self.data, self.batch_size, self.threads = data, batch_size, threads
        self.device = torch.device(device)
        self.local_world_size = local_world_size
        self.global_batch = batch_size * data.world_size if global_batch is None else global_batch
        self._check()
        self.accumulation = self.global_batch // (batch_size * data.world_size)
        self.indices = np.empty(0, np.int64)
        self.wait_seconds = 0.0
        self._consumed = 0  # samples of all ranks, in the current epoch
        self._resume = False
        self._pool = BatchPool(batch_size, data.crop_shape, self.device, threads)
        self._run: _Prefetcher | None = None

    def _check(self) -> None:
        data, where = self.data, self.data.split.path
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {self.device}: there are {torch.cuda.device_count()} here; use another, or cpu")
        step = self.batch_size * data.world_size
        if self.batch_size < 1 or self.threads < 1:
            raise UsageError(f"batch size {self.batch_size}, threads {self.threads}: both must be at least 1")
        if not 1 <= self.local_world_size <= data.world_size or data.world_size % self.local_world_size:
            raise UsageError(f"{self.local_world_size} local ranks: must divide the world size {data.world_size}")
        if self.global_batch < 1 or self.global_batch % step:
            raise UsageError(
                f"global batch {self.global_batch}: must be a multiple of batch size {self.batch_size} x world size "
                f"{data.world_size} = {step}"
            )
        if not data.train:
            return
        if self.global_batch > data.num_samples:
            raise UsageError(
                f"global batch {self.global_batch} (batch size {self.batch_size}, world size {data.world_size}): is "
                f"larger than the {data.num_samples} samples of {where}; choose a smaller one"
            )
        unlabelled = int(np.count_nonzero(data.split.labels == UNLABELLED))
        if unlabelled:
            raise UsageError(f"{where}: {unlabelled} samples have no label; training needs a labelled split")

    # Epochs and state

    @property
    def epoch(self) -> int:
        """The epoch that is being served, else the next one."""
        return self.data.epoch if self._run is None or self._run.stopped else self._run.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration serves.

        Another epoch than the present one ends a running iteration and drops a position that was loaded.
        """
        if epoch != self.epoch:
            self._stop()
            self._consumed, self._resume = 0, False
        self.data.set_epoch(epoch)

    @property
    def _served(self) -> int:
        """Samples that all ranks together serve in an epoch."""
        data = self.data
        return data.num_samples // self.global_batch * self.global_batch if data.train else data.num_samples

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return -(-len(range(self.data.rank, self._served, self.data.world_size)) // self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches yielded so far, not those prefetched; the same on every rank."""
        data, ended = self.data, 0 < self._served <= self._consumed
        windowed = f"windowed {data.window} x {data.split.chunk_images}" if data.order == "windowed" else data.order
        return {
            "epoch": self.epoch + ended,
            "samples": 0 if ended else self._consumed,
            "seed": data.seed,
            "global_batch": self.global_batch,
            "order": windowed,
            "order_version": ORDER_VERSION,
            "fingerprint": data.split.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration serve what the state's epoch has left, at this or another world size.

        Raises:
            UsageError: the state belongs to other data, another seed, order or global batch (the difference is named),
                isn't a position in an epoch, or lies between batches of this size.
        """
        own = self.state_dict()
        if not isinstance(state, dict) or not set(own) <= set(state):
            raise UsageError("the checkpoint holds no position in the training data; start afresh")
        names = ["seed", "global_batch", "order", "order_version"] if self.data.train else []
        if state["fingerprint"] != own["fingerprint"]:
            raise UsageError(
                f"another store (its samples differ: {str(state['fingerprint'])[:8]}, this run's "
                f"{own['fingerprint'][:8]}); resume with the same, or start afresh"
            )
        for name in names:
            if state[name] != own[name]:
                raise UsageError(
                    f"checkpoint's {name.replace('_', ' ')} is {state[name]}, this run's {own[name]}: resume with "
                    "the same, or start afresh"
                )
        epoch, samples = state["epoch"], state["samples"]
        if type(epoch) is not int or type(samples) is not int or epoch < 0 or not 0 <= samples <= self._served:
            raise UsageError(
                f"checkpoint is {samples!r} samples into epoch {epoch!r}: must be whole numbers, of at most "
                f"{self._served} samples in an epoch; start afresh"
            )
        step = self.batch_size * self.data.world_size
        if samples % step:
            raise UsageError(
                f"checkpoint is {samples} samples into its epoch, between batches of {self.batch_size} x "
                f"{self.data.world_size} ranks: resume from an optimizer step, or with the old sizes"
            )
        self._stop()
        self.data.set_epoch(epoch)
        self._consumed, self._resume = samples, True

    # Iteration

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._stop()
        if not self._resume:
            self._consumed = 0
        self._resume = False
        start = time.perf_counter()
        self._run = _Prefetcher(self, self.data.epoch, self._consumed)
        self.wait_seconds += time.perf_counter() - start
        return _Batches(self, self._run)

    def _stop(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None

    def close(self) -> None:
        """Stop the threads and free the ring; harmless when repeated. A later iteration starts them again."""
        self._stop()
        self._pool.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pool = BatchPool(self.batch_size, self.data.crop_shape, self.device, self.threads)


class _Batch(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor
    slots: np.ndarray
    event: Any = None
    """CUDA event: the copies to the device are done."""


class _Prefetcher:
    """The threads and queues of one iteration. The threads refer to this, and not to the loader or its iterator."""

    def __init__(self, loader: Loader, epoch: int, consumed: int) -> None:
        data = loader.data
        self._data, self.epoch, self._pool, self._batch_size = data, epoch, loader._pool, loader.batch_size
        order = data.epoch_slots(epoch)
        self.slots = order[consumed + data.rank : loader._served : data.world_size].copy()
        self.num_batches = -(-len(self.slots) // self._batch_size)
        positions = data.crop_positions(self.slots, epoch)
        # compiled now, and not in a thread, so that a fork can't come between
        self._positions = positions if compiled() is None else None
        self._addresses = data.split.maps.locate(positions, data.crop_extent)
        self._ahead = ReadAhead(
            data, epoch, order, consumed, self._addresses, self._batch_size, loader.local_world_size
        )
        self._stream = torch.cuda.Stream(loader.device) if loader.device.type == "cuda" else None
        self._condition = threading.Condition()
        self._results: dict[int, _Batch | BaseException] = {}
        self._next = self.yielded = 0
        self.stopped = False
        self._pid = os.getpid()
        count = min(loader.threads, self.num_batches)
        self._threads = [threading.Thread(target=self._work, name=f"loader-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # each thread begins with the first device
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
            result: _Batch | BaseException
            try:
                result = self._fill(batch)
            except BaseException as error:  # handed to the caller, who raises it
                result = error
            with self._condition:
                self._results[batch] = result
                self._condition.notify_all()
            del result  # the caller alone decides how long a batch lives

    def _fill(self, batch: int) -> _Batch:
        data = self._data
        part = slice(batch * self._batch_size, (batch + 1) * self._batch_size)
        slots = self.slots[part]
        memory = self._pool.take()
        with self._ahead.disk.watch():
            self._ahead.ask(batch)
            out = memory.array[: len(slots)]
            if self._positions is None:
                copy_crops(self._addresses[part], out, data.row_stride)
            else:
                copy_crops_numpy(data.split.maps, self._positions[part], out, data.row_stride)
        labels = torch.from_numpy(data.split.labels[slots].astype(np.int64))
        if self._stream is None:
            images = self._pool.lend(memory, len(slots)).permute(0, 3, 1, 2)
            if self._pool.device.type != "cpu":
                images, labels = images.to(self._pool.device), labels.to(self._pool.device)
            return _Batch(images, labels, slots)
        assert memory.pinned is not None
        with torch.cuda.stream(self._stream):
            images = memory.pinned[: len(slots)].to(self._pool.device, non_blocking=True).permute(0, 3, 1, 2)
            memory.copied.record(self._stream)
            labels = labels.pin_memory().to(self._pool.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._pool.give_back(memory)
        return _Batch(images, labels, slots, event)

    def take(self) -> _Batch:
        """The next batch, in order; waits for it."""
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


class _Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """The iterator; ends its threads when it is dropped, also by a `break`, and at the interpreter's exit."""

    def __init__(self, loader: Loader, run: _Prefetcher) -> None:
        self._loader, self._run = loader, run
        self._ended = False
        weakref.finalize(self, run.close)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        loader, run, data = self._loader, self._run, self._loader.data
        if self._ended:
            raise StopIteration
        if run.yielded == run.num_batches and not run.stopped:
            self._ended = True
            loader._stop()
            loader._consumed = 0
            data.set_epoch(run.epoch + 1)
            raise StopIteration
        start = time.perf_counter()
        batch = run.take()
        loader.wait_seconds += time.perf_counter() - start
        loader.indices = batch.slots
        loader._consumed = min(loader._consumed + loader.batch_size * data.world_size, loader._served)
        if batch.event is not None:
            stream = torch.cuda.current_stream(loader.device)
            stream.wait_event(batch.event)
            batch.images.record_stream(stream)
            batch.labels.record_stream(stream)
        return batch.images, batch.labels
