"""From any pixel mode of PIL to 8-bit RGB. `docs/decoding.md` lists what becomes what."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image.options import DEFAULTS, WHITE_16BIT, DecodeOptions

BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
MIN_IS_WHITE = 0
STRIP_PIXELS = 1 << 20


def to_rgb(image: Image.Image, options: DecodeOptions = DEFAULTS) -> Image.Image:
    """A loaded image, in any mode that PIL reads, in mode RGB."""
    transparency = image.info.get("transparency")
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        levels = np.asarray(image)
        is_unsigned = image.format == "TIFF" and tiff_tag(image, SAMPLE_FORMAT, (1,))[0] == 1
        if image.mode == "I" and levels.min() < 0 and is_unsigned:
            raise BadSample("unsupported", "levels of 32 bits from 2^31 on, which Pillow can't read")
        rgb = Image.fromarray(levels_to_rgb(levels, _declared_maximum(image), options))
        if _min_is_white(image):
            rgb = Image.fromarray(255 - np.asarray(rgb))
        if isinstance(transparency, int):
            rgb.paste(options.background, mask=Image.fromarray(levels == transparency))
        return rgb
    if image.mode == "RGB" and isinstance(transparency, tuple) and max(transparency) > 255:
        image = image.copy()  # the caller's image stays as it is
        # a 48-bit PNG is read as 24-bit, but its transparent colour is not
        image.info["transparency"] = tuple(level >> 8 for level in transparency)
    if image.mode == "La":  # PIL converts it to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*options.background, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image if image.mode == "RGB" else image.convert("RGB")


def tiff_tag(image: Image.Image, tag: int, default: Any) -> Any:
    """A tag of a TIFF; the default where there is none, and for other formats."""
    return image.tag_v2.get(tag, default) if image.format == "TIFF" else default  # type: ignore[attr-defined]


def _declared_maximum(image: Image.Image) -> int | None:
    """The level that the file's format calls white, None where it says nothing."""
    if image.mode == "F":
        return None
    if image.format == "TIFF":
        bits = int(tiff_tag(image, BITS_PER_SAMPLE, (16,))[0])
        return 2**bits - 1 if image.mode.startswith("I;16") else None
    return WHITE_16BIT


def _min_is_white(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") and bool(tiff_tag(image, PHOTOMETRIC, None) == MIN_IS_WHITE)


def levels_to_rgb(levels: np.ndarray, maximum: int | None, options: DecodeOptions) -> np.ndarray:
    """uint8 (H, W, 3), C-contiguous, out of levels of any dtype, (H, W) or (H, W, C), C 1, 3 or 4, the last one alpha.

    `maximum` is the level that is white, None where the file doesn't say it (see `scale_to_8_bit`).
    """
    if maximum == WHITE_16BIT and levels.dtype.kind == "u" and options.scale_16bit != WHITE_16BIT:
        highest = int(levels.max())
        maximum = max(1, highest) if options.scale_16bit == "max" else int(options.scale_16bit)
        if highest > maximum:
            raise BadSample("unsupported", f"a level of {highest}; --scale-16bit is {maximum}")
    if levels.dtype != np.uint8 or maximum not in (None, 255):
        levels = scale_to_8_bit(np.ascontiguousarray(levels), maximum)
    if levels.shape[2:] == (4,):
        return np.array(to_rgb(Image.fromarray(np.ascontiguousarray(levels)), options))
    if levels.shape[2:] != (3,):
        levels = np.repeat(levels.reshape(*levels.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(levels)


def scale_to_8_bit(levels: np.ndarray, maximum: int | None = WHITE_16BIT) -> np.ndarray:
    """Levels of more than 8 bits, or fractional ones, as uint8 of the same shape: scaled and rounded, never clipped.

    `maximum` becomes 255. None takes 1 (fractional levels only), 255 or 65535, the smallest that holds all levels; when
    none does, or some are negative, the image's own minimum to maximum become 0 to 255.
    """
    low, high = 0.0, float(maximum or 0)
    if maximum is None or levels.dtype.kind != "u":
        smallest, largest = float(levels.min()), float(levels.max())
        if not np.isfinite(smallest + largest):  # NaN, too, comes out of min
            raise BadSample("unsupported", "levels that are NaN or infinite")
        ranges = [high] if maximum else [*([1.0] if levels.dtype.kind == "f" else []), 255.0, 65535.0]
        fitting = [top for top in ranges if largest <= top and smallest >= 0]
        low, high = (0.0, fitting[0]) if fitting else (smallest, largest)
    out = np.empty(levels.shape, np.uint8)
    flat_in, flat_out = levels.reshape(-1), out.reshape(-1)
    span = high - low or 1.0
    for start in range(0, flat_in.size, STRIP_PIXELS):  # in strips, so that float64 stays small
        part = slice(start, start + STRIP_PIXELS)
        flat_out[part] = np.floor((flat_in[part].astype(np.float64) - low) * 255 / span + 0.5)
    return out


def to_array(rgb: Image.Image, out: np.ndarray) -> np.ndarray:
    """Copy an RGB image's pixels to `out`, uint8 (height, width, 3); returns it. In strips: no second copy is made."""
    width, height = rgb.size
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = rgb.crop((0, top, width, min(top + rows, height))) if rows < height else rgb
        out[top : top + rows] = np.asarray(strip)
    return out


def image_to_array(image: Image.Image) -> np.ndarray:
    """A PIL image that a program made or opened, as the array that decodes like the same picture in a file.

    It is uint8 (H, W) or (H, W, 3), or uint16 (H, W) where the image's levels have 16 bits.
    """
    image.load()
    if image.mode == "L" and not image.has_transparency_data:
        return np.asarray(image)
    plain = "transparency" not in image.info and not _min_is_white(image)
    if plain and image.mode.startswith("I;16") and _declared_maximum(image) == WHITE_16BIT:
        return np.asarray(image).astype(np.uint16)
    return np.asarray(to_rgb(image))


def array_to_rgb(array: np.ndarray, options: DecodeOptions = DEFAULTS) -> np.ndarray:
    """uint8 (H, W, 3), C-contiguous, out of uint8 or uint16 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).

    16 bits are scaled to 8, a fourth channel is alpha over the background.
    """
    channels = {2: 1, 3: array.shape[-1]}.get(array.ndim)
    if array.dtype not in (np.uint8, np.uint16) or channels not in (1, 3, 4) or array.size == 0:
        raise BadSample("bad-shape", f"array of {array.dtype} {array.shape}")
    return levels_to_rgb(array, None if array.dtype == np.uint8 else WHITE_16BIT, options)
