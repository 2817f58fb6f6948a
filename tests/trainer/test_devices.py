"""Nothing that the transforms compute with stays on the CPU: tensors without data, of a device that isn't there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.augment import DeviceTransform

CUDA = torch.device("cuda", 0)
SIZES = np.array([[8, 12], [12, 8], [9, 9], [16, 8]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flip": 0.5},
        {"flip": 0.5, "pad": 2},
        {"flip": 0.5, "min_area": 0.3},
        {"min_area": 0.3, "resample": "cubic"},
        {"flip": 0.5, "stretched": True},
        {"flip": 0.5, "stretched": True, "min_area": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_transforms_stay_on_the_device(options, channels):
    with FakeTensorMode():
        transform = DeviceTransform([0.5] * channels, [0.2] * channels, device=CUDA, **options)
        images = torch.empty(4, 12, 12, channels, dtype=torch.uint8, device=CUDA).permute(0, 3, 1, 2)
        sizes = SIZES if options.get("stretched") else None
        for pixels in (transform.training(images, np.arange(4), 3, 8, sizes), transform.evaluation(images, sizes)):
            assert pixels.device == CUDA
            assert pixels.dtype == torch.float32
            assert pixels.shape[:2] == (4, 3)
            assert pixels.is_contiguous(memory_format=torch.channels_last)
