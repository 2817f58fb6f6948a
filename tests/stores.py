"""Small stores for tests, written without the converter."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from zarr.storage import LocalStore

from pipeline.sources.byte_strings import ByteStrings
from pipeline.store.attributes import with_digest
from pipeline.store.format import SplitArrays, chunk_index
from pipeline.store.geometry import Geometry
from pipeline.store.writer import (
    channel_statistics,
    root_attributes,
    split_attributes,
    write_group,
    write_split,
)


def make_images(num: int, size: int = 8, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 (num, size, size, channels) of random, all different images."""
    return np.random.default_rng(seed).integers(0, 256, (num, size, size, channels), np.uint8)


def make_store(
    path: Path,
    splits: Mapping[str, tuple[np.ndarray, Sequence[int] | np.ndarray]],
    *,
    chunk_images: int = 4,
    bad: Mapping[str, Sequence[int]] | None = None,
    class_ids: Sequence[str] | None = None,
    fit: str = "crop",
) -> Path:
    """Write a store of today's format.

    Args:
        path: the store's folder.
        splits: name -> (images uint8 (N, S, S, C), labels (N,)).
        chunk_images: slots per chunk, at most those of the split.
        bad: name -> slots to make bad (zeroed, labelled -1).
        class_ids: one id per class; made up where not given.
        fit: what the store says of its geometry; all source pictures were squares of its size.
    """
    bad = bad or {}
    top = max((int(np.max(labels)) for _, labels in splits.values()), default=0)
    ids = list(class_ids or [f"class{i:03d}" for i in range(top + 1)])
    size, channels = next(iter(splits.values()))[0].shape[2:]
    geometry = Geometry(size=size, fit=fit, channels={3: "rgb", 1: "gray"}[channels])
    write_group(LocalStore(path), "", root_attributes(geometry.to_json(), ids, ids, splits))
    for name, (given_images, given_labels) in splits.items():
        images = given_images.copy()
        labels = np.array(given_labels, np.int32)
        slots = list(bad.get(name, ()))
        images[slots] = 0
        labels[slots] = -1
        per_chunk = min(chunk_images, len(images)) or 1
        num_chunks = -(-len(images) // per_chunk)
        padded = np.zeros((num_chunks * per_chunk, *images.shape[1:]), np.uint8)
        padded[: len(images)] = images
        chunks = padded.reshape(num_chunks, -1)
        folder = path / name
        (folder / "images").mkdir(parents=True)
        for chunk, data in enumerate(chunks):
            index = chunk_index(per_chunk, images[0].nbytes)
            (folder / "images" / f"c.{chunk}.0.0.0").write_bytes(data.tobytes() + index)
        keys, offsets = ByteStrings.pack([f"{name}/{i:06d}.png".encode() for i in range(len(images))]).arrays
        source_size = np.full((len(images), 2), size, np.int32)
        source_size[slots] = 0
        digests = np.array([list(hashlib.sha256(data.tobytes()).digest()) for data in chunks], np.uint8)
        valid = images[labels != -1].astype(np.int64)
        axes = (0, 1, 2)
        mean, std = channel_statistics(
            valid.sum(axes).tolist(), (valid**2).sum(axes).tolist(), valid.size // images.shape[3]
        )
        arrays = SplitArrays(labels, keys, offsets, source_size, digests.reshape(num_chunks, 32))
        attributes = {
            "recipe": {},
            "bad_samples": [{"slot": s, "key": f"{name}/{s:06d}.png", "reason": "truncated"} for s in slots],
            "order": {"shuffled": False, "seed": 0},
            "mean": mean,
            "std": std,
        }
        shape = images.shape[1:]
        write_split(LocalStore(folder), "", shape, per_chunk, arrays, split_attributes(arrays, attributes))
    return path


def edit_attributes(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the attributes of a group, given by its zarr.json, and make their digest fit again."""
    metadata = json.loads(path.read_text())
    change(metadata["attributes"])
    metadata["attributes"] = with_digest(metadata["attributes"])
    path.write_text(json.dumps(metadata, indent=2))


def as_format_1(path: Path) -> Path:
    """Turn an uncompressed store into one of format 1, as earlier releases wrote it byte for byte."""
    for file in [path / "zarr.json", *path.glob("*/zarr.json")]:
        metadata = json.loads(file.read_text())
        attributes = metadata["attributes"]
        del attributes["attributes_sha256"]
        if attributes.pop("splits", None) is not None:
            attributes["format_version"] = 1
        file.write_text(json.dumps(metadata, indent=2))
    for file in path.glob("*/images/zarr.json"):
        metadata = json.loads(file.read_text())
        shape, chunk = metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        metadata["codecs"] = [{"name": "bytes"}]
        file.write_text(json.dumps(metadata, indent=2))
        for number in range(-(-shape[0] // chunk[0])):
            data = file.parent / f"c.{number}.0.0.0"
            data.write_bytes(data.read_bytes()[: math.prod(chunk)])
    return path


def three_class_store(path: Path, images: np.ndarray, chunk_images: int) -> Path:
    """A store of three classes whose val is the first three images of train, where slot 4 is bad."""
    labels = [i % 3 for i in range(len(images))]
    splits = {"train": (images, labels), "val": (images[:3], labels[:3])}
    return make_store(path, splits, bad={"train": [4]}, chunk_images=chunk_images)
