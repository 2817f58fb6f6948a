"""Comparing a split with the source that it was made from: labels of all keys, pixels of some samples."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import joblib
import numpy as np

from pipeline.errors import BadSample, StoreError, UsageError
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.image.resize import software_versions
from pipeline.progress import Progress
from pipeline.sources import Source, SourceSet, open_source
from pipeline.store.format import BAD_LABEL, UNLABELLED
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Split, Store
from pipeline.text import as_text, counted

MOST_DIFFERENCES = 20
BLOCK_IMAGES = 128


def open_origin(
    split: Split, against: str | os.PathLike[str], kind: str | None, whole: SourceSet | None
) -> tuple[SourceSet, np.ndarray]:
    """The source that the split was made from, as far as its keys tell, before hours of reading.

    `whole` is the source where it could be opened with all its splits. Returns it, and int64 (N,): slot -> index in it,
    -1 where it lacks the key.

    Raises:
        UsageError: it can't be opened, has no such split, or none of the split's samples.
    """
    recipe = split.attrs["recipe"]
    example, made_of = as_text(split.key(0)), recipe.get("source", "unknown")
    columns = {name: recipe.get(name) for name in ("label_column", "image_column")}
    expected = (
        f"expected is the SRC that {split.store_path} was converted from: a source of kind {made_of} with a split "
        f"{split.name} of {counted(split.num_samples, 'sample')}, such as {example}"
    )
    name = "train" if "val_split" in recipe and split.name == "val" else split.name  # drawn from train
    try:
        found = whole if whole and name in whole.splits else None
        found = found or open_source(against, kind, splits=[name], unlabelled=True, **columns)
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
) -> tuple[int, list[str], list[str]]:
    """Compare the label of every key, then decode `sample` random samples again (0: all) and compare their pixels.

    Many samples are compared in processes, one per core that this process may use. `found` and `index` are as from
    `open_origin`.

    Returns:
        How many pictures were decoded again; problems, and notes that are worth knowing, in one line each.
    """
    if problems := _label_differences(store, split, found, index):
        return 0, problems, []
    slots = np.arange(split.num_samples)
    if 0 < sample < len(slots):
        slots = np.random.default_rng().choice(slots, sample, replace=False)
    slots = slots[np.argsort(index[slots], kind="stable")]  # in the source's order, so that it is read in sequence
    job = partial(_compare_block, split, found.splits[split.name], Geometry(**store.geometry), _decode_options(split))
    blocks = [slots[first : first + BLOCK_IMAGES] for first in range(0, len(slots), BLOCK_IMAGES)]
    n_jobs = max(1, min(joblib.cpu_count(), len(blocks) // 2))  # of a few blocks the start of a process costs more
    differences: list[Difference] = []
    with Progress(f"compare {split.name}", len(slots), split.image_bytes, quiet=quiet) as progress:
        parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
        for block in parallel(joblib.delayed(job)(slots, index[slots]) for slots in blocks):
            differences += block[1]
            progress.advance(block[0])
    other = _other_software(split)
    pixels = [difference for difference in differences if difference.levels]
    if other and pixels:  # one line for all of them: the software explains them, and doesn't excuse them
        levels = max(difference.levels for difference in pixels)
        differences = [difference for difference in differences if not difference.levels]
        problems.append(
            f"{split.path}: {len(pixels):,} of {counted(len(slots), 'picture')} differ from the source's by up to "
            f"{levels} of 255, but {other}; compare with the same software"
        )
    problems += [f"{_name(split, found.slot)}: {found.text}" for found in sorted(differences)]
    return len(slots), problems, [f"{split.path}: {other}"] if other and not pixels else []


def _other_software(split: Split) -> str:
    """What made the split and what compares it here, where they differ in what decides pixels; else nothing."""
    then, now = split.attrs.get("software", {}), software_versions()
    names = [name for name in then if name not in ("efficient-imagenet", "zarr") and then[name] != now.get(name)]
    if not names:
        return ""
    made, here = (", ".join(f"{name} {versions.get(name)}" for name in names) for versions in (then, now))
    return f"converted with {made}, compared with {here}"


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


class Difference(NamedTuple):
    """A slot whose sample isn't the source's, in words; `levels`: by how many levels pixels differ at most."""

    slot: int
    text: str
    levels: int = 0


def _compare_block(
    split: Split, origin: Source, geometry: Geometry, options: DecodeOptions, slots: np.ndarray, index: np.ndarray
) -> tuple[int, list[Difference]]:
    """How many, and the differences between `slots` and the samples `index` of the source, both int64 (n,)."""
    found = (
        _difference(split, origin, geometry, options, slot, at)
        for slot, at in zip(slots.tolist(), index.tolist(), strict=True)
    )
    return len(slots), [difference for difference in found if difference is not None]


def _difference(
    split: Split, origin: Source, geometry: Geometry, options: DecodeOptions, slot: int, at: int
) -> Difference | None:
    decoded = np.empty(geometry.image_shape, np.uint8)
    is_bad = split.labels[slot] == BAD_LABEL
    try:
        decode_into(origin.read(at), [geometry], [decoded], options)
    except BadSample as bad:
        return None if is_bad else Difference(slot, f"in the source it is bad now ({bad.reason})")
    if is_bad:
        return Difference(slot, "bad in the store, good in the source; convert again with --overwrite")
    stored = split.read_image(slot)
    if np.array_equal(stored, decoded):
        return None
    levels = int(np.abs(stored.astype(int) - decoded).max())
    return Difference(slot, f"pixels differ from the source's by up to {levels}", levels)


def _name(split: Split, slot: int) -> str:
    return f"{split.path}: slot {slot}, {as_text(split.key(slot))}"
