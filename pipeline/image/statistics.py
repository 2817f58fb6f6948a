"""Exact integer sums of pixels, from which a split's mean and standard deviation come."""

from __future__ import annotations

import numpy as np

from pipeline.compiled.library import RESIZE, load


def channel_sums(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact sums and sums of squares per channel, both int64 (C,), of uint8 (n, H, W, C), C 1 or 3, C-contiguous."""
    channels = images.shape[-1]
    if images.dtype != np.uint8 or not images.flags.c_contiguous or channels not in (1, 3):
        raise ValueError(f"can't sum {images.dtype} {images.shape}: must be uint8, C-contiguous, of 1 or 3 channels")
    library = load(RESIZE)[0]
    if library is None:
        return channel_sums_numpy(images)
    out = np.empty((2, channels), np.int64)
    library.simd_channel_sums(images.ctypes.data, images.size // channels, channels, out.ctypes.data)
    return out[0], out[1]


def channel_sums_numpy(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`channel_sums` where the compiled library can't be had.

    Columns are summed by float32 matrix products over at most 256 rows: every partial sum of squares is an integer
    below 255^2 * 256 < 2^24, so nothing is rounded.
    """
    width, channels = images.shape[2:]
    rows = images.reshape(-1, width * channels)
    sums = np.zeros((2, width * channels), np.int64)
    for start in range(0, len(rows), 256):
        block = rows[start : start + 256].astype(np.float32)
        ones = np.ones(len(block), np.float32)
        sums[0] += (ones @ block).astype(np.int64)
        sums[1] += (ones @ np.square(block, out=block)).astype(np.int64)
    # (2, W*C) -> (2, W, C) -> (2, C)
    out = sums.reshape(2, width, channels).sum(1)
    return out[0], out[1]
