"""Which columns of an Arrow table, as parquet files and Hugging Face's library hold it, are the images and labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import UsageError
from pipeline.sources.base import SourceOptions

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "picture", "photo")
LABEL_COLUMNS = ("label", "labels", "class", "cls", "target", "category", "fine_label", "label_id", "class_id")


@dataclass(frozen=True)
class Columns:
    """The columns that are used.

    Attributes:
        image: column of {bytes, path} or of bytes.
        name_path: the leaf `image.path`, where there is one.
        label: column of integers, text or booleans, if there is one.
        class_names: what the file calls the integer labels, if it does.
    """

    image: str
    name_path: str | None
    label: str | None
    class_names: tuple[str, ...] | None
    unused: tuple[str, ...] = field(default=(), compare=False)
    """The other columns that may be labels."""
    unfit: tuple[str, ...] = field(default=(), compare=False)
    """The others, each with its type."""


def find_columns(schema: Any, path: str, options: SourceOptions) -> Columns:
    """The image and label columns of an Arrow schema: asked for, else declared by Hugging Face, else by name."""
    import pyarrow as pa

    try:
        features = dict(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError, RecursionError):  # not written by Hugging Face's library
        features = {}

    def is_bytes(kind: Any) -> bool:
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    def is_image(kind: Any) -> bool:
        return is_bytes(kind) or (
            pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and is_bytes(kind.field("bytes").type)
        )

    def is_label(kind: Any) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        types = pa.types
        fitting = (types.is_integer, types.is_floating, types.is_string, types.is_large_string, types.is_boolean)
        return any(is_kind(kind) for is_kind in fitting)

    def pick(what: str, declared_as: str, known: Sequence[str], fits: Any, asked: str | None) -> str | None:
        possible = [column.name for column in schema if fits(column.type)]
        declared = [
            name
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == declared_as and name in possible
        ]
        if asked and asked not in possible:
            have = ", ".join(possible) or "none"
            is_there = asked in schema.names
            why = f"{schema.field(asked).type} can't be the {what}" if is_there else "no such column"
            raise UsageError(f"{path}: --{what}-column {asked}: {why}; columns that can be: {have}")
        if not asked and len(declared) > 1:
            raise UsageError(f"{path}: {' and '.join(declared)} may both be the {what}; name one with --{what}-column")
        found = [name for name in known if name in possible]
        return next(iter([asked] if asked else declared + found), None)

    image = pick("image", "Image", IMAGE_COLUMNS, is_image, options.image_column)
    label = pick("label", "ClassLabel", LABEL_COLUMNS, is_label, options.label_column)
    if image is None:
        have = ", ".join(f"{column.name}: {column.type}" for column in list(schema)[:8])
        if any(is_image(column.type) for column in schema):
            raise UsageError(f"{path}: no image column (bytes, or {{bytes, path}}) among {have}; give --image-column")
        raise UsageError(
            f"{path}: no column of images, as encoded bytes or {{bytes, path}}, among {have}; for paths in text give "
            "a CSV of paths and labels, or cast_column(NAME, datasets.Image()); for arrays pass (image, label) pairs"
        )
    kind = schema.field(image).type
    has_name = pa.types.is_struct(kind) and kind.get_field_index("path") >= 0
    class_names = features.get(label, {}).get("names") if isinstance(features.get(label), dict) else None
    others = [column for column in schema if column.name not in (image, label)]
    unused = tuple(column.name for column in others if is_label(column.type))
    unfit = tuple(f"{column.name}: {column.type}" for column in others if not is_label(column.type))
    return Columns(image, f"{image}.path" if has_name else None, label, tuple(class_names or ()) or None, unused, unfit)


def whole_label(label: Any, column: str | None, where: str) -> Any:
    """A label as it is; of a float the whole number that it is, as pandas writes integers where one is missing; of a
    boolean its name."""
    if isinstance(label, bool):
        return str(label)
    if isinstance(label, float):
        if not label.is_integer():
            raise UsageError(f"{where}: label {label} in {column}; write whole numbers or text")
        return int(label)
    return label
