"""One run of the study: an arm with a seed, trained by the trainer's own loop and evaluated on several stores."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from pipeline.store.atomic import write_json
from tests.bench.accuracy.arms import CROP, EVAL_SIZE, STRETCHED, Settings, arm, store_path
from trainer import networks
from trainer.dataset import RankPartitionedDataset
from trainer.evaluation import evaluate
from trainer.loader import Loader
from trainer.ranks import Ranks
from trainer.setup import TrainingSetup
from trainer.training import TrainingRun

NARROW = "resnet_small_narrow"
"""The trainer's resnet_small at half its width: 104,000 parameters."""

EVAL_BATCH = 250


class OrdinaryLoader(Loader):
    """torch's DataLoader over torchvision's ImageFolder and RandomResizedCrop, in the order of the store's samples.

    Args:
        data: a store of the same pictures, whose order and crop size are used, and none of its pixels.
        folder: of the original JPEGs, `<class>/<n>.jpg`.
        min_area: smallest share of a picture's area.
    """

    def __init__(self, data: RankPartitionedDataset, batch_size: int, folder: Path, min_area: float) -> None:
        super().__init__(data, batch_size)
        crop = v2.RandomResizedCrop(data.crop_shape[0], scale=(min_area, 1.0), antialias=True)
        transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
        # decoded once and kept: the same pixels in a third of the time
        self._pictures = ImageFolder(folder, transform, loader=functools.cache(default_loader))
        numbers = {Path(path).relative_to(folder).as_posix(): i for i, (path, _) in enumerate(self._pictures.samples)}
        keys = [data.split.key(slot).decode() for slot in range(data.num_samples)]
        self._numbers = np.array([numbers["/".join(key.split("/")[-2:])] for key in keys])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        epoch = self.data.epoch
        slots = self.data.epoch_slots(epoch)[: len(self) * self.batch_size]
        batches = torch.utils.data.DataLoader(
            self._pictures, self.batch_size, sampler=self._numbers[slots].tolist(), generator=torch.Generator()
        )
        for number, (images, labels) in enumerate(batches):
            self.indices = slots[number * self.batch_size :][: self.batch_size]
            yield images.contiguous(memory_format=torch.channels_last), labels
        self.data.set_epoch(epoch + 1)


class OrdinarySetup(TrainingSetup):
    """A setup whose training batches come from the JPEGs."""

    folder: Path
    min_area: float

    def loaders(self) -> list[Loader]:
        (loader,) = super().loaders()
        return [OrdinaryLoader(loader.data, loader.batch_size, self.folder, self.min_area)]


class _Losses:
    """Stands in for the trainer's metrics: keeps the mean training loss of each epoch."""

    def __init__(self) -> None:
        self.train: list[float] = []

    def step(self, step: int, lr: float, loss: float, loss_step: int) -> None:
        pass

    def epoch(self, line: dict[str, Any]) -> None:
        self.train.append(line["train_loss"])


def start(name: str, seed: int, settings: Settings, work: Path) -> TrainingRun:
    """Set up a run, as `trainer/main.py` would, without its output folder.

    Args:
        name: of the arm.
        work: has `originals` and `stores`.
    """
    networks.OWN.setdefault(NARROW, lambda num_classes, _: networks.ResNetSmall(num_classes, 8))
    chosen = arm(name)
    config = chosen.config(settings, work / "stores", seed)
    kind = OrdinarySetup if chosen.min_area else TrainingSetup
    setup = kind(config, Ranks(), torch.device("cpu"), lambda _: None)
    if isinstance(setup, OrdinarySetup):
        setup.folder, setup.min_area = work / "originals" / "train", chosen.min_area
    setup.val = None  # evaluated once, at the end
    return TrainingRun(setup, None, lambda _: None)


def train_and_evaluate(name: str, seed: int, settings: Settings, work: Path) -> dict[str, Any]:
    """Train an arm and evaluate it.

    Returns:
        `arm`, `seed`, `settings`, `steps`, `samples`, `seconds`, `train_loss` (of the last epoch), and `top1`: from
        "crop of store" to accuracy (0 to 1), for the store of its own, which `own` names, for the one that all have in
        common, and for those of whole pictures, which show the same part as that one.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    run = start(name, seed, settings, work)
    losses = _Losses()
    run.metrics = losses  # type: ignore[assignment]
    run.fit()
    run.loader.close()
    chosen, stores = arm(name), work / "stores"
    own = store_path(stores, chosen.size, "stretch" if chosen.fit == "stretch" else chosen.filter)
    places = {(own, CROP), *((store_path(stores, EVAL_SIZE), crop) for crop in (CROP, EVAL_SIZE))}
    places |= {(store_path(stores, size, "stretch"), CROP) for size in STRETCHED}
    top1 = {}
    for store, crop in sorted(places):
        transform = copy.copy(run.setup.transform)
        transform.stretched = store.name.startswith("stretch")
        transform.eval_resize, transform.eval_crop = EVAL_SIZE, crop
        loader = Loader(RankPartitionedDataset(store, "val", crop=None if transform.stretched else crop), EVAL_BATCH)
        figures = evaluate(run.raw, loader, transform, run.ranks, amp=settings.amp)
        assert figures is not None
        loader.close()
        top1[place_name(crop, store)] = figures["val_top1"]
    return {
        "arm": name,
        "seed": seed,
        "settings": asdict(settings),
        "steps": run.state.step,
        "samples": run.state.step * settings.global_batch,
        "seconds": round(time.perf_counter() - began, 1),
        "train_loss": losses.train[-1],
        "own": place_name(CROP, own),
        "top1": top1,
    }


def place_name(crop: int, store: Path) -> str:
    """How results name an evaluation: "28 of bicubic-32" for the centre crop of 28 px out of that store."""
    return f"{crop} of {store.stem}"


def result_path(work: Path, name: str, seed: int) -> Path:
    return work / "results" / f"{name}.{seed}.json"


def run_and_keep(name: str, seed: int, settings: Settings, work: Path) -> dict[str, Any]:
    """Do the run and write its result, in one rename, to `results/ARM.SEED.json`."""
    result = train_and_evaluate(name, seed, settings, work)
    write_json(result_path(work, name, seed), result)
    return result


def kept(name: str, seed: int, settings: Settings, work: Path) -> dict[str, Any] | None:
    """The result of an earlier call with the same settings, if there is one."""
    path = result_path(work, name, seed)
    result = json.loads(path.read_text()) if path.exists() else None
    return result if result and result["settings"] == asdict(settings) else None
