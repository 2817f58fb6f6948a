"""From Python: a `Dataset` or `DatasetDict` of Hugging Face's library `datasets`, read from its Arrow files.

Images are taken as the encoded bytes that are stored; nothing is decoded for the index. Columns are found as in
parquet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.arrow_columns import find_columns, whole_label
from pipeline.sources.base import SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, first_duplicate
from pipeline.sources.labels import LabelColumn
from pipeline.sources.parquet import assemble_tables, image_bytes
from pipeline.sources.sequence import LazySource, item, numbered

_INDEX_ROWS = 1000


def is_dataset(samples: Any) -> bool:
    """Whether it is a `datasets.Dataset`, without importing that library."""
    return all(hasattr(samples, name) for name in ("features", "with_format", "__getitem__", "__len__"))


@dataclass(eq=False)
class HuggingFaceSource(LazySource):
    """Rows of a dataset that gives Arrow tables."""

    image_column: str

    def read(self, i: int) -> bytes:
        value = item(self.samples, i).column(self.image_column)[0].as_py()
        return image_bytes(value, os.curdir, self.key(i))


class _Part:
    """One split: the labels of its rows, and the images' own names."""

    def __init__(self, name: str, samples: Any, options: SourceOptions) -> None:
        import pyarrow.compute as pc

        if samples.format["type"] == "custom":
            raise UsageError(
                f"{name}: has a transform, which conversion from Arrow would pass over; pass "
                "dataset.with_format(None), or the transformed items as (image, label)"
            )
        self.name = name
        self.columns = find_columns(samples.features.arrow_schema, name, options)
        self.rows = samples.with_format("arrow")
        self.column, own = LabelColumn(), list[str | None]()
        image, label = self.columns.image, self.columns.label
        for table in self.rows.select_columns([image, *([label] if label else [])]).iter(_INDEX_ROWS):
            for value in table.column(label).to_pylist() if label else [None] * len(table):
                self.column.add(whole_label(value, label, name))
            if self.columns.name_path:
                own += pc.struct_field(table.column(image), "path").to_pylist()
        self.keys = numbered(len(self.rows))
        if own and all(own):
            named = ByteStrings.pack(os.fsencode(path) for path in own if path)
            self.keys = self.keys if first_duplicate(named) else named

    def where(self, i: int) -> str:
        return f"row {i} of {self.name}"

    def source(self, labels: np.ndarray) -> HuggingFaceSource:
        return HuggingFaceSource(self.keys, labels, self.rows, self.columns.image)


def open_hugging_face(src: Any, options: SourceOptions) -> SourceSet:
    """The source of a dataset, or of a mapping from split names to datasets; `validation` becomes `val`."""
    if isinstance(src, str | os.PathLike):
        raise UsageError(f"{src}: --source hugging-face is for datasets that a Python program passes; use another kind")
    by_split: Mapping[str, Any] = src if isinstance(src, Mapping) else {options.only_split: src}
    parts = {}
    for given, samples in by_split.items():
        split = names.split_of_folder(os.fsencode(given)) or str(given)
        if split in parts:
            raise UsageError(f"the datasets {' and '.join(by_split)} give {split} twice; leave one out")
        if options.wants(split) or split == "train":
            parts[split] = _Part(split, samples, options)
    return assemble_tables("hugging-face", parts, options, "the dataset")
