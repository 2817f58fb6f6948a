"""Image folders: class sub-folders, in split folders where there are some.

    SRC/train/<class>/...   SRC/val/<class>/...      splits, by folders named train, val, test, ...
    SRC/<class>/...                                  one split
    SRC/x.jpg ...                                    one split, unlabelled

Every sub-folder of `train` is a class, even one without images: it keeps its place in the class map, so that labels
don't depend on which files happen to be there, and a note says so. Other splits use that map.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder
from pipeline.sources.devkit import NAME, is_official_val
from pipeline.sources.files import FileSource
from pipeline.sources.ignored import Ignored
from pipeline.sources.labels import LabelColumn, assemble, some
from pipeline.text import as_text, counted


def list_folder(path: bytes, ignored: Ignored | None = None) -> tuple[list[bytes], list[bytes]]:
    """Names of the sub-folders and of the image candidates in a folder, each sorted; the rest is counted.

    Links to folders count as folders. Nothing but the names is looked at, unless the entry is a link.
    """
    folders, files, passed_over = [], [], []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                try:
                    is_folder = entry.is_dir()
                except OSError:  # such as a loop of links
                    is_folder = False
                if is_folder and names.is_system_folder(name):
                    passed_over.append((name, names.SYSTEM_FOLDER))
                elif is_folder:
                    folders.append(name)
                elif why := names.why_ignored(name):
                    passed_over.append((name, why))
                else:
                    files.append(name)
    except OSError as error:
        raise UsageError(
            f"{as_text(path)}: can't be listed ({error.strerror}); check the path and its permissions"
        ) from None
    if ignored is not None:
        for name, why in sorted(passed_over):  # sorted, so that the examples don't depend on the file system
            ignored.add(why, os.path.join(path, name))
    return sorted(folders), sorted(files)


def walk(
    path: bytes, ignored: Ignored, prefix: bytes = b"", above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[bytes]:
    """Relative paths of all image candidates below a folder, in the order of `path_order`. Links are followed."""
    status = os.stat(path)
    if (status.st_dev, status.st_ino) in above:
        ignored.add(names.LINK_LOOP, path)
        return
    above |= {(status.st_dev, status.st_ino)}
    folders, files = list_folder(path, ignored)
    if not folders:
        for name in files:
            yield prefix + name
        return
    inner = set(folders)
    for name in sorted(folders + files):
        if name in inner:
            yield from walk(os.path.join(path, name), ignored, prefix + name + b"/", above)
        else:
            yield prefix + name


class NestedImages:
    """Images of a split that lie deeper than its class folders, given the keys of all labelled images in their order.

    A class may have folders of its own, or SRC is a folder too high: with SRC `photos` the class of
    `photos/stuff/cat/1.jpg` is `stuff`, with SRC `photos/stuff` it is `cat`.
    """

    def __init__(self) -> None:
        self.first = b""
        self._total = self._count = 0
        self._classes: list[str] = []

    def add(self, key: bytes) -> None:
        """Count one image: `class/1.jpg` is where it should be, `class/folder/1.jpg` is deeper."""
        self._total += 1
        if key.count(b"/") < 2:
            return
        self._count += 1
        if not self.first:
            self.first = key
        name = as_text(key.partition(b"/")[0])
        if name not in self._classes[-1:]:
            self._classes.append(name)

    @property
    def wanted_root(self) -> bytes:
        """The folder, relative to the split's, whose sub-folders would make the first such image's folder its class."""
        folders = self.first.split(b"/")[:-1]
        splits = [depth for depth, folder in enumerate(folders) if depth and names.split_of_folder(folder)]
        return b"/".join(folders[: splits[0] if splits else -1])

    def warning(self, example: str, remedy: str) -> str:
        """One line.

        Args:
            example: where the first such image is.
            remedy: what to do where the deeper folders are the classes.
        """
        lie = "lies" if self._count == 1 else "lie"
        return (
            f"{self._count:,} of {counted(self._total, 'image')} {lie} deeper than the class folders, such as "
            f"{example}; taken for the class: {some(self._classes)}; if the folders below are the "
            f"classes, {remedy}"
        )


@dataclass
class Scan:
    """One split folder as found: relative paths of its images and its class folders' names."""

    root: bytes
    keys: ByteStrings
    column: LabelColumn
    classes: list[str]
    deeper: NestedImages = field(default_factory=NestedImages)

    @property
    def is_flat(self) -> bool:
        return not self.column.tokens

    def path(self, key: bytes) -> str:
        return as_text(os.path.join(self.root, key))

    def where(self, i: int) -> str:
        return self.path(self.keys[i])

    def source(self, labels: np.ndarray) -> FileSource:
        return FileSource(self.root, self.keys, labels)


def scan(root: bytes, ignored: Ignored) -> Scan:
    """Index a split folder. Without images in sub-folders, its own images are unlabelled samples."""
    folders, files = list_folder(root, ignored)
    keys, column, deeper = ByteStringsBuilder(), LabelColumn(), NestedImages()
    classes = [as_text(folder) for folder in folders]
    if len(set(classes)) != len(classes):
        raise UsageError(f"{as_text(root)}: two class folders have names that read the same; rename one")
    status = os.stat(root)
    above = frozenset([(status.st_dev, status.st_ino)])
    for folder, name in zip(folders, classes, strict=True):
        before = len(keys)
        for path in walk(os.path.join(root, folder), ignored, folder + b"/", above):
            keys.append(path)
            deeper.add(path)
        if len(keys) > before:
            column.add(name, len(keys) - before)
    if keys:
        if files:
            ignored.add(names.OUTSIDE_CLASSES, os.path.join(root, files[0]), len(files))
        return Scan(root, keys.build(), column, classes, deeper)
    column.add(None, len(files))
    return Scan(root, ByteStrings.pack(files), column, [] if files else classes)


def split_folders(root: bytes, splits: Sequence[str] = ()) -> dict[str, bytes] | None:
    """Split name -> folder, or None where the folder holds classes.

    A folder named `train` may also be a class (of vehicles): it is one where it holds images itself and has siblings
    that aren't named as splits. Folders that `splits` names count as splits.

    Raises:
        UsageError: both readings are possible, or two folders are the same split.
    """
    folders, _ = list_folder(root)
    found: dict[str, bytes] = {}
    others = []
    for folder in folders:
        name = folder.decode("utf-8", "replace")
        split = name if name in splits else names.split_of_folder(folder)
        if split is None:
            others.append(folder)
        elif split in found:
            raise UsageError(
                f"{as_text(root)}: {as_text(found[split])}/ and {as_text(folder)}/ would both be the split "
                f"{split!r}; rename or move one of them"
            )
        else:
            found[split] = folder
    if not found:
        return None
    siblings = [folder for folder in others if next(walk(os.path.join(root, folder), Ignored()), None)]
    flat = all(_is_flat(os.path.join(root, folder)) for folder in found.values())
    named = bool(set(splits) & set(found))
    if not siblings or (named and not flat):
        return {split: os.path.join(root, folder) for split, folder in found.items()}
    if flat and not named:
        return None
    raise UsageError(
        f"{as_text(root)}: holds both split folders ({', '.join(sorted(found))}) and other folders with images "
        f"({as_text(siblings[0])}); move the others away, name the splits with --split, or give one split's folder"
    )


def _is_flat(path: bytes) -> bool:
    folders, files = list_folder(path)
    return bool(files) and not folders


def open_folder(src: Path, options: SourceOptions) -> SourceSet:
    """The folder source; only the wanted splits are walked.

    Raises:
        UsageError: no such folder, an unreadable one, or a class that `train` doesn't have.
    """
    root = os.fsencode(src)
    ignored = Ignored(root)
    found = split_folders(root, options.splits)
    holds_splits = found is not None
    if found is None:
        _refuse_wrapper(root)
        found = {options.only_split: root}
    else:
        inside = {os.path.basename(path) for path in found.values()}
        for folder in list_folder(root)[0]:
            if folder not in inside:
                ignored.add(names.OUTSIDE_SPLITS, folder)
    scans = {split: scan(found[split], ignored) for split in names.natural_splits(set(found)) if options.wants(split)}
    made = build("folder", scans, found.get("train"), options, ignored)
    for split, part in scans.items():
        if part.is_flat and is_official_val(part.keys):
            made.notes.append(f"{split}: ImageNet's validation images; {NAME}.tar.gz beside it would label them")
        if part.deeper.first and not made.warnings:
            flags = f" with --split {split}" if holds_splits else ""
            remedy = f"give {part.path(part.deeper.wanted_root)} as SRC{flags}"
            made.warnings.append(part.deeper.warning(part.path(part.deeper.first), remedy))
    return made


def build(
    kind: str, scans: dict[str, Scan], train: bytes | None, options: SourceOptions, ignored: Ignored
) -> SourceSet:
    """The source set of scanned split folders; `train` is the folder that gives the class map, scanned or not."""
    class_ids = None
    if "train" in scans:
        class_ids = scans["train"].classes
    elif train is not None:
        class_ids = [as_text(folder) for folder in list_folder(train)[0]]
    if not class_ids:  # no train split, or an unlabelled one
        class_ids = [name for scan in scans.values() for name in scan.classes]
    return assemble(kind, scans, options, class_ids=class_ids, ignored=ignored)


def _refuse_wrapper(root: bytes) -> None:
    folders, files = list_folder(root)
    if len(folders) == 1 and not files:
        path = os.path.join(root, folders[0])
        inner = [names.split_of_folder(name) for name in list_folder(path)[0]]
        if "train" in inner and None not in inner:
            raise UsageError(f"{as_text(root)}: its only folder holds the splits; give {as_text(path)} as SRC")
