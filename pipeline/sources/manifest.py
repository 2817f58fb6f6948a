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
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.base import Source, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate
from pipeline.sources.files import FileSource
from pipeline.sources.folder import single_name
from pipeline.sources.labels import LabelColumn, all_integers, resolve, stated

MANIFEST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img", "img_path")
LABELS = ("label", "class", "class_id", "target", "category", "label_id", "labels", "cls", "wnid", "class_name", "y")
SPLITS = ("split", "subset", "set")

_Row = tuple[int, str, str | None, str | None]  # line, path, label (None: no such column), split


@dataclass
class _Listed:
    """One split while it is collected."""

    keys: ByteStringsBuilder = field(default_factory=ByteStringsBuilder)
    column: LabelColumn = field(default_factory=LabelColumn)


def open_manifest(src: Path, splits: Sequence[str] | None = None) -> SourceSet:
    """The manifest source.

    Raises:
        UsageError: no path column, a row that can't be read or has no label, or a path that is listed twice.
    """
    try:
        listed = _collect(src, splits)
    except UnicodeError as error:
        raise UsageError(f"{src}: {names.one_line(error)}; save it as UTF-8") from None
    columns = {split: listed[split].column for split in names.natural_splits(set(listed))}
    if all_integers(columns.values()):
        for column in columns.values():
            column.read_integers()
    keys = {split: listed[split].keys.build() for split in columns}
    ids, labels = resolve(columns, lambda split, i: f"{src}: {names.text(keys[split][i])}")
    root = os.fsencode(src.parent)
    sources: dict[str, Source] = {}
    for split in columns:
        _refuse_duplicates(keys[split], src)
        if not splits or split in splits:
            sources[split] = FileSource(root, keys[split], labels[split])
    return SourceSet("manifest", ids, sources, origin=str(src))


def _collect(src: Path, splits: Sequence[str] | None) -> dict[str, _Listed]:
    """Split name -> its images, in the manifest's order."""
    listed: dict[str, _Listed] = {}
    rows = _csv_rows(src) if src.suffix.lower() in (".csv", ".tsv") else _json_rows(src)
    labelled: bool | None = None
    for line, path, label, split in rows:
        labelled = label is not None if labelled is None else labelled
        if not path:
            raise UsageError(f"{src}, line {line}: no path; write the image's path, relative to the manifest")
        if labelled and not (label or "").strip():
            raise UsageError(f"{src}, line {line}: no label for {path}; write the class, or -1 for none")
        name = single_name(splits) if split is None else split.strip()
        part = listed.setdefault(names.split_of_folder(os.fsencode(name)) or name, _Listed())
        part.keys.append(os.fsencode(path))
        part.column.add(stated(label) if labelled and label else None)
    return listed


def _refuse_duplicates(keys: ByteStrings, src: Path) -> None:
    if twice := first_duplicate(keys):
        raise UsageError(f"{src}: lists {names.text(keys[twice[0]])} twice; keep one of the lines")


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
        columns: tuple[int, int | None, int | None] | None = None
        width = 0
        try:
            for row in reader:
                if not row:
                    continue
                if columns is None:
                    width = len(row)
                    columns = _header(row)
                    if columns is not None:
                        continue
                    if not names.is_image(os.fsencode(row[0])):
                        raise UsageError(
                            f"{src}: no column for the path among {', '.join(row[:8])}; name it `path`, the label's "
                            "`label`"
                        )
                    columns = 0, (1 if width > 1 else None), None
                if len(row) != width:
                    raise UsageError(
                        f"{src}, line {reader.line_num}: {len(row)} fields instead of {width}; put fields that hold "
                        f"`{delimiter}` into quotes"
                    )
                path, label, split = columns
                yield (
                    reader.line_num,
                    row[path],
                    None if label is None else row[label],
                    None if split is None else row[split],
                )
        except csv.Error as error:
            raise UsageError(f"{src}, line {reader.line_num}: {error}; check the quotes") from None


def _header(row: Sequence[str]) -> tuple[int, int | None, int | None] | None:
    """Positions of the path, label and split columns, or None where the row is no header."""
    cells = [cell.strip().lower() for cell in row]
    path, label, split = (
        next((cells.index(name) for name in wanted if name in cells), None) for wanted in (PATHS, LABELS, SPLITS)
    )
    return None if path is None else (path, label, split)


def _json_rows(src: Path) -> Iterator[_Row]:
    with _open(src) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                fields = {name.lower(): value for name, value in row.items()}
            except (ValueError, AttributeError):
                raise UsageError(f"{src}, line {line}: not a JSON object; write one object per line") from None
            path, label, split = (
                next((fields[name] for name in wanted if name in fields), None) for wanted in (PATHS, LABELS, SPLITS)
            )
            if not isinstance(path, str):
                raise UsageError(f"{src}, line {line}: no text field `path`; write the image's path there")
            if label is None and any(name in fields for name in LABELS):
                label = -1  # null
            if isinstance(label, bool) or not isinstance(label, str | int | None):
                raise UsageError(f"{src}, line {line}: label {label!r}; write an integer or text")
            yield line, path, None if label is None else str(label), None if split is None else str(split)
