"""The check for machines with a GPU, in a form that a CPU does in seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from stores import make_images, make_store

from trainer import gpu_check
from trainer.dataset import RankPartitionedDataset
from trainer.gpu_check import Resident
from trainer.loader import Loader

SMALL = ["--model=resnet_small", "--size=16", "--crop=12", "--batch-size=8", "--images=40", "--steps=3"]
NAMES = ["resident batches", "loader, 2 thread(s)", "1 core", "data wait", "rrc, loader", "rrc on the device", "memory"]


def test_it_trains_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ["--threads=[2]", "--device=cpu", "--compile=false", "--threshold=0", "--ranks=2", f"--folder={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *SMALL, *more])
    assert gpu_check.main() == 0
    text = capfd.readouterr().out
    for wanted in ("resnet_small on 2 x cpu, batch 8", *NAMES):
        assert wanted in text
    assert text.splitlines()[-1] == "passed"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("slow", "code", "word"), [("", 0, "passed"), ("rrc, loader", 1, "FAILED: rrc, loader: below")]
)
def test_a_slow_loader_fails(capsys: pytest.CaptureFixture[str], slow: str, code: int, word: str) -> None:
    rates = {"resident batches": 110, "loader, 1 thread(s)": 99, "rrc, resident batches": 80, "rrc, loader": 79}
    rates |= {"resident batches, again": 90, slow: 78}
    rows = {name: {"rate": rate, "waiting": 0.0, "peak": 1} for name, rate in rates.items() if name}
    assert gpu_check._verdict(rows, 0.98) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(word)


def test_resident_batches_are_the_loaders_first(tmp_path: Path) -> None:
    data = RankPartitionedDataset(make_store(tmp_path / "s.zarr", {"train": (make_images(40, 16), [0, 1] * 20)}))
    loader = Resident(data, 8)
    first = next(iter(Loader(data, 8)))[0].clone()
    for epoch in range(2):
        assert loader.epoch == epoch
        batches = [images for images, _ in loader]
        assert len(batches) == len(loader) == 5
        assert all(torch.equal(images, first) for images in batches)
        assert len(loader.indices) == 8
    assert loader.state_dict()["samples"] == 0


def test_no_such_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device=xpu"])
    assert gpu_check.main() == 2
    assert capsys.readouterr().err.startswith("gpu-check: --device xpu: not available")
