"""Sources: what can be converted, and how each kind is recognised. `open_source` is all that others need.

A new kind is one file with an `open_...` function, a line in `KINDS`, and a line in `detect.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names, subset
from pipeline.sources.archive_index import KeptIndex
from pipeline.sources.base import Source, SourceOptions, SourceSet
from pipeline.sources.detect import detect_kind
from pipeline.sources.folder import open_folder
from pipeline.sources.hugging_face import open_hugging_face
from pipeline.sources.ignored import describe
from pipeline.sources.imagenet import open_imagenet
from pipeline.sources.kaggle import open_kaggle
from pipeline.sources.labels import some
from pipeline.sources.manifest import open_manifest
from pipeline.sources.parquet import open_parquet
from pipeline.sources.sequence import open_sequence
from pipeline.sources.subset import ValSplit
from pipeline.sources.tar import open_tar
from pipeline.sources.torchvision_sets import open_torchvision
from pipeline.sources.webdataset import open_archives, open_webdataset
from pipeline.store.format import UNLABELLED
from pipeline.store.remote import check_local
from pipeline.text import counted

__all__ = ["SOURCE_KINDS", "UNLABELLED", "Source", "SourceSet", "ValSplit", "open_source"]


class _Kind(NamedTuple):
    """A kind of source: what opens it, what tells it apart, and what can be named in it by `--...-column`."""

    open: Callable[[Any, SourceOptions], SourceSet]
    recognised_by: str
    columns: tuple[str, ...] = ()


KINDS = {
    "folder": _Kind(open_folder, "its folders of images", ("label",)),
    "imagenet": _Kind(open_imagenet, "the official archives' names"),
    "kaggle": _Kind(open_kaggle, "its folder ILSVRC/Data/CLS-LOC"),
    "tar": _Kind(open_tar, "its tar archives of images"),
    "webdataset": _Kind(open_webdataset, "tar members that share a name, such as 1.jpg and 1.cls", ("label",)),
    "parquet": _Kind(open_parquet, "its parquet files", ("label", "image")),
    "manifest": _Kind(open_manifest, "the file's suffix", ("label", "image")),
    "torchvision": _Kind(open_torchvision, "the prefix torchvision:"),
    "hugging-face": _Kind(open_hugging_face, "being a dataset of Hugging Face's", ("label", "image")),
    "sequence": _Kind(open_sequence, "being no path but samples from Python"),
}
SOURCE_KINDS = tuple(KINDS)
FROM_PYTHON = ("sequence", "hugging-face")


def open_source(
    src: Any,
    kind: str | None = None,
    *,
    splits: Sequence[str] | None = None,
    class_order: str | Path | None = None,
    classes: str | Path | None = None,
    val_split: ValSplit | None = None,
    limit_per_class: int | None = None,
    check_md5: bool = False,
    download: bool = False,
    label_column: str | None = None,
    image_column: str | None = None,
    unlabelled: bool = False,
    index: KeptIndex | None = None,
) -> SourceSet:
    """Look at SRC, index it, and apply the subset options.

    Args:
        src: a path, `torchvision:NAME[:ROOT]`, or from Python a sequence of (image, label[, key]), or a mapping from
            split names to such sequences, or a `SourceSet` of your own sources. An image is encoded bytes, a path, an
            array or a PIL image.
        kind: one of `SOURCE_KINDS`; None finds it by looking at `src`.
        splits: the wanted splits; None takes all. `validation` and `valid` mean `val`. A source with a single unnamed
            split gets the one name that is asked for.
        class_order: `numeric`, or a file of class ids in label order.
        classes: a file of the class ids to keep.
        val_split: what a val split takes of a source that has none; None for no such split.
        limit_per_class: keep that many samples of each class in each split.
        check_md5: compare the official ImageNet archives with their known MD5 sums first.
        download: let torchvision fetch what is missing.
        label_column: where the labels are: a column of a table, or of a WebDataset a file's extension or a JSON field.
        image_column: the column of a table that holds the images or their paths.
        unlabelled: take images as unlabelled although labels may lie beside them.
        index: what earlier runs found in archives, for speed.

    Raises:
        UsageError: one line that says what is wrong with SRC or the options.
    """
    if kind is not None and kind not in SOURCE_KINDS:
        raise UsageError(f"--source {kind}: must be one of {', '.join(SOURCE_KINDS)}")
    forced = kind is not None
    if isinstance(src, str | os.PathLike):
        check_local(src, "SRC", "bring the images to this machine's disk first")
    kind = src.kind if isinstance(src, SourceSet) else kind or detect_kind(src)
    if check_md5 and kind != "imagenet":
        raise UsageError(f"--check-md5: only the official ImageNet archives have known sums; {src} is a {kind} source")
    if download and kind != "torchvision":
        raise UsageError(f"--download: only torchvision's datasets can be downloaded; {src} is a {kind} source")
    known = KINDS["webdataset" if kind == "tar" and not forced else kind].columns if kind in KINDS else ()
    for name, column in (("label", label_column), ("image", image_column)):
        if column is not None and name not in known:
            raise UsageError(f"--{name}-column {column}: a {kind} source has no columns; leave it out")
    asked = tuple(names.split_of_folder(os.fsencode(split)) or split for split in splits or ())
    options = SourceOptions(asked, check_md5, download, label_column, image_column, index)
    found = _open(src, kind, options, forced)
    missing = [split for split in asked if split not in found.splits]
    if missing:
        have = ", ".join(_open(src, kind, replace(options, splits=()), forced).splits) or "none"
        raise UsageError(f"{found.origin}: no split {missing[0]!r} (there are: {have}); give one of these")
    _refuse_empty(found)
    if not unlabelled:
        _refuse_vanished_labels(found)
    if classes is not None:
        found = _without_empty(subset.choose_classes(found, classes), asked)
    if class_order is not None:
        found = subset.order_classes(found, class_order)
    if val_split is not None:
        found = subset.draw_val(found, val_split)
    if limit_per_class is not None:
        found = subset.limit_per_class(found, limit_per_class)
    _refuse_empty(found)
    return _with_notes(found)


def _open(src: Any, kind: str, options: SourceOptions, forced: bool) -> SourceSet:
    if isinstance(src, SourceSet):
        kept = {split: source for split, source in src.splits.items() if options.wants(split)}
        return replace(src, splits=kept, notes=list(src.notes), warnings=list(src.warnings))
    if kind not in FROM_PYTHON and not isinstance(src, str | os.PathLike):
        raise UsageError(f"--source {kind}: for paths, not for a {type(src).__name__} in Python; leave it out")
    if kind not in (*FROM_PYTHON, "torchvision"):
        src = Path(os.fspath(src))
        if not src.exists():
            raise UsageError(f"{src}: no such file or folder; check the path")
    found = (open_archives if kind == "tar" and not forced else KINDS[kind].open)(src, options)
    found.origin = "the samples" if kind in FROM_PYTHON else str(src)
    return found


def _refuse_empty(found: SourceSet) -> None:
    ignored = f" (ignored: {describe(found.ignored)})" if found.ignored else ""
    empty = [split for split, source in found.splits.items() if not len(source)]
    if empty or not found.splits:
        what = f"no images in split {empty[0]!r}" if len(found.splits) > 1 else "no images found"
        remedy = "leave the split out with --split" if len(found.splits) > 1 else "check the path and --source"
        raise UsageError("; ".join([f"{found.origin}: {what}{ignored}", *found.notes, remedy]))


def _refuse_vanished_labels(found: SourceSet) -> None:
    for split, hint in found.label_hints.items():
        if split in found.splits and (np.asarray(found.splits[split].labels) == UNLABELLED).all():
            raise UsageError(f"{found.origin}: no image of {split} has a label, but {hint}, or give --unlabelled")


def _without_empty(found: SourceSet, asked: Sequence[str]) -> SourceSet:
    """Leave out splits that have no sample of the chosen classes, such as an unlabelled `test`, unless asked for."""
    empty = [split for split, source in found.splits.items() if not len(source) and split not in asked]
    if len(empty) < len(found.splits):
        found.splits = {split: source for split, source in found.splits.items() if split not in empty}
        found.notes += [f"{split}: no image of the chosen classes; the split is left out" for split in empty]
    return found


def _with_notes(found: SourceSet) -> SourceSet:
    """Say which classes have no sample to train on, and which labelled set has unlabelled splits."""
    train = found.splits.get("train")
    if train is not None and found.class_ids:
        labels = np.asarray(train.labels)
        counts = np.bincount(labels[labels >= 0], minlength=len(found.class_ids))
        empty = np.flatnonzero(counts == 0).tolist()
        if empty and counts.any():
            classes = counted(len(counts), "class", "classes")
            have, keep = ("has", "it keeps its label") if len(empty) == 1 else ("have", "they keep their labels")
            without = some([found.class_ids[i] for i in empty])
            found.notes.append(f"train: {len(empty):,} of {classes} {have} no image ({without}); {keep}")
    for split, source in found.splits.items() if found.class_ids else ():
        count = int((np.asarray(source.labels) == UNLABELLED).sum())
        if count:
            have = "has" if count == 1 else "have"
            found.notes.append(f"{split}: {count:,} of {counted(len(source), 'image')} {have} no label")
    return found
