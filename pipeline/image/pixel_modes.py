"""From any pixel mode of PIL to 8-bit RGB. `docs/decoding.md` lists what becomes what."""

from __future__ import annotations

import numpy as np
from PIL import Image

BITS_PER_SAMPLE = 258  # TIFF tags
PHOTOMETRIC = 262
MIN_IS_WHITE = 0
STRIP_PIXELS = 1 << 20
BACKGROUND = (255, 255, 255)
"""What shows through transparent pixels, (R, G, B)."""


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """A loaded image in mode RGB.

    Args:
        image: in any mode that PIL reads.
        background: what shows through where the image is transparent.

    Raises:
        ValueError: PIL can't convert this mode.
    """
    transparency = image.info.get("transparency")
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        levels = np.asarray(image)
        rgb = Image.fromarray(scale_to_8_bit(levels, _declared_maximum(image))).convert("RGB")
        if _min_is_white(image):
            rgb = Image.fromarray(255 - np.asarray(rgb))
        if isinstance(transparency, int):
            rgb.paste(background, mask=Image.fromarray(levels == transparency))
        return rgb
    if image.mode == "RGB" and isinstance(transparency, tuple) and max(transparency) > 255:
        image = image.copy()  # the caller's image stays as it is
        # a 48-bit PNG is read as 24-bit, but its transparent colour is not
        image.info["transparency"] = tuple(level >> 8 for level in transparency)
    if image.mode == "La":  # PIL converts it to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image if image.mode == "RGB" else image.convert("RGB")


def _declared_maximum(image: Image.Image) -> int | None:
    """The level that the file's format calls white, None where it says nothing."""
    if image.mode == "F":
        return None
    if image.format == "TIFF":
        bits = int(image.tag_v2.get(BITS_PER_SAMPLE, (16,))[0])  # type: ignore[attr-defined]
        return 2**bits - 1 if image.mode.startswith("I;16") else None
    return 65535


def _min_is_white(image: Image.Image) -> bool:
    return (
        image.format == "TIFF" and image.mode.startswith("I;16") and image.tag_v2.get(PHOTOMETRIC) == MIN_IS_WHITE  # type: ignore[attr-defined]
    )


def scale_to_8_bit(levels: np.ndarray, maximum: int | None = 65535) -> np.ndarray:
    """Levels of more than 8 bits, or fractional ones, as uint8 of the same shape: scaled and rounded, never clipped.

    Args:
        levels: uint16, int32 or float32, any shape.
        maximum: the level that becomes 255. None takes 1 (fractional levels only), 255 or 65535, the smallest that
            holds all levels; when none does, or some are negative, the image's own minimum to maximum become 0 to 255.
            Levels that aren't finite count as 0.
    """
    low = 0.0
    high = float(maximum or 0)
    if maximum is None or levels.dtype.kind != "u":
        levels = np.nan_to_num(levels, nan=0.0, posinf=0.0, neginf=0.0) if levels.dtype.kind == "f" else levels
        smallest, largest = float(levels.min()), float(levels.max())
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

    Returns:
        uint8 (H, W) or (H, W, 3).

    Raises:
        OSError: it was opened from a file whose data are damaged.
        ValueError: PIL can't convert its mode.
    """
    image.load()
    if image.mode == "L" and not image.has_transparency_data:
        return np.asarray(image)
    return np.asarray(to_rgb(image, BACKGROUND))


def array_to_rgb(array: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """uint8 (H, W, 3), C-contiguous, out of uint8 or uint16 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).

    16 bits are scaled to 8, a fourth channel is alpha over the background.

    Raises:
        ValueError: another dtype or shape, or no pixels.
    """
    channels = {2: 1, 3: array.shape[-1]}.get(array.ndim)
    if array.dtype not in (np.uint8, np.uint16) or channels not in (1, 3, 4) or array.size == 0:
        raise ValueError(f"array of {array.dtype} {array.shape}")
    if array.dtype != np.uint8:
        array = scale_to_8_bit(np.ascontiguousarray(array))
    if channels == 4:
        return np.array(to_rgb(Image.fromarray(np.ascontiguousarray(array)), background))
    if channels == 1:
        array = np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(array)
