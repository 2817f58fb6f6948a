"""What a conversion will write, said and checked before the first image is read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import joblib
import numpy as np

from pipeline.conversion.plan import SplitPlan
from pipeline.conversion.workdir import Workspace
from pipeline.errors import BadSample, Error
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.progress import say
from pipeline.sources.base import Source, SourceSet
from pipeline.sources.byte_strings import ByteStrings
from pipeline.store.geometry import Geometry
from pipeline.text import counted, duration

ESTIMATE_SECONDS = 3.0
SMALL_FILES = 40  # folders, metadata and small arrays of a split, locks, and room for temp files
"""Files beside a split's chunks."""
BLOCK_BYTES = 4096  # of most file systems
ENTRY_BYTES = 64  # of a file in a folder
RECEIPT_BYTES = 1000  # beside what it says of each sample


class Need(NamedTuple):
    """Room that something takes below a folder."""

    folder: Path
    num_bytes: int
    num_files: int


def split_bytes(plan: SplitPlan, geometry: Geometry) -> int:
    """Exact bytes of a split's chunk files and small arrays (metadata's few kilobytes not counted)."""
    arrays = plan.num_samples * (4 + 8) + 8 + (plan.num_samples + 1) * 8 + len(plan.keys) - 8 + plan.num_chunks * 32
    return plan.num_chunks * plan.chunk_bytes(geometry) + arrays


def describe(
    found: SourceSet, plans: Sequence[SplitPlan], geometries: Sequence[Geometry], dsts: Sequence[Path], *, quiet: bool
) -> None:
    """Say per split and size: samples, classes, bytes, files."""
    for plan in plans:
        counts = np.bincount(plan.labels[plan.labels >= 0], minlength=len(found.class_ids))
        unlabelled = plan.num_samples - int(counts.sum())
        text = f"{plan.split}: {counted(plan.num_samples, 'image')}"
        if counts.any():
            classes = counted(int(np.count_nonzero(counts)), "class", "classes")
            least, most = int(counts.min()), int(counts.max())
            text += f" of {classes} ({f'{least:,}' if least == most else f'{least:,} to {most:,}'} a class)"
        say(text + (f", {unlabelled:,} unlabelled" if unlabelled else ""), quiet=quiet)
        for geometry, dst in zip(geometries, dsts, strict=True):
            say(
                f"  {dst}/{plan.split}: {split_bytes(plan, geometry):,} bytes in "
                f"{counted(plan.num_chunks, 'chunk file')} of {counted(plan.chunk_images, 'image')} "
                f"({geometry.size} px, {geometry.fit}, {geometry.filter})",
                quiet=quiet,
            )


def on_disk(num_bytes: int) -> int:
    """Bytes that a file takes on the disk: whole blocks, and its entry in a folder."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES + ENTRY_BYTES


def _index_bytes(source: Source) -> int:
    """Bytes of a source's arrays, which are handed to the workers in a file."""
    total = 0
    for value in getattr(source, "__dict__", {}).values():
        if hasattr(value, "change_stamps"):  # a subset's source
            total += _index_bytes(value)
        arrays = (value.blob, value.offsets) if isinstance(value, ByteStrings) else (value,)
        total += sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    return total


def needs(plans: Sequence[SplitPlan], stores: Sequence[tuple[Workspace, Geometry]], *, overwrite: bool) -> list[Need]:
    """Room that a conversion takes until it is committed, beside what it has written already or will delete."""
    found = []
    for workspace, geometry in stores:
        for plan in plans:
            work, done = workspace.split(plan.split), workspace.dst / plan.split
            if done.exists() and not overwrite:
                continue
            freed = folder_bytes(work.path) + folder_bytes(done) if overwrite else 0
            left = plan.num_chunks - (0 if overwrite else sum(1 for _ in work.receipts.glob("*.json")))
            # A receipt holds about 60 bytes of JSON per sample.
            chunk = on_disk(plan.chunk_bytes(geometry)) + on_disk(RECEIPT_BYTES + 60 * plan.chunk_images)
            small = split_bytes(plan, geometry) - plan.num_chunks * plan.chunk_bytes(geometry)
            wanted = left * chunk + 2 * small + _index_bytes(plan.source) + SMALL_FILES * on_disk(1)
            found.append(Need(workspace.path, wanted - freed, 2 * left + SMALL_FILES))
    return found


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(os.lstat(os.path.join(root, name)).st_size for root, _, names in os.walk(folder) for name in names)


def check_space(wanted: Iterable[Need]) -> None:
    """Check that what is still to be written fits on its file systems."""
    totals: dict[int, Need] = {}
    for need in wanted:
        folder = next(path for path in (need.folder, *need.folder.parents) if path.exists())
        _, size, files = totals.get(folder.stat().st_dev, (folder, 0, 0))
        totals[folder.stat().st_dev] = Need(folder, size + need.num_bytes, files + need.num_files)
    for folder, size, files in totals.values():
        free_bytes, free_files = free_space(folder)
        if free_bytes < size:
            raise Error(
                f"{folder}: {size:,} bytes are needed and {free_bytes:,} are free; make room or choose another DST"
            )
        if 0 < free_files < files:
            raise Error(f"{folder}: {files:,} files are needed and {free_files:,} are free; give a larger --chunk-mb")


def free_space(folder: Path) -> tuple[int, int]:
    """Free bytes and free file entries (0 where the file system doesn't count them) for this user."""
    if not hasattr(os, "statvfs"):  # Windows
        return shutil.disk_usage(folder).free, 0
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, status.f_favail


def estimate(
    plans: Sequence[SplitPlan], geometries: Sequence[Geometry], options: DecodeOptions, n_jobs: int, *, quiet: bool
) -> None:
    """Decode a few seconds of samples from all over the source, and say how long a conversion would take."""
    ends = np.cumsum([plan.num_samples for plan in plans])
    total = int(ends[-1])
    places = [np.empty(geometry.image_shape, np.uint8) for geometry in geometries]
    start, done, bad = time.monotonic(), 0, 0
    for chosen in np.random.default_rng(0).permutation(total).tolist():  # each sample once at most
        number = int(np.searchsorted(ends, chosen, "right"))
        plan = plans[number]
        try:
            index = chosen - int(ends[number]) + plan.num_samples
            decode_into(plan.source.read(index), geometries, places, options)
        except BadSample:
            bad += 1
        done += 1
        if time.monotonic() - start > ESTIMATE_SECONDS:
            break
    rate = done / (time.monotonic() - start)
    workers = min(joblib.effective_n_jobs(n_jobs), max(plan.num_chunks for plan in plans))  # as many as will be started
    say(
        f"dry run: {counted(done, 'sample')} tried, {bad:,} bad; {rate:,.0f} images/s in one process, so about "
        f"{duration(total / rate / workers)} with {counted(workers, 'job')} (an estimate; nothing was written)",
        quiet=quiet,
    )
