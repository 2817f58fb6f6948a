"""Proving a finished store: every byte against its digest, every array against its metadata, samples against SRC."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import zarr

from pipeline.commands.compare import compare, open_origin
from pipeline.errors import Error, StoreError, UsageError
from pipeline.image.statistics import channel_sums
from pipeline.progress import Progress
from pipeline.sources import SourceSet, open_source
from pipeline.store.format import (
    BAD_LABEL,
    SMALL_ARRAYS,
    SplitArrays,
    chunk_name,
    images_in_chunk,
    single_chunk_name,
    split_order,
)
from pipeline.store.integrity import altered_arrays, check_chunk, inconsistent_arrays, read_arrays
from pipeline.store.reader import Split, Store
from pipeline.store.remote import is_remote, zarr_store
from pipeline.store.writer import channel_statistics, known_codecs
from pipeline.text import counted, one_line, printable


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
        path: the store, or its URL.
        against: a source; `sample` random samples per split are decoded again and compared, labels of all keys too.
        sample: how many, 0 or more; 0 for all. At a URL also: only chunks of so many random samples are read.
        source: kind of the source, where looking at it isn't enough.

    Returns:
        {"store", "ok", "problems": [one line each], "notes": [one line each; no problem, but worth knowing],
        "splits": {name: {"num_samples", "num_valid", "chunks", "compared"}}}.

    Raises:
        StoreNotFoundError: no store is there.
        StoreError: the root group is damaged.
        UsageError: the source can't be opened, `sample` is negative, or `source` is given without `against`.
    """
    if source is not None and against is None:
        raise UsageError(f"--source {source}: the kind of what --against SRC compares with; add that, or leave it out")
    if sample < 0:
        raise UsageError(f"--sample {sample}: must be a number of samples, or 0 for all")
    store = Store(path)
    names = store.splits
    problems = list(_strangers(store.path, names)) if names else [f"{store.path}: no complete split"]
    for name in split_order({*store.attrs.get("splits", names)} ^ {*names}):
        problems.append(f"{store.path}: split {name} is {'not listed in zarr.json' if name in names else 'missing'}")
    splits: dict[str, dict[str, Any]] = {}
    whole = None
    if against is not None and names:
        with contextlib.suppress(Error):  # only some of its splits may be readable, which `open_origin` tries
            whole = open_source(against, source, unlabelled=True)
    notes = [] if whole is None else _lacking(whole, names)
    with known_codecs():
        for name in names:
            try:
                split = Split(store, name, check=False)
            except StoreError as error:
                problems.append(str(error))
                continue
            splits[name] = {
                "num_samples": split.num_samples,
                "num_valid": split.num_valid,
                "chunks": split.num_chunks,
                "compared": 0,
            }
            found, arrays = split.problems(), read_arrays(split)
            if arrays is None:
                problems += found
                continue
            found += _strangers_in(split, arrays)
            found += altered_arrays(split, arrays)
            found += inconsistent_arrays(split, arrays)
            origin = open_origin(split, against, source, whole) if against is not None and not found else None
            chunks = split.good_chunks()
            if is_remote(split.path) and sample:
                chunks = np.intersect1d(chunks, _random_chunks(split, sample))
                notes.append(
                    f"{split.path}: {len(chunks):,} of {counted(split.num_chunks, 'chunk')} checked, as it is at a "
                    "URL; --sample 0 checks all"
                )
            found += _check_chunks(split, arrays, chunks.tolist(), quiet)
            found += [] if found else _zarr_differences(split, arrays)
            if origin is not None and not found:
                splits[name]["compared"], found, more = compare(store, split, *origin, sample, quiet)
                notes += more
            problems += found
    return {"store": str(store.path), "ok": not problems, "problems": problems, "notes": notes, "splits": splits}


def _strangers(folder: Path, expected: Collection[str]) -> Iterator[str]:
    for child in sorted(folder.iterdir(), key=str):
        if child.name not in ("zarr.json", *expected):
            yield f"{child}: not a part of the store"


def _strangers_in(split: Split, arrays: SplitArrays) -> Iterator[str]:
    yield from _strangers(split.path, ["images", *SMALL_ARRAYS])
    yield from _strangers(split.path / "images", {chunk_name(chunk) for chunk in range(split.num_chunks)})
    for name, array in arrays.named().items():
        yield from _strangers(split.path / name, [single_chunk_name(array.ndim)])


def _zarr_differences(split: Split, arrays: SplitArrays) -> list[str]:
    """Read the split through zarr-python, which must see the same: small arrays whole, a few images."""
    problems = []
    try:
        root = zarr.open_group(zarr_store(split.store_path), mode="r")
        if root.metadata.consolidated_metadata is not None:
            problems.append(f"{split.store_path / 'zarr.json'}: holds consolidated_metadata, which may be out of date")
        group: Any = zarr.open_group(zarr_store(split.path), mode="r")
        for name, array in arrays.named().items():
            read = group[name][...]
            if read.dtype != array.dtype or not np.array_equal(read, array):
                problems.append(f"{split.path / name}: zarr-python reads other values")
        for slot in {0, split.chunk_images - 1, split.num_samples // 2, split.num_samples - 1} if split.is_raw else ():
            if slot < split.num_samples and not np.array_equal(group["images"][slot], split.read_image(slot)):
                problems.append(f"{split.path / 'images'}: zarr-python reads another image in slot {slot}")
    except Exception as error:  # whatever zarr makes of it
        problems.append(f"{split.path}: zarr-python can't read it ({one_line(error)})")
    return problems


def _lacking(whole: SourceSet, names: Sequence[str]) -> list[str]:
    """A note for each split that only the source has. A source's only split goes by any name that is asked for."""
    if len(whole.splits) < 2:
        return []
    return [f"{whole.origin} has a split {name} that the store lacks" for name in whole.splits if name not in names]


def _random_chunks(split: Split, sample: int) -> np.ndarray:
    """int64 (n,): the chunks of so many random slots."""
    most = min(sample, split.num_samples)
    return np.unique(np.random.default_rng().choice(split.num_samples, most, replace=False) // split.chunk_images)


def _check_chunks(split: Split, arrays: SplitArrays, present: Sequence[int], quiet: bool) -> list[str]:
    """These chunks' digests, padding and bad slots, and where they are all, the split's mean and std."""
    split.digests  # noqa: B018 - read once, before threads ask for it
    problems: list[str] = []

    def images_of(chunk: int) -> int:
        return images_in_chunk(chunk, split.chunk_images, split.num_samples)

    sums = squares = np.zeros(split.image_shape[2], np.int64)
    jobs = (joblib.delayed(_check_chunk)(split, arrays.labels, chunk) for chunk in present)
    threads = joblib.Parallel(n_jobs=-1, prefer="threads", return_as="generator_unordered")
    total = sum(map(images_of, present))
    with Progress(f"verify {split.name}", total, split.image_bytes, quiet=quiet) as progress:
        for chunk, problem, chunk_sums, chunk_squares in threads(jobs):
            if problem:
                problems.append(problem)
            sums, squares = sums + chunk_sums, squares + chunk_squares
            progress.advance(images_of(chunk))
    if not problems and len(present) == split.num_chunks:
        height, width, _ = split.image_shape
        num_pixels = int(np.count_nonzero(arrays.labels != BAD_LABEL)) * height * width
        statistics = channel_statistics(sums.tolist(), squares.tolist(), num_pixels)
        # Earlier releases took the root by `**`, whose last digit depends on the system's library.
        if not np.allclose((split.mean, split.std), statistics, rtol=1e-14, atol=0):
            problems.append(f"{split.path / 'zarr.json'}: mean or std doesn't fit the pixels")
    return sorted(problems)


def _check_chunk(split: Split, labels: np.ndarray, chunk: int) -> tuple[int, str, np.ndarray, np.ndarray]:
    """(chunk, problem or "", channel sums, channel sums of squares)."""
    sums, squares = np.zeros((2, split.image_shape[2]), np.int64)
    not_zero: list[str] = []

    def look(first: int, images: np.ndarray) -> None:
        nonlocal sums, squares
        slots = labels[first : first + len(images)]
        for position in np.flatnonzero(slots == BAD_LABEL):
            if images[position].any():
                not_zero.append(f"bad slot {first + position} isn't zero")
        if images[len(slots) :].any():
            not_zero.append("padding isn't zero")
        if len(slots):
            block_sums, block_squares = channel_sums(images[: len(slots)])
            sums, squares = sums + block_sums, squares + block_squares

    problem = check_chunk(split, chunk, look)
    if not problem and not_zero:
        problem = f"{split.chunk_path(chunk)}: {not_zero[0]}"
    return chunk, problem, sums, squares


def result_text(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [*result["problems"], *(f"note: {note}" for note in result["notes"])]
    for name, split in result["splits"].items():
        compared = f", {split['compared']:,} compared with the source" if split["compared"] else ""
        samples, chunks = counted(split["num_samples"], "sample"), counted(split["chunks"], "chunk")
        lines.append(f"{name}: {samples} ({split['num_valid']:,} valid) in {chunks}{compared}")
    verdict = "every check passed" if result["ok"] else counted(len(result["problems"]), "problem")
    lines.append(f"{result['store']}: {verdict}")
    return "\n".join(map(printable, lines))


def check(result: dict[str, Any]) -> None:
    """Raise for the exit code when a check failed.

    Raises:
        Error: the store has problems.
    """
    if not result["ok"]:
        problems = counted(len(result["problems"]), "problem")
        raise Error(f"{result['store']}: {problems}; restore the files or convert with --overwrite")
