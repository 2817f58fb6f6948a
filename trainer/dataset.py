"""The Dataset: a rank's share of a split, ready for a default DataLoader and for `trainer.loader.Loader`."""

from __future__ import annotations

import hashlib
import os
from operator import index
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from pipeline.errors import StoreError, UsageError
from pipeline.store.format import BAD_LABEL
from pipeline.store.maps import will_need
from pipeline.store.reader import Split, Store, open_store
from pipeline.store.remote import is_remote
from trainer.order import DEFAULT_WINDOW, centre_offsets, check_seed, crop_offsets, epoch_order, weighted_order
from trainer.reading.collate import BatchMemory, Samples, collate
from trainer.reading.copy_crops import copy_crops
from trainer.reading.read_ahead import DiskWatch

ORDERS = ("random", "windowed")


class FixedArguments:
    """Attributes whose names are in `_fixed` are set once: what was computed from them would fit no other value."""

    _fixed: ClassVar[frozenset[str]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}.{name} can't be changed; make a new {type(self).__name__}")
        super().__setattr__(name, value)


def checked_indices(given: npt.ArrayLike, split: Split, name: str = "indices") -> np.ndarray:
    """int64 (N,), read-only, of slots that hold a served sample; an error names where they were given."""
    indices = np.asarray(given)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or len(indices) == 0:
        raise UsageError(
            f"{name}: must be a list of at least one slot, not {indices.dtype} {indices.shape} (of a mask take "
            "np.flatnonzero)"
        )
    wrong = np.flatnonzero((indices < 0) | (indices >= split.num_samples))
    if len(wrong) == 0:
        indices = indices.astype(np.int64)
        wrong = np.flatnonzero(split.labels[indices] == BAD_LABEL)
    if len(wrong):
        slot = indices[wrong[0]]
        why = "a bad sample" if 0 <= slot < split.num_samples else f"outside 0..{split.num_samples - 1}"
        raise UsageError(f"{name}: slot {slot} of {split.path} is {why}; leave it out")
    indices.flags.writeable = False
    return indices


def _checked_weights(given: npt.ArrayLike, num_samples: int) -> np.ndarray:
    """float64 (N,), read-only."""
    weights = np.array(given, np.float64)
    if weights.shape != (num_samples,) or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise UsageError(
            f"weights {weights.shape}: must be one for each of the {num_samples} samples, finite, 0 or more, and not "
            "all 0"
        )
    weights.flags.writeable = False
    return weights


def _fingerprint(split: Split, *chosen: np.ndarray | None) -> str:
    """The split's own, or with a subset or weights one that changes with them."""
    if all(array is None for array in chosen):
        return split.fingerprint
    digest = hashlib.sha256(split.fingerprint.encode())
    for array in chosen:
        digest.update(b"-" if array is None else array.tobytes())
    return digest.hexdigest()


class RankPartitionedDataset(FixedArguments, torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples of one rank, as (image, label): uint8 (C, H, W), a fresh writable copy of the crop, and int.

    With N served samples and P ranks, rank r's sample i is `order[r + i * P]`: in training there are N // P of them and
    the order and the crops change with `set_epoch`; otherwise the order is the store's and nobody's samples are cut.
    Under a default DataLoader (forked, spawned or persistent workers, shuffled or not) nothing else is needed than
    `set_epoch`, which running workers see too. Pickles as paths and numbers; files are opened by whoever reads.

    Args:
        store: the store's folder, or an open `Store`.
        split: name of the split.
        rank, world_size: r and P.
        seed: 0 or more; with the epoch it decides order and crops.
        crop: side of the square crop in pixels; random in training, else central. None: whole images.
        train: shuffled order and random crops; None means True for the split `train` and False for others.
        order: `random`, or `windowed` for disks that hate random reads (see `trainer.order.epoch_order`).
        window: chunks per window of the windowed order.
        indices: int (N,), the store slots to serve, some perhaps several times; all served samples by default. In
            evaluation they keep this order.
        weights: float (N,), for training: each epoch draws N of the samples with replacement, in proportion to their
            weights, keyed by (seed, epoch). A sample has one crop in an epoch, however often it is served.

    Attributes:
        num_samples: N.
        fingerprint: of the samples, subset and weights included; part of the data's state in checkpoints.
        crop_shape: (rows, columns, channels) of the images served.

    Arguments are attributes too, which can't be changed.

    Raises:
        UsageError: an argument that can't work with this store, in one line.
        StoreError: a damaged store, or later one that was replaced by another.
    """

    _fixed: ClassVar[frozenset[str]] = frozenset(
        ("rank", "world_size", "seed", "crop", "train", "order", "window", "indices", "weights")
    ) | frozenset(("num_samples", "crop_shape", "fingerprint"))

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        split: str = "train",
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        crop: int | None = None,
        train: bool | None = None,
        order: str = "random",
        window: int | None = None,
        indices: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
    ) -> None:
        opened = (store if isinstance(store, Store) else open_store(store))[split]
        self._split: Split | None = opened
        self._where = (str(opened.store_path), split)  # workers may have another working directory
        self._identity = (opened.fingerprint, opened.image_shape, opened.chunk_images)
        self.rank, self.world_size, self.seed = index(rank), index(world_size), index(seed)
        self.crop = None if crop is None else index(crop)
        self.train = split == "train" if train is None else train
        self.order = order
        self.window = DEFAULT_WINDOW if window is None else index(window)
        self.indices = None if indices is None else checked_indices(indices, opened)
        self.num_samples = opened.num_valid if self.indices is None else len(self.indices)
        self.weights = None if weights is None else _checked_weights(weights, self.num_samples)
        self.fingerprint = _fingerprint(opened, self.indices, self.weights)
        self._check(opened)
        height, width, channels = opened.image_shape
        self.crop_shape = (height, width, channels) if self.crop is None else (self.crop, self.crop, channels)
        # Shared memory without a name, because persistent workers hold a copy of everything else.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._slots: tuple[int, np.ndarray] | None = None
        self._disk = DiskWatch()
        self._memory = BatchMemory()

    def _check(self, split: Split) -> None:
        height, width, _ = split.image_shape
        if is_remote(split.path):
            raise UsageError(
                f"{split.path}: at a URL, which can't be memory-mapped; the trainer takes it with --cache DIR, other "
                f"programs after python -m pipeline copy {split.store_path} NEW.zarr"
            )
        if not split.is_raw:
            raise UsageError(
                f"{split.path}: compressed ({'+'.join(split.codecs)}), which can't be memory-mapped; make a raw copy: "
                f"python -m pipeline copy {split.store_path} NEW.zarr --codec none"
            )
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of world size {self.world_size}: ranks count from 0 to world size - 1")
        if self.train and self.world_size > self.num_samples:
            raise UsageError(
                f"world size {self.world_size} is larger than the {self.num_samples} samples of {split.path}; "
                "use fewer ranks (--nproc-per-node)"
            )
        if self.crop is not None and not 1 <= self.crop <= min(height, width):
            raise UsageError(
                f"crop {self.crop}: images of {split.path} are {height}x{width}; choose 1 to {min(height, width)}"
            )
        if self.order not in ORDERS:
            raise UsageError(f"order {self.order!r}: must be {' or '.join(ORDERS)}")
        if self.window < 1:
            raise UsageError(f"window {self.window}: must be at least 1 chunk")
        if self.weights is not None and (not self.train or self.order != "random"):
            raise UsageError(
                "weights: only for training, in random order; leave them out, or choose samples by indices"
            )
        check_seed(self.seed)

    @property
    def split(self) -> Split:
        """The opened split; opened again in a worker that was spawned.

        Raises:
            StoreError: another store has taken its place.
        """
        if self._split is None:
            split = open_store(self._where[0])[self._where[1]]
            if (split.fingerprint, split.image_shape, split.chunk_images) != self._identity:
                raise StoreError(f"{split.path}: replaced by another store since it was opened; start again")
            self._split = split
        return self._split

    @property
    def epoch(self) -> int:
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and crops of an epoch, 0 or more; also for DataLoader workers that already run."""
        check_seed(self.seed, epoch)
        self._epoch[0] = epoch

    @property
    def slots(self) -> np.ndarray:
        """int64 (N,): the store slots of the samples before they are shuffled."""
        return self.split.valid_slots if self.indices is None else self.indices

    def epoch_slots(self, epoch: int) -> np.ndarray:
        """int64 (N,): the store slots of all ranks' samples in the order of the epoch."""
        if not self.train:
            return self.slots
        if self.weights is not None:
            return self.slots[weighted_order(self.seed, epoch, self.weights)]
        chunk_images = self.split.chunk_images if self.order == "windowed" else None
        return self.slots[epoch_order(self.seed, epoch, self.num_samples, chunk_images, self.window)]

    def crop_positions(self, slots: np.ndarray, epoch: int) -> np.ndarray:
        """int64 (n,): the byte where each sample's crop begins, counted through all chunks end to end."""
        height, width, channels = self.split.image_shape
        room = (height - self.crop_shape[0], width - self.crop_shape[1])
        place = crop_offsets(self.seed, epoch, slots, room) if self.train else centre_offsets(len(slots), room)
        return slots * self.split.image_bytes + (place[0] * width + place[1]) * channels

    @property
    def row_stride(self) -> int:
        """Bytes from one row of a stored image to the next."""
        return self.split.image_shape[1] * self.split.image_shape[2]

    @property
    def crop_extent(self) -> int:
        """Bytes from the first to the last byte of a crop, in the store."""
        rows, columns, channels = self.crop_shape
        return (rows - 1) * self.row_stride + columns * channels

    def _rank_slots(self, epoch: int) -> np.ndarray:
        """int64 (len(self),): this rank's store slots in the epoch, kept until another epoch is asked for."""
        if self._slots is None or self._slots[0] != epoch:
            slots = self.epoch_slots(epoch)[self.rank :: self.world_size]
            self._slots = epoch, slots[: len(self)].copy()
        return self._slots[1]

    def __len__(self) -> int:
        if self.train:
            return self.num_samples // self.world_size
        return len(range(self.rank, self.num_samples, self.world_size))

    def slot(self, i: int) -> int:
        """The store slot of sample i in the current epoch."""
        return int(self._rank_slots(self.epoch)[self._checked(i)])

    def _checked(self, i: int) -> int:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return i

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """Samples that lie in one batch, from which `collate` makes no copy."""
        epoch = self.epoch
        slots = self._rank_slots(epoch)[np.array([self._checked(int(i)) for i in indices], np.int64)]
        positions = self.crop_positions(slots, epoch)
        memory = self._memory.take((len(slots), *self.crop_shape))
        with self._disk.watch():
            if self._disk.cold:
                will_need(self.split.maps.locate(positions, self.crop_extent), self.crop_extent)
            copy_crops(self.split.maps, positions, memory.images.numpy(), self.row_stride)
        return Samples(memory, torch.from_numpy(self.split.labels[slots].astype(np.int64)))

    def dataloader(self, batch_size: int, num_workers: int = 2, **options: Any) -> DataLoader:
        """torch's DataLoader over this rank's samples, in the epoch's order.

        Args:
            batch_size: samples per batch.
            num_workers: processes, which stay from epoch to epoch and see `set_epoch`.
            options: as DataLoader's.

        Returns:
            batches (images, labels): uint8 (B, C, H, W), channels_last, and int64 (B,).
        """
        options = {"collate_fn": collate, "persistent_workers": num_workers > 0, **options}
        return DataLoader(self, batch_size, num_workers=num_workers, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_split": None, "_slots": None, "_memory": BatchMemory()}

    def __repr__(self) -> str:
        return f"RankPartitionedDataset({self._where[0]!r}, {self._where[1]!r}, rank={self.rank}/{self.world_size})"
