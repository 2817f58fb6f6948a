"""Manifests: a CSV, TSV or JSON-lines file that lists images and their labels.

    path,label                                  {"path": "a/1.jpg", "label": "cat"}
    a/1.jpg,cat

Paths are relative to the manifest. A label is a class id, a class name or an integer: when all labels are integers
they are the class numbers, otherwise they are ids; -1 means unlabelled, and so does a file without a label column. A
column `split` gives each image its split. Files that are missing are found when they are read, every one of them.
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

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStringsBuilder, first_duplicate
from pipeline.sources.files import FileSource
from pipeline.sources.labels import LabelColumn, assemble
from pipeline.text import as_text, one_line

MANIFEST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img", "img_path")
LABELS = ("label", "class", "class_id", "target", "category", "label_id", "labels", "cls", "wnid", "class_name", "y")
SPLITS = ("split", "subset", "set")
COLUMNS = (PATHS, LABELS, SPLITS)

_Row = tuple[int, str, str | None, str | None]  # line, path, label (None: no such column), split


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
        return FileSource(os.fsencode(self.src.parent), keys, labels)


def open_manifest(src: Path, options: SourceOptions) -> SourceSet:
    """The manifest source.

    Raises:
        UsageError: no path column, a row that can't be read or has no label, or a path that is listed twice.
    """
    try:
        parts = _collect(src, options)
    except UnicodeError as error:
        raise UsageError(f"{src}: {one_line(error)}; save it as UTF-8") from None
    ordered = {split: parts[split] for split in names.natural_splits(set(parts))}
    return assemble("manifest", ordered, options, read_integers=True)


def _collect(src: Path, options: SourceOptions) -> dict[str, _Part]:
    """Split name -> its images, in the manifest's order."""
    parts: dict[str, _Part] = {}
    rows = _csv_rows(src) if src.suffix.lower() in (".csv", ".tsv") else _json_rows(src)
    labelled: bool | None = None
    for line, path, label, split in rows:
        labelled = label is not None if labelled is None else labelled
        if not path:
            raise UsageError(f"{src}, line {line}: no path; write the image's path, relative to the manifest")
        if labelled and not (label or "").strip():
            raise UsageError(f"{src}, line {line}: no label for {path}; write the class, or -1 for none")
        name = options.only_split if split is None else split.strip()
        part = parts.setdefault(names.split_of_folder(os.fsencode(name)) or name, _Part(src))
        part.lines.append(line)
        part.keys.append(os.fsencode(path))
        if labelled and label:
            part.column.add_text(label)
        else:
            part.column.add(None)
    return parts


def _open(src: Path) -> io.TextIOWrapper:
    """The manifest as text: UTF-8 with or without a BOM, or UTF-16 with one; other bytes stay as they are in paths."""
    try:
        file = open(src, "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise UsageError(f"{src}: {error.strerror}; check the path and its permissions") from None
    head = file.peek(2)[:2]
    encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    return io.TextIOWrapper(file, encoding=encoding, errors="surrogateescape", newline="")


def _csv_rows(src: Path) -> Iterator[_Row]:
    with _open(src) as file:
        first = file.readline()
        file.seek(0)
        delimiter = "\t" if src.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
        rows: Iterator[list[str]] = filter(None, reader)
        try:
            header = next(rows, [])
            cells = [cell.strip().lower() for cell in header]
            path, label, split = (next((cells.index(n) for n in wanted if n in cells), None) for wanted in COLUMNS)
            if path is None and header:
                if not names.is_image(os.fsencode(header[0])):
                    raise UsageError(
                        f"{src}: no column for the path among {', '.join(header[:8])}; name it `path`, the label's "
                        "`label`"
                    )
                path, label, split = 0, (1 if len(header) > 1 else None), None
                rows = itertools.chain([header], rows)
            for row in rows:
                if len(row) != len(header):
                    raise UsageError(
                        f"{src}, line {reader.line_num}: {len(row)} fields instead of {len(header)}; put fields that "
                        f"hold `{delimiter}` into quotes"
                    )
                stated = [None if place is None else row[place] for place in (label, split)]
                yield reader.line_num, row[path or 0], stated[0], stated[1]
        except csv.Error as error:
            raise UsageError(f"{src}, line {reader.line_num}: {error}; check the quotes") from None


def _json_rows(src: Path) -> Iterator[_Row]:
    with _open(src) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = {name.lower(): value for name, value in json.loads(text).items()}
            except (ValueError, AttributeError):
                raise UsageError(f"{src}, line {line}: not a JSON object; write one object per line") from None
            path, label, split = (next((fields[n] for n in wanted if n in fields), None) for wanted in COLUMNS)
            if not isinstance(path, str):
                raise UsageError(f"{src}, line {line}: no text field `path`; write the image's path there")
            if label is None and any(name in fields for name in LABELS):
                label = -1  # null
            if isinstance(label, bool) or not isinstance(label, str | int | None):
                raise UsageError(f"{src}, line {line}: label {label!r}; write an integer or text")
            yield line, path, None if label is None else str(label), None if split is None else str(split)
