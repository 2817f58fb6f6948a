"""What a config becomes before the first step: batch sizes, stores and loaders, model, optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.errors import UsageError
from pipeline.store.format import UNLABELLED
from pipeline.store.reader import Split, Store, open_store
from pipeline.text import one_line
from trainer.augment import check_source_sizes, check_stretched, device_transform, is_stretched
from trainer.batching import Batching
from trainer.config import Config, Stage
from trainer.dataset import RankPartitionedDataset, checked_indices
from trainer.evaluation import evaluate
from trainer.loader import Loader
from trainer.models import check_size, load_weights, make_model, read_weights
from trainer.networks import WhitenedNet
from trainer.ranks import Ranks, broadcast_object
from trainer.reading.cache import Cache
from trainer.stop import sigterm_ends

WHITENING_IMAGES = 2000
"""So many training images give the covariance of patches for whitened_net."""


class TrainingSetup:
    """What training and evaluation share.

    Attributes:
        model: the bare module on its device, channels_last, with --weights loaded.
        transform: from stored pixels to the model's.
        val: the Dataset of the split val, or of a labelled test where there is no val; None where there is neither,
            or val has no labels.

    Raises:
        UsageError, StoreError: anything that can't work, before any training.
    """

    def __init__(self, config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        self.batching = Batching.choose(config, ranks.world_size)
        self.stages = config.stages or [config.stage(0)]
        self._crop_flag = "--stages: crop" if config.stages else "--crop"
        last = self.stages[-1]
        crop = config.final_crop
        self.cache = None
        if config.cache and config.is_remote:
            self.cache = Cache(config.cache, ranks.local_rank == 0, say)
        evaluated = self._open(config.eval_size or last.size)
        same = config.eval_only or config.eval_size in (None, last.size)
        store = evaluated if same else self._open(last.size)  # that one may hold val alone
        if not store.class_ids:
            raise UsageError(f"{store.path}: has no classes; convert a source with labels")
        if store.class_ids != evaluated.class_ids:
            raise UsageError(f"{evaluated.path}: has other classes than {store.path}; convert both from one source")
        self.class_ids = store.class_ids
        self.stretched = is_stretched(store)
        if evaluated.geometry["fit"] != store.geometry["fit"]:
            raise UsageError(f"{evaluated.path}: made with another --fit than {store.path}; convert both alike")
        crop_flag = "--eval-crop" if config.eval_crop else self._crop_flag
        check_stretched(config, self.stretched, int(evaluated.geometry["size"]), crop_flag)
        self.val = self._val(evaluated, crop, say)
        self.transform = device_transform(config, store, device)
        self.amp = config.amp if config.amp is not None else device.type != "cpu"
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(config.seed)
        model = make_model(config, len(self.class_ids), crop or int(evaluated.geometry["size"]))
        if isinstance(model, WhitenedNet) and "train" in store:
            split = store["train"]
            if self.stretched:
                check_source_sizes(split)
            slots = split.valid_slots[:WHITENING_IMAGES]
            images = np.stack([split.image(slot) for slot in slots.tolist()])
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
            model.whiten(self.transform.evaluation(pixels, split.source_size[slots]).cpu())
        if config.weights:
            # rank 0 alone reads, or downloads
            state = broadcast_object(read_weights(config.weights, config.model) if ranks.rank == 0 else None, ranks)
            head = load_weights(model, state, f"--weights {config.weights}", new_head=not config.eval_only)
            say(f"weights from {config.weights}" + (f"; new head: {', '.join(head)}" if head else ""))
        if config.sync_bn and ranks.world_size > 1:
            if device.type == "cpu":
                raise UsageError("--sync-bn: torch has none for the CPU; leave it out, or train on an accelerator")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device).to(memory_format=torch.channels_last)

    def close(self) -> None:
        """Stop bringing chunks."""
        if self.cache is not None:
            self.cache.close()

    def _open(self, size: int | None) -> Store:
        path = self.config.store_path(size)
        if self.cache is None:
            return open_store(path)
        with sigterm_ends(f"{self.cache.folder} keeps what is there: run it again"):
            return self.cache.open(path)

    def bring(self, loaders: Sequence[Loader], epoch: int) -> None:
        """Begin to bring what isn't in --cache yet, in the order in which a run needs it that goes on at `epoch`."""
        if self.cache is None:
            return
        wanted = [
            (loader.data.split, loader.coming_slots(stage.epoch))
            for loader, stage in zip(loaders, self.stages, strict=False)
        ]
        now = max(sum(stage.epoch <= epoch for stage in self.stages) - 1, 0)
        wanted = wanted[now:] + wanted[:now]
        if self.val:
            wanted.insert(1, (self.val.split, self.val.slots))
        self.cache.start(wanted)

    def _val(self, store: Store, crop: int | None, say: Callable[[str], None]) -> RankPartitionedDataset | None:
        config, ranks = self.config, self.ranks
        # torchvision calls its second split test; ImageNet's test split has no labels
        labelled_test = "test" in store and UNLABELLED not in store["test"].labels
        split = "test" if labelled_test and "val" not in store else "val"
        unlabelled = split in store and not (store[split].labels >= 0).any()
        if unlabelled and config.eval_only:
            raise UsageError(f"{store.path}: {split} has no labels; --eval-only needs a val split that has some")
        if unlabelled:
            say(f"{store.path}: {split} has no labels: training without evaluation")
        elif split in store or config.eval_only:
            _check_crop("--eval-crop" if config.eval_crop else self._crop_flag, crop, store[split])
            if self.stretched:
                check_source_sizes(store[split])
                crop = None
            return RankPartitionedDataset(store, split, rank=ranks.rank, world_size=ranks.world_size, crop=crop)
        else:
            say(f"{store.path} has no split val: training without evaluation")
        return None

    def loaders(self) -> list[Loader]:
        """A training loader for each stage; they hold no memory before they are iterated."""
        loaders = [self._loader(stage) for stage in self.stages]
        first = loaders[0].data.split
        for split in (loader.data.split for loader in loaders):
            if split.fingerprint != first.fingerprint:
                raise UsageError(f"{split.path}: other samples or order than {first.path}; convert all sizes together")
        return loaders

    def _loader(self, stage: Stage) -> Loader:
        config, batching, ranks = self.config, self.batching, self.ranks
        store = self._open(stage.size)
        _check_crop(self._crop_flag, stage.crop, store["train"])
        if self.stretched:
            check_source_sizes(store["train"])
        data = RankPartitionedDataset(
            store,
            "train",
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=config.seed,
            crop=None if config.augment == "rrc" or self.stretched else stage.crop,
            order=config.order,
            window=config.window,
            indices=_read_slots(config.subset, store["train"]) if config.subset else None,
        )
        size = min(data.crop_shape[:2])
        if config.pad >= size:
            raise UsageError(f"--pad {config.pad}: must be below the {size} pixels of the images that are trained on")
        check_size(self.model, config.model, stage.crop or size, 2 if config.sync_bn else batching.batch_size)
        if batching.global_batch > data.num_samples:
            share = 1 << (data.num_samples // ranks.world_size).bit_length() - 1  # of a rank; the Dataset has one each
            also = f" --batch-size {share}" if config.batch_size and share % config.batch_size else ""
            raise UsageError(
                f"--global-batch {batching.global_batch}: larger than the {data.num_samples} samples of "
                f"{data.split.path}; use --global-batch {share * ranks.world_size}{also}"
            )
        # nodes with unequal numbers of ranks can't share the reading of a window
        local = 1 if ranks.world_size % ranks.local_world_size else ranks.local_world_size
        sizes = batching.batch_size, batching.global_batch
        return Loader(data, *sizes, threads=config.threads, device=self.device, local_world_size=local)

    def evaluate(
        self, model: nn.Module, stopped: Callable[[], bool] = lambda: False, epoch: int | None = None
    ) -> dict[str, Any] | None:
        """Figures of the val split; None when stopped.

        They are NaN where there is no val split, or where `epoch`, counted from 1, isn't one to evaluate.
        """
        last = epoch in (None, self.config.epochs)
        if self.val is None or not (last or (epoch or 0) % self.config.eval_every == 0):
            return dict.fromkeys(("val_loss", "val_top1", "val_top5"), math.nan)
        flip, threads = self.config.flip_eval and last, self.config.threads
        with closing(Loader(self.val, self.batching.batch_size, threads=threads, device=self.device)) as loader:
            return evaluate(model, loader, self.transform, self.ranks, amp=self.amp, flip=flip, stopped=stopped)


def _read_slots(file: str, split: Split) -> np.ndarray:
    """int64 (n,): the split's slots in a .npy, or in a text with one on each line."""
    try:
        slots = np.load(file) if file.endswith(".npy") else np.loadtxt(file, np.int64, ndmin=1)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise UsageError(f"--subset {file}: must be a text with a slot on each line, or a .npy ({reason})") from error
    return checked_indices(slots, split, f"--subset {file}")


def _check_crop(flag: str, crop: int | None, split: Split) -> None:
    size = min(split.image_shape[:2])
    if crop and crop > size:
        raise UsageError(f"{flag} {crop}: images of {split.path} are {size}x{size}; choose {size} or less")
