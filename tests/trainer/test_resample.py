"""Boxes and their resampling: torchvision's, on squares and on pictures that were stretched into squares."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from trainer.resample import (
    FILTERS,
    Boxes,
    centre_boxes,
    resized_crop,
    resized_crop_boxes,
    unstretched_crop,
    window_boxes,
)

MODES = {"triangle": InterpolationMode.BILINEAR, "cubic": InterpolationMode.BICUBIC}


def images(n: int = 6, size: int = 40, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=generator)


def picture(height: int, width: int) -> torch.Tensor:
    """A smooth uint8 picture (3, height, width), the same whatever its size."""
    y, x = np.mgrid[0:height, 0:width]
    y, x = (y + 0.5) / height, (x + 0.5) / width
    waves = [np.sin(9 * x + i) * np.cos(7 * y - i) for i in range(3)]
    return torch.from_numpy((127 + 100 * np.stack(waves)).astype(np.uint8))


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize("out", [8, 24, 40, 56])
def test_resized_crop_is_torchvisions(out: int, resample: str) -> None:
    """float32 against torchvision's float path: 1e-3 of 255; against its rounded uint8 path: one level."""
    batch = images(64)
    boxes = resized_crop_boxes(0, 0, np.arange(64), (40, 40), 0.08)
    mine = resized_crop(batch, boxes, out, None, resample)
    for i in range(64):
        box = [int(a[i]) for a in (boxes.top, boxes.left, boxes.height, boxes.width)]
        how = {"size": [out, out], "interpolation": MODES[resample], "antialias": True}
        exact = tv.resized_crop(batch[i].float(), *box, **how).clamp(0, 255)
        assert (mine[i] - exact).abs().max() < 1e-3
        rounded = (mine[i].round() - tv.resized_crop(batch[i], *box, **how).float()).abs()
        assert rounded.mean() < 0.5
        assert rounded.max() <= 1 or resample == "cubic"  # which torchvision cuts off between its two passes


@pytest.mark.parametrize("resample", FILTERS)
def test_a_square_picture_is_cropped_as_torchvision_crops_it(resample: str) -> None:
    batch = images(32)
    sizes = np.full((32, 2), 40, np.int32)
    boxes = resized_crop_boxes(1, 2, np.arange(32), (sizes[:, 0], sizes[:, 1]), 0.08)
    mine = unstretched_crop(batch, sizes, boxes, 24, None, resample)
    assert torch.equal(mine, resized_crop(batch, boxes, 24, None, resample))


@pytest.mark.parametrize(("height", "width"), [(300, 400), (375, 200), (160, 512)])
def test_a_stretched_picture_gives_torchvisions_crop_of_the_picture(height: int, width: int) -> None:
    """Where the square has as many pixels in each direction as the picture shows: one level, on average, of 255."""
    original = picture(height, width)
    stretched = Image.fromarray(original.permute(1, 2, 0).numpy()).resize((512, 512), Image.Resampling.BICUBIC)
    square = torch.from_numpy(np.array(stretched)).permute(2, 0, 1)[None]
    sizes = np.array([[height, width]])
    for slot in range(20):
        boxes = resized_crop_boxes(0, 0, np.array([slot]), (sizes[:, 0], sizes[:, 1]), 0.08)
        box = [int(a[0]) for a in (boxes.top, boxes.left, boxes.height, boxes.width)]
        mine = unstretched_crop(square, sizes, np.array([box]), 64)
        wanted = tv.resized_crop(original.float(), *box, size=[64, 64], antialias=True)
        assert (mine[0] - wanted).abs().mean() < 1


def test_single_samples_are_mirrored() -> None:
    batch = images(4)
    boxes = Boxes(*(np.array(v) for v in ([0, 3, 5, 0], [1, 2, 0, 0], [40, 20, 31, 8], [30, 25, 11, 40])))
    plain = resized_crop(batch, boxes, 16)
    mixed = resized_crop(batch, boxes, 16, torch.tensor([True, False, True, False]))
    assert torch.allclose(mixed[[0, 2]], plain[[0, 2]].flip(3), atol=1e-3)
    assert torch.equal(mixed[[1, 3]], plain[[1, 3]])


@pytest.mark.parametrize("size", [(256, 256), (333, 500), (500, 375), (90, 700)])
@pytest.mark.parametrize("scale", [0.08, 0.35])
def test_boxes_are_spread_as_torchvisions(size: tuple[int, int], scale: float) -> None:
    """Two samples of each of the four numbers and of the area; fixed seeds, so that this never fails by chance."""
    n = 4000
    slots = np.arange(n)
    sides = tuple(np.full(n, side) for side in size)
    mine = resized_crop_boxes(3, 5, slots, sides, scale)  # type: ignore[arg-type]
    torch.manual_seed(0)
    blank = torch.empty(3, *size)
    transform = v2.RandomResizedCrop(8, scale=(scale, 1.0))
    drawn = [transform.make_params([blank]) for _ in range(n)]
    for name in ("top", "left", "height", "width"):
        found, wanted = getattr(mine, name), np.array([box[name] for box in drawn])
        assert scipy.stats.ks_2samp(found, wanted).pvalue > 1e-3, name
    area = np.array([box["height"] * box["width"] for box in drawn])
    assert scipy.stats.ks_2samp(mine.height * mine.width, area).pvalue > 1e-3
    assert (mine.top + mine.height <= size[0]).all()
    assert (mine.left + mine.width <= size[1]).all()


def test_boxes_of_sizes_together_are_those_of_each_alone() -> None:
    slots, rng = np.arange(500), np.random.default_rng(0)
    sizes = rng.integers(20, 600, (500, 2))
    boxes = resized_crop_boxes(1, 1, slots, (sizes[:, 0], sizes[:, 1]), 0.08)
    for i in range(0, 500, 7):
        alone = resized_crop_boxes(1, 1, slots[i : i + 1], (int(sizes[i, 0]), int(sizes[i, 1])), 0.08)
        assert [int(a[i]) for a in vars(boxes).values()] == [int(a[0]) for a in vars(alone).values()]
    assert (resized_crop_boxes(1, 2, slots, (256, 256), 0.08).height != boxes.height).mean() > 0.9


@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (224, 224), (232, 200), (35, 32)])
def test_centre_boxes_show_what_resize_and_centre_crop_show(resize: int, crop: int) -> None:
    sizes = np.array([[300, 400], [375, 251], [100, 701], [640, 640], [37, 36]], np.int32)
    boxes = centre_boxes(sizes, resize, crop)
    for i, (height, width) in enumerate(sizes.tolist()):
        resized = tv.resize(torch.empty(1, height, width), [resize]).shape[1:]
        for axis, (start, length) in enumerate(((boxes.top, boxes.height), (boxes.left, boxes.width))):
            index = torch.arange(resized[axis]).view((1, -1, 1) if axis == 0 else (1, 1, -1)).expand(1, *resized)
            shown = tv.center_crop(index, [crop, crop])
            scale = sizes[i, axis] / resized[axis]
            assert start[i] == pytest.approx(int(shown[0, 0, 0]) * scale)
            assert length[i] == pytest.approx(crop * scale)


def test_windows_lie_anywhere_in_the_picture() -> None:
    slots, sizes = np.arange(2000), np.tile(np.array([[300, 400]]), (2000, 1))
    boxes = window_boxes(0, 0, slots, sizes, 0.75, (3, 4))
    assert (boxes.height == 225).all()
    assert (boxes.width == 225).all()
    for start, room in ((boxes.top, 75), (boxes.left, 175)):
        assert start.min() >= 0
        assert start.max() <= room
        assert scipy.stats.kstest(start / room, "uniform").pvalue > 1e-3


def test_a_box_below_a_pixel_of_the_square_is_that_pixel() -> None:
    """A panorama of 20,000 pixels in a square of 40: a crop of 100 pixels lies between two pixels' centres."""
    batch = images(1)
    out = unstretched_crop(batch, np.array([[100, 20_000]]), np.array([[0, 10_300, 100, 100]]), 8)
    assert torch.isfinite(out).all()
    wanted = resized_crop(batch, Boxes.of(np.array([[0, 20, 40, 1]])), 8)
    assert torch.equal(out, wanted)
    assert out.std(3).max() == 0


@pytest.mark.parametrize("sizes", [np.array([[0, 10]]), np.array([[10, 10], [10, 10]]), np.array([10])])
def test_sizes_that_cannot_be(sizes: np.ndarray) -> None:
    with pytest.raises(ValueError, match="source_sizes"):
        unstretched_crop(images(1), sizes, np.array([[0, 0, 5, 5]]), 4)


def test_an_unknown_filter() -> None:
    with pytest.raises(ValueError, match="triangle or cubic"):
        unstretched_crop(images(1), np.array([[9, 9]]), np.array([[0, 0, 5, 5]]), 4, resample="lanczos")
