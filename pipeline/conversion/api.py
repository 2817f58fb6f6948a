"""`convert`: a source opened, planned, described and run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.conversion.backends import backend
from pipeline.conversion.commit import Report, folder_errors
from pipeline.conversion.names import check_split_name, store_paths
from pipeline.conversion.options import ConvertOptions
from pipeline.conversion.plan import make_plan
from pipeline.conversion.preflight import check_space, describe, estimate, needs
from pipeline.conversion.run import Conversion
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, UsageError
from pipeline.image.resize import software_versions
from pipeline.progress import say
from pipeline.sources import KINDS, open_source
from pipeline.sources.archive_index import KeptIndex
from pipeline.sources.ignored import describe as describe_ignored


def convert(src: Any, dst: str | os.PathLike[str], **options: Any) -> Report:
    """Convert a dataset into a store, or go on with a conversion that was interrupted.

    Args:
        src: a folder, archive or file (see docs/sources.md), `torchvision:NAME`, a `Dataset` of Hugging Face's, or a
            sequence of (image, label) or (image, label, key); an image is bytes, a path, a PIL image or
            a uint8 (H, W, C) array.
        dst: the store to write; holds `{size}` when there are several sizes.
        options: the fields of `ConvertOptions`, which are the command's flags with underscores for dashes. `size` may
            be a list: each image is decoded once for all sizes. `split` may be a list, too.

    Returns:
        A `Report`.

    Raises:
        UsageError: arguments or a source that can't work.
        BadSamplesError: bad samples under `on_error="stop"`; `<dst>.errors.jsonl` lists them.
        Error: a failed conversion; finished chunks are kept for a rerun.
    """
    chosen = ConvertOptions(**options)
    quiet, geometries = chosen.quiet, chosen.geometries
    workspaces = [Workspace(path) for path in store_paths(dst, chosen.sizes)]
    _check_apart(src, workspaces)
    index = KeptIndex(workspaces[0].path, scan=chosen.overwrite)
    found = open_source(
        src, chosen.source, splits=chosen.splits, class_order=chosen.class_order, classes=chosen.classes,
        val_split=chosen.val_split, limit_per_class=chosen.limit_per_class, check_md5=chosen.check_md5,
        download=chosen.download, label_column=chosen.label_column, image_column=chosen.image_column,
        unlabelled=chosen.unlabelled, index=index,
    )  # fmt: skip
    for name in found.splits:
        check_split_name(name)
    by = KINDS[found.kind].recognised_by if found.kind in KINDS else "the caller"
    how = "as --source says" if chosen.source else f"recognised by {by}"
    lines = [f"source: {found.kind}, {how}"]
    if ignored := describe_ignored(found.ignored):
        lines.append(f"ignored: {ignored}")
    lines += [f"note: {note}" for note in found.notes] + [f"warning: {warning}" for warning in found.warnings]
    for line in lines:
        say(line, quiet=quiet)
    recipe = {"source": found.kind, **chosen.decode.to_recipe()}
    if chosen.val_split:
        recipe["val_split"] = asdict(chosen.val_split)
    columns = {"label_column": chosen.label_column, "image_column": chosen.image_column}
    recipe |= {name: column for name, column in columns.items() if column}
    software = software_versions()
    plans = [
        make_plan(
            name, source, geometries, recipe, software, chunk_mb=chosen.chunk_mb, seed=chosen.seed,
            shuffled=name.startswith("train") and not chosen.no_shuffle,
        )
        for name, source in found.splits.items()
    ]  # fmt: skip
    class_names = found.class_names or found.class_ids
    job = Conversion(
        plans, list(zip(workspaces, geometries, strict=True)), found.class_ids, class_names, chosen.decode,
        chosen.chosen_part, quiet, chosen.verbose, index,
    )  # fmt: skip
    stores = [workspace.dst for workspace in workspaces]
    describe(found, plans, geometries, stores, quiet=quiet)
    if chosen.dry_run:
        estimate(plans, geometries, chosen.decode, chosen.n_jobs, quiet=quiet)
        try:
            check_space(needs(plans, job.stores, overwrite=chosen.overwrite))
        except Error as error:
            say(f"warning: it won't fit: {error}")
        return Report(stores)
    with folder_errors(workspaces[0].path), backend(chosen.backend, chosen.scheduler):
        return job.run(chosen.backend, chosen.n_jobs, chosen.on_error, chosen.overwrite)


# So that help() and editors list every option with its default.
_fixed = [*inspect.signature(convert).parameters.values()][:2]
_options = inspect.signature(ConvertOptions).parameters.values()
convert.__signature__ = inspect.Signature([*_fixed, *_options], return_annotation="Report")  # type: ignore[attr-defined]


def _check_apart(src: Any, workspaces: Sequence[Workspace]) -> None:
    """Raise UsageError where a store would lie in its own source: the next conversion would take it for images."""
    if isinstance(src, str) and not src.strip():
        raise UsageError("SRC is empty; give a folder, an archive or a file of images")
    if isinstance(src, str | os.PathLike) and os.path.exists(src):
        source = Path(src).resolve()
        for workspace in workspaces:
            if source in workspace.dst.resolve().parents:
                raise UsageError(f"{workspace.dst}: inside SRC {source}; choose a DST outside of it")
            if not {workspace.dst.resolve(), workspace.path.resolve()}.isdisjoint([source, *source.parents]):
                raise UsageError(f"SRC {source}: inside DST {workspace.dst}, or in its work folder; choose another DST")
