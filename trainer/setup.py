"""What a config becomes before the first step: batch sizes, stores and loaders, model, optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.errors import UsageError
from pipeline.store.format import UNLABELLED
from pipeline.store.reader import Split, Store, open_store
from trainer.augment import IMAGENET_MEAN, IMAGENET_STD, DeviceTransform
from trainer.config import Config, Stage
from trainer.dataset import RankPartitionedDataset
from trainer.evaluation import evaluate
from trainer.loader import Loader
from trainer.models import build_model, check_size, load_weights, read_weights
from trainer.ranks import Ranks, broadcast_object

LARGEST_MICRO_BATCH = 256
"""Default limit of samples per rank and micro-step: ResNet-50 at 224 px in bf16 then fits into 40 GB."""


@dataclass(frozen=True)
class Batching:
    """G = `global_batch` = ranks x `batch_size` x `accumulation`."""

    global_batch: int
    batch_size: int
    accumulation: int

    @classmethod
    def choose(cls, config: Config, world_size: int) -> Batching:
        """G stays the same on fewer ranks, which then accumulate gradients.

        Raises:
            UsageError: numbers that don't divide.
        """
        if config.eval_only:
            size = config.batch_size or LARGEST_MICRO_BATCH
            return cls(size * world_size, size, 1)
        total = config.global_batch or (config.batch_size * world_size if config.batch_size else 256)
        if total % world_size:
            near = max(total // world_size, 1) * world_size
            raise UsageError(f"--global-batch {total}: not divisible by {world_size} ranks; --global-batch {near} is")
        share = total // world_size
        size = config.batch_size or max(n for n in range(1, min(share, LARGEST_MICRO_BATCH) + 1) if share % n == 0)
        if share % size:
            near = max(n for n in range(1, min(share, size) + 1) if share % n == 0)
            raise UsageError(
                f"--batch-size {size}: doesn't divide the {share} samples that a rank takes of --global-batch {total} "
                f"(ranks: {world_size}); --batch-size {near} does"
            )
        return cls(total, size, share // size)


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
        evaluated = open_store(config.store_path(config.eval_size or last.size))
        same = config.eval_only or config.eval_size in (None, last.size)
        store = evaluated if same else open_store(config.store_path(last.size))  # that one may hold val alone
        if not store.class_ids:
            raise UsageError(f"{store.path}: has no classes; convert a source with labels")
        if store.class_ids != evaluated.class_ids:
            raise UsageError(f"{evaluated.path}: has other classes than {store.path}; convert both from one source")
        self.class_ids = store.class_ids
        self.stretched = is_stretched(store)
        if evaluated.geometry["fit"] != store.geometry["fit"]:
            raise UsageError(f"{evaluated.path}: made with another --fit than {store.path}; convert both alike")
        self._check_stretched(crop, int(evaluated.geometry["size"]))
        self.val = self._val(evaluated, crop, say)
        self.transform = device_transform(config, store, device)
        self.amp = config.amp if config.amp is not None else device.type != "cpu"
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(config.seed)
        model = build_model(config.model, len(self.class_ids), crop or int(evaluated.geometry["size"]))
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

    def _check_stretched(self, crop: int | None, size: int) -> None:
        config = self.config
        if not self.stretched and config.eval_resize:
            raise UsageError(f"--eval-resize {config.eval_resize}: only for a store of --fit stretch; leave it out")
        if self.stretched and config.pad:
            raise UsageError(f"--pad {config.pad}: not for a store of --fit stretch, whose crops lie anywhere already")
        if self.stretched and (crop or size) > (config.eval_resize or size) and (crop or 0) <= size:
            flag = "--eval-crop" if config.eval_crop else self._crop_flag
            raise UsageError(
                f"--eval-resize {config.eval_resize}: below the {crop or size} pixels of the crop; raise it, or lower "
                f"{flag}"
            )

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
                _check_source_sizes(store[split])
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
        store = open_store(config.store_path(stage.size))
        _check_crop(self._crop_flag, stage.crop, store["train"])
        if self.stretched:
            _check_source_sizes(store["train"])
        data = RankPartitionedDataset(
            store,
            "train",
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=config.seed,
            crop=None if config.augment == "rrc" or self.stretched else stage.crop,
            order=config.order,
            window=config.window,
        )
        size = min(data.crop_shape[:2])
        if config.pad >= size:
            raise UsageError(f"--pad {config.pad}: must be below the {size} pixels of the images that are trained on")
        check_size(self.model, config.model, stage.crop or size)
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

    def evaluate(self, model: nn.Module, stopped: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Figures of the val split, NaN where there is none; None when stopped."""
        if self.val is None:
            return dict.fromkeys(("val_loss", "val_top1", "val_top5"), math.nan)
        flip, threads = self.config.flip_eval, self.config.threads
        with closing(Loader(self.val, self.batching.batch_size, threads=threads, device=self.device)) as loader:
            return evaluate(model, loader, self.transform, self.ranks, amp=self.amp, flip=flip, stopped=stopped)


def device_transform(config: Config, store: Store, device: torch.device) -> DeviceTransform:
    """From the store's pixels to the model's, as the config says.

    Raises:
        UsageError: the store has no mean and std to normalise by.
    """
    if config.normalize == "imagenet":
        mean, std = [*IMAGENET_MEAN], [*IMAGENET_STD]
    elif "train" in store:
        mean, std = store["train"].mean, store["train"].std
    else:
        raise UsageError(f"{store.path}: has no split train, whose mean and std --normalize store takes")
    return DeviceTransform(
        mean,
        std,
        device=device,
        seed=config.seed,
        flip=config.flip,
        pad=config.pad,
        min_area=config.rrc_scale if config.augment == "rrc" else None,
        resample=config.resample,
        stretched=is_stretched(store),
        eval_resize=config.eval_resize,
        eval_crop=config.final_crop,
    )


def is_stretched(store: Store) -> bool:
    return bool(store.geometry["fit"] == "stretch")


def _check_source_sizes(split: Split) -> None:
    if (split.source_size[split.valid_slots] < 1).any():
        raise UsageError(f"{split.path}: has samples without a source size, which --fit stretch needs; convert it anew")


def _check_crop(flag: str, crop: int | None, split: Split) -> None:
    size = min(split.image_shape[:2])
    if crop and crop > size:
        raise UsageError(f"{flag} {crop}: images of {split.path} are {size}x{size}; choose {size} or less")
