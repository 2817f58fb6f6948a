"""What only a GPU can show, in at most ten minutes: `python -m tests.gpu [--only NAME ...] [--folder DIR]`.

    streams     the loader under torch's CUDA sanitizer, with copies that come late; batches equal the CPU's
    syncs       training steps during which nothing but the one planned wait may stop the host
    resampling  random resized crops in float16 against float32 on the CPU
    memory      device memory after 40 epochs of training is that after 2
    ranks       two ranks over NCCL evaluate and train as one does (where there are two devices)
    rate        gpu-check: training on loaded batches is as fast as on resident ones

Prints a line for each and exits with 1 where one failed, with 2 where there is no CUDA device. Not run by `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
SECONDS = 600
COMMON = ["--model=resnet_small", "--crop=28", "--lr=0.05", "--warmup-epochs=0", "--debug"]


def make(folder: Path) -> Path:
    """A store of 2,000 images in 10 classes, each class with a brightness of its own, and 503 for evaluation."""
    from stores import make_store

    rng = np.random.default_rng(0)
    splits = {}
    for name, count in (("train", 2_000), ("val", 503)):
        labels = rng.integers(0, 10, count)
        images = np.clip(rng.normal(25 * labels[:, None, None, None] + 15, 20, (count, 32, 32, 3)), 0, 255)
        splits[name] = images.astype(np.uint8), labels
    return make_store(folder / "s.zarr", splits, chunk_images=100)


def streams(store: Path, folder: Path) -> str:
    """Run `late_copies` in a process that begins under the sanitizer."""
    code = f"from tests.gpu import late_copies; late_copies({str(store)!r})"
    python([sys.executable, "-c", code], TORCH_CUDA_SANITIZER="1")
    return "no unordered access; all batches right"


def late_copies(store: str) -> None:
    """Batches of a CUDA loader whose copy stream is slow, against the CPU's."""
    from trainer.dataset import RankPartitionedDataset
    from trainer.loader import Loader
    from trainer.reading.prefetcher import copy_stream

    device = torch.device("cuda", torch.cuda.current_device())
    cuda, host = (
        Loader(RankPartitionedDataset(store, crop=28), 64, threads=2, device=kind) for kind in (device, "cpu")
    )
    for _ in range(3):
        for (images, labels), (images_host, labels_host) in zip(cuda, host, strict=True):
            with copy_stream(device):
                torch.cuda._sleep(20_000_000)  # about 10 ms; what is copied next waits for it
            assert torch.equal((images + 0).cpu(), images_host)
            assert torch.equal((labels + 0).cpu(), labels_host)


def syncs(store: Path, folder: Path) -> str:
    """From the third step to the epoch's end, an operation that makes the host wait is an error."""
    from trainer.stop import LossWatch

    record, sync = LossWatch.record_step, LossWatch.sync
    watched = []

    def record_step(self: Any, step: int, *args: Any, **options: Any) -> Any:
        if step >= 3:
            torch.cuda.set_sync_debug_mode("error")
            watched.append(step)
        return record(self, step, *args, **options)

    def sync_now(self: Any, *args: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return sync(self, *args, **options)

    LossWatch.record_step, LossWatch.sync = record_step, sync_now  # type: ignore[method-assign]
    try:
        for k, extra in enumerate(([], ["--augment=rrc", "--mixup=0.2"], ["--ema=0.99", "--clip-grad=1"])):
            train(store, folder / f"syncs-{k}", "--epochs=2", "--global-batch=128", "--flip=0.5", *extra)
    finally:
        LossWatch.record_step, LossWatch.sync = record, sync  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("default")
    return f"{len(watched)} steps without a wait"


def resampling(store: Path, folder: Path) -> str:
    """Half precision holds a uint8 exactly; weights are rounded to 11 bits."""
    from trainer.augment import DeviceTransform

    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 256, 256, 3), np.uint8)).permute(
        0, 3, 1, 2
    )
    worst = 0.0
    for options in ({}, {"resample": "cubic"}):
        made = []
        for device in ("cuda", "cpu"):
            transform = DeviceTransform([0.0] * 3, [1 / 255] * 3, device=device, flip=0.5, min_area=0.08, **options)
            made.append(transform.training(images.to(device), np.arange(64), 0, 224).cpu())
        worst = max(worst, float((made[0] - made[1]).abs().max()))
    assert worst < 1, f"pixels differ by up to {worst:.2f} of 255"
    return f"pixels differ by at most {worst:.2f} of 255"


def memory(store: Path, folder: Path) -> str:
    """A loader for evaluation is made anew in each epoch."""
    from trainer.training import TrainingRun

    finish, reserved = TrainingRun._finish_epoch, []

    def finish_epoch(self: Any, *args: Any) -> None:
        reserved.append(torch.cuda.memory_reserved())
        finish(self, *args)

    TrainingRun._finish_epoch = finish_epoch  # type: ignore[method-assign]
    try:
        train(store, folder / "memory", "--epochs=40", "--global-batch=128")
    finally:
        TrainingRun._finish_epoch = finish  # type: ignore[method-assign]
    assert len(reserved) == 40
    assert reserved[-1] <= 1.05 * reserved[1], (
        f"{reserved[1] / 1e6:.0f} MB after 2 epochs, {reserved[-1] / 1e6:.0f} after 40"
    )
    return f"{reserved[-1] / 1e6:.0f} MB reserved, after 2 epochs and after 40"


def ranks(store: Path, folder: Path) -> str:
    """The same global batches, and evaluation of the same weights to the last digit."""
    if torch.cuda.device_count() < 2:
        return "skipped: one device"
    figures = []
    for count in (1, 2):
        torchrun(count, store, folder / f"ranks-{count}", "--epochs=3", "--global-batch=128", "--sync-bn")
        figures.append(epochs(folder / f"ranks-{count}"))
    for one, two in zip(*figures, strict=True):
        assert abs(one["train_loss"] - two["train_loss"]) < 0.05
        assert abs(one["val_top1"] - two["val_top1"]) < 0.05
    weights = f"--weights={folder / 'ranks-1' / 'best.pt'}"
    lines = [torchrun(count, store, folder / "none", "--eval-only", weights).splitlines()[-1] for count in (1, 2)]
    assert lines[0] == lines[1], " / ".join(lines)
    return lines[0]


def rate(store: Path, folder: Path) -> str:
    """The trainer's own loop, resident and loaded."""
    flags = ["--images=4000", "--steps=40", "--threads=[1]", f"--folder={folder}"]
    return python([sys.executable, "-m", "trainer.gpu_check", *flags]).splitlines()[-1]


CHECKS: dict[str, Callable[[Path, Path], str]] = {
    check.__name__: check for check in (streams, syncs, resampling, memory, ranks, rate)
}


def train(store: Path, out: Path, *flags: str) -> None:
    """Train in this process."""
    from trainer.main import main as train_main

    assert train_main([f"--data={store}", f"--out={out}", "--device=cuda", *COMMON, *flags]) == 0, "training failed"


def torchrun(count: int, store: Path, out: Path, *flags: str) -> str:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return python([*start, "trainer/main.py", f"--data={store}", f"--out={out}", *COMMON, *flags])


def python(command: list[str], **variables: str) -> str:
    """Run a command in the project's folder; its output. AssertionError with the end of it where it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, timeout=SECONDS, capture_output=True, text=True
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert done.returncode == 0, " | ".join([line for line in lines if line.startswith("trainer")] or lines[-3:])
    return done.stdout


def epochs(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="NAME")
    parser.add_argument("--folder", type=Path, help="for stores and runs, 2 GB; a temporary one by default")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.gpu: no CUDA device here; run it on a machine that has one", file=sys.stderr)  # noqa: T201
        return 2
    failed = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        store = make(Path(name))
        for check in args.only:
            start = time.perf_counter()
            try:
                text = CHECKS[check](store, Path(name))
            except Exception as error:  # the other checks are worth as much
                failed.append(check)
                text = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            print(f"{check:11} {time.perf_counter() - start:5.0f} s  {text}", flush=True)  # noqa: T201
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
