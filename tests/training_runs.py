"""Help for tests of the trainer: small stores that can be learnt, runs in this process and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from stores import make_store

from trainer.main import main

torch.set_num_threads(1)  # more threads than free cores spin while they wait for each other

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = Path(sysconfig.get_path("scripts")) / "torchrun"


def quadrant_images(num: int, size: int = 8, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noise with one brighter quadrant, which is the class: uint8 (num, size, size, 3), int64 (num,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, num)
    images = rng.integers(0, 80, (num, size, size, 3))
    half = size // 2
    for label in range(classes):
        top, left = label // 2 * half, label % 2 * half
        images[labels == label, top : top + half, left : left + half] += 120
    return images.astype(np.uint8), labels


def quadrant_store(path: Path, train: int = 130, val: int = 37, size: int = 8, chunk_images: int = 16) -> Path:
    ids = [f"quadrant{i}" for i in range(4)]
    splits = {"train": quadrant_images(train, size, seed=1), "val": quadrant_images(val, size, seed=2)}
    return make_store(path, splits, chunk_images=chunk_images, class_ids=ids)


def flags(**fields: Any) -> list[str]:
    """Command line of config fields."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]


SMALL = {"model": "flatten_linear", "global_batch": 16, "epochs": 2, "lr": 0.5, "flip": 0.0, "device": "cpu"}


def run_here(**fields: Any) -> int:
    """Run the trainer in this process; returns the exit code."""
    return main(flags(**{**SMALL, **fields}))


def refusal(capsys: pytest.CaptureFixture[str], code: int = 2, **fields: Any) -> str:
    """The single line with which a run is refused."""
    capsys.readouterr()
    assert run_here(**fields) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def torchrun(
    ranks: int,
    fields: Mapping[str, Any],
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """The literal command of the README, from the project's root."""
    command = [str(TORCHRUN), f"--nproc-per-node={ranks}", *options, "trainer/main.py", *flags(**{**SMALL, **fields})]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def own_lines(stderr: str) -> list[str]:
    """The trainer's lines among torchrun's."""
    return [line for line in stderr.splitlines() if line.startswith(("trainer:", "trainer,"))]


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def epochs_done(out: Path) -> int:
    return len(metrics(out)) if (out / "metrics.jsonl").exists() else 0


def free_ports(count: int) -> list[int]:
    stores = [dist.TCPStore("127.0.0.1", 0, 1, is_master=True) for _ in range(count)]
    return [store.port for store in stores]


def checkpoint(out: Path) -> dict[str, Any]:
    """The newest checkpoint in a run's folder."""
    return torch.load(out / "last.pt", weights_only=True)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
