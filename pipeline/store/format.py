"""The store's format as `docs/format.md` specifies it: names, constants, and what each `zarr.json` must say.

No files are read here. What is wrong with metadata is raised as a `ValueError`; whoever read them knows where they lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.store.geometry import Geometry

FORMAT_NAME = "efficient-imagenet"
FORMAT_VERSION = 1
BAD_LABEL = -1
"""Label of a slot whose sample is bad: its image is zero and it is never served."""
UNLABELLED = -2
"""Label of a sample without one: it is served, but can't be trained on."""
CODECS = ("none", "zstd", "blosc", "max")
"""What `copy --codec` takes."""
SMALL_ARRAYS = {"labels": "int32", "keys": "uint8", "key_offsets": "int64", "source_size": "int32", "digests": "uint8"}
"""Arrays beside the images, by name, with their data types; each is one uncompressed chunk."""

_INT_OR_NULL = (int, type(None))
_ROOT_ATTRIBUTES = {
    "format_version": int,
    "geometry": {"size": int, "fit": str, "filter": str, "channels": str, "exif_transpose": bool},
    "class_ids": [str],
    "class_names": [str],
}
_SPLIT_ATTRIBUTES = {
    "num_samples": int,
    "num_valid": int,
    "recipe": {},
    "bad_samples": [{"slot": int, "key": str, "reason": str}],
    "order": {"shuffled": bool, "seed": _INT_OR_NULL},
    "mean": [float],
    "std": [float],
    "sample_fingerprint": str,
    "sha256": dict.fromkeys(SMALL_ARRAYS, str),
}
_OPTIONAL_ATTRIBUTES = {"source_modes": {}, "decoder_warnings": int, "software": {}, "resizer": str}
_MAY_BE_THERE: dict[str, Any] = {"attributes": {}, "storage_transformers": [], "dimension_names": None}
"""Fields of an array's metadata that a writer may add with these values: they change nothing."""


@dataclass(frozen=True)
class SplitArrays:
    """The small arrays of a split, in slot order, as `docs/format.md` defines them.

    Attributes:
        labels: int32 (N,).
        keys: uint8 (total,).
        key_offsets: int64 (N+1,).
        source_size: int32 (N, 2).
        digests: uint8 (chunks, 32).
    """

    labels: np.ndarray
    keys: np.ndarray
    key_offsets: np.ndarray
    source_size: np.ndarray
    digests: np.ndarray

    def named(self) -> dict[str, np.ndarray]:
        """Name -> contiguous little-endian array."""
        little = {name: np.dtype(kind).newbyteorder("<") for name, kind in SMALL_ARRAYS.items()}
        return {name: np.ascontiguousarray(getattr(self, name), dtype) for name, dtype in little.items()}


@dataclass(frozen=True)
class ImageLayout:
    """Where the images of a split lie.

    Attributes:
        num_samples: slots, N.
        image_shape: (H, W, C).
        chunk_images: slots per chunk, K.
        codecs: names of the Zarr codecs.
    """

    num_samples: int
    image_shape: tuple[int, int, int]
    chunk_images: int
    codecs: list[str]

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any], image_shape: tuple[int, int, int]) -> ImageLayout:
        """From `images/zarr.json`, of which every field is checked.

        Raises:
            ValueError: a field that is missing or has another value than the format gives it.
        """
        try:
            num_samples, chunk_images = metadata["shape"][0], metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
            codecs = metadata["codecs"]
            names = [codec["name"] for codec in codecs]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"shape, chunk_grid or codecs is missing or damaged ({error!r})") from None
        for name, value, low in (("shape", num_samples, 0), ("chunk_shape", chunk_images, 1)):
            if type(value) is not int or value < low:
                raise ValueError(f"{name} begins with {value!r}, must be an integer of at least {low}")
        if chunk_images > max(num_samples, 64):
            raise ValueError(f"chunk_shape begins with {chunk_images:,}, more than the {num_samples:,} slots")
        check_array_metadata(metadata, (num_samples, *image_shape), (chunk_images, *image_shape), "uint8", codecs)
        return cls(num_samples, image_shape, chunk_images, names)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_samples // self.chunk_images)


def chunk_name(chunk: int) -> str:
    """File name of the images' chunk with that number, from 0."""
    return f"c.{chunk}.0.0.0"


def single_chunk_name(num_dimensions: int) -> str:
    """File name of an array's only chunk."""
    return "c" + ".0" * num_dimensions


def small_array_shape(name: str, num_samples: int, num_chunks: int) -> tuple[int, ...] | None:
    """Shape of a small array; None for `keys`, whose length only `key_offsets` tells."""
    shapes = {
        "labels": (num_samples,),
        "key_offsets": (num_samples + 1,),
        "source_size": (num_samples, 2),
        "digests": (num_chunks, 32),
    }
    return shapes.get(name)


def check_small_metadata(metadata: dict[str, Any], name: str, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a small array after every field of its `zarr.json` was checked.

    Args:
        metadata: of the array.
        name: one of `SMALL_ARRAYS`.
        shape: what it must be, None where any length will do.

    Raises:
        ValueError: a field that is missing or has another value than the format gives it.
    """
    if shape is None:
        length = metadata.get("shape")
        if not isinstance(length, list) or len(length) != 1 or type(length[0]) is not int or length[0] < 0:
            raise ValueError(f"shape is {_short(length)}, must be one length")
        shape = (length[0],)
    chunk = tuple(max(1, length) for length in shape)
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    check_array_metadata(metadata, shape, chunk, SMALL_ARRAYS[name], codecs)
    return shape


def check_array_metadata(
    metadata: dict[str, Any], shape: Sequence[int], chunk: Sequence[int], data_type: str, codecs: list[Any]
) -> None:
    """Compare an array's metadata with what the format says, so that every Zarr reader sees the same array.

    Raises:
        ValueError: the first field that differs.
    """
    expected = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": codecs,
    }
    for name in dict.fromkeys([*expected, *metadata]):
        wanted = expected[name] if name in expected else _MAY_BE_THERE.get(name, "absent")
        found = metadata.get(name, "absent")
        if _canonical(found, data_type) != _canonical(wanted, data_type):
            raise ValueError(f"{name} is {_short(found)}, must be {_short(wanted)}")


def _canonical(value: Any, data_type: str) -> str:
    """The value as text that is equal for equal values only: in Python 1, 1.0 and true are equal."""
    if np.dtype(data_type).itemsize == 1 and isinstance(value, list):  # the byte order of single bytes may be left out
        whole = {"name": "bytes", "configuration": {"endian": "little"}}
        value = [{"name": "bytes"} if codec == whole else codec for codec in value]
    return json.dumps(value, sort_keys=True)


def check_group_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """A group's attributes after the rest of its `zarr.json` was checked.

    Raises:
        ValueError: not a group of Zarr version 3, or one without attributes.
    """
    if metadata.get("node_type") != "group" or metadata.get("zarr_format") != 3:
        raise ValueError("not a group of Zarr version 3")
    attributes = metadata.get("attributes")
    if not isinstance(attributes, dict):
        raise ValueError("attributes are missing")
    return attributes


def check_root_attributes(attributes: dict[str, Any]) -> Geometry:
    """The geometry that a root group's attributes give, after all of them were checked.

    Raises:
        ValueError: an attribute that is missing, or of another type or value than the format gives it.
    """
    _check_types(attributes, _ROOT_ATTRIBUTES, {})
    if len(attributes["class_ids"]) != len(attributes["class_names"]):
        raise ValueError("class_ids and class_names differ in length")
    try:
        return Geometry(**attributes["geometry"])
    except TypeError:  # a field too many
        raise ValueError("attribute geometry is damaged") from None


def check_split_attributes(attributes: dict[str, Any], layout: ImageLayout) -> None:
    """Check types and lengths of a split's attributes; whether they fit the arrays is `integrity`'s to say.

    Raises:
        ValueError: an attribute that is missing, or of another type or value than the format gives it.
    """
    _check_types(attributes, _SPLIT_ATTRIBUTES, _OPTIONAL_ATTRIBUTES)
    num_samples, num_valid = attributes["num_samples"], attributes["num_valid"]
    if num_samples != layout.num_samples or not 0 <= num_valid <= num_samples:
        raise ValueError(f"num_samples {num_samples}, num_valid {num_valid} don't fit {layout.num_samples} images")
    for name in ("mean", "std"):
        values = attributes[name]
        if len(values) != layout.image_shape[2] or not all(map(math.isfinite, values)):
            raise ValueError(f"attribute {name} is {_short(values)}, must be {layout.image_shape[2]} numbers")


def _check_types(attributes: dict[str, Any], required: dict[str, Any], optional: dict[str, Any]) -> None:
    for name, kind in {**required, **optional}.items():
        if name in required and name not in attributes:
            raise ValueError(f"attribute {name} is missing")
        if name in attributes and not _is_kind(attributes[name], kind):
            raise ValueError(f"attribute {name} is damaged")


def _is_kind(value: Any, kind: Any) -> bool:
    """True where the value has the form: a type or several, [form of each element], or {name: form of that field}."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is_kind(element, kind[0]) for element in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(n in value and _is_kind(value[n], form) for n, form in kind.items())
    return type(value) in (kind if isinstance(kind, tuple) else (kind,))  # a bool is no int here


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "..."
