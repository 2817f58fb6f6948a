"""The store's format as `docs/format.md` specifies it: names, constants, and what an array's `zarr.json` must say.

No files are read here. What is wrong with metadata is raised as a `ValueError`; whoever read them knows where they lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

FORMAT_NAME = "efficient-imagenet"
FORMAT_VERSION = 2
"""What is written."""
READABLE_VERSIONS = (1, 2)
BAD_LABEL = -1
"""Label of a slot whose sample is bad: its image is zero and it is never served."""
UNLABELLED = -2
"""Label of a sample without one: it is served, but can't be trained on."""
COPY = ".copy"
"""Name of an unfinished copy in its work folder; no split's name begins so."""
PARTIAL_ROOT = "zarr.json.partial"
"""Name of the root group of a store whose chunks are still being brought from a URL."""
MIN_CHUNKS = 64
"""`convert` cuts a small split into so many chunks, or one an image, so that as many jobs can share it."""
CODECS = ("none", "zstd", "blosc", "max")
"""What `copy --codec` takes."""
SMALL_ARRAYS = {"labels": "int32", "keys": "uint8", "key_offsets": "int64", "source_size": "int32", "digests": "uint8"}
"""Arrays beside the images, by name, with their data types; each is one uncompressed chunk."""

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


def check_images_metadata(
    metadata: dict[str, Any], image_shape: tuple[int, int, int], version: int
) -> tuple[int, int, list[str]]:
    """Slots N, slots per chunk K, and names of the codecs, after every field of `images/zarr.json` was checked.

    The codecs are those that each image (in version 1 each chunk) was encoded with.
    """
    try:
        num_samples, chunk_images = metadata["shape"][0], metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
        codecs = metadata["codecs"] if version == 1 else metadata["codecs"][0]["configuration"]["codecs"]
        names = [codec["name"] for codec in codecs]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"shape, chunk_grid or codecs is missing or damaged ({error!r})") from None
    if not is_kind(names, [str]):
        raise ValueError(f"codecs are {short(codecs)}, must have names")
    for name, value, low in (("shape", num_samples, 0), ("chunk_shape", chunk_images, 1)):
        if type(value) is not int or value < low:
            raise ValueError(f"{name} begins with {value!r}, must be an integer of at least {low}")
    whole = codecs if version == 1 else _sharded(image_shape, codecs)
    check_array_metadata(metadata, (num_samples, *image_shape), (chunk_images, *image_shape), "uint8", whole)
    return num_samples, chunk_images, names


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

    It is offset and length of each image, both uint64, and the CRC-32C of all these; little-endian.
    """
    import google_crc32c  # reading needs none

    offsets = np.arange(chunk_images, dtype="<u8") * image_bytes
    index = np.stack([offsets, np.full_like(offsets, image_bytes)], axis=1).tobytes()
    return index + google_crc32c.value(index).to_bytes(4, "little")


def split_order(names: Iterable[str]) -> list[str]:
    """Names of splits: `train` first, then `val`, then the rest sorted."""
    return sorted(names, key=lambda name: ({"train": 0, "val": 1}.get(name, 2), name))


def images_in_chunk(chunk: int, chunk_images: int, num_images: int) -> int:
    """Images of a split that lie in a chunk: the last chunk may have fewer than the others, and padding."""
    return min(chunk_images, num_images - chunk * chunk_images)


def chunk_name(chunk: int) -> str:
    """File name of the images' chunk with that number, from 0."""
    return f"c.{chunk}.0.0.0"


def single_chunk_name(num_dimensions: int) -> str:
    """File name of an array's only chunk."""
    return "c" + ".0" * num_dimensions


def check_small_metadata(metadata: dict[str, Any], name: str, num_samples: int, num_chunks: int) -> tuple[int, ...]:
    """The shape of a small array, one of `SMALL_ARRAYS`, after every field of its `zarr.json` was checked."""
    lengths = metadata.get("shape")
    if not is_kind(lengths, [int]) or not lengths or min(lengths) < 0:
        raise ValueError(f"shape is {short(lengths)}, must be lengths")
    shape: tuple[int, ...] = {
        "labels": (num_samples,),
        "keys": (lengths[0],),  # which `key_offsets` tells
        "key_offsets": (num_samples + 1,),
        "source_size": (num_samples, 2),
        "digests": (num_chunks, 32),
    }[name]
    chunk = tuple(max(1, length) for length in shape)
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    check_array_metadata(metadata, shape, chunk, SMALL_ARRAYS[name], codecs)
    return shape


def check_array_metadata(
    metadata: dict[str, Any], shape: Sequence[int], chunk: Sequence[int], data_type: str, codecs: list[Any]
) -> None:
    """Compare an array's metadata with what the format says, so that every Zarr reader sees the same array."""
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
            raise ValueError(f"{name} is {short(found)}, must be {short(wanted)}")


def _canonical(value: Any, data_type: str) -> str:
    """The value as text that is equal for equal values only: in Python 1, 1.0 and true are equal."""
    if np.dtype(data_type).itemsize == 1 and isinstance(value, list):  # the byte order of single bytes may be left out
        whole = {"name": "bytes", "configuration": {"endian": "little"}}
        value = [{"name": "bytes"} if codec == whole else codec for codec in value]
    return json.dumps(value, sort_keys=True)


def is_kind(value: Any, kind: Any) -> bool:
    """True where the value has the form: a type or several, [form of each element], or {name: form of that field}."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(is_kind(element, kind[0]) for element in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(n in value and is_kind(value[n], form) for n, form in kind.items())
    return type(value) in (kind if isinstance(kind, tuple) else (kind,))  # a bool is no int here


def short(value: Any) -> str:
    """The value as JSON, cut where it is long, for a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "..."
