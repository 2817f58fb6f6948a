"""Boxes of a batch of squares, each resampled to one size on the device, in two batched matrix products.

A store of `--fit stretch` keeps the whole picture in a square. Boxes are drawn in the pixels of the picture as it was,
then mapped into the square: rows and columns are resampled each at a scale of its own, which undoes the stretch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.order import uniform

RRC_TOP, RRC_LEFT, RRC_TRIES = 5, 6, 7
"""Streams of `uniform`; from RRC_TRIES on two for each try."""

ASPECT = (3 / 4, 4 / 3)
"""Smallest and largest width over height of a random resized crop, torchvision's."""


@dataclass(frozen=True)
class Boxes:
    """Crop boxes of n samples in pixels, each (n,), whole numbers or not."""

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray

    @classmethod
    def of(cls, boxes: np.ndarray) -> Boxes:
        """From (n, 4): top, left, height, width."""
        return cls(*np.asarray(boxes).T)

    def mapped(self, rows: np.ndarray, columns: np.ndarray) -> Boxes:
        """In other pixels: vertical lengths times `rows`, horizontal ones times `columns`, each float (n,)."""
        return Boxes(self.top * rows, self.left * columns, self.height * rows, self.width * columns)


def resized_crop_boxes(
    seed: int,
    epoch: int,
    slots: np.ndarray,
    size: tuple[int, int] | np.ndarray,
    min_area: float,
    tries: int = 10,
) -> Boxes:
    """Boxes of random resized crops: area uniform in [min_area, 1], aspect ratio log-uniform in [3/4, 4/3].

    As torchvision's `RandomResizedCrop.get_params`, but keyed by sample: the first of ten draws that fits, else the
    largest central box with an aspect ratio between those bounds.

    Args:
        slots: int64 (n,).
        size: height and width of the images in pixels: one for all, or (2, n).

    Returns:
        int64 (n,) each.
    """
    height, width = (np.broadcast_to(np.asarray(side, np.int64), len(slots)) for side in size)
    draws = np.stack([uniform(seed, epoch, slots, RRC_TRIES + i) for i in range(2 * tries)])  # (2 tries, n)
    area = height * width * (min_area + (1 - min_area) * draws[0::2])
    low, high = np.log(ASPECT[0]), np.log(ASPECT[1])
    aspect = np.exp(low + (high - low) * draws[1::2])
    widths = np.rint(np.sqrt(area * aspect)).astype(np.int64)  # (tries, n)
    heights = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first, columns, drawn = fits.argmax(0), np.arange(len(slots)), fits.any(0)
    widest = np.minimum(width, np.rint(height * ASPECT[1]).astype(np.int64))
    highest = np.minimum(height, np.rint(width / ASPECT[0]).astype(np.int64))
    w = np.where(drawn, widths[first, columns], widest)
    h = np.where(drawn, heights[first, columns], highest)
    top = (uniform(seed, epoch, slots, RRC_TOP) * (height - h + 1)).astype(np.int64)
    left = (uniform(seed, epoch, slots, RRC_LEFT) * (width - w + 1)).astype(np.int64)
    return Boxes(np.where(drawn, top, (height - h) // 2), np.where(drawn, left, (width - w) // 2), h, w)


def window_boxes(
    seed: int, epoch: int, slots: np.ndarray, source_sizes: np.ndarray, share: float, streams: tuple[int, int]
) -> Boxes:
    """Square windows of `share` of each picture's shorter side, anywhere in it: float (n,) each, in source pixels."""
    side = source_sizes.min(1) * share
    top, left = (uniform(seed, epoch, slots, stream) for stream in streams)
    return Boxes(top * (source_sizes[:, 0] - side), left * (source_sizes[:, 1] - side), side, side)


def centre_boxes(source_sizes: np.ndarray, resize: int, crop: int) -> Boxes:
    """What torchvision's `Resize(resize)` and `CenterCrop(crop)` show of each picture, in its own pixels.

    Args:
        source_sizes: int (n, 2): height and width.

    Returns:
        float (n,) each, never beyond the picture.
    """
    sizes = source_sizes.astype(np.int64)
    shorter = sizes.min(1, keepdims=True)
    resized = sizes * resize // shorter  # torchvision cuts the longer side's fraction off
    scale = sizes / resized
    sides = np.minimum(crop, resized)
    corner = np.rint((resized - sides) / 2)
    return Boxes.of(np.concatenate([corner * scale, sides * scale], 1))


def triangle(distance: Tensor) -> Tensor:
    """The filter of bilinear resampling."""
    return (1 - distance).clamp(min=0)


def cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5 (IEEE Trans. ASSP 29, 1981), the one of PIL and of torchvision with antialiasing."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {"triangle": triangle, "cubic": cubic}


def _matrices(start: Tensor, length: Tensor, size: int, out: int, mirrored: Tensor, resample: str) -> Tensor:
    """Rows of weights that resample pixels [start, start + length) of a line of `size` to `out` pixels.

    The filter is widened where it shrinks (antialiasing), cut and renormalised at the box's edges, as torchvision has
    it. `start`, `length` float (n,), `mirrored` bool (n,). Returns (n, out, size).
    """
    scale = (length / out)[:, None, None]
    steps = torch.arange(out, device=start.device, dtype=start.dtype)
    steps = torch.where(mirrored[:, None], out - 1 - steps, steps)  # (n, out)
    centre = start[:, None, None] + (steps[:, :, None] + 0.5) * scale
    pixel = torch.arange(size, device=start.device, dtype=start.dtype) + 0.5
    weight = FILTERS[resample]((pixel - centre).abs() / scale.clamp(min=1))  # (n, out, size)
    first, end = start[:, None, None], (start + length)[:, None, None]
    # a pixel counts where more than half of it lies in the box; a box narrower than that takes the nearest pixel
    inside = (pixel > first) & (pixel < end)
    nearest = (pixel - 0.5) == ((first + end) / 2).floor().clamp(max=size - 1)
    weight = torch.where(inside.any(2, keepdim=True), weight * inside, nearest.to(weight.dtype))
    return weight / weight.sum(2, keepdim=True)


def resized_crop(
    images: Tensor, boxes: Boxes, out: int, mirrored: Tensor | None = None, resample: str = "triangle"
) -> Tensor:
    """Cut each sample's box and resize it to (out, out), antialiased, mirrored where asked: two batched products.

    Args:
        images: uint8 (n, C, H, W).
        boxes: in pixels of the images.
        mirrored: bool (n,), on the images' device; None for none.
        resample: `triangle` or `cubic`.

    Returns:
        float (n, C, out, out), 0 to 255; float16 on CUDA, whose 11 bits hold a uint8 exactly, else float32.
    """
    box = torch.tensor(np.stack([boxes.top, boxes.height, boxes.left, boxes.width]), dtype=torch.float32)
    top, height, left, width = box.to(images.device, non_blocking=True)
    unmirrored = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    dtype = torch.float16 if images.is_cuda else torch.float32
    rows = _matrices(top, height, images.shape[2], out, unmirrored, resample).to(dtype)
    columns = _matrices(left, width, images.shape[3], out, unmirrored if mirrored is None else mirrored, resample)
    # pixels: (n, C, H, W) -> (n, C, out, W) -> (n, C, out, out)
    pixels = images.to(dtype, memory_format=torch.contiguous_format)
    crops = rows[:, None] @ pixels @ columns.to(dtype)[:, None].transpose(2, 3)
    return crops.clamp(0, 255) if resample == "cubic" else crops  # the cubic overshoots at edges


def unstretched_crop(
    images: Tensor,
    source_sizes: np.ndarray,
    boxes: np.ndarray | Boxes,
    out: int,
    mirrored: Tensor | None = None,
    resample: str = "triangle",
) -> Tensor:
    """`resized_crop` for the squares of a store of `--fit stretch`, by boxes in the pictures' own pixels.

    Args:
        images: uint8 (n, C, S, S).
        source_sizes: int (n, 2): height and width of each picture before it was stretched (`loader.source_sizes`).
        boxes: float (n, 4): top, left, height, width in source pixels.
        out: side of the crops in pixels.
        mirrored: bool (n,), on the images' device; None for none.
        resample: `triangle` or `cubic`.

    Returns:
        float (n, C, out, out), 0 to 255, with the pictures' own aspect ratio.

    Raises:
        ValueError: a source size below 1, as bad slots have, or an unknown filter.
    """
    if resample not in FILTERS:
        raise ValueError(f"resample {resample!r}: must be {' or '.join(FILTERS)}")
    sizes = np.asarray(source_sizes)
    if sizes.shape != (len(images), 2) or (sizes < 1).any():
        raise ValueError("source_sizes: must be (n, 2), height and width of each picture, each at least 1")
    boxes = boxes if isinstance(boxes, Boxes) else Boxes.of(boxes)
    return resized_crop(
        images, boxes.mapped(images.shape[2] / sizes[:, 0], images.shape[3] / sizes[:, 1]), out, mirrored, resample
    )
