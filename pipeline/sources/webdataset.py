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
from pipeline.sources.archive import ArchiveSource, Table, TableBuilder, opened
from pipeline.sources.base import Source, SourceSet
from pipeline.sources.byte_strings import ByteStringsBuilder, first_duplicate
from pipeline.sources.folder import single_name
from pipeline.sources.ignored import NO_IMAGE, OTHER_FILE, Ignored
from pipeline.sources.labels import LabelColumn, all_integers, resolve, stated
from pipeline.sources.tar import find_files, split_of_archive
from pipeline.sources.tarfiles import members, pread

LABEL_FIELDS = ("label", "cls", "class", "class_id", "label_id")
_KEY = re.compile(rb"((?:.*/|)[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(rb"(?:.*/)?__[^/]*__(?:/.*)?", re.DOTALL)  # such as __info__.json: about the shard
_LOOK = 64  # members that are looked at to tell WebDataset from a plain tar


@dataclass
class _Shards:
    """One split's samples while they are collected."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    keys: ByteStringsBuilder = field(default_factory=ByteStringsBuilder)
    column: LabelColumn = field(default_factory=LabelColumn)
    without: int | None = None
    """The first sample that states no label."""


def split_name(name: bytes) -> tuple[bytes, str] | None:
    """Key and extension (lower case) of a file in a shard, or None where it belongs to no sample."""
    match = _KEY.fullmatch(name)
    if (
        match is None
        or _META.fullmatch(match[1])
        or any(names.is_system_folder(part) for part in name.split(b"/")[:-1])
    ):
        return None
    return match[1], match[2].lower().decode("utf-8", "backslashreplace")


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


def open_webdataset(src: Path, splits: Sequence[str] | None = None) -> SourceSet:
    """The WebDataset source: one shard, or a folder of them; the split is told by the shard's name.

    Raises:
        UsageError: a damaged shard, a sample with two images, or labels for some samples only.
    """
    paths, ignored = find_files(src, ".tar"), Ignored()
    builder = TableBuilder()
    for number, path in enumerate(paths):
        builder.add_archive(str(path), number)
    table = builder.build()
    collected: dict[str, _Shards] = {}
    for number, path in enumerate(paths):
        shards = collected.setdefault(split_of_archive(path, src) or single_name(splits), _Shards())
        _collect(table, number, path, shards, ignored)
    parts = {split: _finish(collected[split], table, paths) for split in names.natural_splits(set(collected))}
    columns = {split: collected[split].column for split in parts}
    if all_integers(columns.values()):
        for column in columns.values():
            column.read_integers()
    ids, labels = resolve(
        columns, lambda split, i: f"{paths[parts[split].archive[i]]}: {names.text(parts[split].names[i])}"
    )
    sources: dict[str, Source] = {
        split: ArchiveSource([str(path) for path in paths], part, labels[split])
        for split, part in parts.items()
        if not splits or split in splits
    }
    return SourceSet("webdataset", ids, sources, ignored=ignored, origin=str(src))


def _samples(table: Table, number: int, path: Path, ignored: Ignored) -> Iterator[tuple[bytes, dict[str, int]]]:
    """Each sample of a shard: its key, and extension -> row of the table."""
    key, files = b"", dict[str, int]()
    inside = np.flatnonzero(table.archive == number)
    for row in inside.tolist():
        parts = split_name(table.names[row])
        if parts is None:
            ignored.add(OTHER_FILE, table.names[row])
            continue
        if parts[0] != key and files:
            yield key, files
            files = {}
        key = parts[0]
        if parts[1] in files:
            raise UsageError(f"{path}: {names.text(table.names[row])} is twice in it; make the shard again")
        files[parts[1]] = row
    if files:
        yield key, files


def _collect(table: Table, number: int, path: Path, shards: _Shards, ignored: Ignored) -> None:
    with opened(str(path)) as fd:
        for key, files in _samples(table, number, path, ignored):
            images = [extension for extension in files if _is_image(extension)]
            plain = [extension for extension in images if "." not in extension] or images  # jpg before mask.png
            if not plain:
                ignored.add(NO_IMAGE, key)
                continue
            if len(plain) > 1:
                raise UsageError(
                    f"{path}: sample {names.text(key)} has the images {' and '.join(sorted(plain))}; keep one of them"
                )
            label = _label(fd, files, table, f"{path}: {names.text(key)}")
            if label is None and shards.without is None:
                shards.without = len(shards.rows)
            for extension, row in files.items():
                if extension not in (plain[0], "cls", "json"):
                    ignored.add(OTHER_FILE, table.names[row])
            shards.rows.append(files[plain[0]])
            shards.keys.append(key)
            shards.column.add(None if label is None else stated(label))


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


def _finish(shards: _Shards, table: Table, paths: Sequence[Path]) -> Table:
    """The split's table with its keys as names."""
    part = table.take(np.array(shards.rows, np.int64), shards.keys.build())
    if shards.without is not None and shards.column.tokens:
        i = shards.without
        raise UsageError(
            f"{paths[part.archive[i]]}: sample {names.text(part.names[i])} has no .cls and no label in a .json, and "
            "others have; add it (-1 for none)"
        )
    if first_duplicate(part.names) is not None:
        keys = ByteStringsBuilder()
        for archive, key in zip(part.archive.tolist(), part.names, strict=True):
            keys.append(os.fsencode(paths[archive].stem) + b"/" + key)
        part.names = keys.build()
        if twice := first_duplicate(part.names):
            first, second = (paths[part.archive[i]] for i in twice)
            raise UsageError(f"{first}, {second}: sample {names.text(part.names[twice[0]])} is there twice; delete one")
    return part
