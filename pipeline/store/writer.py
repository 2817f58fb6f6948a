"""Writing a split's metadata and small arrays around finished chunk files, and the root group.

zarr-python writes every `zarr.json`, so that what we call a plain Zarr v3 hierarchy is one by its own judgement.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.storage import LocalStore

from pipeline.errors import Error
from pipeline.store.atomic import fsync_dir
from pipeline.store.attributes import with_digest
from pipeline.store.format import BAD_LABEL, FORMAT_NAME, FORMAT_VERSION, SplitArrays, split_order
from pipeline.store.integrity import array_digests, sample_fingerprint


def channel_statistics(sums: Sequence[int], squares: Sequence[int], num_pixels: int) -> tuple[list[float], list[float]]:
    """Per-channel mean and standard deviation of pixel values divided by 255, from exact integer sums.

    `num_pixels` are those of one channel; with 0 the answer is mean 0, std 1. The variance is the population's:
    (n * sum(x^2) - sum(x)^2) / n^2, all in integers before the division, so the order of summation doesn't matter.
    """
    if num_pixels == 0:
        return [0.0] * len(sums), [1.0] * len(sums)
    mean = [total / (255 * num_pixels) for total in sums]
    variance = [
        (num_pixels * square - total * total) / (255 * num_pixels) ** 2
        for total, square in zip(sums, squares, strict=True)
    ]
    return mean, [math.sqrt(value) for value in variance]  # rounded alike everywhere, unlike `**`


def root_attributes(
    geometry: dict[str, Any], class_ids: Sequence[str], class_names: Sequence[str], splits: Iterable[str] = ()
) -> dict[str, Any]:
    """Attributes of the root group of a store with these splits."""
    return with_digest(
        {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "geometry": geometry,
            "class_ids": list(class_ids),
            "class_names": list(class_names),
            "splits": split_order(splits),
        }
    )


def write_root(folder: Path, work: Path, attributes: dict[str, Any]) -> None:
    """Write a store's root group in one rename; the folder is made where it isn't there.

    `work` is a folder on the same file system, for the file until it is complete.
    """
    made = work / ".root"  # no split's name begins so
    shutil.rmtree(made, ignore_errors=True)
    write_group(LocalStore(made), "", attributes)
    folder.mkdir(parents=True, exist_ok=True)
    with open(made / "zarr.json", "rb") as file:
        os.fsync(file.fileno())
    os.replace(made / "zarr.json", folder / "zarr.json")
    made.rmdir()
    fsync_dir(folder)
    fsync_dir(folder.parent)


def write_group(store: ZarrStore, path: str, attributes: dict[str, Any]) -> None:
    """Write a Zarr v3 group's `zarr.json` at `path` ("" for the root) of a zarr store."""
    zarr.create_group(store, path=path, attributes=attributes, zarr_format=3, overwrite=False)


def split_attributes(arrays: SplitArrays, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A split's attributes: the given ones and those that follow from the arrays."""
    return with_digest(
        {
            "num_samples": len(arrays.labels),
            "num_valid": int(np.count_nonzero(arrays.labels != BAD_LABEL)),
            **attributes,
            "sample_fingerprint": sample_fingerprint(arrays.labels, arrays.keys, arrays.key_offsets),
            "sha256": array_digests(arrays),
        }
    )


def write_split(
    store: ZarrStore,
    path: str,
    image_shape: tuple[int, int, int],
    chunk_images: int,
    arrays: SplitArrays,
    attributes: Mapping[str, Any],
    *,
    filters: Any = None,
    compressors: Any = None,
) -> zarr.Array[Any]:
    """Write a split's group, small arrays and the images' metadata; image chunks are left as they are.

    Args:
        store, path: any store that zarr can write, and the split's path in it ("" where it is the split's own folder).
        image_shape: (H, W, C).
        chunk_images: slots per chunk, K.
        arrays: the small arrays, which are never compressed.
        attributes: all of the split's attributes (see `split_attributes`).
        filters, compressors: codecs of each image, none by default.

    Returns:
        The images' Zarr array, uint8 (N, H, W, C).
    """
    write_group(store, path, dict(attributes))
    prefix = f"{path}/" if path else ""
    common: dict[str, Any] = {
        "fill_value": 0,
        "chunk_key_encoding": {"name": "default", "separator": "."},
        # zarr would otherwise leave out chunks that are all zero; ours all exist.
        "config": {"write_empty_chunks": True},
    }
    for name, array in arrays.named().items():
        chunks = tuple(max(1, length) for length in array.shape)
        made = zarr.create_array(
            store,
            name=prefix + name,
            shape=array.shape,
            chunks=chunks,
            dtype=array.dtype,
            compressors=None,
            filters=None,
            **common,
        )
        if array.size:
            made[...] = array
    return zarr.create_array(
        store,
        name=f"{prefix}images",
        shape=(len(arrays.labels), *image_shape),
        shards=(chunk_images, *image_shape),
        chunks=(1, *image_shape),
        dtype="uint8",
        compressors=compressors,
        filters=filters,
        **common,
    )


@contextlib.contextmanager
def known_codecs() -> Iterator[None]:
    """Keep zarr from warning about `numcodecs.delta`, which `copy --codec max` uses knowingly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numcodecs codecs are not in the Zarr version 3 specification")
        yield


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, and the folder itself."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_dir(root)


def publish(work_folder: Path, final: Path) -> None:
    """Make a finished folder visible under its final name, durably, in one rename."""
    if final.exists():
        raise Error(f"{final}: exists already; another run may have committed it")
    sync_tree(work_folder)
    os.rename(work_folder, final)
    fsync_dir(final.parent)
