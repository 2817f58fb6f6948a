"""Large stores of random images for benchmarks: incompressible, or sparse files that occupy no disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from zarr.storage import LocalStore

from pipeline.sources.byte_strings import ByteStrings
from pipeline.store.format import SplitArrays, chunk_index
from pipeline.store.geometry import Geometry
from pipeline.store.writer import root_attributes, split_attributes, write_group, write_split


def random_store(
    path: Path,
    num_images: int,
    size: int = 256,
    chunk_bytes: int = 100_000_000,
    num_classes: int = 1000,
    *,
    sparse: bool = False,
    smooth: bool = False,
) -> Path:
    """Write a store with one split, `train`.

    Args:
        path: the store's folder.
        num_images: N.
        size: side of the images in pixels.
        chunk_bytes: upper bound of a chunk's size.
        num_classes: labels are slot modulo this.
        sparse: image files are holes of the right length instead of random bytes.
        smooth: images with the spectrum of photographs, roughly, so that a JPEG of one has a photograph's size.

    Digests are zero: the store can be read, but not verified.
    """
    shape = (size, size, 3)
    image_bytes = size * size * 3
    chunk_images = max(1, min(chunk_bytes // image_bytes, num_images))
    num_chunks = -(-num_images // chunk_images)
    ids = [f"class{i:04d}" for i in range(num_classes)]
    write_group(LocalStore(path), "", root_attributes(Geometry(size=size).to_json(), ids, ids, ["train"]))
    folder = path / "train"
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    pool = smooth_images(64, size, rng) if smooth else None
    for chunk in range(num_chunks):
        with open(folder / "images" / f"c.{chunk}.0.0.0", "wb") as file:
            if sparse:
                file.truncate(chunk_images * image_bytes)
            elif pool is None:
                file.write(rng.bytes(chunk_images * image_bytes))
            else:
                for _ in range(chunk_images):
                    image = pool[rng.integers(len(pool))]
                    file.write(np.roll(image, rng.integers(0, size, 2), (0, 1)).tobytes())
            file.seek(0, os.SEEK_END)
            file.write(chunk_index(chunk_images, image_bytes))
    keys = ByteStrings.pack([b"%07d" % i for i in range(num_images)]).arrays
    arrays = SplitArrays(
        np.arange(num_images, dtype=np.int32) % num_classes,
        keys[0],
        keys[1],
        np.full((num_images, 2), size, np.int32),
        np.zeros((num_chunks, 32), np.uint8),
    )
    attributes = {
        "recipe": {},
        "bad_samples": [],
        "order": {"shuffled": False, "seed": 0},
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
    }
    write_split(LocalStore(folder), "", shape, chunk_images, arrays, split_attributes(arrays, attributes))
    return path


def smooth_images(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (count, size, size, 3): noise whose power falls with the square of the frequency."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
    weight = 1 / np.maximum(frequency, 1 / size)
    images = np.fft.irfft2(
        np.fft.rfft2(rng.standard_normal((count, 3, size, size))) * weight, (size, size)
    )  # (count, 3, size, size)
    images *= 60 / images.std((2, 3), keepdims=True)
    return np.clip(images + 128, 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
