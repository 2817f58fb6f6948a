"""Proving a finished store: every byte against its digest, every array against its metadata, samples against SRC."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import zarr

from pipeline.errors import BadSample, Error, StoreError, UsageError
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.image.statistics import channel_sums
from pipeline.progress import Progress
from pipeline.sources import open_source
from pipeline.sources.base import Source, SourceSet
from pipeline.store.geometry import Geometry
from pipeline.store.reader import BAD_LABEL, SMALL_ARRAYS, UNLABELLED, Split, Store
from pipeline.store.writer import SplitArrays, array_digests, channel_statistics, known_codecs, sample_fingerprint
from pipeline.text import as_text, counted


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    sample: int = 1000,
    source: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Check a store.

    Args:
        path: the store.
        against: a source; `sample` random samples per split are decoded again and compared, labels of all keys too.
        sample: how many, 0 or more; 0 for all.
        source: kind of the source, where looking at it isn't enough.

    Returns:
        {"store", "ok", "problems": [one line each], "notes": [one line each; no problem, but worth knowing],
        "splits": {name: {"num_samples", "num_valid", "chunks", "compared"}}}.

    Raises:
        StoreNotFoundError: no store is there.
        UsageError: the source can't be opened, `sample` is negative, or `source` is given without `against`.
    """
    if source is not None and against is None:
        raise UsageError(f"--source {source}: the kind of what --against SRC compares with; add that, or leave it out")
    if sample < 0:
        raise UsageError(f"--sample {sample}: must be a number of samples, or 0 for all")
    with known_codecs():
        return _verify(Store(path), against, sample, source, quiet)


def _verify(
    store: Store, against: str | os.PathLike[str] | None, sample: int, source: str | None, quiet: bool
) -> dict[str, Any]:
    problems: list[str] = []
    splits: dict[str, dict[str, Any]] = {}
    names = store.splits
    if not names:
        problems.append(f"{store.path}: no complete split")
    whole = _open_whole(against, source) if against is not None and names else None
    problems += [f"{child}: not a part of the store" for child in _strangers(store)]
    for name in names:
        try:
            split = Split(store.path, name, check=False)
        except StoreError as error:
            problems.append(str(error))
            continue
        found = [*split.problems(), *_check_arrays(store, split)]
        origin = _open_origin(split, against, source, whole) if against is not None and not found else None
        found += _check_chunks(split, quiet)
        splits[name] = {
            "num_samples": split.num_samples,
            "num_valid": split.num_valid,
            "chunks": split.num_chunks,
            "compared": 0,
        }
        if origin is not None and not found:
            compared, differences = _compare(store, split, *origin, sample, quiet)
            splits[name]["compared"] = compared
            found += differences
        problems += found
    notes = [] if whole is None else _lacking(whole, names)
    return {"store": str(store.path), "ok": not problems, "problems": problems, "notes": notes, "splits": splits}


def _strangers(store: Store) -> list[Path]:
    return [
        child for child in sorted(store.path.iterdir()) if child.name != "zarr.json" and child.name not in store.splits
    ]


def _check_arrays(store: Store, split: Split) -> Iterator[str]:
    """Small arrays against their digests, each other, and the attributes."""
    try:
        arrays = SplitArrays(**{name: split.small_array(name) for name in SMALL_ARRAYS})
    except StoreError:
        return  # named by Split.problems already
    for name, digest in array_digests(arrays).items():
        if split.attrs.get("sha256", {}).get(name) != digest:
            yield f"{split.path / name}: altered (SHA-256 differs from the one in {split.path / 'zarr.json'})"
    num = split.num_samples
    expected = {"labels": (num,), "key_offsets": (num + 1,), "source_size": (num, 2), "digests": (split.num_chunks, 32)}
    for name, shape in expected.items():
        if getattr(arrays, name).shape != shape:
            yield f"{split.path / name}: shape {getattr(arrays, name).shape}, not {shape}"
            return
    labels, offsets = arrays.labels, arrays.key_offsets
    outside = np.flatnonzero((labels >= len(store.class_ids)) | (labels < UNLABELLED))
    if len(outside):
        slot = outside[0]
        classes = counted(len(store.class_ids), "class", "classes")
        yield f"{split.path / 'labels'}: slot {slot} has label {labels[slot]}, outside the {classes}"
    if np.any(np.diff(offsets) < 0) or offsets[0] != 0 or offsets[-1] != len(arrays.keys):
        yield f"{split.path / 'key_offsets'}: not ascending from 0 to the keys' length"
    attrs = split.attrs
    if attrs["sample_fingerprint"] != sample_fingerprint(labels, arrays.keys, offsets):
        yield f"{split.path / 'zarr.json'}: sample_fingerprint doesn't fit labels and keys"
    bad = np.flatnonzero(labels == BAD_LABEL).tolist()
    if bad != sorted(entry["slot"] for entry in attrs["bad_samples"]):
        yield f"{split.path / 'zarr.json'}: bad_samples doesn't list exactly the slots labelled {BAD_LABEL}"
    if attrs["num_samples"] != num or attrs["num_valid"] != num - len(bad):
        yield f"{split.path / 'zarr.json'}: num_samples or num_valid doesn't fit the labels"
    geometry = Geometry(**store.geometry)
    if split.image_shape != geometry.image_shape:
        yield f"{split.path / 'images'}: {split.image_shape} per image, {geometry.image_shape} in the geometry"


def _read_chunk(split: Split, chunk: int) -> np.ndarray:
    """uint8 (chunk_bytes,) of one whole uncompressed chunk, padding included, through zarr when it is compressed."""
    if split.is_raw:
        return np.fromfile(split.chunk_path(chunk), np.uint8)
    whole = np.zeros((split.chunk_images, *split.image_shape), np.uint8)
    images = zarr.open_array(str(split.path / "images"), mode="r")
    first = chunk * split.chunk_images
    part = np.asarray(images[first : first + split.chunk_images])
    whole[: len(part)] = part
    return whole.reshape(-1)


def _check_chunk(split: Split, chunk: int) -> tuple[int, str, np.ndarray, np.ndarray]:
    """(chunk, problem or "", channel sums, channel sums of squares)."""
    none = np.zeros(split.image_shape[2], np.int64)
    try:
        data = _read_chunk(split, chunk)
    except (OSError, ValueError, RuntimeError) as error:
        return chunk, f"{split.chunk_path(chunk)}: can't be read ({error})", none, none
    if hashlib.sha256(data).digest() != split.digests[chunk].tobytes():
        return chunk, f"{split.chunk_path(chunk)}: altered (SHA-256 differs from the one in digests)", none, none
    images = data.reshape(split.chunk_images, *split.image_shape)
    num = min(split.chunk_images, split.num_samples - chunk * split.chunk_images)
    first = chunk * split.chunk_images
    for position in np.flatnonzero(split.labels[first : first + num] == BAD_LABEL):
        if images[position].any():
            return chunk, f"{split.chunk_path(chunk)}: bad slot {first + position} isn't zero", none, none
    if images[num:].any():
        return chunk, f"{split.chunk_path(chunk)}: padding isn't zero", none, none
    return chunk, "", *channel_sums(images[:num])


def _check_chunks(split: Split, quiet: bool) -> list[str]:
    """Every chunk's digest, padding and bad slots, and the split's mean and std."""
    try:
        present = [c for c in range(split.num_chunks) if split.chunk_path(c).exists()]
        split.digests, split.labels  # noqa: B018 - read once, before threads ask for them
    except StoreError:
        return []
    problems: list[str] = []
    sums = squares = np.zeros(split.image_shape[2], np.int64)
    jobs = (joblib.delayed(_check_chunk)(split, chunk) for chunk in present)
    threads = joblib.Parallel(n_jobs=os.cpu_count(), prefer="threads", return_as="generator_unordered")
    with Progress(f"verify {split.name}", split.num_samples, split.image_bytes, quiet=quiet) as progress:
        for chunk, problem, chunk_sums, chunk_squares in threads(jobs):
            if problem:
                problems.append(problem)
            sums, squares = sums + chunk_sums, squares + chunk_squares
            progress.advance(min(split.chunk_images, split.num_samples - chunk * split.chunk_images))
    if not problems and len(present) == split.num_chunks:
        height, width, _ = split.image_shape
        num_pixels = int(np.count_nonzero(split.labels != BAD_LABEL)) * height * width
        if (split.mean, split.std) != channel_statistics(sums.tolist(), squares.tolist(), num_pixels):
            problems.append(f"{split.path / 'zarr.json'}: mean or std doesn't fit the pixels")
    return sorted(problems)


def _open_whole(against: str | os.PathLike[str], kind: str | None) -> SourceSet | None:
    """The source with all its splits; None where only some of them may be readable, which `_open_origin` tries."""
    try:
        return open_source(against, kind)
    except Error:
        return None


def _lacking(whole: SourceSet, names: Sequence[str]) -> list[str]:
    """A note for each split that only the source has. A source's only split goes by any name that is asked for."""
    if len(whole.splits) < 2:
        return []
    return [f"{whole.origin} has a split {name} that the store lacks" for name in whole.splits if name not in names]


def _open_origin(
    split: Split, against: str | os.PathLike[str], kind: str | None, whole: SourceSet | None
) -> tuple[SourceSet, np.ndarray]:
    """The source that the split was made from, as far as its keys tell, before hours of reading.

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
    try:
        if whole is None or split.name not in whole.splits:
            found = open_source(against, kind, splits=[split.name])
        else:
            found = whole
    except UsageError as error:
        raise UsageError(f"--against {against}: {error}; {expected}") from None
    origin = found.splits[split.name]
    index = _match(split, origin)
    if (index < 0).all():
        raise UsageError(
            f"--against {against}: none of the samples of {split.name} is there ({counted(len(origin), 'other')}, such "
            f"as {as_text(origin.key(0))}); {expected}"
        )
    return found, index


def _compare(
    store: Store, split: Split, found: SourceSet, index: np.ndarray, sample: int, quiet: bool
) -> tuple[int, list[str]]:
    """Decode samples of the source again and compare pixels; compare the label of every key.

    `index` is int64 (N,), slot -> index in the source.
    """
    origin = found.splits[split.name]
    problems: list[str] = []
    class_of = {name: label for label, name in enumerate(found.class_ids)}
    wanted = np.array([class_of.get(name, -3) for name in store.class_ids] + [UNLABELLED], np.int64)
    for slot in range(split.num_samples):
        if index[slot] < 0:
            problems.append(f"{split.path}: slot {slot}, {as_text(split.key(slot))}: not in {found.origin}")
        elif split.labels[slot] != BAD_LABEL:
            label = int(split.labels[slot])
            if wanted[label if label >= 0 else -1] != origin.labels[index[slot]]:
                problems.append(
                    f"{split.path}: slot {slot}, {as_text(split.key(slot))}: label {label} differs from the source's"
                )
        if len(problems) >= 20:
            return 0, [*problems, f"{split.path}: more differences; stopped after 20"]
    if problems:
        return 0, problems
    slots = np.arange(split.num_samples)
    if 0 < sample < len(slots):
        slots = np.sort(np.random.default_rng().choice(slots, sample, replace=False))
    geometry = Geometry(**store.geometry)
    recipe = split.attrs["recipe"]
    options = DecodeOptions(max_pixels=recipe["max_pixels"], background=tuple(recipe["background"]))
    stored = zarr.open_array(str(split.path / "images"), mode="r") if not split.is_raw else None
    place = np.empty(geometry.image_shape, np.uint8)
    with Progress(f"compare {split.name}", len(slots), split.image_bytes, quiet=quiet) as progress:
        for slot in slots.tolist():
            name = f"{split.path}: slot {slot}, {as_text(split.key(slot))}"
            is_bad = split.labels[slot] == BAD_LABEL
            try:
                decode_into(origin.read(int(index[slot])), [geometry], [place], options)
            except BadSample as bad:
                if not is_bad:
                    problems.append(f"{name}: in the source it is bad now ({bad.reason})")
            else:
                image = np.asarray(split.image(slot) if stored is None else stored[slot])
                if is_bad:
                    problems.append(f"{name}: bad in the store, good in the source; convert again with --overwrite")
                elif not np.array_equal(image, place):
                    worst = int(np.abs(image.astype(int) - place).max())
                    problems.append(f"{name}: pixels differ from the source's by up to {worst}")
            progress.advance(1)
    return len(slots), problems


def _match(split: Split, origin: Source) -> np.ndarray:
    """int64 (N,): slot -> index in the source with the same key, -1 where there is none."""
    by_key = {origin.key(i): i for i in range(len(origin))}
    return np.array([by_key.get(split.key(slot), -1) for slot in range(split.num_samples)], np.int64)


def result_text(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [*result["problems"], *(f"note: {note}" for note in result["notes"])]
    for name, split in result["splits"].items():
        compared = f", {split['compared']:,} compared with the source" if split["compared"] else ""
        samples, chunks = counted(split["num_samples"], "sample"), counted(split["chunks"], "chunk")
        counts = f"{samples} ({split['num_valid']:,} valid) in {chunks}"
        lines.append(f"{name}: {counts}{compared}")
    verdict = "every check passed" if result["ok"] else counted(len(result["problems"]), "problem")
    lines.append(f"{result['store']}: {verdict}")
    return "\n".join(lines)


def check(result: dict[str, Any]) -> None:
    """Raise for the exit code when a check failed.

    Raises:
        Error: the store has problems.
    """
    if not result["ok"]:
        problems = counted(len(result["problems"]), "problem")
        raise Error(f"{result['store']}: {problems}; restore the files or convert with --overwrite")
