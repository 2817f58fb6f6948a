"""Digests of a split's arrays and chunks, and the checks against them that verify, report and copy share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipeline.errors import StoreError
from pipeline.store.format import BAD_LABEL, SplitArrays, chunk_index
from pipeline.store.remote import read_part, zarr_store
from pipeline.store.split import Split
from pipeline.text import one_line

BLOCK_BYTES = 8_000_000
"""A chunk is read in blocks of about this size, so that memory doesn't grow with it."""

Look = Callable[[int, np.ndarray], None]
"""Called with the images of a chunk block by block: the first slot and uint8 (n, H, W, C), padding included."""


def array_digests(arrays: SplitArrays) -> dict[str, str]:
    """Name -> hexadecimal SHA-256 of each small array's bytes, as the split's attributes hold them."""
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.named().items()}


def sample_fingerprint(labels: np.ndarray, keys: np.ndarray, key_offsets: np.ndarray) -> str:
    """Hexadecimal SHA-256 over labels (bad slots are -1), keys and their order; pixels are no part of it.

    Labels are int32 (N,), keys uint8 (total,), offsets int64 (N+1,).
    """
    digest = hashlib.sha256(b"efficient-imagenet samples 1\0")
    for array, dtype in ((labels, "<i4"), (key_offsets, "<i8"), (keys, "u1")):
        digest.update(np.ascontiguousarray(array, dtype).tobytes())
    return digest.hexdigest()


def altered_arrays(split: Split, arrays: SplitArrays) -> list[str]:
    """One line for each small array, and for the fingerprint, that isn't what the attributes say."""
    stored = split.attrs["sha256"]
    problems = [
        f"{split.path / name}: altered (SHA-256 differs from the one in {split.path / 'zarr.json'})"
        for name, digest in array_digests(arrays).items()
        if stored.get(name) != digest
    ]
    if split.fingerprint != sample_fingerprint(arrays.labels, arrays.keys, arrays.key_offsets):
        problems.append(f"{split.path / 'zarr.json'}: sample_fingerprint doesn't fit labels and keys")
    return problems


def inconsistent_arrays(split: Split, arrays: SplitArrays) -> Iterator[str]:
    """One line for each way in which small arrays and attributes contradict each other."""
    labels, offsets = arrays.labels, arrays.key_offsets
    if problem := split.label_problem(labels):
        yield problem
    if np.any(np.diff(offsets) < 0) or offsets[0] != 0 or offsets[-1] != len(arrays.keys):
        yield f"{split.path / 'key_offsets'}: not ascending from 0 to the keys' length"
    bad = np.flatnonzero(labels == BAD_LABEL).tolist()
    if bad != sorted(entry["slot"] for entry in split.attrs["bad_samples"]):
        yield f"{split.path / 'zarr.json'}: bad_samples doesn't list exactly the slots labelled {BAD_LABEL}"


def check_chunk(split: Split, chunk: int, look: Look | None = None) -> str:
    """Compare a chunk's pixels with its digest, through zarr where they are compressed, and its index.

    Returns a problem in one line, or nothing. `look` sees all blocks, before it is known whether they are unaltered.
    """
    path, digest = split.chunk_path(chunk), hashlib.sha256()
    first = chunk * split.chunk_images
    try:
        for images in _blocks(split, chunk):
            digest.update(images)
            if look is not None:
                look(first, images)
            first += len(images)
        index = b""
        if split.is_raw:  # else zarr has read and checked it, or there is none
            index = read_part(path, split.chunk_bytes, split.file_bytes - split.chunk_bytes).tobytes()
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        return f"{path}: can't be read ({one_line(error)})"
    if digest.digest() != split.digests[chunk].tobytes():
        return f"{path}: altered (SHA-256 differs from the one in digests)"
    if index and index != chunk_index(split.chunk_images, split.image_bytes):
        return f"{path}: altered (the index at its end isn't that of its images)"
    return ""


def _blocks(split: Split, chunk: int) -> Iterator[np.ndarray]:
    """uint8 (n, H, W, C) each: a whole chunk in its order, padding included."""
    each = max(1, BLOCK_BYTES // split.image_bytes)
    first = chunk * split.chunk_images
    num = min(split.chunk_images, split.num_samples - first)
    if split.is_raw:
        for done in range(0, split.chunk_images, each):
            count = min(each, split.chunk_images - done)
            start, length = done * split.image_bytes, count * split.image_bytes
            yield read_part(split.chunk_path(chunk), start, length).reshape(count, *split.image_shape)
        return
    import zarr

    array: Any = zarr.open_array(zarr_store(split.path / "images"), mode="r")
    for done in range(0, num, each if split.version > 1 else num):  # a chunk of version 1 is decoded whole
        stop = min(done + each, num) if split.version > 1 else num
        yield np.ascontiguousarray(array[first + done : first + stop])
    for done in range(num, split.chunk_images, each):
        yield np.zeros((min(each, split.chunk_images - done), *split.image_shape), np.uint8)


def read_arrays(split: Split) -> SplitArrays | None:
    """All small arrays, or None where one is damaged so far that `Split.problems` names it."""
    try:
        return split.arrays()
    except StoreError:
        return None
