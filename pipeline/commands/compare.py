"""Comparing a split with the source that it was made from: labels of all keys, pixels of some samples."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.errors import BadSample, StoreError, UsageError
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.progress import Progress
from pipeline.sources import Source, SourceSet, open_source
from pipeline.store.format import BAD_LABEL, UNLABELLED
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Split, Store
from pipeline.text import as_text, counted

MOST_DIFFERENCES = 20


def open_origin(
    split: Split, against: str | os.PathLike[str], kind: str | None, whole: SourceSet | None
) -> tuple[SourceSet, np.ndarray]:
    """The source that the split was made from, as far as its keys tell, before hours of reading.

    Args:
        split: of the store.
        against, kind: the source, and its kind where looking at it isn't enough.
        whole: the source where it could be opened with all its splits.

    Returns:
        The source, and int64 (N,): slot -> index in it, -1 where it lacks the key.

    Raises:
        UsageError: it can't be opened, has no such split, or none of the split's samples.
    """
    example, made_of = as_text(split.key(0)), split.attrs["recipe"].get("source", "unknown")
    expected = (
        f"expected is the SRC that {split.store_path} was converted from: a source of kind {made_of} with a split "
        f"{split.name} of {counted(split.num_samples, 'sample')}, such as {example}"
    )
    name = "train" if "val_split" in split.attrs["recipe"] and split.name == "val" else split.name  # drawn from train
    try:
        found = whole if whole and name in whole.splits else open_source(against, kind, splits=[name])
    except UsageError as error:
        raise UsageError(f"--against {against}: {error}; {expected}") from None
    found = replace(found, splits={split.name: found.splits[name]})
    origin = found.splits[split.name]
    by_key = {origin.key(i): i for i in range(len(origin))}
    index = np.array([by_key.get(split.key(slot), -1) for slot in range(split.num_samples)], np.int64)
    if (index < 0).all():
        raise UsageError(
            f"--against {against}: none of the samples of {split.name} is there ({counted(len(origin), 'other')}, such "
            f"as {as_text(origin.key(0))}); {expected}"
        )
    return found, index


def compare(
    store: Store, split: Split, found: SourceSet, index: np.ndarray, sample: int, quiet: bool
) -> tuple[int, list[str]]:
    """Compare the label of every key, then decode samples of the source again and compare their pixels.

    Args:
        found, index: as from `open_origin`.
        sample: random slots whose pixels are compared, 0 for all.

    Returns:
        How many pictures were compared, and what differs, one line each.
    """
    origin = found.splits[split.name]
    if problems := _label_differences(store, split, found, index):
        return 0, problems
    slots = np.arange(split.num_samples)
    if 0 < sample < len(slots):
        slots = np.sort(np.random.default_rng().choice(slots, sample, replace=False))
    geometry, options = Geometry(**store.geometry), _decode_options(split)
    images = _open_images(split)
    with Progress(f"compare {split.name}", len(slots), split.image_bytes, quiet=quiet) as progress:
        for slot in slots.tolist():
            difference = _difference(images, split, origin, slot, int(index[slot]), geometry, options)
            if difference:
                problems.append(f"{_name(split, slot)}: {difference}")
            progress.advance(1)
    return len(slots), problems


def _label_differences(store: Store, split: Split, found: SourceSet, index: np.ndarray) -> list[str]:
    origin = found.splits[split.name]
    class_of = {name: label for label, name in enumerate(found.class_ids)}
    wanted = np.array([class_of.get(name, -3) for name in store.class_ids] + [UNLABELLED], np.int64)
    problems: list[str] = []
    for slot in range(split.num_samples):
        label = int(split.labels[slot])
        if index[slot] < 0:
            problems.append(f"{_name(split, slot)}: not in {found.origin}")
        elif label != BAD_LABEL and wanted[label if label >= 0 else -1] != origin.labels[index[slot]]:
            problems.append(f"{_name(split, slot)}: label {label} differs from the source's")
        if len(problems) >= MOST_DIFFERENCES:
            return [*problems, f"{split.path}: more differences; stopped after {MOST_DIFFERENCES}"]
    return problems


def _decode_options(split: Split) -> DecodeOptions:
    try:
        return DecodeOptions.from_recipe(split.attrs["recipe"])
    except (KeyError, TypeError, ValueError):
        raise StoreError(f"{split.path / 'zarr.json'}: max_pixels or background of the recipe is damaged") from None


def _open_images(split: Split) -> Any:
    """The images by slot: the split's own map, or the Zarr array where they are compressed."""
    if split.is_raw:
        return None
    import zarr

    return zarr.open_array(str(split.path / "images"), mode="r")


def _difference(
    images: Any, split: Split, origin: Source, slot: int, at: int, geometry: Geometry, options: DecodeOptions
) -> str:
    """In words, how slot's image differs from sample `at` of the source; empty where it doesn't."""
    decoded = np.empty(geometry.image_shape, np.uint8)
    is_bad = split.labels[slot] == BAD_LABEL
    try:
        decode_into(origin.read(at), [geometry], [decoded], options)
    except BadSample as bad:
        return "" if is_bad else f"in the source it is bad now ({bad.reason})"
    if is_bad:
        return "bad in the store, good in the source; convert again with --overwrite"
    stored = np.asarray(split.image(slot) if images is None else images[slot])
    if np.array_equal(stored, decoded):
        return ""
    return f"pixels differ from the source's by up to {np.abs(stored.astype(int) - decoded).max()}"


def _name(split: Split, slot: int) -> str:
    return f"{split.path}: slot {slot}, {as_text(split.key(slot))}"
