"""`make gpu-check`: does the loader keep up with this machine's accelerators?

Makes a store of random images, and trains on it with the trainer's own loop under torchrun: on one batch that already
lies on the device, and on batches from the loader. Prints both rates. Exits with 1 where the loader's is below
`threshold` of the other. Minutes on a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli
from torch import Tensor

from pipeline import convert
from pipeline.errors import Error
from trainer import setup, training
from trainer.bench.machine import on_cores
from trainer.config import Config
from trainer.loader import Loader
from trainer.ranks import Ranks, device_name, process_group
from trainer.report.records import json_lines


@dataclass(frozen=True)
class RandomImages:
    """A sequence of (image, label) pairs; the images can't be compressed."""

    count: int
    size: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.random.default_rng(i).integers(0, 256, (self.size, self.size, 3), np.uint8), i % 1000


class Resident(Loader):
    """Serves its first batch, which then lies on the device, for whole epochs: training without any loading."""

    _first: tuple[tuple[Tensor, Tensor], np.ndarray] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._first is None:
            self._first = next(super().__iter__()), self.indices
        batch, self.indices = self._first
        for _ in range(len(self)):
            yield batch
        self.set_epoch(self.epoch + 1)


def check(
    model: str = "resnet50",
    size: int = 256,
    crop: int = 224,
    batch_size: int = 256,
    images: int = 10_000,
    steps: int = 60,
    threads: tuple[int, ...] = (1, 2, 4),
    ranks: int = 0,
    device: str = "auto",
    compile: bool = True,
    threshold: float = 0.98,
    folder: str | None = None,
    store: str | None = None,
) -> int:
    """Measure training on resident and on loaded batches.

    Args:
        model: a model's name, with 1,000 classes.
        size: side of the stored images; crop: of the training crops, in pixels.
        batch_size: samples per rank and step.
        images: stored images; they take size x size x 3 bytes each, which should exceed the processor's caches.
        steps: timed steps of each measurement, at least; an epoch before them warms up.
        threads: numbers of loader threads to measure.
        ranks: processes; one per accelerator by default.
        device: as --device of the trainer.
        compile: torch.compile the model.
        threshold: smallest good ratio of loaded to resident.
        folder: where to put the store; a temporary folder by default.
        store: measure this store in the present process group, as the processes do that are started for it.

    Returns:
        The exit code: 0, or 1 where a ratio is below the threshold.
    """
    if store is None:
        Ranks().device(device)  # wrong use is one line
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            store = str(Path(temporary) / "random.zarr")
            _say(f"store: {images:,} random images of {size} px, {images * size**2 * 3 / 1e9:.2f} GB, in {temporary}")
            jobs = -1 if images > 1000 else 1
            convert(RandomImages(images, size), store, split="train", size=size, n_jobs=jobs, quiet=True)
            count = ranks or max(1, torch.accelerator.device_count() if device != "cpu" else 1)
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", "trainer.gpu_check"]
            return subprocess.run([sys.executable, "-m", *torchrun, *sys.argv[1:], f"--store={store}"]).returncode
    group = Ranks.from_env()
    target = group.device(device)
    total = batch_size * group.world_size
    config = Config(
        data=store,
        model=model,
        epochs=1 - (-steps // max(1, images // total)),
        global_batch=total,
        batch_size=batch_size,
        crop=crop,
        ema=0.999,
        lr=0.001,
        device=device,
        compile=compile,
    )
    if group.rank == 0:
        _say(
            f"{model} on {group.world_size} x {device_name(target)}, batch {batch_size}, crop {crop} of {size} px, "
            f"{'bf16' if target.type != 'cpu' else 'fp32'}, channels_last, {'compiled' if compile else 'eager'}"
        )
    rrc = replace(config, augment="rrc")
    runs: dict[str, tuple[Config, bool, int]] = {
        "resident batches": (config, True, 0),
        **{f"loader, {n} thread(s)": (replace(config, threads=n), False, 0) for n in threads},
        "loader, 1 thread, 1 core": (config, False, 1),
        "rrc, resident batches": (rrc, True, 0),
        "rrc, loader": (rrc, False, 0),
        "resident batches, again": (config, True, 0),
    }
    rows = {}
    with process_group(group, target, config.timeout):
        for k, (name, (wanted, resident, one_core)) in enumerate(runs.items()):
            with on_cores(1, group.local_rank) if one_core else nullcontext():
                rows[name] = _measure(replace(wanted, out=f"{store}-{k}"), group, target, resident)
    return _verdict(rows, threshold) if group.rank == 0 else 0


def _measure(config: Config, ranks: Ranks, device: torch.device, resident: bool) -> dict[str, Any]:
    """A run's figures after its first epoch, on rank 0."""
    torch.compiler.reset()
    setup.Loader = Resident if resident else Loader  # type: ignore[misc]
    training.train(config, ranks, device, lambda line: None)
    if ranks.rank:
        return {}
    lines = json_lines(Path(str(config.out)) / "metrics.jsonl")[0][1:]
    return {
        "rate": len(lines) / sum(1 / line["images_per_second"] for line in lines),  # epochs are equally long
        "waiting": sum(line["data_wait_share"] for line in lines) / len(lines),
        "peak": max(line["peak_memory_bytes"] for line in lines),
    }


def _verdict(rows: dict[str, dict[str, Any]], threshold: float) -> int:
    """Print all rows; the exit code."""
    base = (rows["resident batches"]["rate"] + rows["resident batches, again"]["rate"]) / 2
    slow = []
    for name, row in rows.items():
        ratio = row["rate"] / (rows["rrc, resident batches"]["rate"] if name.startswith("rrc") else base)
        _say(f"{name:27} {row['rate']:10,.1f} images/s, {ratio:6.1%} of resident, data wait {row['waiting']:.2%}")
        if "loader" in name and ratio < threshold:
            slow.append(name)
    _say(f"rrc on the device takes     {base / rows['rrc, resident batches']['rate'] - 1:10.1%} of a step's time")
    _say(f"peak memory                 {max(row['peak'] for row in rows.values()) / 1e9:10,.2f} GB a rank")
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
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(code)  # as in main.py
    sys.exit(code)
