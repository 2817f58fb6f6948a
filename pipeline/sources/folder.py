"""Image folders: class sub-folders, in split folders where there are some.

    SRC/train/<class>/...   SRC/val/<class>/...      splits, by folders named train, val, test, ...
    SRC/<class>/...                                  one split
    SRC/x.jpg ...                                    one split, unlabelled

Every sub-folder of `train` is a class, even one without images: it keeps its place in the class map, so that labels
don't depend on which files happen to be there, and a note says so. Other splits use that map.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder
from pipeline.sources.devkit import NAME, is_official_val
from pipeline.sources.files import FileSource, entries_of, label_files
from pipeline.sources.ignored import LINK_LOOP, LINK_TO_NOTHING, OUTSIDE_CLASSES, OUTSIDE_SPLITS, SYSTEM_FOLDER, Ignored
from pipeline.sources.labels import LabelColumn, assemble, refuse_alike, some
from pipeline.sources.manifest import read_metadata
from pipeline.sources.nested_images import NestedImages
from pipeline.store.format import split_order
from pipeline.text import as_text

MAX_WAYS = 100  # to one folder, through links
MAX_BESIDE = 20  # folders beside SRC that are looked into


def list_folder(path: bytes, ignored: Ignored | None = None) -> tuple[list[bytes], list[bytes]]:
    """Names of the sub-folders and of the image candidates in a folder, each sorted; the rest is counted.

    Links to folders count as folders, and so do links that lead nowhere, unless their name has an extension: they may
    be classes. Nothing but the names is looked at, unless the entry is a link.
    """
    folders, files, passed_over = [], [], []
    for entry in entries_of(path):
        name = entry.name
        try:
            is_folder = entry.is_dir() or (
                b"." not in name and entry.is_symlink() and not os.path.exists(os.path.join(path, name))
            )
        except OSError:  # such as a loop of links
            is_folder = b"." not in name
        if is_folder and names.is_system_folder(name):
            passed_over.append((name, SYSTEM_FOLDER))
        elif is_folder:
            folders.append(name)
        elif why := names.why_ignored(name):
            passed_over.append((name, why))
        else:
            files.append(name)
    if ignored is not None:
        for name, why in sorted(passed_over):  # sorted, so that the examples don't depend on the file system
            ignored.add(why, os.path.join(path, name))
    return sorted(folders), sorted(files)


def walk(
    path: bytes, ignored: Ignored, prefix: bytes = b"", above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[bytes]:
    """Relative paths of all image candidates below a folder, in the order of `path_order`. Links are followed.

    `prefix` goes before the paths. Links to the folders `above`, by device and inode, aren't followed.
    """
    inside, entered = set(above), Counter[tuple[int, int]]()
    stack: list[tuple[tuple[int, int], bytes, bytes, Iterator[bytes], frozenset[bytes]]] = []
    below: tuple[bytes, bytes] | None = path, prefix
    while below or stack:
        if below:
            (path, prefix), below = below, None
            try:
                status = os.stat(path)
            except OSError:
                ignored.add(LINK_TO_NOTHING, path)
                continue
            this = status.st_dev, status.st_ino
            if this in inside:
                ignored.add(LINK_LOOP, path)
                continue
            entered[this] += 1
            if entered[this] > MAX_WAYS:
                raise UsageError(f"{as_text(path)}: more than {MAX_WAYS} ways lead here through links; remove some")
            inside.add(this)
            folders, files = list_folder(path, ignored)
            stack.append((this, path, prefix, iter(sorted(folders + files)), frozenset(folders)))
        this, path, prefix, entries, folder_names = stack[-1]
        for name in entries:
            if name in folder_names:
                below = os.path.join(path, name), prefix + name + b"/"
                break
            yield prefix + name
        else:
            stack.pop()
            inside.discard(this)


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
        return FileSource(self.keys, labels, self.root)


def scan(root: bytes, ignored: Ignored) -> Scan:
    """Index a split folder. Without images in sub-folders, its own images are unlabelled samples."""
    folders, files = list_folder(root, ignored)
    keys, column, deeper = ByteStringsBuilder(), LabelColumn(), NestedImages()
    classes = [as_text(folder) for folder in folders]
    refuse_alike(classes, lambda name: as_text(root))
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
            ignored.add(OUTSIDE_CLASSES, os.path.join(root, files[0]), len(files))
        return Scan(root, keys.build(), column, classes, deeper)
    column.add(None, len(files))
    return Scan(root, ByteStrings.pack(files), column, [] if files else classes)


def split_folders(root: bytes, splits: Sequence[str] = ()) -> dict[str, bytes] | None:
    """Split name -> folder, or None where the folder holds classes.

    A folder named `train` may also be a class (of vehicles): it is one where it holds images itself and has siblings
    that aren't named as splits. Folders that `splits` names count as splits.
    """
    folders, _ = list_folder(root)
    found: dict[str, bytes] = {}
    others, named_as_split = [], names.splits_among(folders)
    for folder in folders:
        name = folder.decode("utf-8", "replace")
        split = name if name in splits else named_as_split.get(folder)
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
    asked = bool(set(splits) & set(found))
    if not siblings or (asked and not flat):
        return {split: os.path.join(root, folder) for split, folder in found.items()}
    if flat and not asked:
        return None
    raise UsageError(
        f"{as_text(root)}: holds both split folders ({', '.join(sorted(found))}) and other folders with images "
        f"({as_text(siblings[0])}); move the others away, name the splits with --split, or give one split's folder"
    )


def _is_flat(path: bytes) -> bool:
    folders, files = list_folder(path)
    return bool(files) and not folders


def open_folder(src: Path, options: SourceOptions) -> SourceSet:
    """The folder source; only the wanted splits are walked."""
    root = os.fsencode(src)
    ignored = Ignored(root)
    found = split_folders(root, options.splits)
    holds_splits = found is not None
    if found is None:
        _refuse_wrapper(root)
        found = {options.only_split: root}
    else:
        folders, files = list_folder(root, ignored)
        for folder in folders:
            if folder not in {os.path.basename(path) for path in found.values()}:
                ignored.add(OUTSIDE_SPLITS, folder)
        if files:
            ignored.add(OUTSIDE_CLASSES, files[0], len(files))
    scans = {split: scan(found[split], ignored) for split in split_order(found) if options.wants(split)}
    flat = {split: part for split, part in scans.items() if part.is_flat and len(part.column)}
    listed = {split: read_metadata(part.root, root, part.keys, options) for split, part in flat.items()}
    for split, column in listed.items():
        flat[split].column = column or flat[split].column
    made = build("folder", scans, found.get("train"), options, ignored, from_text=any(listed.values()))
    for split, part in flat.items():
        if is_official_val(part.keys):
            made.notes.append(f"{split}: ImageNet's validation images; {NAME}.tar.gz beside it would label them")
        elif not holds_splits and not listed[split] and (other := _other_class(os.path.abspath(root))):
            above = as_text(os.path.dirname(os.path.abspath(root)))
            made.notes.append(
                f"{split}: no labels; if the folders in {above} are classes ({as_text(other)} is another), give "
                f"{above} as SRC"
            )
        beside = label_files(Path(os.fsdecode(part.root)))
        beside += label_files(src) if part.root != root else label_files(src.parent, src.name)
        if beside:
            made.label_hints[split] = (
                f"{some(beside)} may hold the labels; give a table of paths and labels as SRC, or name it metadata.csv "
                "with the columns file_name and label"
            )
    for split, part in scans.items():
        flags = f" with --split {split}" if holds_splits else ""
        made.warnings += part.deeper.warning(part.path, "give {root} as SRC" + flags)[: not made.warnings]
    if len(made.class_ids) == 1 and (beside := label_files(src)):
        made.warnings.append(f"all images are of one class, {made.class_ids[0]!r}, and {some(beside)} may hold others")
    return made


def build(
    kind: str,
    scans: dict[str, Scan],
    train: bytes | None,
    options: SourceOptions,
    ignored: Ignored,
    *,
    from_text: bool = False,
) -> SourceSet:
    """The source set of scanned split folders; `train` is the folder that gives the class map, scanned or not."""
    class_ids = None
    if "train" in scans:
        class_ids = scans["train"].classes
    elif train is not None:
        class_ids = [as_text(folder) for folder in list_folder(train)[0]]
    if not class_ids and not from_text:  # no train split, or an unlabelled one
        class_ids = [name for scan in scans.values() for name in scan.classes]
    return assemble(kind, scans, options, class_ids=class_ids or None, read_integers=from_text, ignored=ignored)


def _other_class(root: bytes) -> bytes | None:
    """A folder beside an unlabelled one that holds images, too, so that both may be classes."""
    above, name = os.path.split(root)
    with contextlib.suppress(OSError, UsageError):
        beside, _ = list_folder(above)
        for other in () if name in names.splits_among(beside) else beside[:MAX_BESIDE]:
            with contextlib.suppress(OSError, UsageError):
                if other != name and list_folder(os.path.join(above, other))[1]:
                    return other
    return None


def _refuse_wrapper(root: bytes) -> None:
    folders, files = list_folder(root)
    if len(folders) == 1 and not files:
        path = os.path.join(root, folders[0])
        inner = list_folder(path)[0]
        splits = names.splits_among(inner)
        if "train" in splits.values() and len(splits) == len(inner):
            raise UsageError(f"{as_text(root)}: its only folder holds the splits; give {as_text(path)} as SRC")
