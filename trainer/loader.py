"""The trainer's loader: threads copy crops from the memory maps into batches, ahead of the training loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import index
from typing import Any, ClassVar

import numpy as np
import torch

from pipeline.errors import UsageError
from pipeline.store.format import UNLABELLED
from trainer.dataset import FixedArguments, RankPartitionedDataset
from trainer.order import ORDER_VERSION, window_bounds
from trainer.reading.batch_pool import BatchPool
from trainer.reading.prefetcher import Prefetcher
from trainer.reading.read_ahead import ReadAhead, random_plan, windowed_plan
from trainer.reading.waits import Waits


class Loader(FixedArguments):
    """Batches of one rank, filled ahead by threads.

    In training the k-th global batch is the set `order[kG : (k+1)G]` for every world size P that divides G; the
    N mod G last samples of the order are left out. In evaluation every sample is served exactly once over all ranks
    and the last batch may be smaller. At an epoch's end the loader goes on to the next one by itself.

    Args:
        data: the Dataset; its rank, seed, crop, order and epoch are used.
        batch_size: samples per rank and micro-step, B.
        global_batch: samples per optimizer step, G, a multiple of B * P (gradient accumulation); B * P by default.
        threads: threads that copy. One feeds several GPUs.
        device: where batches go. On CUDA and XPU host memory is pinned, and copies run on a stream of their own.
        local_world_size: ranks on this machine, for the windowed order's reading.

    Attributes:
        accumulation: micro-steps per optimizer step, G / (B * P).
        indices: int64 (B,), store slots of the batch last yielded.
        source_sizes: int32 (B, 2), height and width of its pictures before they were converted, in pixels.

    Arguments are attributes too, which can't be changed. Iterating yields (images, labels): uint8 (B, C, H, W),
    channels_last, and int64 (B,). A batch keeps its memory for as long as any tensor or array on it is alive, so
    `list(loader)` is right; a loop that drops batches reuses a few. One iteration at a time: a new `iter` ends the
    previous one.

    Raises:
        UsageError: sizes that don't fit together or to the data, training on unlabelled samples, or a CUDA device that
            isn't there.
    """

    _fixed: ClassVar[frozenset[str]] = frozenset(
        ("data", "batch_size", "global_batch", "threads", "device", "local_world_size", "accumulation")
    )

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
        self.data, self.batch_size, self.threads = data, index(batch_size), index(threads)
        self.device = torch.device(device)
        self.local_world_size = index(local_world_size)
        self.global_batch = self.batch_size * data.world_size if global_batch is None else index(global_batch)
        self._check()
        self.accumulation = self.global_batch // (self.batch_size * data.world_size)
        self.indices = np.empty(0, np.int64)
        self._consumed = 0  # samples of all ranks, in the current epoch
        self._resume = False
        self._pool = self._new_pool()
        self._waits = Waits(self.device)
        self._prefetcher: Prefetcher | None = None
        self._serving = 0  # the prefetcher's epoch

    def _new_pool(self) -> BatchPool:
        return BatchPool((self.batch_size, *self.data.crop_shape), self.device, self.threads)

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
                f"larger than the {data.num_samples} samples of {where}; choose at most "
                f"{data.num_samples // data.world_size * data.world_size}"
            )
        unlabelled = int(np.count_nonzero(data.split.labels[data.slots] == UNLABELLED))
        if unlabelled:
            raise UsageError(f"{where}: {unlabelled} samples have no label; training needs a labelled split")

    @property
    def wait_seconds(self) -> float:
        """Seconds that training has waited for batches so far: the caller, or the device where it works by itself."""
        return self._waits.seconds()

    # Epochs and state

    @property
    def epoch(self) -> int:
        """The epoch that is being served, else the next one."""
        running = self._prefetcher is not None and not self._prefetcher.stopped
        return self._serving if running else self.data.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration serves.

        Another epoch than the present one ends a running iteration and drops a position that was loaded.
        """
        if epoch != self.epoch:
            self._stop()
            self._consumed, self._resume = 0, False
        self.data.set_epoch(epoch)

    def coming_slots(self, epoch: int) -> np.ndarray:
        """int64 (n,): store slots of all ranks' samples that come next in this epoch, or in `epoch` if later."""
        return self.data.epoch_slots(max(epoch, self.epoch))[self._consumed :]

    @property
    def _served(self) -> int:
        """Samples that all ranks together serve in an epoch."""
        data = self.data
        return data.num_samples // self.global_batch * self.global_batch if data.train else data.num_samples

    @property
    def source_sizes(self) -> np.ndarray:
        return self.data.split.source_size[self.indices]

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
            "fingerprint": data.fingerprint,
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
                f"{own['fingerprint'][:8]}); resume with the same store and subset, or start afresh"
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
        with self._waits:
            self._serving = self.data.epoch
            self._prefetcher = self._prefetch(self._serving, self._consumed)
        return _Batches(self, self._prefetcher)

    def _prefetch(self, epoch: int, consumed: int) -> Prefetcher:
        data = self.data
        order = data.epoch_slots(epoch)
        slots = order[consumed + data.rank : self._served : data.world_size].copy()
        positions = data.crop_positions(slots, epoch)
        split, chunks = data.split, data.split.maps
        if data.train and data.order == "windowed":
            plan = windowed_plan(
                order,
                window_bounds(data.seed, epoch, data.num_samples, split.chunk_images, data.window),
                consumed,
                self.batch_size,
                split.image_bytes,
                rank=data.rank,
                world_size=data.world_size,
                local_world_size=self.local_world_size,
            )
        else:
            plan = random_plan(positions, data.crop_extent, self.batch_size)
        ahead = ReadAhead(chunks, plan)
        return Prefetcher(chunks, positions, data.row_stride, slots, split.labels, ahead, self._pool, self.threads)

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def close(self) -> None:
        """Stop the threads and free the pool; harmless when repeated. A later iteration starts them again."""
        self._stop()
        self._pool.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefetcher": None, "_pool": None, "_waits": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pool, self._waits = self._new_pool(), Waits(self.device)


class _Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """The iterator; ends its threads when it is dropped, also by a `break`, and at the interpreter's exit."""

    def __init__(self, loader: Loader, prefetcher: Prefetcher) -> None:
        self._loader, self._prefetcher = loader, prefetcher
        self._ended = False
        weakref.finalize(self, prefetcher.close)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        loader, prefetcher = self._loader, self._prefetcher
        if self._ended:
            raise StopIteration
        if prefetcher.yielded == prefetcher.num_batches and not prefetcher.stopped:
            self._ended = True
            loader._stop()
            loader._consumed = 0
            loader.data.set_epoch(loader._serving + 1)
            raise StopIteration
        with loader._waits:
            batch = prefetcher.take()
            if batch.arrived is not None:
                stream = torch.accelerator.current_stream(loader.device)
                stream.wait_event(batch.arrived)
                batch.images.record_stream(stream)
                batch.labels.record_stream(stream)
        loader.indices = batch.slots
        loader._consumed = min(loader._consumed + loader.batch_size * loader.data.world_size, loader._served)
        return batch.images, batch.labels
