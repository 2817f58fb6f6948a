"""Augmentation on the device: geometry, keys, and agreement with torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from trainer.augment import (
    FLIP,
    IMAGENET_MEAN,
    IMAGENET_STD,
    DeviceTransform,
    make_mix,
    shift,
)
from trainer.config import Config
from trainer.order import uniform


def images(n: int = 6, size: int = 40, channels: int = 3) -> torch.Tensor:
    return torch.randint(
        0, 256, (n, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def transform(channels: int = 3, **options: Any) -> DeviceTransform:
    return DeviceTransform([0.5] * channels, [0.25] * channels, **options)


def test_shift_is_a_window_of_the_reflected_image() -> None:
    batch = images(3, 8)
    out = shift(batch, np.array([0, 2, 4]), np.array([4, 2, 1]), 2)
    assert torch.equal(out[1], batch[1].float())  # (2, 2) is no shift
    padded = torch.nn.functional.pad(batch.float(), (2, 2, 2, 2), mode="reflect")
    assert torch.equal(out[0], padded[0, :, 0:8, 4:12])
    assert torch.equal(out[2], padded[2, :, 4:12, 1:9])


@pytest.mark.parametrize("augment", ["crop", "rrc"])
def test_training_batches_do_not_depend_on_their_company(augment: str) -> None:
    change = transform(seed=9, flip=0.5, **({"min_area": 0.08} if augment == "rrc" else {"pad": 3}))
    batch, slots = images(6), np.array([5, 17, 2, 900, 31, 4])
    whole = change.training(batch, slots, 2, 24 if augment == "rrc" else 40)
    parts = [change.training(batch[i : i + 2], slots[i : i + 2], 2, whole.shape[2]) for i in (0, 2, 4)]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)
    assert whole.is_contiguous(memory_format=torch.channels_last)
    assert not torch.allclose(change.training(batch, slots, 3, whole.shape[2]), whole, atol=0.1)


def test_flip_and_normalise_in_crop_mode() -> None:
    batch, slots = images(64, 4), np.arange(64)
    out = transform(flip=0.5).training(batch, slots, 0)
    mirrored = torch.from_numpy(uniform(0, 0, slots, FLIP) < 0.5)
    wanted = torch.where(mirrored[:, None, None, None], batch.flip(3), batch).float()
    assert torch.allclose(out, (wanted / 255 - 0.5) / 0.25, atol=1e-5)
    assert 20 < mirrored.sum() < 44


def test_one_channel_becomes_three_and_imagenet_statistics() -> None:
    out = transform(1).evaluation(images(2, 4, 1))
    assert out.shape == (2, 3, 4, 4)
    assert torch.equal(out[:, 0], out[:, 2])
    batch = images(2, 4)
    out = DeviceTransform(IMAGENET_MEAN, IMAGENET_STD).evaluation(batch)
    assert torch.allclose(out, tv.normalize(batch / 255, list(IMAGENET_MEAN), list(IMAGENET_STD)), atol=1e-5)


def test_mixes() -> None:
    assert make_mix(Config("s"), 4) is None
    for config in (Config("s", mixup=0.2), Config("s", cutmix=1.0), Config("s", mixup=0.2, cutmix=1.0)):
        mix = make_mix(config, 4)
        assert mix is not None
        x, y = mix(images(8).float(), torch.arange(8) % 4)
        assert (x.shape, y.shape) == ((8, 3, 40, 40), (8, 4))
        assert torch.allclose(y.sum(1), torch.ones(8))
