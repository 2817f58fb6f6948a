"""Sums of pixels: exact, by C and by numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pipeline.image.statistics import channel_sums, channel_sums_numpy


@pytest.mark.quick
@pytest.mark.parametrize("sums", [channel_sums, channel_sums_numpy])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 3, 5, 3), (3, 7, 9, 1), (2, 64, 33, 3), (0, 4, 4, 3)])
def test_channel_sums(sums: Callable[..., tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    columns = images.reshape(-1, shape[-1]).astype(np.int64)
    got = sums(images)
    assert all(part.dtype == np.int64 for part in got)
    np.testing.assert_array_equal(got, [columns.sum(0), (columns**2).sum(0)])


@pytest.mark.parametrize("sums", [channel_sums, channel_sums_numpy])
@pytest.mark.parametrize("channels", [1, 3])
def test_channel_sums_beyond_what_float32_and_32_bits_hold(
    sums: Callable[..., tuple[np.ndarray, np.ndarray]], channels: int
) -> None:
    images = np.full((2, 600, 401, channels), 255, np.uint8)
    pixels = 2 * 600 * 401
    np.testing.assert_array_equal(sums(images), [[pixels * 255] * channels, [pixels * 255**2] * channels])
