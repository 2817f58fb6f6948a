"""`convert`: arguments checked and a source opened, then planned, described and run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.conversion.backends import backend as chosen_backend
from pipeline.conversion.commit import Report, folder_errors
from pipeline.conversion.plan import make_plan
from pipeline.conversion.preflight import describe, estimate
from pipeline.conversion.run import Conversion
from pipeline.conversion.workdir import Part, Workspace, check_split_name, store_paths
from pipeline.errors import UsageError
from pipeline.image.decode import DecodeOptions
from pipeline.image.resize import software_versions
from pipeline.progress import say
from pipeline.sources import open_source
from pipeline.sources.ignored import describe as describe_ignored
from pipeline.store.geometry import Geometry

DEFAULT_MAX_PIXELS = DecodeOptions().max_pixels


def convert(
    src: Any,
    dst: str | os.PathLike[str],
    *,
    size: int | Sequence[int] = 256,
    fit: str = "crop",
    filter: str = "bicubic",
    channels: str = "rgb",
    exif_transpose: bool = False,
    split: str | Sequence[str] | None = None,
    source: str | None = None,
    n_jobs: int = -1,
    backend: str = "loky",
    scheduler: str | None = None,
    part: str | None = None,
    on_error: str = "stop",
    max_pixels: int = DEFAULT_MAX_PIXELS,
    classes: str | Path | None = None,
    class_order: str | Path | None = None,
    limit_per_class: int | None = None,
    no_shuffle: bool = False,
    seed: int = 0,
    chunk_mb: float = 100,
    overwrite: bool = False,
    dry_run: bool = False,
    check_md5: bool = False,
    download: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Report:
    """Convert a dataset into a store, or go on with a conversion that was interrupted.

    Args:
        src: a folder, archive or file (see the README's table of sources), `torchvision:NAME`, or a sequence of
            (image, label) or (image, label, key); an image is bytes, a path, a PIL image or a uint8 (H, W, C) array.
        dst: the store to write; holds `{size}` when there are several sizes.
        size: side of the stored squares in pixels, or a list of them: each image is decoded once for all.
        fit, filter, channels, exif_transpose: see `Geometry`.
        split: only these splits; for a source without split folders, the name of its split (default `train`).
        source: force a kind of source instead of looking at `src`.
        n_jobs: worker processes; -1 for one per core.
        backend: `loky`, `dask` or `ray`; scheduler: address of a running cluster.
        part: "I/N": convert only every N-th chunk, for batch schedulers.
        on_error: `stop` commits nothing when samples are bad, `skip` commits with bad slots marked.
        max_pixels: images with more are bad samples, refused before decoding.
        classes: file with the class ids to keep; class_order: file with all class ids in label order, or "numeric";
            limit_per_class: at most so many samples a class.
        no_shuffle: keep the source's order in train splits, too; seed: of the shuffle.
        chunk_mb: size of a chunk file in megabytes (10^6 bytes).
        overwrite: delete these splits, or a store that has no others, and unfinished work first.
        dry_run: print what would be written, and stop.
        check_md5: check the official archives' MD5 first; download: let torchvision download.
        quiet: show nothing; verbose: one line for each chunk, with images/s and its bad files.

    Returns:
        A `Report`.

    Raises:
        UsageError: arguments or a source that can't work.
        BadSamplesError: bad samples under `stop`; `<dst>.errors.jsonl` lists them.
        Error: a failed conversion; finished chunks are kept for a rerun.
    """
    sizes = sorted({size} if isinstance(size, int) else set(size))
    if not sizes:
        raise UsageError("--size: at least one is needed")
    geometries = [Geometry(one, fit, filter, channels, exif_transpose) for one in sizes]
    workspaces = [Workspace(path) for path in store_paths(dst, sizes)]
    _check_apart(src, workspaces)
    chosen_part = Part.parse(part) if part else None
    if on_error not in ("stop", "skip"):
        raise UsageError(f"--on-error {on_error}: must be stop or skip")
    for flag, value, works, must in (
        ("--n-jobs", n_jobs, n_jobs != 0, "a number of processes, or -1 for one per core"),
        ("--chunk-mb", chunk_mb, 0 < chunk_mb < math.inf, "more than 0"),
        ("--max-pixels", max_pixels, max_pixels > 0, "more than 0"),
        ("--seed", seed, seed >= 0, "0 or more"),
    ):
        if not works:
            raise UsageError(f"{flag} {value}: must be {must}")
    if overwrite and chosen_part:
        raise UsageError(
            "--overwrite can't go with --part: parts would delete each other's work; remove the store first"
        )
    if quiet and verbose:
        raise UsageError("--quiet and --verbose contradict each other; give one of them")
    splits = [split] if isinstance(split, str) else split
    if isinstance(src, str) and not src.strip():
        raise UsageError("SRC is empty; give a folder, an archive or a file of images")

    found = open_source(
        src, source, splits=splits, class_order=class_order, classes=classes, limit_per_class=limit_per_class,
        check_md5=check_md5, download=download,
    )  # fmt: skip
    for name in found.splits:
        check_split_name(name)
    ignored = describe_ignored(found.ignored)
    lines = [f"ignored: {ignored}"] if ignored else []
    lines += [f"note: {note}" for note in found.notes] + [f"warning: {warning}" for warning in found.warnings]
    for line in lines:
        say(line, quiet=quiet)
    recipe = {"source": found.kind, "max_pixels": max_pixels, "background": list(DecodeOptions().background)}
    software = software_versions()
    plans = [
        make_plan(
            name, found.splits[name], geometries, recipe, software,
            chunk_mb=chunk_mb, shuffled=name.startswith("train") and not no_shuffle, seed=seed,
        )
        for name in found.splits
    ]  # fmt: skip
    class_names = found.class_names or found.class_ids
    job = Conversion(
        plans,
        geometries,
        workspaces,
        found.class_ids,
        class_names,
        DecodeOptions(max_pixels=max_pixels),
        chosen_part,
        quiet,
        verbose,
    )
    describe(found, plans, geometries, [workspace.dst for workspace in workspaces], quiet=quiet)
    if dry_run:
        estimate(plans, geometries, job.options, n_jobs, quiet=quiet)
        return Report([workspace.dst for workspace in workspaces])
    with folder_errors(), chosen_backend(backend, scheduler):
        return job.run(backend, n_jobs, on_error, overwrite)


def _check_apart(src: Any, workspaces: Sequence[Workspace]) -> None:
    """Raise UsageError where a store would lie in its own source: the next conversion would take it for images."""
    if isinstance(src, str | os.PathLike) and os.path.isdir(src):
        for workspace in workspaces:
            if Path(src).resolve() in workspace.dst.resolve().parents:
                raise UsageError(f"{workspace.dst}: inside SRC {os.fspath(src)}; choose a DST outside of it")
