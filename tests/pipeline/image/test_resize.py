"""Which resizer is in use, and that it resizes as PIL does."""

from __future__ import annotations

import json

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.compiled.library import RESIZE, Library, load
from pipeline.image import resize as resizer
from pipeline.store.geometry import FILTERS


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


BOXES = [(0.0, 0.0, 50.0, 40.0), (3.25, 1.5, 44.0, 39.75), (5.0, 5.0, 6.0, 6.0), (0.0, 0.5, 16.0, 30.0)]


@pytest.mark.quick
@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("size", [(16, 12), (50, 12), (16, 40), (50, 40), (90, 70), (1, 1)])
def test_resizes_as_pil_does(filter_name: str, box: resizer.Box, size: tuple[int, int]) -> None:
    pixels = noise(40, 50)
    image = Image.fromarray(pixels).resize(size, Image.Resampling[filter_name.upper()], box)
    for mode, channels in (("RGB", 3), ("L", 1)):
        expected = np.asarray(image.convert(mode)).reshape(size[1], size[0], channels).astype(int)
        stock, used = np.empty(expected.shape, np.uint8), np.empty(expected.shape, np.uint8)
        resizer.resize_with_pillow(pixels, box, size, filter_name, stock)
        np.testing.assert_array_equal(stock, expected)
        resizer.resize_into(pixels, box, size, filter_name, used)
        assert np.abs(used - expected).max() <= 2


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    out_height=st.integers(1, 70),
    out_width=st.integers(1, 70),
    cut=st.tuples(*[st.floats(0, 0.49)] * 4),
    whole=st.booleans(),
    filter_name=st.sampled_from(FILTERS),
)
@settings(max_examples=400, deadline=None)
def test_any_resize_is_near_pils_and_stays_in_its_place(
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    cut: tuple[float, float, float, float],
    whole: bool,
    filter_name: str,
) -> None:
    pixels = noise(height, width)
    left, top, right, bottom = (0.0, 0.0, 0.0, 0.0) if whole else cut
    box = (width * left, height * top, width * (1 - right), height * (1 - bottom))
    expected = np.empty((out_height, out_width, 3), np.uint8)
    resizer.resize_with_pillow(pixels, box, (out_width, out_height), filter_name, expected)
    block = np.full((out_height + 2, out_width + 8, 3), 99, np.uint8)
    resizer.resize_into(pixels, box, (out_width, out_height), filter_name, block[1:-1, 4:-4])
    assert np.abs(block[1:-1, 4:-4].astype(int) - expected).max() <= 3
    block[1:-1, 4:-4] = 99
    assert (block == 99).all()


@pytest.mark.quick
def test_a_cut_copies() -> None:
    pixels, out = noise(30, 40), np.empty((12, 20, 3), np.uint8)
    resizer.resize_into(pixels, (3.0, 5.0, 23.0, 17.0), (20, 12), "lanczos", out)
    np.testing.assert_array_equal(out, pixels[5:17, 3:23])


@pytest.mark.quick
def test_one_channel_is_the_luma() -> None:
    pixels = np.empty((4, 4, 3), np.uint8)
    pixels[:] = (200, 100, 50)
    out = np.empty((2, 2, 1), np.uint8)
    resizer.resize_into(pixels, (0.0, 0.0, 4.0, 4.0), (2, 2), "box", out)
    assert (out == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)).all()


@pytest.mark.quick
@pytest.mark.skipif(resizer.resizer().startswith("pillow "), reason="pillow-simd can't be had here")
@pytest.mark.parametrize(
    ("pixels", "box", "out"),
    [
        (noise(9, 9)[:, ::2], (0.0, 0.0, 5.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 10.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.empty((4, 5, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.empty((4, 8, 3), np.uint8)[:, ::2]),
        (noise(9, 9), (5.0, 0.0, 5.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.empty((4, 4, 3), np.int8)),
        (noise(9, 9).astype(np.int8), (0.0, 0.0, 9.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (float("nan"), 0.0, 9.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.broadcast_to(np.uint8(0), (4, 4, 3))),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.frombuffer(bytes(48), np.uint8).reshape(4, 4, 3)),
    ],
)
def test_what_c_could_not_survive_never_reaches_it(pixels: np.ndarray, box: resizer.Box, out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="can't resize"):
        resizer.resize_into(pixels, box, (4, 4), "bicubic", out)


@pytest.mark.quick
def test_without_pillow_simd_pillow_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Library("resize", "no-such-distribution", RESIZE.sources, RESIZE.functions)
    monkeypatch.setattr(resizer, "RESIZE", missing)
    assert resizer.resizer() == f"pillow {PIL.__version__}"
    assert resizer.software_versions.__wrapped__()["resizer"] == f"pillow {PIL.__version__}"
    pixels, out = noise(40, 50), np.empty((12, 16, 3), np.uint8)
    resizer.resize_into(pixels, (0.0, 0.0, 50.0, 40.0), (16, 12), "bicubic", out)
    expected = Image.fromarray(pixels).resize((16, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(out, np.asarray(expected))


@pytest.mark.quick
def test_software_versions_can_be_stored() -> None:
    versions = resizer.software_versions()
    assert json.loads(json.dumps(versions)) == versions
    assert versions["pillow"] == PIL.__version__
    assert {"resizer", "simplejpeg", "numpy", "zarr", "efficient-imagenet", "libjpeg_turbo"} <= versions.keys()


def test_an_unknown_filter_has_no_weights() -> None:
    """C indexes its table of kernels by the number."""
    library = load(RESIZE)[0]
    if library is None:
        pytest.skip("no compiled library here")
    bounds, used, weights = np.empty(10, np.int32), np.empty(3, np.int32), np.empty(200, np.int16)
    for number in (-1, 0, 5, 99):
        arguments = 10, 0.0, 10.0, 5, number, bounds.ctypes.data, weights.ctypes.data, 200, used.ctypes.data
        assert library.simd_weights(*arguments) == -1
