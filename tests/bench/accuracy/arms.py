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

STRETCHED = (32, 36, 40)
"""Sides of the stores of `--fit stretch`; at ImageNet's 224 px 256, 288 and 320."""

FILTERS = ("bicubic", "bilinear", "lanczos", "box")

STAGES = ((24, 20), (CROP, 24), (EVAL_SIZE, CROP))
"""Store and crop of the stages of growing resolution, in about the ratios of the ImageNet recipes."""

BASE = "ordinary-0.08"
"""The arm of torchvision's defaults."""

FAMILIES = (
    "ordinary loader",
    "store, crop",
    "store, resized crop",
    "growing resolution",
    "other filters",
    "whole pictures, crop",
    "whole pictures, resized crop",
)


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
        fit: of that store; of `stretch` the centre that `Resize(32)` and `CenterCrop(28)` show is evaluated, as in the
            other arms.
    """

    name: str
    family: str
    words: str
    size: int
    filter: str = "bicubic"
    fields: Mapping[str, Any] = field(default_factory=dict)
    min_area: float = 0.0
    fit: str = "crop"

    @property
    def base(self) -> str:
        """The arm that differences are taken from: torchvision's at the same scale, else at its default."""
        return f"ordinary-{self.fields['rrc_scale']}" if "rrc_scale" in self.fields else BASE

    def config(self, settings: Settings, stores: Path, seed: int) -> Config:
        """The trainer's config; `stores` is the folder with all stores."""
        growing, stretched = self.family == "growing resolution", self.fit == "stretch"
        # the shares of the epochs are those of the 16-epoch recipe for ImageNet: 6, 5 and 5
        starts = (0, settings.epochs * 6 // 16, settings.epochs * 11 // 16)
        return Config(
            data=str(store_path(stores, "{size}" if growing else self.size, "stretch" if stretched else self.filter)),
            stages=[Stage(start, *sizes) for start, sizes in zip(starts, STAGES, strict=True)] if growing else [],
            crop=None if growing else CROP,
            eval_resize=EVAL_SIZE if stretched else None,
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


def store_path(stores: Path, size: int | str, kind: str = "bicubic") -> Path:
    """The store of that size; `kind` is its filter, or `stretch` for whole pictures (bicubic)."""
    return stores / f"{kind}-{size}.zarr"


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


def _whole(size: int, min_area: float = 0.0, resample: str = "triangle") -> Arm:
    store = f"whole pictures, {size} px ({size / CROP:.2f} x)"
    if not min_area:
        return Arm(f"whole-crop-{size}", FAMILIES[5], f"{store}, random crop", size, fit="stretch")
    name, words = f"whole-rrc-{size}-{min_area}", f"{store}, `--augment rrc --rrc-scale {min_area}`"
    fields = {"augment": "rrc", "rrc_scale": min_area, "resample": resample}
    if resample != "triangle":
        name, words = f"{name}-{resample}", words[:-1] + f" --resample {resample}`"
    return Arm(name, FAMILIES[6], words, size, fields=fields, fit="stretch")


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
    *(_whole(size) for size in STRETCHED),
    *(_whole(size, min_area) for size in STRETCHED for min_area in (0.08, 0.35)),
    _whole(36, 0.35, "cubic"),
    _growing("growing-crop", {}, "random crop"),
    _growing("growing-rrc", {"augment": "rrc", "rrc_scale": 0.35}, "`rrc` 0.35"),
    *(_filter(name) for name in FILTERS[1:]),
)
"""All with horizontal flips."""


def arm(name: str) -> Arm:
    return next(found for found in ARMS if found.name == name)
