"""WebDataset tars: the files of a sample lie side by side and share a key; `.cls` or `.json` holds the label.

The key is the path up to the first dot of the file's name and the extension the rest, as WebDataset defines them
(https://github.com/webdataset/webdataset, "The WebDataset Format"). Samples keep the order of the shards, sorted by
name. Keys that several shards use are told apart by the shard's name in front.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.archive import ArchivePart, Table, index_archives
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate
from pipeline.sources.files import data_files, split_of_data_file
from pipeline.sources.ignored import Ignored
from pipeline.sources.labels import LabelColumn, assemble
from pipeline.sources.tar_headers import members, opened, pread
from pipeline.text import as_text

LABEL_FIELDS = ("label", "cls", "class", "class_id", "label_id")
_KEY = re.compile(rb"((?:.*/|)[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(rb"(?:.*/)?__[^/]*__(?:/.*)?", re.DOTALL)  # such as __info__.json: about the shard
_LOOK = 64  # members that are looked at to tell WebDataset from a plain tar


@dataclass
class _Split:
    """One split while it is collected: rows of the table of all files, their keys and labels."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    keys: ByteStringsBuilder = field(default_factory=ByteStringsBuilder)
    column: LabelColumn = field(default_factory=LabelColumn)
    unstated: int | None = None
    """The first sample that states no label."""

    def part(self, table: Table, archives: list[str]) -> ArchivePart:
        part = ArchivePart(archives, table.take(np.array(self.rows, np.int64), self.keys.build()), self.column)
        if self.unstated is not None and self.column.tokens:
            raise UsageError(
                f"{archives[part.table.archive[self.unstated]]}: sample {as_text(part.table.names[self.unstated])} has "
                "no .cls and no label in a .json, and others have; add it (-1 for none)"
            )
        if first_duplicate(part.table.names) is not None:
            pairs = zip(part.table.archive.tolist(), part.table.names, strict=True)
            part.table.names = ByteStrings.pack(
                os.fsencode(Path(archives[archive]).stem) + b"/" + key for archive, key in pairs
            )
            if twice := first_duplicate(part.table.names):
                first, second = (archives[part.table.archive[i]] for i in twice)
                key = as_text(part.table.names[twice[0]])
                raise UsageError(f"{first}, {second}: sample {key} is there twice; delete one")
        return part


def looks_like_webdataset(paths: Sequence[Path]) -> bool:
    """True where one of the first images of the first archive has a `.cls`, or a `.json` with a label, beside it."""
    if not paths:
        return False
    images, labels = set(), set()
    with opened(str(paths[0])) as fd:
        for _, member in zip(range(_LOOK), members(fd, str(paths[0])), strict=False):
            key, extension = split_name(member.name) or (b"", "")
            if _is_image(extension):
                images.add(key)
            elif extension == "cls" or (extension == "json" and _label_in(pread(fd, member.size, member.offset))):
                labels.add(key)
    return bool(images & labels)


def open_webdataset(src: Path, options: SourceOptions) -> SourceSet:
    """The WebDataset source: one shard, or a folder of them; the split is told by the shard's name.

    Raises:
        UsageError: a damaged shard, a sample with two images, or labels for some samples only.
    """
    paths, ignored = data_files(src, ".tar"), Ignored()
    archives = [str(path) for path in paths]
    table, _ = index_archives(archives)
    found: dict[str, _Split] = {}
    for number, path in enumerate(paths):
        split = found.setdefault(split_of_data_file(path, src) or options.only_split, _Split())
        _collect(table, number, path, split, ignored)
    parts = {split: found[split].part(table, archives) for split in names.natural_splits(set(found))}
    return assemble("webdataset", parts, options, read_integers=True, ignored=ignored)


def split_name(name: bytes) -> tuple[bytes, str] | None:
    """Key and extension (lower case) of a file in a shard, or None where it belongs to no sample."""
    match = _KEY.fullmatch(name)
    system = any(names.is_system_folder(part) for part in name.split(b"/")[:-1])
    return None if match is None or system or _META.fullmatch(match[1]) else (match[1], as_text(match[2].lower()))


def _samples(table: Table, number: int, path: Path, ignored: Ignored) -> Iterator[tuple[bytes, dict[str, int]]]:
    """Each sample of a shard: its key, and extension -> row of the table."""
    key, files = b"", dict[str, int]()
    for row in np.flatnonzero(table.archive == number).tolist():
        parts = split_name(table.names[row])
        if parts is None:
            ignored.add(names.OTHER_FILE, table.names[row])
            continue
        if parts[0] != key and files:
            yield key, files
            files = {}
        key = parts[0]
        if parts[1] in files:
            raise UsageError(f"{path}: {as_text(table.names[row])} is twice in it; make the shard again")
        files[parts[1]] = row
    if files:
        yield key, files


def _collect(table: Table, number: int, path: Path, split: _Split, ignored: Ignored) -> None:
    with opened(str(path)) as fd:
        for key, files in _samples(table, number, path, ignored):
            images = [extension for extension in files if _is_image(extension)]
            plain = [extension for extension in images if "." not in extension] or images  # jpg before mask.png
            if not plain:
                ignored.add(names.NO_IMAGE, key)
                continue
            if len(plain) > 1:
                raise UsageError(
                    f"{path}: sample {as_text(key)} has the images {' and '.join(sorted(plain))}; keep one of them"
                )
            label = _label(fd, files, table, f"{path}: {as_text(key)}")
            if label is None:
                split.column.add(None)
                split.unstated = len(split.rows) if split.unstated is None else split.unstated
            else:
                split.column.add_text(label)
            for extension, row in files.items():
                if extension not in (plain[0], "cls", "json"):
                    ignored.add(names.OTHER_FILE, table.names[row])
            split.rows.append(files[plain[0]])
            split.keys.append(key)


def _is_image(extension: str) -> bool:
    return names.is_image(b"x." + extension.encode())


def _label(fd: int, files: dict[str, int], table: Table, where: str) -> str | None:
    """What the sample's `.cls` or `.json` says, as text; None where neither does."""
    for extension in ("cls", "json"):
        row = files.get(extension)
        if row is None:
            continue
        content = pread(fd, int(table.size[row]), int(table.offset[row]))
        if extension == "json":
            return _label_in(content, where)
        text = content.decode("utf-8", "backslashreplace").strip()
        if not text:
            raise UsageError(f"{where}.cls: empty; write the class, or -1 for none")
        return text
    return None


def _label_in(content: bytes, where: str = "") -> str | None:
    """The label in a JSON file: the value itself, or one of `LABEL_FIELDS`."""
    try:
        value: Any = json.loads(content)
    except ValueError as error:
        if not where:
            return None
        raise UsageError(f"{where}.json: not JSON ({error}); make the shard again") from None
    if isinstance(value, dict):
        value = next((value[name] for name in LABEL_FIELDS if value.get(name) is not None), None)
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    return None
