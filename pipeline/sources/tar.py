"""Plain tar archives with class folders (`tar -cf pets.tar train val`), read without extraction.

The paths inside are read as the folder source reads a folder, and give the same keys in the same order. A folder that
wraps everything else is passed through. Several archives are put together; those with a split's name (`train.tar`,
`pets-val-00.tar`) belong to that split.
"""

from __future__ import annotations

import os
import posixpath
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.archive import ArchiveSource, Table, TableBuilder
from pipeline.sources.base import SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate, path_order
from pipeline.sources.folder import single_name
from pipeline.sources.ignored import OUTSIDE_SPLITS, Ignored
from pipeline.sources.labels import LabelColumn, resolve
from pipeline.sources.names import OUTSIDE_CLASSES
from pipeline.sources.nested_images import NestedImages


def find_files(src: Path, suffix: str) -> list[Path]:
    """`src` itself, or the visible files with the suffix below it, sorted as `path_order` does."""
    if not src.is_dir():
        return [src]
    found = []
    for path in src.rglob("*"):
        relative = path.relative_to(src)
        if path.suffix.lower() == suffix and not any(part.startswith(".") for part in relative.parts):
            found.append(path)
    return sorted(found, key=lambda path: [os.fsencode(part) for part in path.parts])


def split_of_archive(path: Path, src: Path) -> str | None:
    """The split that the archive's name, or that of a folder below SRC, says."""
    relative = path.relative_to(src) if path != src else Path(path.name)
    return names.split_of_file(os.fsencode(relative.with_suffix("")))


def _index(paths: Sequence[Path]) -> TableBuilder:
    builder = TableBuilder()
    for number, path in enumerate(paths):
        builder.add_archive(str(path), number)
    return builder


def read_table(paths: Sequence[Path]) -> Table:
    """All files in the archives."""
    return _index(paths).build()


def image_rows(table: Table, ignored: Ignored) -> np.ndarray:
    """int64: the rows of the table that are image candidates; the rest is counted."""
    keep = np.zeros(len(table.names), bool)
    for i, name in enumerate(table.names):
        if why := names.why_ignored(name):
            ignored.add(why, name)
        else:
            keep[i] = True
    return np.flatnonzero(keep)


def open_tar(src: Path, splits: Sequence[str] | None = None) -> SourceSet:
    """The tar source: one archive, or a folder of them.

    Raises:
        UsageError: a truncated or damaged archive, the same path twice, or a class that `train` doesn't have.
    """
    paths, ignored, notes = find_files(src, ".tar"), Ignored(), list[str]()
    builder = _index(paths)
    table = builder.build()
    images = image_rows(table, ignored)
    others = _other_folders(builder, table, images)
    table = table.take(images)
    classes: dict[str, set[bytes]] = {}
    rows: dict[str, array[int]] = {}
    keys: dict[str, ByteStringsBuilder] = {}
    tops: dict[str, bytes] = {}
    for number, path in enumerate(paths):
        inside = np.flatnonzero(table.archive == number)
        found = layout(table.names.take(inside), str(path))
        if found.wrapper:
            notes.append(f"{path}: everything in it lies in {found.wrapper}/; the classes are the folders below that")
        default = split_of_archive(path, src) or single_name(splits)
        for row in inside.tolist():
            folders = table.names[row].split(b"/")
            split: str | None = found.split or default
            if found.holds_splits:
                split = names.split_of_folder(folders[found.depth]) if len(folders) > found.depth + 1 else None
            if split is None:
                ignored.add(OUTSIDE_SPLITS, table.names[row])
                continue
            depth = found.depth + found.holds_splits
            tops.setdefault(split, b"/".join(folders[:depth]))
            rows.setdefault(split, array("q")).append(row)
            keys.setdefault(split, ByteStringsBuilder()).append(b"/".join(folders[depth:]))
        top = table.names[int(inside[0])].split(b"/")[: found.depth] if len(inside) else []
        for folder in others.get(number, ()):
            if named := _class_folder(folder, top, found, default):
                classes.setdefault(named[0], set()).add(named[1])
    tables, columns, deep = {}, {}, {}
    for split in names.natural_splits(set(rows)):
        part = table.take(np.array(rows.pop(split), np.int64), keys.pop(split).build())
        tables[split], columns[split], deep[split] = _order(part, paths, ignored)
    _declare(columns, classes)
    ids, labels = resolve(columns, lambda split, i: f"{src}: {names.text(tables[split].names[i])}")
    sources = {
        split: ArchiveSource([str(path) for path in paths], part, labels[split])
        for split, part in tables.items()
        if not splits or split in splits
    }
    warnings = [_too_high(deep[split], tops[split], split, src) for split in sources if deep[split].first]
    return SourceSet("tar", ids, sources, ignored=ignored, notes=notes, warnings=warnings[:1], origin=str(src))


def _other_folders(builder: TableBuilder, table: Table, images: np.ndarray) -> dict[int, set[bytes]]:
    """Of each archive, the folders that are members or hold other files than images: classes without any, perhaps."""
    folders: dict[int, set[bytes]] = {}
    for archive, folder in builder.folders:
        folders.setdefault(archive, set()).add(folder)
    for row in np.setdiff1d(np.arange(len(table.names)), images).tolist():
        folders.setdefault(int(table.archive[row]), set()).add(posixpath.dirname(table.names[row]))
    return folders


def _class_folder(folder: bytes, top: list[bytes], found: Layout, default: str) -> tuple[str, bytes] | None:
    """The split and the class folder that a folder of an archive is or lies in; None where it is in no class.

    `top` are the folders that are left out of this archive's paths.
    """
    parts = folder.split(b"/")
    inner = parts[len(top) :]
    if parts[: len(top)] != top or not inner:
        return None
    split: str | None = found.split or default
    if found.holds_splits:
        split, inner = names.split_of_folder(inner[0]), inner[1:]
    if split is None or not inner or not inner[0] or names.is_system_folder(inner[0]):
        return None
    return split, inner[0]


def _declare(columns: dict[str, LabelColumn], classes: dict[str, set[bytes]]) -> None:
    """Give class folders without images their place, in the splits that the class map is made of."""
    makes_map = ["train"] if "train" in columns and columns["train"].tokens else list(columns)
    for split in makes_map:
        if columns[split].tokens:  # else its samples are unlabelled
            for folder in sorted(classes.get(split, ())):
                columns[split].add(names.text(folder), 0)


def _too_high(deeper: NestedImages, top: bytes, split: str, src: Path) -> str:
    """The warning; `top` is what was left out of the split's paths."""
    wanted = names.text(posixpath.join(top, deeper.wanted_root))
    flags = "" if split == "train" else f" with --split {split}"
    example = names.text(posixpath.join(top, deeper.first))
    return deeper.warning(f"{src}: {example}", f"unpack it and give the folder {wanted} as SRC{flags}")


def _order(table: Table, paths: Sequence[Path], ignored: Ignored) -> tuple[Table, LabelColumn, NestedImages]:
    """One split in the order of a sorted walk, its labels (the first folder, where there are folders), and what lies
    in folders below that."""
    inner = np.fromiter((b"/" in key for key in table.names), bool, len(table.names))
    labelled = bool(inner.any())
    if labelled and not inner.all():
        outside = np.flatnonzero(~inner)
        ignored.add(OUTSIDE_CLASSES, table.names[int(outside[0])], len(outside))
        table = table.take(np.flatnonzero(inner))
    table = table.take(path_order(table.names))
    refuse_duplicates(table, paths)
    column, deeper = LabelColumn(), NestedImages()
    for key in table.names:
        column.add(names.text(key.partition(b"/")[0]) if labelled else None)
        deeper.look(key)
    return table, column, deeper


def refuse_duplicates(table: Table, paths: Sequence[Path]) -> None:
    """Raise UsageError where two samples have one key: which of them is meant can't be known."""
    if twice := first_duplicate(table.names):
        first, second = (paths[table.archive[i]] for i in twice)
        where = f"twice in {first}" if first == second else f"in {first} and in {second}"
        raise UsageError(
            f"{names.text(table.names[twice[0]])} is {where}; delete one of them (`tar --delete`) or unpack the archive"
        )


@dataclass(frozen=True)
class Layout:
    """How the paths in one archive are read.

    Attributes:
        depth: leading folders that are left out.
        split: the split that these folders name, if any.
        holds_splits: the next folder names the split.
        wrapper: the folders left out, where they say nothing.
    """

    depth: int
    split: str | None = None
    holds_splits: bool = False
    wrapper: str = ""


def layout(paths: ByteStrings, where: str) -> Layout:
    """Find the folders of splits and classes in an archive's image paths.

    Raises:
        UsageError: some of the first folders name splits and others don't.
    """
    common, nearest = _common_folders(paths)
    for depth, folder in enumerate(common):
        if split := names.split_of_folder(folder):
            return Layout(depth + 1, split)
    if common and nearest == len(common):  # images lie directly in the last common folder: it is a class
        common = common[:-1]
    plain = Layout(len(common), wrapper=names.text(b"/".join(common)))
    tops: dict[bytes, bool] = {}  # folder -> all its images lie in it directly
    for path in paths:
        folders = path.split(b"/")[len(common) : -1]
        if folders:
            tops[folders[0]] = tops.get(folders[0], True) and len(folders) == 1
    found = sorted(top for top in tops if names.split_of_folder(top))
    others = sorted(set(tops) - set(found))
    if found and not others:
        return Layout(len(common), holds_splits=True)
    if not all(tops[top] for top in found):
        raise UsageError(
            f"{where}: holds both split folders ({names.text(found[0])}/) and others ({names.text(others[0])}/); "
            "put them into archives of their own"
        )
    return plain


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
