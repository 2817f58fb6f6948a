"""Placement of images in the square, against torchvision's own arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.functional import _compute_resized_output_size
from torchvision.transforms.v2.functional._geometry import _center_crop_compute_crop_anchor

from pipeline.image.placement import crop_placement
from pipeline.store.geometry import Geometry

pytestmark = pytest.mark.quick
sides = st.integers(1, 5000)


@given(height=sides, width=sides, size=st.integers(1, 512))
@settings(max_examples=300, deadline=None)
def test_crop_is_torchvisions_resize_and_centre_crop(height: int, width: int, size: int) -> None:
    placement = crop_placement(height, width, Geometry(size))
    h, w = _compute_resized_output_size((height, width), [size])
    top, left = _center_crop_compute_crop_anchor(size, size, h, w)
    expected = (left * width / w, top * height / h, (left + size) * width / w, (top + size) * height / h)
    assert placement.box == pytest.approx(expected)
    assert placement.size == (size, size)
    assert placement.offset == (0, 0)


@given(height=sides, width=sides, size=st.integers(1, 512), fit=st.sampled_from(["crop", "stretch", "pad"]))
@settings(max_examples=300, deadline=None)
def test_box_lies_in_the_image_and_result_in_the_square(height: int, width: int, size: int, fit: str) -> None:
    placement = crop_placement(height, width, Geometry(size, fit))
    left, top, right, bottom = placement.box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    for offset, length in zip(placement.offset, placement.size, strict=True):
        assert offset >= 0
        assert length >= 1
        assert offset + length <= size


@pytest.mark.parametrize(
    ("height", "width", "size", "offset"),
    [
        (100, 200, (64, 32), (0, 16)),
        (200, 100, (32, 64), (16, 0)),
        (9, 9, (64, 64), (0, 0)),
        (1, 1000, (64, 1), (0, 31)),
    ],
)
def test_pad_keeps_the_aspect_and_centres(
    height: int, width: int, size: tuple[int, int], offset: tuple[int, int]
) -> None:
    placement = crop_placement(height, width, Geometry(64, "pad"))
    assert placement.box == (0, 0, width, height)
    assert (placement.size, placement.offset) == (size, offset)


def test_scale_is_the_smaller_direction() -> None:
    assert crop_placement(640, 320, Geometry(32, "stretch")).scale == 10
    assert crop_placement(640, 320, Geometry(32)).scale == 10
    assert crop_placement(16, 16, Geometry(32)).scale == 0.5
