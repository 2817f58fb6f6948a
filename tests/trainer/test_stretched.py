"""Whole pictures from squares of `--fit stretch`: what the trainer makes of them is torchvision's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from training_runs import metrics, refusal, run_here

from pipeline import convert, open_store
from trainer.augment import FLIP, DeviceTransform
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.order import uniform
from trainer.resample import resized_crop_boxes, unstretched_crop, window_boxes

SIZE = 64


def picture(height: int, width: int, label: int, phase: float) -> np.ndarray:
    """A smooth uint8 (height, width, 3) picture; its class is in the direction of its waves."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    along = x if label else y
    wave = 127 + 90 * np.sin(12 * along + phase)
    return np.dstack([wave, wave * 0.8, 60 + 0 * wave]).astype(np.uint8)


@pytest.fixture(scope="module")
def pictures() -> list[tuple[np.ndarray, int]]:
    rng = np.random.default_rng(0)
    sizes = [(96, 128), (128, 96), (80, 200), (100, 100)]
    return [(picture(*sizes[i % 4], i // 4 % 2, rng.uniform(0, 6)), i // 4 % 2) for i in range(64)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pictures: list[tuple[np.ndarray, int]]) -> Path:
    path = tmp_path_factory.mktemp("stretched") / "whole.zarr"
    splits = {"train": pictures, "val": pictures[:24]}
    convert(splits, path, size=SIZE, fit="stretch", n_jobs=1, quiet=True)
    return path


def test_a_batch_knows_its_pictures_sizes(store: Path, pictures: list[tuple[np.ndarray, int]]) -> None:
    data = RankPartitionedDataset(store, "val")
    loader = Loader(data, 10)
    sizes = []
    for images, _ in loader:
        assert loader.source_sizes.dtype == np.int32
        assert loader.source_sizes.shape == (len(images), 2)
        sizes += loader.source_sizes.tolist()
    assert sizes == [list(image.shape[:2]) for image, _ in pictures[:24]]


def test_evaluation_shows_what_torchvisions_resize_and_centre_crop_show(
    store: Path, pictures: list[tuple[np.ndarray, int]]
) -> None:
    transform = DeviceTransform([0.0] * 3, [1 / 255] * 3, stretched=True, eval_resize=56, eval_crop=48)
    reference = v2.Compose([v2.Resize(56, antialias=True), v2.CenterCrop(48)])
    data = RankPartitionedDataset(store, "val")
    ((batch, _),) = Loader(data, 24)
    found = transform.evaluation(batch, data.split.source_size)
    assert found.shape == (24, 3, 48, 48)
    assert found.is_contiguous(memory_format=torch.channels_last)
    for i, (image, _) in enumerate(pictures[:24]):
        wanted = reference(torch.from_numpy(image).permute(2, 0, 1).float())
        assert (found[i] - wanted).abs().mean() < 3, i  # the square has 64 pixels where some pictures have 200


@pytest.mark.parametrize("min_area", [None, 0.25])
def test_training_shows_boxes_of_the_whole_picture(store: Path, min_area: float | None) -> None:
    data = RankPartitionedDataset(store, "train", seed=3)
    transform = DeviceTransform([0.0] * 3, [1 / 255] * 3, seed=3, flip=0.5, min_area=min_area, stretched=True)
    loader = Loader(data, 16)
    loader.set_epoch(2)
    for images, _ in loader:
        slots, sizes = loader.indices, loader.source_sizes
        found = transform.training(images, slots, 2, 48, sizes)
        if min_area:
            boxes = resized_crop_boxes(3, 2, slots, sizes.T, min_area)
        else:
            boxes = window_boxes(3, 2, slots, sizes, 48 / SIZE, (3, 4))
            assert (boxes.height == sizes.min(1) * 0.75).all()
        mirrored = torch.from_numpy(uniform(3, 2, slots, FLIP) < 0.5)
        assert torch.allclose(found, unstretched_crop(images, sizes, boxes, 48, mirrored), atol=1e-3)
        assert found.shape == (16, 3, 48, 48)


@pytest.mark.parametrize("augment", ["crop", "rrc"])
def test_a_run_learns_and_evaluates_alike(store: Path, tmp_path: Path, augment: str) -> None:
    fields = {"data": store, "out": tmp_path / "run", "augment": augment, "crop": 48, "rrc_scale": 0.35, "flip": 0}
    assert run_here(**fields, epochs=6, lr=0.05, resample="cubic", eval_resize=56) == 0
    last = metrics(tmp_path / "run")[-1]
    assert last["val_top1"] > 0.8
    weights = tmp_path / "run" / "last.pt"
    assert run_here(**fields | {"out": None}, eval_only=True, weights=weights, resample="cubic", eval_resize=56) == 0


def test_gray_squares_too(tmp_path: Path, pictures: list[tuple[np.ndarray, int]]) -> None:
    samples = [(Image.fromarray(image).convert("L"), label) for image, label in pictures[:32]]
    convert({"train": samples, "val": samples}, tmp_path / "a.zarr", size=32, fit="stretch", channels="gray", n_jobs=1)
    assert run_here(data=tmp_path / "a.zarr", out=tmp_path / "run", crop=24, augment="rrc", epochs=1) == 0


def test_whitening_sees_whole_pictures(store: Path, tmp_path: Path) -> None:
    assert run_here(data=store, out=tmp_path / "run", model="whitened_net", crop=48, epochs=1) == 0


def test_bad_slots_have_no_size_and_are_never_served(tmp_path: Path, pictures: list[tuple[np.ndarray, int]]) -> None:
    samples, path = [*pictures[:32], (b"no picture", 0)], tmp_path / "a.zarr"
    convert({"train": samples, "val": samples}, path, size=32, fit="stretch", on_error="skip", n_jobs=1, quiet=True)
    assert (open_store(path)["train"].source_size < 1).any()
    for augment in ("crop", "rrc"):
        assert run_here(data=path, out=tmp_path / augment, crop=24, augment=augment, epochs=1) == 0
        assert np.isfinite(metrics(tmp_path / augment)[-1]["val_loss"])


def test_refusals(store: Path, tmp_path: Path, pictures: list[tuple[np.ndarray, int]], capsys) -> None:
    fields = {"data": store, "out": tmp_path / "run"}
    assert "--pad 2" in refusal(capsys, **fields, pad=2)
    assert f"--crop {SIZE + 1}" in refusal(capsys, **fields, crop=SIZE + 1)
    assert "--eval-resize" in refusal(capsys, **fields, crop=48, eval_resize=40)
    for augment in ("crop", "rrc"):
        assert f"--eval-crop {SIZE + 1}" in refusal(capsys, **fields, crop=48, eval_crop=SIZE + 1, augment=augment)
        assert "--eval-crop" in refusal(capsys, **fields, crop=40, eval_crop=56, eval_resize=48, augment=augment)
    convert({"train": pictures[:32]}, tmp_path / "cut.zarr", size=SIZE, n_jobs=1, quiet=True)
    assert "--eval-resize 56" in refusal(capsys, data=tmp_path / "cut.zarr", out=tmp_path / "run", eval_resize=56)
    assert not (tmp_path / "run").exists()


def test_a_store_whose_sizes_are_gone(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    split = open_store(store)["train"]
    nothing = np.zeros_like(split.source_size)
    monkeypatch.setattr("pipeline.store.split.Split.source_size", nothing)
    assert "source size" in refusal(capsys, data=store, out=tmp_path / "run")
