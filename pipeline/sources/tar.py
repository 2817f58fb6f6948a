"""Plain tar archives with class folders (`tar -cf pets.tar train val`), read without extraction.

The paths inside are read as the folder source reads a folder, and give the same keys in the same order. A folder that
wraps everything else is passed through. Several archives are put together; those with a split's name (`train.tar`,
`pets-val-00.tar`) belong to that split.
"""

from __future__ import annotations

import posixpath
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.archive import ArchivePart
from pipeline.sources.archive_index import Index, index_archives
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder
from pipeline.sources.files import data_files, label_files, split_of_data_file
from pipeline.sources.ignored import OUTSIDE_CLASSES, OUTSIDE_SPLITS, Ignored
from pipeline.sources.labels import assemble, some
from pipeline.sources.nested_images import NestedImages
from pipeline.store.format import split_order
from pipeline.text import as_text


@dataclass
class _Split:
    """One split while it is collected: rows of the table of all images, and their paths below the split's folder."""

    top: bytes
    """The folders that are left out of the first path."""
    rows: array[int] = field(default_factory=lambda: array("q"))
    keys: ByteStringsBuilder = field(default_factory=ByteStringsBuilder)
    classes: set[str] = field(default_factory=set)
    """Class folders that may hold no image."""

    def shown(self, path: bytes) -> str:
        return as_text(posixpath.join(self.top, path))


def open_tar(src: Path, options: SourceOptions, index: Index | None = None) -> SourceSet:
    """The tar source: one archive, or a folder of them; `index` is what `index_archives` gave for it, if it did."""
    paths, ignored, notes = data_files(src, ".tar"), Ignored(), list[str]()
    archives = [str(path) for path in paths]
    whole, folders = index or index_archives(archives, options.index)
    images = whole.images(ignored)
    beside = label_files(src) if src.is_dir() else label_files(src.parent, src.stem)
    beside += names.label_like(whole.names) if len(images) < len(whole.names) else []
    for row in np.setdiff1d(np.arange(len(whole.names)), images).tolist():  # folders that hold other files
        folders.append((int(whole.archive[row]), posixpath.dirname(whole.names[row])))
    table = whole.take(images)
    del whole  # half the memory
    layouts, found = [], dict[str, _Split]()
    for number, path in enumerate(paths):
        inside = np.flatnonzero(table.archive == number)
        layout = _layout(table.names.take(inside), str(path), split_of_data_file(path, src) or options.only_split)
        layouts.append(layout)
        if layout.wrapper:
            notes.append(f"{path}: everything in it lies in {layout.wrapper}/; the classes are the folders below that")
        for row in inside.tolist():
            name = table.names[row]
            split, inner = layout.place(name)
            if split is None:
                ignored.add(OUTSIDE_SPLITS, name)
                continue
            part = found.setdefault(split, _Split(name[: -len(inner) - 1]))
            part.rows.append(row)
            part.keys.append(inner)
    for archive, folder in folders:
        split, inner = layouts[archive].place(folder + b"/")
        top, slash, _ = inner.partition(b"/")
        if split in found and slash and top and not names.is_system_folder(top):
            found[split].classes.add(as_text(top))
    parts, warnings = {}, list[str]()
    for split in split_order(found):
        part = found[split]
        files = table.take(np.array(part.rows, np.int64), part.keys.build())
        del part.rows, part.keys
        parts[split], deeper = _in_order(ArchivePart(archives, files), ignored)
        if options.wants(split):
            flags = "" if split == "train" else f" with --split {split}"
            warnings += deeper.warning(part.shown, "unpack it and give the folder {root} as SRC" + flags)
    # Class folders without images keep their place, in the splits that the class map is made of.
    for split in ["train"] if "train" in parts and parts["train"].column.tokens else list(parts):
        if parts[split].column.tokens:  # else its samples are unlabelled
            for empty in sorted(found[split].classes):
                parts[split].column.add(empty, 0)
    hint = (
        f"{some(beside)} may hold the labels; name the extension or the JSON field with --label-column, or give a "
        "table of paths and labels as SRC"
    )
    hints = dict.fromkeys(parts if beside else (), hint)
    return assemble("tar", parts, options, ignored=ignored, notes=notes, warnings=warnings[:1], label_hints=hints)


def _in_order(part: ArchivePart, ignored: Ignored) -> tuple[ArchivePart, NestedImages]:
    """One split in the order of a sorted walk with its labels (the first folder, where there are folders), and what
    lies in folders below that."""
    table = part.table
    inner = np.fromiter((b"/" in key for key in table.names), bool, len(table.names))
    labelled = bool(inner.any())
    if labelled and not inner.all():
        outside = np.flatnonzero(~inner)
        ignored.add(OUTSIDE_CLASSES, table.names[int(outside[0])], len(outside))
        table = table.take(np.flatnonzero(inner))
    part, deeper = ArchivePart(part.archives, table.sorted(part.archives)), NestedImages()
    for key in part.table.names:
        part.column.add(as_text(key.partition(b"/")[0]) if labelled else None)
        deeper.add(key)
    return part, deeper


@dataclass(frozen=True)
class _Layout:
    """How the paths in one archive are read.

    Attributes:
        top: leading folders that are left out.
        split: that all paths belong to, None where the next folder names it.
        splits: these folders' names and splits.
        wrapper: the folders left out, where they say nothing.
    """

    top: bytes
    split: str | None
    splits: Mapping[bytes, str] = field(default_factory=dict)
    wrapper: str = ""

    def place(self, path: bytes) -> tuple[str | None, bytes]:
        """A path's split, None where it lies in none, and the path below the split's folder."""
        if not path.startswith(self.top):
            return None, b""
        inner = path[len(self.top) :]
        if self.split is not None:
            return self.split, inner
        folder, slash, inner = inner.partition(b"/")
        return (self.splits.get(folder) if slash else None), inner


def _layout(paths: ByteStrings, where: str, default: str) -> _Layout:
    """Find the folders of splits and classes in an archive's image paths; `default` is the split that it has else."""
    common, nearest = _common_folders(paths)
    for depth, folder in enumerate(common):
        if split := names.split_of_folder(folder):
            return _Layout(_joined(common[: depth + 1]), split)
    if common and nearest == len(common):  # images lie directly in the last common folder: it is a class
        common = common[:-1]
    tops: dict[bytes, bool] = {}  # folder -> all its images lie in it directly
    for path in paths:
        folders = path.split(b"/")[len(common) : -1]
        if folders:
            tops[folders[0]] = tops.get(folders[0], True) and len(folders) == 1
    found = names.splits_among(sorted(tops))
    others = sorted(set(tops) - set(found))
    if found and not others:
        return _Layout(_joined(common), None, found)
    if not all(tops[top] for top in found):
        raise UsageError(
            f"{where}: holds both split folders ({as_text(min(found))}/) and others ({as_text(others[0])}/); "
            "put them into archives of their own"
        )
    return _Layout(_joined(common), default, wrapper=as_text(b"/".join(common)))


def _joined(folders: Sequence[bytes]) -> bytes:
    return b"".join(folder + b"/" for folder in folders)


def _common_folders(paths: ByteStrings) -> tuple[list[bytes], int]:
    """The leading folders that all paths share, and the least number of folders before a file name."""
    common: list[bytes] = []
    nearest = -1
    for path in paths:
        folders = path.split(b"/")[:-1]
        if nearest < 0:
            common, nearest = folders, len(folders)
        while folders[: len(common)] != common:
            common = common[:-1]
        nearest = min(nearest, len(folders))
    return common, nearest
