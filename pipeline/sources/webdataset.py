"""WebDataset tars: the files of a sample lie side by side and share a key; `.cls` or `.json` holds the label.

The key is the path up to the first dot of the file's name and the extension the rest, as WebDataset defines them
(https://github.com/webdataset/webdataset, "The WebDataset Format"). Samples keep the order of the shards, sorted by
name. Keys that several shards use are told apart by the shard's name in front.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.archive import ArchivePart, Table
from pipeline.sources.archive_index import Index, index_archives
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate
from pipeline.sources.files import data_files, opened, split_of_data_file
from pipeline.sources.ignored import NO_IMAGE, OTHER_FILE, Ignored
from pipeline.sources.labels import LabelColumn, assemble
from pipeline.sources.tar import open_tar
from pipeline.sources.tar_headers import pread
from pipeline.text import as_text, one_line

LABEL_FIELDS = ("label", "cls", "class", "class_id", "label_id", "target")
MAX_LABEL_BYTES = 1 << 20
_LABELS_LOOKED_AT = 1000  # to tell WebDataset from a plain tar


@dataclass
class _Split:
    """One split while it is collected: rows of the table of all files, their keys and labels."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    keys: ByteStringsBuilder = field(default_factory=ByteStringsBuilder)
    column: LabelColumn = field(default_factory=LabelColumn)
    unstated: int | None = None
    """The first sample that states no label."""
    unused: set[str] = field(default_factory=set)
    """Extensions of the samples' files that aren't used."""

    def part(self, table: Table, archives: list[str]) -> ArchivePart:
        part = ArchivePart(archives, table.take(np.array(self.rows, np.int64), self.keys.build()), self.column)
        if self.unstated is not None and self.column.tokens:
            raise UsageError(f"{part.where(self.unstated)}: no .cls, and no label in a .json; add it (-1 for none)")
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


def open_archives(src: Path, options: SourceOptions) -> SourceSet:
    """Tars that nobody said the kind of: WebDataset where labels lie beside the images, else plain archives."""
    archives = [str(path) for path in data_files(src, ".tar")]
    index = index_archives(archives, options.index)
    is_webdataset = bool(options.label_column) or _is_webdataset(index[0], archives)  # a plain tar has no column
    return (open_webdataset if is_webdataset else open_tar)(src, options, index)


def open_webdataset(src: Path, options: SourceOptions, index: Index | None = None) -> SourceSet:
    """The WebDataset source: one shard, or a folder of them; the split is told by the shard's name.

    `index` is what `index_archives` gave for it, if it did.
    """
    paths, ignored = data_files(src, ".tar"), Ignored()
    archives = [str(path) for path in paths]
    table, _ = index or index_archives(archives, options.index)
    found: dict[str, _Split] = {}
    for number, path in enumerate(paths):
        split = found.setdefault(split_of_data_file(path, src) or options.only_split, _Split())
        _collect(table, number, path, split, ignored, options)
    parts = {split: one.part(table, archives) for split, one in found.items()}
    hints = {
        split: f"its samples hold .{' and .'.join(sorted(found[split].unused))}; name the one with the label, or a "
        "field of the .json, with --label-column"
        for split in parts
        if found[split].unstated is not None and found[split].unused
    }
    return assemble("webdataset", parts, options, read_integers=True, ignored=ignored, label_hints=hints)


def split_name(name: bytes) -> tuple[bytes, str] | None:
    """Key and extension (lower case) of a file in a shard, or None where it belongs to no sample."""
    folder, slash, file = name.rpartition(b"/")
    stem, dot, extension = file.partition(b".")
    key = folder + slash + stem
    about_shard = any(len(part) > 3 and part[:2] == part[-2:] == b"__" for part in key.split(b"/"))  # __info__.json
    if not dot or not stem or about_shard or any(names.is_system_folder(part) for part in folder.split(b"/") if part):
        return None
    return key, as_text(extension.lower())


def _is_webdataset(table: Table, archives: Sequence[str]) -> bool:
    """True where one of the first label files, `.cls` or a `.json` with a label, lies beside an image of its key."""
    labels: dict[tuple[int, bytes], int] = {}
    for row, name in enumerate(table.names):
        if name[-4:].lower() == b".cls" or name[-5:].lower() == b".json":
            labels[int(table.archive[row]), (split_name(name) or (b"",))[0]] = row
            if len(labels) == _LABELS_LOOKED_AT:
                break
    for row, name in enumerate(table.names) if labels else ():
        key, extension = split_name(name) or (b"", "")
        label = labels.get((int(table.archive[row]), key))
        if label is None or not _is_image(extension):
            continue
        if table.names[label].lower().endswith(b".cls"):
            return True
        with opened(archives[table.archive[label]]) as fd:
            if table.size[label] <= MAX_LABEL_BYTES and _label_in(_content(fd, table, label, ""), LABEL_FIELDS):
                return True
    return False


def _samples(table: Table, number: int, path: Path, ignored: Ignored) -> Iterator[tuple[bytes, dict[str, int]]]:
    """Each sample of a shard, in the order of their first files: its key, and extension -> row of the table."""
    rows = np.flatnonzero(table.archive == number)  # one after the other
    inside = ByteStrings(table.names.blob, table.names.offsets[rows[0] : rows[-1] + 2]) if len(rows) else ()
    hashes = np.fromiter((hash(name[: name.find(b".", name.rfind(b"/") + 1)]) for name in inside), np.int64, len(rows))
    _, first, place = np.unique(hashes, return_index=True, return_inverse=True)
    key, files = b"", dict[str, int]()
    for row in rows[np.argsort(first[place], kind="stable")].tolist():  # a sample's files need not lie side by side
        parts = split_name(table.names[row])
        if parts is None:
            ignored.add(OTHER_FILE, table.names[row])
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


def _collect(table: Table, number: int, path: Path, split: _Split, ignored: Ignored, options: SourceOptions) -> None:
    with opened(str(path)) as fd:
        for key, files in _samples(table, number, path, ignored):
            images = [extension for extension in files if _is_image(extension)]
            plain = [extension for extension in images if "." not in extension] or images  # jpg before mask.png
            if not plain:
                ignored.add(NO_IMAGE, key)
                continue
            if len(plain) > 1:
                raise UsageError(
                    f"{path}: sample {as_text(key)} has the images {' and '.join(sorted(plain))}; keep one of them"
                )
            used, label = _label(fd, files, table, f"{path}: {as_text(key)}", options.label_column)
            if label is None:
                split.column.add(None)
                split.unstated = len(split.rows) if split.unstated is None else split.unstated
                split.unused.update(extension for extension in files if not _is_image(extension))
            else:
                split.column.add_text(label)
            for extension, row in files.items():
                if extension not in (plain[0], used, "json"):
                    ignored.add(OTHER_FILE, table.names[row])
            split.rows.append(files[plain[0]])
            split.keys.append(key)


def _is_image(extension: str) -> bool:
    return names.is_image(b"x." + extension.encode())


def _content(fd: int, table: Table, row: int, where: str) -> bytes:
    """A small file of a sample."""
    if table.size[row] > MAX_LABEL_BYTES:
        raise UsageError(f"{where}: {table.size[row]:,} bytes are too many for a label; make the shard again")
    if len(content := table.contents[row]) == table.size[row]:
        return content
    return pread(fd, int(table.size[row]), int(table.offset[row])) if table.offset[row] >= 0 else b""


def _label(fd: int, files: dict[str, int], table: Table, where: str, column: str | None) -> tuple[str, str | None]:
    """The extension that is used, and the label as text; None where no file states one.

    The label is in the file of the extension `column`, or else in the field `column` of the `.json`. Without a
    `column` it is in the `.cls`, the `.output.cls` or the like, or in one of `LABEL_FIELDS` of the `.json`.
    """
    texts = [column] if column else ["cls", *sorted(extension for extension in files if extension.endswith(".cls"))]
    for extension in texts:
        if extension in files and extension != "json":
            content = _content(fd, table, files[extension], f"{where}.{extension}")
            text = content.decode("utf-8", "backslashreplace").strip()
            if not text:
                raise UsageError(f"{where}.{extension}: empty; write the class, or -1 for none")
            return extension, text
    if "json" not in files:
        return "", None
    content = _content(fd, table, files["json"], f"{where}.json")
    return "json", _label_in(content, (column,) if column else LABEL_FIELDS, f"{where}.json")


def _label_in(content: bytes, fields: Sequence[str], where: str = "") -> str | None:
    """The label in a JSON file: the value itself, or one of its fields."""
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        if not where:
            return None
        raise UsageError(f"{where}: not JSON ({one_line(error)}); make the shard again") from None
    if isinstance(value, dict):
        value = next((value[name] for name in fields if value.get(name) is not None), None)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
