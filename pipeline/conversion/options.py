"""What a conversion can be told: one dataclass makes convert's flags, help, checks and keyword arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.conversion.backends import BACKENDS
from pipeline.conversion.names import Part
from pipeline.errors import UsageError
from pipeline.image.decode import DecodeOptions
from pipeline.sources import FROM_PYTHON, SOURCE_KINDS, ValSplit
from pipeline.store.geometry import CHANNELS, FILTERS, FITS, Geometry

ON_ERROR = ("stop", "skip")
COMMAND_KINDS = tuple(kind for kind in SOURCE_KINDS if kind not in FROM_PYTHON)


def _flag(default: Any, metavar: str | None = None, **arguments: Any) -> Any:
    """A field with what the command line needs to know of its flag, as argparse calls it."""
    return field(default=default, metadata={"metavar": metavar, **arguments})


@dataclass(kw_only=True)
class ConvertOptions:
    """The flags of `convert`, with underscores for dashes.

    Attributes made of them: `sizes` (ascending), `geometries` (one for each size), `splits` (None for all),
    `chosen_part`, `val_split` and `decode`.

    Raises:
        UsageError: a value that can't work; the line names the flag, the value and what is allowed.
    """

    verbose: bool = False
    """one line for each chunk, with images/s and its bad files"""
    size: int | Sequence[int] = _flag(Geometry.size, "S", action="append", type=int)
    """side in pixels; repeatable"""
    fit: str = _flag(Geometry.fit, choices=FITS)
    """how an image becomes a square"""
    filter: str = _flag(Geometry.filter, choices=FILTERS)
    """resampling filter, always antialiased"""
    channels: str = _flag(Geometry.channels, choices=tuple(CHANNELS))
    """three channels, or one"""
    exif_transpose: bool = False
    """apply the EXIF orientation before the resize"""
    split: str | Sequence[str] | None = _flag(None, "NAME", action="append")
    """only this split, repeatable; or the name of an only split"""
    source: str | None = _flag(None, choices=COMMAND_KINDS)
    """force a kind of source"""
    n_jobs: int = _flag(-1, "N")
    """worker processes; -1: one per core"""
    backend: str = _flag("loky", choices=BACKENDS)
    """processes here, or a Dask or Ray cluster"""
    scheduler: str | None = _flag(None, "ADDR")
    """running Dask or Ray cluster; else a local one is started"""
    part: str | None = _flag(None, "I/N")
    """only every N-th chunk, I from 1; for batch schedulers"""
    on_error: str = _flag("stop", choices=ON_ERROR)
    """with bad samples: commit nothing, or skip them"""
    max_pixels: int = _flag(DecodeOptions.max_pixels, "N")
    """images with more pixels are bad samples"""
    scale_16bit: int | str = _flag(DecodeOptions.scale_16bit, "N|max", type=str)
    """the level that is white in images of 16 bits; max: each image's own highest"""
    classes: str | Path | None = field(default=None, metadata={"metavar": "FILE", "is_path": True})
    """keep only the class ids listed in FILE, one a line"""
    class_order: str | Path | None = field(default=None, metadata={"metavar": "FILE|numeric", "is_path": True})
    """label order other than sorted ids"""
    label_column: str | None = _flag(None, "NAME")
    """column, file extension or JSON field of the labels"""
    image_column: str | None = _flag(None, "NAME")
    """column of the images, or of their paths"""
    unlabelled: bool = False
    """take images as unlabelled although labels may lie beside"""
    val_fraction: float | None = _flag(None, "F", type=float)
    """draw this share of each class of train as val, by key and seed; for a SRC without val"""
    val_per_class: int | None = _flag(None, "N", type=int)
    """draw N samples of each class as val; with --val-fraction at least N"""
    limit_per_class: int | None = _flag(None, "N", type=int)
    """at most N samples a class and split"""
    no_shuffle: bool = False
    """keep the source's order in train splits, too"""
    seed: int = _flag(0, "SEED")
    """seed of the shuffle, and of the draw of val"""
    chunk_mb: float = _flag(100.0, "MB")
    """size of a chunk file in 10^6 bytes; a small set has up to 64 smaller ones, for as many jobs"""
    overwrite: bool = False
    """delete these splits, and unfinished work, first"""
    dry_run: bool = False
    """say what would be written, and stop"""
    check_md5: bool = False
    """check the official archives' MD5 first"""
    download: bool = False
    """let torchvision download the dataset"""
    quiet: bool = False
    """show no progress, only errors and what was asked for"""

    def __post_init__(self) -> None:
        self.sizes = _whole_numbers("size", self.size)
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata.get("choices", ())
            if item.type in ("int", "int | None") and value is not None:
                setattr(self, item.name, _whole_numbers(item.name, value)[0])
            elif item.type in ("bool", "float", "float | None") and value is not None:
                setattr(self, item.name, bool(value) if item.type == "bool" else _number(item.name, value))
            elif choices and item.name != "source" and value not in choices:
                raise _wrong(item.name, value, f"one of {', '.join(choices)}")
        for name, good, wanted in (
            ("n_jobs", self.n_jobs != 0, "a number of processes, or -1 for one per core"),
            ("chunk_mb", 0 < self.chunk_mb < math.inf, "more than 0"),
            ("max_pixels", self.max_pixels > 0, "more than 0"),
            ("seed", self.seed >= 0, "0 or more"),
            ("val_fraction", self.val_fraction is None or 0 < self.val_fraction < 1, "above 0 and below 1"),
            ("val_per_class", self.val_per_class is None or self.val_per_class > 0, "1 or more"),
        ):
            if not good:
                raise _wrong(name, getattr(self, name), wanted)
        if not self.sizes:
            raise UsageError("--size: at least one is needed")
        if self.scheduler and self.backend == "loky":
            raise UsageError(f"--scheduler {self.scheduler}: goes with --backend dask or ray; add one of them")
        if self.overwrite and self.part is not None:
            raise UsageError("--overwrite can't go with --part, as parts would delete each other's; remove the store")
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose contradict each other; give one of them")
        self.splits = [self.split] if isinstance(self.split, str) else self.split
        asked = self.val_fraction is not None or self.val_per_class is not None
        self.val_split = ValSplit(self.val_fraction or 0.0, self.val_per_class or 0, self.seed) if asked else None
        self.chosen_part = None if self.part is None else Part.parse(self.part)
        self.decode = DecodeOptions(max_pixels=self.max_pixels, scale_16bit=_scale(self.scale_16bit))
        geometry = (self.fit, self.filter, self.channels, self.exif_transpose)
        self.geometries = [Geometry(size, *geometry) for size in self.sizes]


def _whole_numbers(name: str, value: Any) -> list[int]:
    """One number or several, ascending and each once, as Python's own integers: numpy's are taken, fractions not."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    try:
        return sorted({operator.index(one) for one in (value if several else [value])})
    except TypeError:
        raise _wrong(name, value, "a whole number") from None


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _wrong(name, value, "a number") from None


def _scale(value: int | str) -> int | str:
    """A level from 1 to 65535, or `max`."""
    try:
        level = value if value == "max" else operator.index(int(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        level = 0
    if level != "max" and not 1 <= level <= 65535:  # type: ignore[operator]
        raise _wrong("scale_16bit", value, "a level from 1 to 65535, or max")
    return level


def _wrong(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"--{name.replace('_', '-')} {value}: must be {wanted}")
