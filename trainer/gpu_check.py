"""`make gpu-check`: does the loader keep up with this machine's accelerator?

Makes a store of random images, trains the model on batches that already lie on the device and then on batches from the
loader, and prints both. Exits with 1 where the loader's rate is below `threshold` of the other. Minutes on a GPU.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor

from pipeline import convert
from pipeline.errors import Error
from trainer.augment import DeviceTransform
from trainer.bench.machine import on_cores
from trainer.config import Config
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.metrics import peak_memory_bytes
from trainer.models import build_model
from trainer.optimizer import make_optimizer
from trainer.ranks import Ranks, device_name


@dataclass(frozen=True)
class RandomImages:
    """A sequence of (image, label) pairs; the images can't be compressed."""

    count: int
    size: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng(i).integers(0, 256, (self.size, self.size, 3), np.uint8), i % 1000


class Resident(list[tuple[Tensor, Tensor]]):
    """One batch that lies on the device already, with the loader's interface as far as it is used here."""

    wait_seconds = 0.0

    def __init__(self, batch_size: int, size: int, device: torch.device) -> None:
        images = torch.randint(0, 256, (batch_size, size, size, 3), dtype=torch.uint8, device=device)
        labels = torch.randint(0, 1000, (batch_size,), device=device)
        super().__init__([(images.permute(0, 3, 1, 2), labels)])
        self.indices = np.arange(batch_size)


def check(
    model: str = "resnet50",
    size: int = 256,
    crop: int = 224,
    batch_size: int = 256,
    images: int = 10_000,
    steps: int = 60,
    threads: tuple[int, ...] = (1, 2, 4),
    device: str = "auto",
    compile: bool = True,
    threshold: float = 0.98,
    folder: str | None = None,
) -> int:
    """Measure training steps on resident and on loaded batches.

    Args:
        model: a model's name, with 1,000 classes.
        size: side of the stored images; crop: of the training crops, in pixels.
        batch_size: samples per step.
        images: stored images; they take size x size x 3 bytes each.
        steps: timed steps of each measurement, after a sixth as many to warm up.
        threads: numbers of loader threads to measure.
        device: as --device of the trainer.
        compile: torch.compile the model.
        threshold: smallest good ratio of loaded to resident.
        folder: where to put the store; a temporary folder by default.

    Returns:
        The exit code: 0, or 1 where a ratio is below the threshold.
    """
    target = Ranks().device(device)
    torch.backends.cudnn.benchmark = True
    network = build_model(model, 1000, crop).train().to(target).to(memory_format=torch.channels_last)
    config = Config("random images")
    optimizer = make_optimizer(config, network)
    forward = torch.compile(network, dynamic=False) if compile else network

    def measure(source: Resident | Loader, config: Config = config) -> tuple[float, float]:
        """(images per second, share of the time spent waiting for data)."""
        min_area = config.rrc_scale if config.augment == "rrc" else None
        pixels = DeviceTransform([0.5] * 3, [0.25] * 3, device=target, flip=config.flip, min_area=min_area)
        start = waited = 0.0
        batches = chain.from_iterable(repeat(source))
        for step, (batch, labels) in enumerate(batches, -(steps // 6) - 1):
            if step in (0, steps) and target.type != "cpu":
                torch.accelerator.synchronize(target)
            if step == 0:
                start, waited = time.perf_counter(), source.wait_seconds
            if step == steps:
                seconds = time.perf_counter() - start
                return steps * batch_size / seconds, (source.wait_seconds - waited) / seconds
            x = pixels.training(batch, source.indices, 0, crop)
            with torch.autocast(target.type, torch.bfloat16, enabled=target.type != "cpu"):
                logits = forward(x)
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError("batches never end")

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        store = Path(temporary) / "random.zarr"
        _say(f"store: {images:,} random images of {size} px, {images * size * size * 3 / 1e9:.2f} GB, in {temporary}")
        jobs = -1 if images > 1000 else 1
        convert(RandomImages(images, size), store, split="train", size=size, n_jobs=jobs, quiet=True)
        _say(
            f"{model} on {device_name(target)}, batch {batch_size}, crop {crop} of {size} px, "
            f"{'bf16' if target.type != 'cpu' else 'fp32'}, channels_last, {'compiled' if compile else 'eager'}"
        )
        resident = Resident(batch_size, crop, target)
        first, _ = measure(resident)
        _say(f"resident batches            {first:10,.1f} images/s")
        data, rows = RankPartitionedDataset(store, "train", crop=crop), {}
        for count in threads:
            with closing(Loader(data, batch_size, threads=count, device=target)) as loader:
                rows[f"loader, {count} thread(s)"] = measure(loader)
        if hasattr(os, "sched_setaffinity"):
            with on_cores(1), closing(Loader(data, batch_size, device=target)) as loader:
                rows["loader, 1 thread, 1 core"] = measure(loader)
        again, _ = measure(resident)
        base = (first + again) / 2
        _say(f"resident batches, again     {again:10,.1f} images/s")
        for name, (rate, waiting) in rows.items():
            _say(f"{name:27} {rate:10,.1f} images/s, {rate / base:6.1%} of resident, data wait {waiting:.2%}")
        rrc, _ = measure(Resident(batch_size, size, target), replace(config, augment="rrc"))
        _say(f"rrc on the device           {rrc:10,.1f} images/s, {base / rrc - 1:.1%} of a step's time")
        _say(f"peak memory                 {peak_memory_bytes(target) / 1e9:10,.2f} GB")
    slow = [name for name, (rate, _) in rows.items() if rate / base < threshold]
    _say(f"FAILED: {'; '.join(slow)}: below {threshold:.0%} of resident" if slow else "passed")
    return 1 if slow else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """The command line; returns the exit code."""
    args = [re.sub("^--[a-z-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), arg) for arg in sys.argv[1:]]
    try:
        return auto_cli(check, args=args, as_positional=False)
    except Error as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
