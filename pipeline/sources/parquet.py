"""Hugging Face parquet: files with an `image` column ({bytes, path} or plain bytes) and a `label` column.

Only labels and paths are read for the index; image bytes are read per row group, never a whole file. The split is
told by the name (`train-00000-of-00294.parquet`, `data/validation/0.parquet`). Needs pyarrow: `pip install
"efficient-imagenet[parquet]"`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import BadSample, Error, UsageError
from pipeline.sources.arrow_columns import Columns, find_columns, whole_label
from pipeline.sources.base import Indexed, SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate
from pipeline.sources.files import data_files, file_stamps, opened, read_file, split_of_data_file
from pipeline.sources.labels import LabelColumn, assemble, some
from pipeline.text import as_text, one_line

CACHE_BYTES = 256_000_000
MAX_GROUP_BYTES = 8 << 30  # a row group is read as a whole
_BATCH_ROWS = 16


@dataclass(eq=False)
class ParquetSource(Indexed):
    """Samples in the row groups of parquet files.

    Args:
        files: paths of the files.
        image_column: name of the images' column.
        group_first: int64 (G+1,), the first sample of each row group; the last is N.
        group_file, group_index: int32 (G,), the file of each row group and its number there.
        blocks: `group_first` where all images together don't fit into the cache: they are best read group by group.
    """

    files: list[str]
    image_column: str
    group_first: np.ndarray
    group_file: np.ndarray
    group_index: np.ndarray
    blocks: np.ndarray | None
    _groups: dict[int, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_groups": {}}

    def _group(self, group: int) -> Any:
        """The image column of a row group. Those last used are kept, up to `CACHE_BYTES`: small images are all read
        from memory then, and large ones read in order cost one read per group."""
        column = self._groups.pop(group, None)
        if column is None:
            path = self.files[int(self.group_file[group])]
            try:
                with _opened(path) as file:
                    column = _read_images(file, path, int(self.group_index[group]), self.image_column)
            except UsageError as error:
                raise Error(str(error)) from None
            kept = list(self._groups.items())  # a copy: other threads may read, too
            kept_bytes = sum(other.nbytes for _, other in kept)
            for oldest, other in kept:
                if kept_bytes + column.nbytes <= CACHE_BYTES:
                    break
                kept_bytes -= other.nbytes
                self._groups.pop(oldest, None)
        self._groups[group] = column
        return column

    def read(self, i: int) -> bytes:
        group = int(np.searchsorted(self.group_first, i, "right")) - 1
        value = self._group(group)[i - int(self.group_first[group])].as_py()
        return image_bytes(value, os.path.dirname(self.files[int(self.group_file[group])]), self.key(i))

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): size and modification time in ns of the file that holds the row."""
        files = self.group_file[np.searchsorted(self.group_first, indices, "right") - 1]
        used, place = np.unique(files, return_inverse=True)
        return file_stamps([self.files[file] for file in used.tolist()])[place]


def image_bytes(value: Any, folder: str, key: bytes) -> bytes:
    """The encoded image of a row: its bytes, or those of the file that it names, from `folder` on."""
    data, name = (value.get("bytes"), value.get("path") or "") if isinstance(value, dict) else (value, "")
    if data is None and not name:
        raise BadSample("missing", f"{as_text(key)}: the row holds no image")
    if data is None:
        return read_file(os.fsencode(os.path.join(folder, name)))
    if not data:
        raise BadSample("empty", as_text(key))
    return bytes(data)


def _read_images(file: Any, path: str, group: int, column: str) -> Any:
    """The image column of a row group, as a chunked array: Arrow's own read fails where one holds more than 2 GiB."""
    import pyarrow as pa

    batches, size = [], 0
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False):
        batches.append(batch.column(0))
        size += batch.nbytes
        if size > MAX_GROUP_BYTES:
            raise UsageError(
                f"{path}: row group {group} holds more than {MAX_GROUP_BYTES:,} bytes of images; write the file with "
                "smaller ones (100 rows)"
            )
    return pa.chunked_array(batches)


class _Part:
    """One split: the row groups of its files, with labels and image names only."""

    def __init__(self, src: Path, paths: Sequence[Path], options: SourceOptions) -> None:
        self.src, self.paths, self.options = src, paths, options
        self.columns: Columns | None = None
        self.first, self.file, self.index = array("q", [0]), array("i"), array("i")
        self.own_names: ByteStringsBuilder | None = ByteStringsBuilder()
        """None once an image has no name."""
        self.column = LabelColumn()
        self.image_bytes = 0

    def add_file(self, number: int) -> None:
        path = str(self.paths[number])
        with _opened(path) as file:
            columns = find_columns(file.schema_arrow, path, self.options)
            if self.columns not in (None, columns):
                raise UsageError(f"{path}: has other columns or class names than the files before it; convert it alone")
            self.columns = columns
            wanted = [name for name in (columns.label, columns.name_path) if name]
            for index in range(file.metadata.num_row_groups):
                table = file.read_row_group(index, columns=wanted, use_threads=False)
                count = file.metadata.row_group(index).num_rows
                if not count:
                    continue
                for label in table.column(columns.label).to_pylist() if columns.label else [None] * count:
                    self.column.add(whole_label(label, columns.label, path))
                for image in table.column(columns.image).to_pylist() if columns.name_path else [None]:
                    name = (image or {}).get("path")
                    if name and self.own_names is not None:
                        self.own_names.append(os.fsencode(name))
                    else:
                        self.own_names = None
                leaves = (file.metadata.row_group(index).column(i) for i in range(file.metadata.num_columns))
                self.image_bytes += sum(
                    leaf.total_uncompressed_size
                    for leaf in leaves
                    if leaf.path_in_schema.split(".")[0] == columns.image
                )
                self.first.append(self.first[-1] + count)
                self.file.append(number)
                self.index.append(index)

    def where(self, i: int) -> str:
        group = int(np.searchsorted(self.first, i, "right")) - 1
        return f"{self.paths[self.file[group]]}, sample {i - self.first[group]} of row group {self.index[group]}"

    def source(self, labels: np.ndarray) -> ParquetSource:
        assert self.columns is not None
        first, file, index = np.array(self.first), np.array(self.file), np.array(self.index)
        blocks = first if self.image_bytes > CACHE_BYTES else None
        files = [str(path) for path in self.paths]
        return ParquetSource(self._keys(), labels, files, self.columns.image, first, file, index, blocks)

    def _keys(self) -> ByteStrings:
        """The images' own names where each has one and no two are equal, else file and row: `train-0.parquet/17`."""
        if self.own_names is not None:
            own = self.own_names.build()
            if first_duplicate(own) is None:
                return own
        keys = ByteStringsBuilder()
        rows = dict.fromkeys(self.file, 0)
        for group, number in enumerate(self.file):
            path, start = self.paths[number], rows[number]
            name = os.fsencode(path.relative_to(self.src).as_posix() if path != self.src else path.name)
            rows[number] += self.first[group + 1] - self.first[group]
            for row in range(start, rows[number]):
                keys.append(b"%s/%d" % (name, row))
        return keys.build()


def open_parquet(src: Path, options: SourceOptions) -> SourceSet:
    """The parquet source: one file, or a folder of them."""
    paths, parts = data_files(src, ".parquet"), dict[str, _Part]()
    for number, path in enumerate(paths):
        split = split_of_data_file(path, src) or options.only_split
        if options.wants(split) or split == "train":
            parts.setdefault(split, _Part(src, paths, options)).add_file(number)
    return assemble_tables("parquet", parts, options, str(src))


def assemble_tables(kind: str, parts: Mapping[str, Any], options: SourceOptions, where: str) -> SourceSet:
    """The source set of splits with `columns`; the names of the classes are those that the tables declare."""
    named = {part.columns.class_names for part in parts.values() if part.columns and part.columns.class_names}
    if len(named) > 1:
        raise UsageError(f"{where}: its files name the classes in different ways; convert them one by one")
    class_names = list(named.pop()) if named else []
    hints = {
        split: f"there are other columns ({some(columns.unused)}); name the labels' column with --label-column"
        if columns.unused
        else f"there are other columns ({some(columns.unfit)}), none of which can be labels (whole numbers, text, "
        "booleans); write them into a column of their own"
        for split, columns in ((split, part.columns) for split, part in parts.items())
        if columns and not columns.label and (columns.unused or columns.unfit)
    }
    made = assemble(kind, parts, options, num_classes=len(class_names) or None, label_hints=hints)
    if class_names and len(class_names) == len(made.class_ids):
        made.class_names = class_names
    return made


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; what goes wrong with it becomes one line."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f'{path}: parquet needs pyarrow; run `pip install "efficient-imagenet[parquet]"`') from None
    try:
        with opened(path):  # no FIFO, for which Arrow would wait for ever
            pass
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path}: can't be read as parquet ({one_line(error)}); get the file again") from None
