"""What a conversion will write, said and checked before the first image is read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import joblib
import numpy as np

from pipeline.conversion.plan import SplitPlan
from pipeline.conversion.workdir import Workspace
from pipeline.errors import BadSample, Error
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.progress import say
from pipeline.sources.base import SourceSet
from pipeline.store.geometry import Geometry
from pipeline.text import counted, duration

ESTIMATE_SECONDS = 3.0
SMALL_FILES = 16  # metadata and small arrays of a split, and room for temp files
"""Files beside a split's chunks."""


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


def check_space(
    plans: Sequence[SplitPlan],
    geometries: Sequence[Geometry],
    workspaces: Sequence[Workspace],
    todo: Mapping[str, Sequence[int]],
) -> None:
    """Check that the chunks still to be written fit on their file systems.

    Raises:
        Error: too few free bytes or file entries.
    """
    needed: dict[int, tuple[Path, int, int]] = {}
    for workspace, geometry in zip(workspaces, geometries, strict=True):
        folder = workspace.path
        device = folder.stat().st_dev
        _, size, files = needed.get(device, (folder, 0, 0))
        for plan in plans:
            chunks = len(todo[plan.split])
            small = split_bytes(plan, geometry) - plan.num_chunks * plan.chunk_bytes(geometry)
            # A receipt holds about 60 bytes of JSON per sample.
            size += chunks * plan.chunk_bytes(geometry) + 2 * small + 60 * plan.num_samples
            files += 2 * chunks + SMALL_FILES
        needed[device] = (folder, size, files)
    for folder, size, files in needed.values():
        free_bytes, free_files = free_space(folder)
        if free_bytes < size:
            raise Error(
                f"{folder}: {size:,} bytes are needed and {free_bytes:,} are free; make room or choose another DST"
            )
        if 0 < free_files < files:
            raise Error(
                f"{folder}: {files:,} new files are needed and {free_files:,} are free; use a larger --chunk-mb"
            )


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
