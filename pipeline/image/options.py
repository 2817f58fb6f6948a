"""How to decode, within which limits, and what a decoded sample was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.errors import BadSample

WHITE_16BIT = 65535
# Memory that decoding takes at its peak, in bytes for each pixel, as measured: with alpha or more than 8 bits, and
# without; formats that take more stand in `pil_decode`.
DEEP_PEAK_BYTES, PLAIN_PEAK_BYTES = 20, 8


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode.

    Args:
        max_pixels: larger images are refused before they are decoded.
        background: what shows through transparent pixels, (R, G, B).
        scale_16bit: the level that becomes white in images of 16 bits a channel; `max`: each image's own highest.
    """

    max_pixels: int = 178_956_970
    background: tuple[int, int, int] = (255, 255, 255)
    scale_16bit: int | str = WHITE_16BIT

    @property
    def max_bytes(self) -> int:
        """Memory that decoding one image may take: 2 GB, or 12 bytes for each allowed pixel where that is more."""
        return max(2_000_000_000, 12 * self.max_pixels)

    def to_recipe(self) -> dict[str, Any]:
        """What a store records of it."""
        recipe: dict[str, Any] = {"max_pixels": self.max_pixels, "background": list(self.background)}
        return recipe if self.scale_16bit == WHITE_16BIT else {**recipe, "scale_16bit": self.scale_16bit}

    @classmethod
    def from_recipe(cls, recipe: dict[str, Any]) -> DecodeOptions:
        """The options that a store's recipe records. Raises KeyError, TypeError or ValueError where it is damaged."""
        scale = recipe.get("scale_16bit", WHITE_16BIT)
        return cls(recipe["max_pixels"], tuple(recipe["background"]), scale)


DEFAULTS = DecodeOptions()


@dataclass(frozen=True)
class Decoded:
    """What one sample was.

    Attributes:
        height, width: of the source in pixels, after the EXIF transpose where that is asked for.
        mode: PIL's name of the source's pixel mode.
        warnings: how often the decoder complained about a sample that it could decode all the same.
        peak_16bit: highest of the 8-bit levels that levels of 16 bits became; -1 for sources of other depths.
    """

    height: int
    width: int
    mode: str
    warnings: int
    peak_16bit: int = -1


def check_pixels(height: int, width: int, options: DecodeOptions, peak_bytes: int = DEEP_PEAK_BYTES) -> None:
    """Raise BadSample where an image has more pixels, or takes more memory (in bytes for each pixel), than allowed."""
    if height * width > options.max_pixels:
        raise BadSample("too-large", f"{width} x {height} pixels; --max-pixels is {options.max_pixels:,}")
    if height * width * peak_bytes > options.max_bytes:
        needed, allowed = height * width * peak_bytes / 1e9, options.max_bytes / 1e9
        raise BadSample(
            "too-large",
            f"{width} x {height} pixels take {needed:.1f} GB to decode, of {allowed:.1f} GB; raise --max-pixels",
        )
