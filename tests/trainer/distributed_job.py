"""What each of the four processes of `test_distributed` does.

A module of its own, because each process imports it: without pytest and what makes stores.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import main as main_module
from trainer.augment import DeviceTransform
from trainer.dataset import RankPartitionedDataset
from trainer.evaluation import evaluate
from trainer.loader import Loader
from trainer.main import main
from trainer.models import build_model
from trainer.ranks import Ranks, process_group

WORLD = 4
CPU = torch.device("cpu")


def evaluations(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Figures on 37 samples and on 3 (an empty share on the fourth rank)."""
    torch.manual_seed(ranks.rank)  # another model on each rank, until the buffers and weights are made equal
    model = build_model("resnet_small", 4, 8)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.constant_(norm.running_mean, 0.01 * ranks.rank)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    transform = DeviceTransform([0.3] * 3, [0.2] * 3)
    figures = {}
    for split in ("val", "few"):
        data = RankPartitionedDataset(
            folder / "eval.zarr", split, train=False, rank=ranks.rank, world_size=ranks.world_size
        )
        figures[split] = evaluate(model, Loader(data, 8), transform, ranks, flip=True)
    return figures


def gradient_errors(ranks: Ranks) -> dict[str, float]:
    """Largest difference of DDP's gradients from one process on the whole batch, relative to the largest gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 3, 8, 8), torch.arange(24) % 4
    share = 24 // ranks.world_size
    mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
    whole = build_model("flatten_linear", 4, 8).train()
    split = copy.deepcopy(whole)
    nn.functional.cross_entropy(whole(x), y).backward()
    pairs = list(zip(split.parameters(), whole.parameters(), strict=True))
    scale = max(float(b.grad.abs().max()) for _, b in pairs)

    def error() -> float:
        return max(float((a.grad - b.grad).abs().max()) for a, b in pairs) / scale

    ddp = DistributedDataParallel(split)
    nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
    errors = {"plain": error()}
    if ranks.world_size == 2:  # once more compiled (without C++), and in two micro-steps
        split.zero_grad()
        ddp = DistributedDataParallel(torch.compile(split, dynamic=False, backend="eager"))  # type: ignore[arg-type]
        for micro_step in (0, 1):
            ddp.require_backward_grad_sync = micro_step == 1
            half = slice(mine.start + micro_step * share // 2, mine.start + (micro_step + 1) * share // 2)
            (nn.functional.cross_entropy(ddp(x[half]), y[half]) / 2).backward()
        errors["accumulated"] = error()
    return errors


def stray_warnings(ranks: Ranks) -> int:
    """DDP's gradients in channels_last have the layout of its buckets, or it would warn; warnings are errors here."""
    model = build_model("resnet18", 4, 32).to(memory_format=torch.channels_last).train()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for _ in range(2):
        x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        nn.functional.cross_entropy(ddp(x), torch.zeros(2, dtype=torch.long)).backward()
    return 0


def job(rank: int, folder: Path) -> None:
    """What each of the four processes does."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for world_size in range(1, WORLD + 1):
        if rank < world_size:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=(folder / "ports").read_text().split()[world_size],
            )
            ranks = Ranks.from_env()
            with process_group(ranks, CPU, 120):
                results[f"eval {world_size}"] = evaluations(folder, ranks)
                if world_size in (2, 4):
                    results[f"gradients {world_size}"] = gradient_errors(ranks)
                if world_size == 2:
                    results["warnings"] = stray_warnings(ranks)
    os.environ["MASTER_PORT"] = (folder / "ports").read_text().split()[0]
    command = "--model=flatten_linear --epochs=1 --global-batch=1024 --batch-size=128 --device=cpu --timeout=100"
    results["4097"] = main([f"--data={folder / '4097.zarr'}", f"--out={folder / 'run4097'}", *command.split()])
    os.environ["MASTER_PORT"] = (folder / "ports").read_text().split()[WORLD + 1]
    main_module.GRACE_SECONDS = 0.1
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([f"--data={folder / 'one.zarr'}", "--model=flatten_linear", "--global-batch=4", "--device=cpu"])
    results["refusal"] = code, errors.getvalue()
    (folder / f"results{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # as the trainer does: the refused group is left as it is
