"""Manifests: a CSV, TSV or JSON-lines file that lists images and their labels.

    path,label                                  {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat

Paths are relative to the manifest. A label is a class id, a class name or an integer: when all labels are integers
they are the class numbers, otherwise they are ids; -1 means unlabelled, and so does a file without a label column. A
column `split` gives each image its split. `--image-column` and `--label-column` name columns that are called otherwise.
Files that are missing are found when they are read, every one of them.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate
from pipeline.sources.files import FileSource, open_regular
from pipeline.sources.labels import LabelColumn, assemble, some
from pipeline.text import as_text, one_line

MANIFEST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img", "img_path")
LABELS = ("label", "class", "class_id", "target", "category", "label_id", "labels", "cls", "wnid", "class_name", "y")
SPLITS = ("split", "subset", "set")
MAX_LINE = 1 << 24  # characters

_Row = tuple[int, dict[str, Any]]  # line, column in lower case -> value


@dataclass
class _Part:
    """One split: its images in the manifest's order."""

    src: Path
    keys: ByteStringsBuilder = field(default_factory=ByteStringsBuilder)
    column: LabelColumn = field(default_factory=LabelColumn)
    lines: array[int] = field(default_factory=lambda: array("q"))

    def where(self, i: int) -> str:
        return f"{self.src}, line {self.lines[i]}"

    def source(self, labels: np.ndarray) -> FileSource:
        keys = self.keys.build()
        if twice := first_duplicate(keys):
            raise UsageError(f"{self.where(twice[1])}: lists {as_text(keys[twice[0]])} again; keep one of the lines")
        return FileSource(keys, labels, os.fsencode(self.src.parent))


def open_manifest(src: Path, options: SourceOptions) -> SourceSet:
    """The manifest source."""
    parts, unused = _collect(src, options)
    hint = f"there are other columns ({some(unused)}); name the labels' column with --label-column"
    hints = dict.fromkeys(parts if unused else (), hint)
    return assemble("manifest", parts, options, read_integers=True, label_hints=hints)


def read_metadata(folder: bytes, src: bytes, keys: ByteStrings, options: SourceOptions) -> LabelColumn | None:
    """The labels of a folder's images by a `metadata.csv` or `.jsonl` with a column `file_name`, there or in SRC.

    The form is that of Hugging Face's ImageFolder, https://huggingface.co/docs/datasets/image_dataset. None where there
    is no such file, or it has no labels.
    """
    for place in dict.fromkeys((folder, src)):
        for name in (b"metadata.csv", b"metadata.jsonl"):
            path = Path(os.fsdecode(os.path.join(place, name)))
            _, first = next(_rows(path), (0, {})) if path.is_file() else (0, {})
            if "file_name" not in first or not any(name in first for name in _wanted(options.label_column, LABELS)):
                continue
            stated = dict[bytes, str]()
            for part in _collect(path, options)[0].values():
                tokens = [*map(str, part.column.tokens), "-1"]
                stated.update(
                    zip(part.keys.build(), (tokens[max(code, -1)] for code in part.column.codes), strict=True)
                )
            prefix = b"" if place == folder else os.path.relpath(folder, place) + b"/"
            column = LabelColumn()
            for key in keys:
                if prefix + key not in stated:
                    raise UsageError(f"{path}: doesn't list {as_text(prefix + key)}; add it, or remove the image")
                column.add_text(stated[prefix + key])
            return column
    return None


def _wanted(asked: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    return (asked.lower(),) if asked else known


def _collect(src: Path, options: SourceOptions) -> tuple[dict[str, _Part], list[str]]:
    """Split name -> its images, in the manifest's order; and the columns without use, where there are no labels."""
    wanted = _wanted(options.image_column, PATHS), _wanted(options.label_column, LABELS), SPLITS
    parts: dict[str, _Part] = {}
    columns: dict[str, None] = {}
    lines: dict[bool, int] = {}  # with a label or without -> the first such line
    for line, fields in _rows(src):
        where = f"{src}, line {line}"
        columns.update(dict.fromkeys(fields))
        path, label, split = (next((name for name in known if name in fields), None) for known in wanted)
        for flag, column, asked in (("image", path, True), ("label", label, options.label_column)):
            if asked and column is None:
                raise UsageError(
                    f"{where}: no column for the {flag} among {some(list(fields), 8)}; name it with --{flag}-column"
                )
        lines.setdefault(label is not None, line)
        if len(lines) > 1:
            raise UsageError(f"{src}, line {lines[False]}: no label, but line {lines[True]} has one; write it, or -1")
        key = fields[path or ""]
        if not isinstance(key, str) or not key:
            raise UsageError(f"{where}: no path; write the image's path, relative to the manifest")
        name = options.only_split if split is None or fields[split] is None else str(fields[split]).strip()
        if not name or name.startswith(".") or not set(name).isdisjoint("/\\\0"):
            raise UsageError(f"{where}: split {name!r}; write one such as train, val or test")
        part = parts.setdefault(names.split_of_folder(name.encode("utf-8", "replace")) or name, _Part(src))
        part.lines.append(line)
        try:
            part.keys.append(os.fsencode(key))
        except UnicodeEncodeError:
            raise UsageError(f"{where}: path {key!a} can't be a file's name; correct it") from None
        if label is None:
            part.column.add(None)
        else:
            part.column.add_text(_label(fields[label], where, key))
    unused = [name for name in columns if name not in SPLITS and name not in wanted[0]] if False in lines else []
    return parts, unused


def _label(value: Any, where: str, key: str) -> str:
    if value is None:  # JSON's null
        return "-1"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: label {one_line(repr(value))[:60]}; write an integer or text")
    if not str(value).strip():
        raise UsageError(f"{where}: no label for {key}; write the class, or -1 for none")
    return str(value)


def _rows(src: Path) -> Iterator[_Row]:
    """The rows of a table, whatever its form."""
    try:
        with open(src, "rb", opener=open_regular) as file:
            head = file.peek(2)[:2]
            # UTF-8 with or without a BOM, or UTF-16 with one; other bytes stay as they are in paths.
            encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
            with io.TextIOWrapper(file, encoding=encoding, errors="surrogateescape", newline="") as text:
                yield from _csv_rows(src, text) if src.suffix.lower() in (".csv", ".tsv") else _json_rows(src, text)
    except OSError as error:
        raise UsageError(f"{src}: {error.strerror}; check the path and its permissions") from None
    except UnicodeError as error:
        raise UsageError(f"{src}: {one_line(error)}; save it as UTF-8") from None


def _lines(src: Path, text: io.TextIOWrapper) -> Iterator[str]:
    for line in iter(lambda: text.readline(MAX_LINE), ""):
        if len(line) == MAX_LINE:
            raise UsageError(f"{src}: a line has more than {MAX_LINE:,} characters; write one row per line")
        yield line


def _csv_rows(src: Path, text: io.TextIOWrapper) -> Iterator[_Row]:
    lines = _lines(src, text)
    first = next(lines, "")
    delimiter = "\t" if src.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: Iterator[list[str]] = filter(None, reader)
    try:
        header = next(rows, [""])
        names_in_order = [cell.strip().lower() for cell in header]
        if names.is_image(os.fsencode(header[0])) and set(names_in_order).isdisjoint(PATHS):  # no header
            names_in_order = ["path", "label"][: len(header)]
            rows = itertools.chain([header], rows)
        places = {name: names_in_order.index(name) for name in names_in_order}
        for row in rows:
            if len(row) != len(header):
                raise UsageError(
                    f"{src}, line {reader.line_num}: {len(row)} fields instead of {len(header)}; put fields that hold "
                    f"`{delimiter}` into quotes"
                )
            yield reader.line_num, {name: row[place] for name, place in places.items()}
    except csv.Error as error:
        raise UsageError(f"{src}, line {reader.line_num}: {error}; check the quotes") from None


def _json_rows(src: Path, text: io.TextIOWrapper) -> Iterator[_Row]:
    for line, row in enumerate(_lines(src, text), 1):
        if not row.strip():
            continue
        try:
            yield line, {name.lower(): value for name, value in json.loads(row).items()}
        except (ValueError, AttributeError, RecursionError):
            raise UsageError(f"{src}, line {line}: not a JSON object; write one object per line") from None
