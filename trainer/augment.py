"""What happens to a batch of pixels on the device: resample or shift, flip, normalise, mix.

Each sample's randomness is a function of (seed, epoch, slot), see `trainer.order.uniform`; mixing alone goes by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from trainer.config import Config
from trainer.order import uniform

FLIP, SHIFT_TOP, SHIFT_LEFT, RRC_TOP, RRC_LEFT, RRC_TRIES = 2, 3, 4, 5, 6, 7
"""Streams of `uniform`; from RRC_TRIES on two for each try."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Boxes:
    """Crop boxes of n samples in pixels, each int64 (n,)."""

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray


def resized_crop_boxes(
    seed: int, epoch: int, slots: np.ndarray, size: tuple[int, int], min_area: float, tries: int = 10
) -> Boxes:
    """Boxes of random resized crops: area uniform in [min_area, 1], aspect ratio log-uniform in [3/4, 4/3].

    As torchvision's `RandomResizedCrop.get_params`: the first of ten draws that fits, else the whole image (for the
    squares of a store that is its fallback too), but keyed by sample.

    Args:
        slots: int64 (n,).
        size: (H, W) of the stored images.
    """
    height, width = size
    draws = np.stack([uniform(seed, epoch, slots, RRC_TRIES + i) for i in range(2 * tries)])  # (2 tries, n)
    area = height * width * (min_area + (1 - min_area) * draws[0::2])
    aspect = np.exp(np.log(3 / 4) + (np.log(4 / 3) - np.log(3 / 4)) * draws[1::2])
    widths = np.rint(np.sqrt(area * aspect)).astype(np.int64)  # (tries, n)
    heights = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first, columns = fits.argmax(0), np.arange(len(slots))
    w = np.where(fits.any(0), widths[first, columns], width)
    h = np.where(fits.any(0), heights[first, columns], height)
    top = (uniform(seed, epoch, slots, RRC_TOP) * (height - h + 1)).astype(np.int64)
    left = (uniform(seed, epoch, slots, RRC_LEFT) * (width - w + 1)).astype(np.int64)
    return Boxes(top, left, h, w)


def _resampling_matrices(start: Tensor, length: Tensor, size: int, out: int, mirrored: Tensor) -> Tensor:
    """Rows of weights that resample pixels [start, start + length) of a line of `size` to `out` pixels.

    The triangle filter, widened where it shrinks (antialiasing), cut and renormalised at the box's edges, as
    torchvision's bilinear resize has it. `start`, `length` float (n,), `mirrored` bool (n,). Returns (n, out, size).
    """
    scale = (length / out)[:, None, None]
    steps = torch.arange(out, device=start.device, dtype=start.dtype)
    steps = torch.where(mirrored[:, None], out - 1 - steps, steps)  # (n, out)
    centre = start[:, None, None] + (steps[:, :, None] + 0.5) * scale
    pixel = torch.arange(size, device=start.device, dtype=start.dtype) + 0.5
    weight = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)  # (n, out, size)
    first, end = start[:, None, None], (start + length)[:, None, None]
    weight = weight * ((pixel > first) & (pixel < end))
    return weight / weight.sum(2, keepdim=True)


def resized_crop(images: Tensor, boxes: Boxes, out: int, mirrored: Tensor) -> Tensor:
    """Cut each sample's box and resize it to (out, out), antialiased, mirrored where asked: two batched products.

    Args:
        images: uint8 (n, C, H, W).
        mirrored: bool (n,), on the images' device.

    Returns:
        float (n, C, out, out), 0 to 255; float16 on CUDA, whose 11 bits hold a uint8 exactly, else float32.
    """
    box = torch.tensor(np.stack([boxes.top, boxes.height, boxes.left, boxes.width]), dtype=torch.float32)
    top, height, left, width = box.to(images.device, non_blocking=True)
    dtype = torch.float16 if images.is_cuda else torch.float32
    rows = _resampling_matrices(top, height, images.shape[2], out, torch.zeros_like(mirrored)).to(dtype)
    columns = _resampling_matrices(left, width, images.shape[3], out, mirrored).to(dtype)
    # pixels: (n, C, H, W) -> (n, C, out, W) -> (n, C, out, out)
    pixels = images.to(dtype, memory_format=torch.contiguous_format)
    return rows[:, None] @ pixels @ columns[:, None].transpose(2, 3)


def shift(images: Tensor, top: np.ndarray, left: np.ndarray, pad: int) -> Tensor:
    """Pad by reflection and cut windows of the old size at (top, left), each int64 (n,) in 0 .. 2 pad."""
    n, _, height, width = images.shape
    # reflection isn't there for uint8; float32 holds it exactly
    padded = F.pad(images.float(), (pad, pad, pad, pad), mode="reflect").permute(0, 2, 3, 1)  # (n, H', W', C)
    offsets = torch.from_numpy(np.stack([top, left])).to(images.device, non_blocking=True)
    rows = offsets[0][:, None] + torch.arange(height, device=images.device)  # (n, H)
    columns = offsets[1][:, None] + torch.arange(width, device=images.device)
    sample = torch.arange(n, device=images.device)[:, None, None]
    return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class DeviceTransform:
    """Turns uint8 batches into the model's batches, on the device that holds them: augment, then normalise.

    Example:
        transform = DeviceTransform(store["train"].mean, store["train"].std, device="cuda", flip=0.5)
        for images, labels in loader:
            x = transform.training(images, loader.indices, epoch)    # evaluation: transform.evaluation(images)

    Args:
        mean, std: per channel, of pixels divided by 255; of one channel three equal ones are made.
        device: where the batches are.
        seed: decides, with epoch and slot, what happens to a sample.
        flip: probability of the horizontal flip.
        pad: shift by up to so many pixels, borders reflected.
        min_area: smallest share of the image's area that a random resized crop takes; None for no resampling.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        flip: float = 0.0,
        pad: int = 0,
        min_area: float | None = None,
    ) -> None:
        # a channel that never changes (std 0) stays 0 instead of becoming infinite
        self._scale = (1 / (255 * torch.tensor(std).clamp(min=1e-3))).view(-1, 1, 1).to(device)
        self._mean = (255 * torch.tensor(mean)).view(-1, 1, 1).to(device)
        self.seed, self.flip, self.pad, self.min_area = seed, flip, pad, min_area

    def training(self, images: Tensor, slots: np.ndarray, epoch: int, crop: int | None = None) -> Tensor:
        """Augmented and normalised.

        Args:
            images: uint8 (n, C, H, W).
            slots: int64 (n,), the samples' store slots (`loader.indices`).
            crop: side of the resized crops in pixels, H by default; without `min_area` sizes stay.

        Returns:
            float32 (n, 3, h, w), channels_last.
        """
        return self.normalise(*self.augment(images, slots, epoch, crop))

    def evaluation(self, images: Tensor) -> Tensor:
        """Normalised only: uint8 (n, C, H, W) to float32 (n, 3, H, W), channels_last."""
        return self.normalise(images)

    def augment(
        self, images: Tensor, slots: np.ndarray, epoch: int, crop: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The first half of `training`: pixels (n, C, h, w), 0 to 255, and which of them are still to be mirrored."""
        draws = torch.from_numpy(uniform(self.seed, epoch, slots, FLIP) < self.flip)
        mirrored = draws.to(images.device, non_blocking=True)
        if self.min_area is not None:
            height, width = images.shape[2:]
            boxes = resized_crop_boxes(self.seed, epoch, slots, (height, width), self.min_area)
            return resized_crop(images, boxes, crop or height, mirrored).float(), None
        if self.pad:
            top = (uniform(self.seed, epoch, slots, SHIFT_TOP) * (2 * self.pad + 1)).astype(np.int64)
            left = (uniform(self.seed, epoch, slots, SHIFT_LEFT) * (2 * self.pad + 1)).astype(np.int64)
            images = shift(images, top, left, self.pad)
        return images, mirrored if self.flip else None

    def normalise(self, pixels: Tensor, mirrored: Tensor | None = None) -> Tensor:
        """The second half: mirror where asked, bool (n,), and normalise. Tensors only, so it can be compiled."""
        if mirrored is not None:
            pixels = mirror(pixels, mirrored)
        pixels = ((pixels - self._mean) * self._scale).expand(-1, 3, -1, -1)
        return pixels.contiguous(memory_format=torch.channels_last)


def mirror(pixels: Tensor, mirrored: Tensor) -> Tensor:
    """The pixels (n, C, h, w), mirrored left to right where `mirrored`, bool (n,)."""
    return torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels)


def make_mix(config: Config, num_classes: int) -> v2.RandomChoice | None:
    """Mixup, cutmix or a draw of the two: (images, labels) -> (images, soft labels (n, classes)). None for neither."""
    kinds = (v2.MixUp, config.mixup), (v2.CutMix, config.cutmix)
    mixes = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(mixes) if mixes else None


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of what is random in a step beyond the pixels (dropout, mixup, cutmix), so that no state need be saved."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
