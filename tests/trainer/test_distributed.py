"""Several ranks over gloo: exact evaluation, DDP's gradients, no hang, resume on fewer, refusals, clean ends.

One job of four processes does what needs no torchrun; the literal command is run for the rest.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stores import make_store
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_runs import (
    ROOT,
    SMALL,
    TORCHRUN,
    flags,
    metrics,
    own_lines,
    quadrant_images,
    quadrant_store,
    torchrun,
    wait_until,
)

from trainer.augment import DeviceTransform
from trainer.config import Config
from trainer.dataset import RankPartitionedDataset
from trainer.evaluation import evaluate
from trainer.loader import Loader
from trainer.models import build_model, use_sync_bn
from trainer.ranks import Ranks, process_group
from trainer.run_folder import read_checkpoint

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
    pixels = DeviceTransform(Config("s"), [0.3] * 3, [0.2] * 3, CPU)
    figures = {}
    for split in ("val", "few"):
        data = RankPartitionedDataset(
            folder / "eval.zarr", split, train=False, rank=ranks.rank, world_size=ranks.world_size
        )
        figures[split] = evaluate(model, Loader(data, 8), pixels, ranks, flip=True)
    return figures


def gradient_errors(ranks: Ranks) -> dict[str, float]:
    """Largest difference of DDP's gradients from one process on the whole batch, relative to the largest gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 3, 8, 8), torch.arange(24) % 4
    share = 24 // ranks.world_size
    mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
    errors = {}
    for name in ("flatten_linear", "resnet_small"):
        whole = build_model(name, 4, 8).train()
        split = use_sync_bn(copy.deepcopy(whole), CPU)
        nn.functional.cross_entropy(whole(x), y).backward()
        ddp = DistributedDataParallel(split)
        nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
        pairs = list(zip(split.parameters(), whole.parameters(), strict=True))
        scale = max(float(b.grad.abs().max()) for _, b in pairs)
        errors[name] = max(float((a.grad - b.grad).abs().max()) for a, b in pairs) / scale
        for (key, a), b in zip(split.state_dict().items(), whole.state_dict().values(), strict=True):
            if "running" in key:
                errors[f"{name} buffers"] = max(errors.get(f"{name} buffers", 0.0), float((a - b).abs().max()))
        if name == "flatten_linear":  # once more compiled (without the minutes of C++), and in two micro-steps
            split.zero_grad()
            ddp = DistributedDataParallel(torch.compile(split, dynamic=False, backend="eager"))  # type: ignore[arg-type]
            for micro_step in (0, 1):
                ddp.require_backward_grad_sync = micro_step == 1
                half = slice(mine.start + micro_step * share // 2, mine.start + (micro_step + 1) * share // 2)
                (nn.functional.cross_entropy(ddp(x[half]), y[half]) / 2).backward()
            errors["accumulated"] = max(float((a.grad - b.grad).abs().max()) for a, b in pairs) / scale
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
    import warnings

    from trainer.main import main

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
    results["4097"] = main(
        flags(
            data=folder / "4097.zarr", model="flatten_linear", epochs=1, global_batch=1024, out=folder / "run4097",
            batch_size=128, device="cpu", timeout=100,
        )
    )  # fmt: skip
    (folder / f"results{rank}.json").write_text(json.dumps(results))


def free_ports(count: int) -> list[int]:
    stores = [dist.TCPStore("127.0.0.1", 0, 1, is_master=True) for _ in range(count)]
    return [store.port for store in stores]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("job")
    make_store(
        folder / "eval.zarr",
        {"val": quadrant_images(37), "few": quadrant_images(3, seed=5)},
        chunk_images=8,
        class_ids=list("abcd"),
        bad={"val": [4, 11]},
    )
    images, labels = quadrant_images(4097, size=4)
    make_store(folder / "4097.zarr", {"train": (images, labels), "val": (images[:5], labels[:5])}, chunk_images=512)
    (folder / "ports").write_text(" ".join(map(str, free_ports(WORLD + 1))))
    mp.spawn(job, (folder,), nprocs=WORLD)
    found = [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(WORLD)]
    found[0]["run"] = metrics(folder / "run4097")
    return found


def test_evaluation_is_the_same_on_1_to_4_ranks(results: list[dict[str, Any]]) -> None:
    for split, samples in (("val", 35), ("few", 3)):
        alone = results[0]["eval 1"][split]
        assert alone["val_samples"] == samples
        for world_size in range(2, WORLD + 1):
            for rank in range(world_size):
                figures = results[rank][f"eval {world_size}"][split]
                for key in ("val_samples", "val_top1", "val_top5"):
                    assert figures[key] == alone[key]
                assert figures["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_one_process_on_the_whole_batch(results: list[dict[str, Any]], world_size: int) -> None:
    """float32: 1e-5 of the largest gradient without batch norm, 1e-4 with SyncBN (its sums take another order)."""
    for rank in range(world_size):
        errors = results[rank][f"gradients {world_size}"]
        assert errors["flatten_linear"] < 1e-5
        assert errors["accumulated"] < 1e-5
        assert errors["resnet_small"] < 1e-4
        assert errors["resnet_small buffers"] < 1e-5


def test_4097_samples_on_4_ranks_with_global_batch_1024(results: list[dict[str, Any]]) -> None:
    assert [result["4097"] for result in results] == [0] * WORLD
    assert results[0]["run"][-1]["step"] == 4


def test_no_stride_warnings_from_ddp(results: list[dict[str, Any]]) -> None:
    assert results[0]["warnings"] == results[1]["warnings"] == 0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrant_store(tmp_path_factory.mktemp("data") / "quadrants.zarr")


def test_the_literal_command_then_resume_on_one_rank(store: Path, tmp_path: Path) -> None:
    """Two ranks; then, from mid-epoch, one takes both shares: the same weights but for float32 rounding."""
    out = tmp_path / "run"
    fields = {"data": store, "out": out, "epochs": 2, "pad": 1, "flip": 0.5, "checkpoint_every": 3}
    done = torchrun(2, fields)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/2") == 1
    whole = read_checkpoint(out / "last.pt")
    os.replace(out / "previous.pt", out / "last.pt")
    command = [sys.executable, "trainer/main.py", *flags(**{**SMALL, **fields, "resume": "auto"})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 epochs, 15 steps are done" in done.stdout
    resumed = read_checkpoint(out / "last.pt")
    assert whole is not None
    assert resumed is not None
    assert resumed["data"] == whole["data"]
    for name, value in resumed["model"].items():
        assert torch.allclose(value, whole["model"][name], rtol=1e-4, atol=1e-5)


def test_refusals_are_one_line_from_rank_0_and_end_all_ranks(tmp_path: Path) -> None:
    images, labels = quadrant_images(4)
    single = make_store(tmp_path / "one.zarr", {"train": (images[:1], labels[:1]), "val": (images, labels)})
    for fields, words in (
        ({"data": single, "out": tmp_path / "a", "global_batch": 2}, "1 samples"),
        ({"data": single, "out": tmp_path / "a", "global_batch": 3}, "--global-batch 3: not divisible by 2 ranks"),
    ):
        done = torchrun(2, fields)
        assert done.returncode != 0
        (line,) = own_lines(done.stderr)
        assert words in line


def test_sigterm_to_torchrun_leaves_a_checkpoint_and_no_process(store: Path, tmp_path: Path) -> None:
    fields = {"data": store, "out": tmp_path, "epochs": 5000, "checkpoint_every": 1000000}
    command = [str(TORCHRUN), "--nproc-per-node=2", "trainer/main.py", *flags(**{**SMALL, **fields})]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 2)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=100)
    assert process.returncode != 0
    (line,) = own_lines(stderr)
    assert "stopped by SIGTERM after step" in line
    state = read_checkpoint(tmp_path / "last.pt")
    assert state is not None
    assert f"step {state['step']:,}," in line
    assert state["sums"].shape == (2, 4)
