"""Where an image goes: the part of the source that is resized, to what size, and where that lands in the square.

The rounding is torchvision's, so that a stored image lies on the same pixel grid as the one that
`v2.Resize(S, antialias=True)` + `v2.CenterCrop(S)` gives (`torchvision/transforms/functional.py`,
`_compute_resized_output_size` and `center_crop`); `pad` is `Resize(None, max_size=S)` + `CenterCrop(S)`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pipeline.store.geometry import Geometry


@dataclass(frozen=True)
class Placement:
    """One resize: `box` of the source becomes `size`, which goes to `offset` in the S x S square.

    Args:
        box: (left, top, right, bottom) in source pixels, fractional.
        size: (width, height) in pixels, at most (S, S).
        offset: (left, top) in pixels.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]
    offset: tuple[int, int]

    @property
    def scale(self) -> float:
        """Source pixels per stored pixel, the smaller of both directions; below 1 where the image is enlarged."""
        left, top, right, bottom = self.box
        return min((right - left) / self.size[0], (bottom - top) / self.size[1])


@functools.lru_cache(4096)  # photographs come in few sizes
def crop_placement(height: int, width: int, geometry: Geometry) -> Placement:
    """Where a source of `height` x `width` pixels (both at least 1) goes.

    Cutting before resizing keeps memory at S x S however long and thin the source is.
    """
    side, short, long = geometry.size, min(height, width), max(height, width)
    if geometry.fit == "stretch":
        return Placement((0.0, 0.0, float(width), float(height)), (side, side), (0, 0))
    if geometry.fit == "pad":
        shorter = max(1, int(side * short / long))
        w, h = (side, shorter) if width >= height else (shorter, side)
        return Placement((0.0, 0.0, float(width), float(height)), (w, h), ((side - w) // 2, (side - h) // 2))
    longer = int(side * long / short)
    w, h = (side, longer) if width <= height else (longer, side)  # size of the whole image once resized
    left, top = round((w - side) / 2), round((h - side) / 2)  # Python's rounding, half to even, as torchvision's
    x, y = width / w, height / h
    box = (left * x, top * y, min((left + side) * x, width), min((top + side) * y, height))
    return Placement(box, (side, side), (0, 0))
