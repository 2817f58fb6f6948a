"""What is compared: the arms of the study as configs of the trainer, and the settings that all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import Config, Stage

CROP = 28
"""Side of what the network is trained and evaluated on, in pixels."""

EVAL_SIZE = 32
"""Store of the evaluation that all arms have in common: 28 of 32 is ImageNet's 224 of 256."""

SIZES = (24, CROP, EVAL_SIZE, 35, 45)
"""Sides of the bicubic stores. 1.00, 1.14, 1.25 and 1.61 times the crop, at ImageNet's 224 px 224, 256, 280 and 360;
the smallest is for growing resolution."""

FILTERS = ("bicubic", "bilinear", "lanczos", "box")

STAGES = ((24, 20), (CROP, 24), (EVAL_SIZE, CROP))
"""Store and crop of the stages of growing resolution, in about the ratios of the ImageNet recipes."""

FAMILIES = ("ordinary loader", "store, crop", "store, resized crop", "growing resolution", "other filters")


@dataclass(frozen=True)
class Settings:
    """What all arms share.

    Attributes:
        train, val: images per class.
        epochs: passes over the train split, at least 3 (one for each stage).
        lr: per 256 samples.
    """

    train: int = 250
    val: int = 1000
    epochs: int = 60
    global_batch: int = 128
    lr: float = 0.2
    model: str = "resnet_small_narrow"
    amp: bool = True


@dataclass(frozen=True)
class Arm:
    """One way to feed the network.

    Attributes:
        name: short, for files.
        words: what it does, for readers.
        size, filter: of the store that it is evaluated on, and, but for the ordinary loader, (lastly) trained on.
        fields: of the config, beside the settings.
        min_area: smallest share of the picture that torchvision's RandomResizedCrop takes from the original JPEGs; 0
            where the arm reads a store.
    """

    name: str
    family: str
    words: str
    size: int
    filter: str = "bicubic"
    fields: Mapping[str, Any] = field(default_factory=dict)
    min_area: float = 0.0

    def config(self, settings: Settings, stores: Path, seed: int) -> Config:
        """The trainer's config; `stores` is the folder with all stores."""
        growing = self.family == "growing resolution"
        # the shares of the epochs are those of the 16-epoch recipe for ImageNet: 6, 5 and 5
        starts = (0, settings.epochs * 6 // 16, settings.epochs * 11 // 16)
        return Config(
            data=str(store_path(stores, "{size}" if growing else self.size, self.filter)),
            stages=[Stage(start, *sizes) for start, sizes in zip(starts, STAGES, strict=True)] if growing else [],
            crop=None if growing else CROP,
            model=settings.model,
            epochs=settings.epochs,
            warmup_epochs=settings.epochs / 8,
            global_batch=settings.global_batch,
            lr=settings.lr,
            nesterov=True,
            weight_decay=5e-4,
            amp=settings.amp,
            device="cpu",
            seed=seed,
            **self.fields,
        )


def store_path(stores: Path, size: int | str, filter: str = "bicubic") -> Path:
    return stores / f"{filter}-{size}.zarr"


def _ordinary(min_area: float) -> Arm:
    words = f"torchvision `RandomResizedCrop({CROP}, scale=({min_area}, 1))` from the JPEG"
    # torchvision's resized crop is bilinear, so evaluation is by its bilinear Resize; it also flips itself
    return Arm(f"ordinary-{min_area}", FAMILIES[0], words, EVAL_SIZE, "bilinear", {"flip": 0.0}, min_area)


def _crop(size: int) -> Arm:
    return Arm(f"crop-{size}", FAMILIES[1], f"store {size} px ({size / CROP:.2f} x), random crop", size)


def _pad(pixels: int) -> Arm:
    words = f"store {CROP} px (1.00 x), `--pad {pixels}`"
    return Arm(f"pad-{pixels}", FAMILIES[1], words, CROP, fields={"pad": pixels})


def _resized(size: int, min_area: float) -> Arm:
    words = f"store {size} px ({size / CROP:.2f} x), `--augment rrc --rrc-scale {min_area}`"
    fields = {"augment": "rrc", "rrc_scale": min_area}
    return Arm(f"rrc-{size}-{min_area}", FAMILIES[2], words, size, fields=fields)


def _growing(name: str, fields: Mapping[str, Any], words: str) -> Arm:
    return Arm(name, FAMILIES[3], f"stores 24, 28, 32 px, crops 20, 24, 28, {words}", EVAL_SIZE, fields=fields)


def _filter(name: str) -> Arm:
    return Arm(f"crop-{EVAL_SIZE}-{name}", FAMILIES[4], f"store {EVAL_SIZE} px, {name}, random crop", EVAL_SIZE, name)


ARMS = (
    _ordinary(0.08),
    _ordinary(0.35),
    _crop(28),
    _crop(32),
    _crop(35),
    _crop(45),
    _pad(4),
    _resized(28, 0.35),
    _resized(32, 0.08),
    _resized(32, 0.35),
    _resized(45, 0.35),
    _growing("growing-crop", {}, "random crop"),
    _growing("growing-rrc", {"augment": "rrc", "rrc_scale": 0.35}, "`rrc` 0.35"),
    *(_filter(name) for name in FILTERS[1:]),
)
"""All with horizontal flips."""

BASE = "ordinary-0.08"
"""The arm that differences are taken from: torchvision's defaults."""


def arm(name: str) -> Arm:
    return next(found for found in ARMS if found.name == name)
