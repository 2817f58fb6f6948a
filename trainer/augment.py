"""What happens to a batch of pixels on the device: resample or shift, flip, normalise, mix.

Each sample's randomness is a function of (seed, epoch, slot), see `trainer.order.uniform`; mixing alone goes by batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from pipeline.errors import UsageError
from pipeline.store.reader import Split, Store
from trainer.config import Config
from trainer.order import uniform
from trainer.resample import centre_boxes, resized_crop, resized_crop_boxes, unstretched_crop, window_boxes

FLIP, SHIFT_TOP, SHIFT_LEFT, POLICY = 2, 3, 4, 64
"""Streams of `uniform`; `trainer.resample` has those from 5 on."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        resample: filter of what is resampled, `triangle` or `cubic`.
        stretched: the batches are whole pictures in squares (`--fit stretch`), whose aspect ratio is given back. Each
            method then needs `source_sizes`, int (n, 2), `loader.source_sizes`.
        eval_resize, eval_crop: evaluation of stretched pictures shows what torchvision's `Resize(eval_resize)` and
            `CenterCrop(eval_crop)` show; the side of the squares by default.
        alternate_flip: draw the flip in epoch 0 only, and mirror every other epoch.
        randaugment: magnitude of torchvision's RandAugment with two operations, 0 for none; one sample at a time.
        erasing: probability of torchvision's RandomErasing, which erases to the mean.
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
        resample: str = "triangle",
        stretched: bool = False,
        eval_resize: int | None = None,
        eval_crop: int | None = None,
        alternate_flip: bool = False,
        randaugment: int = 0,
        erasing: float = 0.0,
    ) -> None:
        # a channel that never changes (std 0) stays 0 instead of becoming infinite
        self._scale = (1 / (255 * torch.tensor(std).clamp(min=1e-3))).view(-1, 1, 1).to(device)
        self._mean = (255 * torch.tensor(mean)).view(-1, 1, 1).to(device)
        self.seed, self.flip, self.pad, self.min_area = seed, flip, pad, min_area
        self.resample, self.stretched, self.eval_resize, self.eval_crop = resample, stretched, eval_resize, eval_crop
        self.alternate_flip = alternate_flip
        self._policy: list[nn.Module] = []
        if randaugment:
            self._policy.append(v2.RandAugment(magnitude=randaugment))
        if erasing:
            self._policy += [v2.ToDtype(torch.float32), v2.RandomErasing(erasing, value=[255 * m for m in mean])]

    def training(
        self,
        images: Tensor,
        slots: np.ndarray,
        epoch: int,
        crop: int | None = None,
        source_sizes: np.ndarray | None = None,
    ) -> Tensor:
        """Augmented and normalised.

        Args:
            images: uint8 (n, C, H, W).
            slots: int64 (n,), the samples' store slots (`loader.indices`).
            crop: side in pixels of what is resampled, H by default.
            source_sizes: of stretched pictures.

        Returns:
            float32 (n, 3, h, w), channels_last.
        """
        return self.normalise(*self.augment(images, slots, epoch, crop, source_sizes))

    def evaluation(self, images: Tensor, source_sizes: np.ndarray | None = None) -> Tensor:
        """Normalised, stretched pictures after their centre was cut: float32 (n, 3, h, w), channels_last."""
        if not self.stretched:
            return self.normalise(images)
        assert source_sizes is not None
        crop = self.eval_crop or images.shape[2]
        boxes = centre_boxes(source_sizes, self.eval_resize or images.shape[2], crop)
        return self.normalise(unstretched_crop(images, source_sizes, boxes, crop, None, self.resample).float())

    def augment(
        self,
        images: Tensor,
        slots: np.ndarray,
        epoch: int,
        crop: int | None = None,
        source_sizes: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The first half of `training`: pixels (n, C, h, w), 0 to 255, and which of them are still to be mirrored."""
        drawn = uniform(self.seed, 0 if self.alternate_flip else epoch, slots, FLIP) < self.flip
        if self.alternate_flip and epoch % 2:
            drawn = ~drawn
        mirrored = torch.from_numpy(drawn).to(images.device, non_blocking=True)
        pixels, to_mirror = self._placed(images, mirrored, slots, epoch, crop or images.shape[2], source_sizes)
        if not self._policy:
            return pixels, to_mirror
        return self._changed(pixels if to_mirror is None else mirror(pixels, to_mirror), slots, epoch), None

    def _placed(
        self,
        images: Tensor,
        mirrored: Tensor,
        slots: np.ndarray,
        epoch: int,
        crop: int,
        source_sizes: np.ndarray | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Resampled pictures, already mirrored, or shifted ones, and which to mirror."""
        height, width = images.shape[2:]
        if self.stretched:
            assert source_sizes is not None
            if self.min_area is None:
                streams = SHIFT_TOP, SHIFT_LEFT  # --pad shifts no stretched pictures
                boxes = window_boxes(self.seed, epoch, slots, source_sizes, crop / height, streams)
            else:
                boxes = resized_crop_boxes(self.seed, epoch, slots, source_sizes.T, self.min_area)
            pixels = unstretched_crop(images, source_sizes, boxes, crop, mirrored, self.resample)
            return pixels.float(), None
        if self.min_area is not None:
            boxes = resized_crop_boxes(self.seed, epoch, slots, (height, width), self.min_area)
            return resized_crop(images, boxes, crop, mirrored, self.resample).float(), None
        if self.pad:
            top = (uniform(self.seed, epoch, slots, SHIFT_TOP) * (2 * self.pad + 1)).astype(np.int64)
            left = (uniform(self.seed, epoch, slots, SHIFT_LEFT) * (2 * self.pad + 1)).astype(np.int64)
            images = shift(images, top, left, self.pad)
        return images, mirrored if self.flip or self.alternate_flip else None

    def _changed(self, pixels: Tensor, slots: np.ndarray, epoch: int) -> Tensor:
        """RandAugment and erasing of each sample, by random numbers of its own: torchvision draws them on the CPU."""
        keys = (uniform(self.seed, epoch, slots, POLICY) * 2**53).astype(np.int64).tolist()
        changed = []
        with torch.random.fork_rng(devices=[]):
            for image, key in zip(pixels.round().to(torch.uint8), keys, strict=True):
                torch.default_generator.manual_seed(key)
                for change in self._policy:
                    image = change(image)
                changed.append(image)
        return torch.stack(changed)

    def normalise(self, pixels: Tensor, mirrored: Tensor | None = None) -> Tensor:
        """The second half: mirror where asked, bool (n,), and normalise. Tensors only, so it can be compiled."""
        if mirrored is not None:
            pixels = mirror(pixels, mirrored)
        pixels = ((pixels - self._mean) * self._scale).expand(-1, 3, -1, -1)
        return pixels.contiguous(memory_format=torch.channels_last)


def mirror(pixels: Tensor, mirrored: Tensor) -> Tensor:
    """The pixels (n, C, h, w), mirrored left to right where `mirrored`, bool (n,)."""
    return torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels)


def device_transform(config: Config, store: Store, device: torch.device) -> DeviceTransform:
    """From the store's pixels to the model's, as the config says.

    Raises:
        UsageError: the store has no mean and std to normalise by.
    """
    if config.normalize == "imagenet":
        mean, std = [*IMAGENET_MEAN], [*IMAGENET_STD]
    elif "train" in store:
        mean, std = store["train"].mean, store["train"].std
    else:
        raise UsageError(f"{store.path}: has no split train, whose mean and std --normalize store takes")
    return DeviceTransform(
        mean,
        std,
        device=device,
        seed=config.seed,
        flip=config.flip,
        pad=config.pad,
        min_area=config.rrc_scale if config.augment == "rrc" else None,
        resample=config.resample,
        stretched=is_stretched(store),
        eval_resize=config.eval_resize,
        eval_crop=config.final_crop,
        alternate_flip=config.alternate_flip,
        randaugment=config.randaugment,
        erasing=config.random_erasing,
    )


def is_stretched(store: Store) -> bool:
    return bool(store.geometry["fit"] == "stretch")


def check_stretched(config: Config, stretched: bool, size: int, crop_flag: str) -> None:
    """Check what depends on whether the store is of --fit stretch.

    Args:
        size: of the squares that are evaluated, in pixels.
        crop_flag: the flag that sets evaluation's crop, for messages.

    Raises:
        UsageError: a field that such a store, or another, doesn't take.
    """
    crop, resize = config.final_crop, config.eval_resize
    if not stretched and resize:
        raise UsageError(f"--eval-resize {resize}: only for a store of --fit stretch; leave it out")
    if stretched and config.pad:
        raise UsageError(f"--pad {config.pad}: not for a store of --fit stretch, whose crops lie anywhere already")
    if stretched and (crop or size) > (resize or size) and (crop or 0) <= size:
        raise UsageError(
            f"--eval-resize {resize}: below the {crop or size} pixels of the crop; raise it, or lower {crop_flag}"
        )


def check_source_sizes(split: Split) -> None:
    """Raise UsageError unless each sample of a stretched split has its source size."""
    if (split.source_size[split.valid_slots] < 1).any():
        raise UsageError(f"{split.path}: has samples without a source size, which --fit stretch needs; convert it anew")


def make_mix(config: Config, num_classes: int) -> v2.RandomChoice | None:
    """Mixup, cutmix or a draw of the two: (images, labels) -> (images, soft labels (n, classes)). None for neither."""
    kinds = (v2.MixUp, config.mixup), (v2.CutMix, config.cutmix)
    mixes = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(mixes) if mixes else None


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed what is random in a step beyond the pixels (dropout, mixup, cutmix), so that no state need be saved.

    Only the generators that a step uses: torch.manual_seed keeps a stack trace for each kind of accelerator that isn't
    there, which takes a millisecond.
    """
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
