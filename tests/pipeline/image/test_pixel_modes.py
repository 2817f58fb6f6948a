"""Pixel modes to 8-bit RGB: every expected value is worked out here by hand."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image.pixel_modes import DecodeOptions, array_to_rgb, image_to_array, scale_to_8_bit, to_array, to_rgb

pytestmark = pytest.mark.quick
WHITE, RED, GREEN, BLUE = (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255)


def one_pixel(image: Image.Image, background: tuple[int, int, int] = WHITE) -> tuple[int, ...]:
    rgb = to_rgb(image, DecodeOptions(background=background))
    assert rgb.mode == "RGB"
    return tuple(np.asarray(rgb)[0, 0].tolist())


def reread(image: Image.Image, kind: str, **options: Any) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    again = Image.open(buffer)
    again.load()
    return again


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("L", 7, (7, 7, 7)),
        ("1", 1, WHITE),
        ("CMYK", (0, 255, 255, 0), RED),
        ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
        ("HSV", (0, 255, 255), RED),
        ("YCbCr", (128, 128, 128), (128, 128, 128)),
        ("RGBX", (1, 2, 3, 4), (1, 2, 3)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), WHITE),
        ("LA", (10, 0), WHITE),
        ("LA", (10, 255), (10, 10, 10)),
        ("RGBa", (5, 10, 15, 255), (5, 10, 15)),
        ("La", (10, 255), (10, 10, 10)),
        ("La", (0, 0), WHITE),
        ("I;16", 65535, WHITE),
        ("I;16", 257 * 100, (100, 100, 100)),
        ("I;16B", 257 * 100, (100, 100, 100)),
        ("F", 0.5, (128, 128, 128)),
    ],
)
def test_mode(mode: str, color: Any, expected: tuple[int, ...]) -> None:
    assert one_pixel(Image.new(mode, (2, 2), color)) == expected


def test_alpha_blends_with_the_background() -> None:
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    assert one_pixel(half, (255, 255, 255)) == (255, 127, 127)
    assert one_pixel(half, (0, 0, 255)) == (128, 0, 127)


def test_hidden_colours_of_transparent_pixels_never_show() -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:, 2:] = (0, 255, 0, 255)
    pixels[:, :2] = (255, 0, 0, 0)  # red below full transparency
    assert not np.any(np.all(np.asarray(to_rgb(Image.fromarray(pixels))) == RED, axis=2))


def palette_image() -> Image.Image:
    image = Image.new("P", (2, 2), 2)
    image.putpalette([0, 0, 0, *RED, *GREEN, *BLUE])
    image.putpixel((0, 0), 1)
    return image


def test_palette_is_expanded() -> None:
    assert one_pixel(reread(palette_image(), "PNG")) == RED
    assert one_pixel(reread(palette_image(), "GIF")) == RED


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 255, 255])])
def test_transparent_palette_entry_becomes_background(transparency: Any) -> None:
    image = reread(palette_image(), "PNG", transparency=transparency)
    assert one_pixel(image, BLUE) == BLUE
    assert np.asarray(to_rgb(image, DecodeOptions(background=BLUE)))[1, 1].tolist() == list(GREEN)


@pytest.mark.parametrize(
    ("image", "transparency"),
    [
        (Image.new("RGB", (2, 2), (9, 8, 7)), (9, 8, 7)),
        (Image.new("L", (2, 2), 9), 9),
        (Image.new("1", (2, 2), 1), 255),
        (Image.new("I;16", (2, 2), 1000), 1000),
    ],
)
def test_png_transparent_colour_becomes_background(image: Image.Image, transparency: Any) -> None:
    assert one_pixel(reread(image, "PNG", transparency=transparency), GREEN) == GREEN


def test_48_bit_png_with_a_transparent_colour() -> None:
    image = Image.new("RGB", (2, 2), (1, 2, 3))
    image.info["transparency"] = (0x0100, 0x02FF, 0x0300)
    assert one_pixel(image, GREEN) == GREEN
    image.info["transparency"] = (0x1100, 0x02FF, 0x0300)
    assert one_pixel(image, GREEN) == (1, 2, 3)


def test_16_bit_is_scaled_and_rounded_never_clipped() -> None:
    levels = np.arange(65536, dtype=np.uint16)
    expected = [round(level / 257) for level in range(65536)]  # 65535 / 255 = 257, and no level lies halfway
    assert scale_to_8_bit(levels).tolist() == expected


@pytest.mark.parametrize(
    ("levels", "maximum", "expected"),
    [
        (np.array([0.0, 0.5, 1.0], np.float32), None, [0, 128, 255]),
        (np.array([0.0, 100.0, 200.0], np.float32), None, [0, 100, 200]),
        (np.array([0.0, 257.0, 65535.0], np.float32), None, [0, 1, 255]),
        (np.array([-1.0, 0.0, 1.0], np.float32), None, [0, 128, 255]),
        (np.array([0, 1, 200], np.int32), None, [0, 1, 200]),
        (np.array([0, 257, 65535], np.int32), None, [0, 1, 255]),
        (np.array([-100, 0, 100], np.int32), None, [0, 128, 255]),
        (np.array([0, 1 << 29, 1 << 30], np.int32), None, [0, 128, 255]),
        (np.array([0, 100, 100], np.int32), 65535, [0, 0, 0]),
        (np.array([0, 2048, 4095], np.uint16), 4095, [0, 128, 255]),
        (np.array([-5.0, -5.0], np.float32), None, [0, 0]),
    ],
)
def test_ranges(levels: np.ndarray, maximum: int | None, expected: list[int]) -> None:
    assert scale_to_8_bit(levels, maximum).tolist() == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_levels_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(BadSample) as caught:
        scale_to_8_bit(np.array([0.5, value, 1.0], np.float32), None)
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize(
    ("scale", "expected"), [(65535, [0, 8, 16]), (4095, [0, 128, 255]), ("max", [0, 128, 255]), (8191, [0, 64, 127])]
)
def test_scale_of_16_bits(scale: int | str, expected: list[int]) -> None:
    options = DecodeOptions(scale_16bit=scale)
    levels = np.array([[0, 2048, 4095]], np.uint16)
    image = Image.fromarray(levels)
    assert np.asarray(to_rgb(image, options))[0, :, 1].tolist() == expected
    assert array_to_rgb(levels, options)[0, :, 1].tolist() == expected
    assert array_to_rgb(np.dstack([levels] * 3), options)[0, :, 2].tolist() == expected
    assert image_to_array(image).tolist() == levels.tolist()  # so that the scale is applied to it, too


def test_a_level_above_the_scale_is_refused() -> None:
    with pytest.raises(BadSample) as caught:
        array_to_rgb(np.full((2, 2), 4096, np.uint16), DecodeOptions(scale_16bit=4095))
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("scale", [65535, "max", 4095])
def test_the_scale_is_of_16_bits_only(scale: int | str) -> None:
    options = DecodeOptions(scale_16bit=scale)
    assert one_pixel(Image.new("L", (2, 2), 100)) == (100, 100, 100)
    assert array_to_rgb(np.full((2, 2), 100, np.uint8), options)[0, 0, 0] == 100
    assert np.asarray(to_rgb(Image.new("F", (2, 2), 0.5), options))[0, 0, 0] == 128


def test_recipe_names_the_scale_only_where_it_is_chosen() -> None:
    for options, keys in (
        (DecodeOptions(), {"max_pixels", "background"}),
        (DecodeOptions(1000, (1, 2, 3), "max"), {"max_pixels", "background", "scale_16bit"}),
    ):
        recipe = json.loads(json.dumps(options.to_recipe()))
        assert recipe.keys() == keys
        assert DecodeOptions.from_recipe(recipe) == options


def test_strips_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = np.random.default_rng(0).integers(0, 65536, (37, 41), dtype=np.uint16)
    whole = scale_to_8_bit(levels)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (37, 41, 3), dtype=np.uint8))
    monkeypatch.setattr("pipeline.image.pixel_modes.STRIP_PIXELS", 100)
    np.testing.assert_array_equal(scale_to_8_bit(levels), whole)
    np.testing.assert_array_equal(to_array(image, np.empty((37, 41, 3), np.uint8)), np.asarray(image))


def test_16_bit_tiff_where_zero_is_white() -> None:
    image = Image.new("I;16", (2, 2), 0)
    assert one_pixel(reread(image, "TIFF", tiffinfo={262: 0})) == WHITE
    assert one_pixel(reread(image, "TIFF")) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (2, 3, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_arrays(shape: tuple[int, ...], dtype: type) -> None:
    top = np.iinfo(dtype).max
    array = np.full(shape, top, dtype)
    array[0, 0] = 0
    rgb = array_to_rgb(array)
    assert rgb.shape == (2, 3, 3)
    assert rgb[1, 2].tolist() == [255, 255, 255]
    assert rgb[0, 0].tolist() == ([255] * 3 if shape[-1] == 4 else [0] * 3)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), np.int64),
        np.zeros((2, 3, 2), np.uint8),
        np.zeros(5, np.uint8),
        np.zeros((1, 2, 3, 3), np.uint8),
        np.zeros((0, 3), np.uint8),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(BadSample) as caught:
        array_to_rgb(array)
    assert caught.value.reason == "bad-shape"


def test_arrays_need_not_be_contiguous() -> None:
    array = np.random.default_rng(0).integers(0, 65536, (4, 6, 3), dtype=np.uint16)
    flipped = array[::-1, ::2]
    np.testing.assert_array_equal(array_to_rgb(flipped), array_to_rgb(flipped.copy()))
    assert array_to_rgb(flipped).flags.c_contiguous


def test_12_bit_tiff_is_scaled_by_its_own_maximum() -> None:
    levels = [0, 2048, 4095, 1024]
    packed = int("".join(f"{level:012b}" for level in levels), 2).to_bytes(6, "big")
    tags = [(256, 3, 4), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (279, 4, 6)]
    data = b"II*\0" + struct.pack("<I", 16) + packed + b"\0\0" + struct.pack("<H", len(tags))
    data += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags) + bytes(4)
    image = Image.open(io.BytesIO(data))
    assert np.asarray(to_rgb(image))[0, :, 0].tolist() == [0, 128, 255, 64]
