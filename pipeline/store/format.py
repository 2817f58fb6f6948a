"""The store's format as `docs/format.md` specifies it: names, constants, and what each `zarr.json` must say.

No files are read here. What is wrong with metadata is raised as a `ValueError`; whoever read them knows where they lie.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pipeline.store.geometry import Geometry

FORMAT_NAME = "efficient-imagenet"
FORMAT_VERSION = 2
"""What is written."""
READABLE_VERSIONS = (1, 2)
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
        codecs: names of the Zarr codecs that each image (in version 1 each chunk) was encoded with.
        version: of the format.
    """

    num_samples: int
    image_shape: tuple[int, int, int]
    chunk_images: int
    codecs: list[str]
    version: int

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any], image_shape: tuple[int, int, int], version: int) -> ImageLayout:
        """From `images/zarr.json` of a store of that format version; every field is checked.

        Raises:
            ValueError: a field that is missing or has another value than the format gives it.
        """
        try:
            num_samples, chunk_images = metadata["shape"][0], metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
            codecs = metadata["codecs"] if version == 1 else metadata["codecs"][0]["configuration"]["codecs"]
            names = [codec["name"] for codec in codecs]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"shape, chunk_grid or codecs is missing or damaged ({error!r})") from None
        if not _is_kind(names, [str]):
            raise ValueError(f"codecs are {_short(codecs)}, must have names")
        for name, value, low in (("shape", num_samples, 0), ("chunk_shape", chunk_images, 1)):
            if type(value) is not int or value < low:
                raise ValueError(f"{name} begins with {value!r}, must be an integer of at least {low}")
        if chunk_images > max(num_samples, 64):
            raise ValueError(f"chunk_shape begins with {chunk_images:,}, more than the {num_samples:,} slots")
        whole = codecs if version == 1 else _sharded(image_shape, codecs)
        check_array_metadata(metadata, (num_samples, *image_shape), (chunk_images, *image_shape), "uint8", whole)
        return cls(num_samples, image_shape, chunk_images, names, version)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_samples // self.chunk_images)


def _sharded(image_shape: Sequence[int], codecs: list[Any]) -> list[Any]:
    configuration = {
        "chunk_shape": [1, *image_shape],
        "codecs": codecs,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


def chunk_file_bytes(chunk_images: int, image_bytes: int, version: int = FORMAT_VERSION) -> int:
    """Bytes of a chunk file that isn't compressed: its images, and since version 2 their index."""
    return chunk_images * image_bytes + (16 * chunk_images + 4 if version > 1 else 0)


@lru_cache(maxsize=8)
def chunk_index(chunk_images: int, image_bytes: int) -> bytes:
    """The end of a chunk file that isn't compressed, as the codec `sharding_indexed` defines it.

    Returns:
        Offset and length of each image, both uint64, and the CRC-32C of all these; little-endian.
    """
    import google_crc32c  # reading needs none

    offsets = np.arange(chunk_images, dtype="<u8") * image_bytes
    index = np.stack([offsets, np.full_like(offsets, image_bytes)], axis=1).tobytes()
    return index + google_crc32c.value(index).to_bytes(4, "little")


def split_order(names: Iterable[str]) -> list[str]:
    """Names of splits: `train` first, then `val`, then the rest sorted."""
    return sorted(names, key=lambda name: ({"train": 0, "val": 1}.get(name, 2), name))


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


def attributes_digest(attributes: dict[str, Any]) -> str:
    """Hexadecimal SHA-256 of a group's attributes but this digest itself, as JSON with sorted names and no spaces."""
    rest = {name: value for name, value in attributes.items() if name != "attributes_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_digest(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes and, as the last one, their digest."""
    rest = {name: value for name, value in attributes.items() if name != "attributes_sha256"}
    return {**rest, "attributes_sha256": attributes_digest(rest)}


def _check_digest(attributes: dict[str, Any]) -> None:
    _check_types(attributes, {"attributes_sha256": str}, {})
    if attributes["attributes_sha256"] != attributes_digest(attributes):
        raise ValueError("attributes are altered (SHA-256 differs from attributes_sha256)")


def check_root_attributes(attributes: dict[str, Any]) -> Geometry:
    """The geometry that a root group's attributes give, after all of them were checked.

    Raises:
        ValueError: an attribute that is missing, or of another type or value than the format gives it.
    """
    _check_types(attributes, _ROOT_ATTRIBUTES, {})
    if attributes["format_version"] > 1:
        _check_types(attributes, {"splits": [str]}, {})
        _check_digest(attributes)
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
    if layout.version > 1:
        _check_digest(attributes)
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
