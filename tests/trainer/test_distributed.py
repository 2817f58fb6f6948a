"""Several ranks over gloo: exact evaluation, DDP's gradients, no hang, resume on fewer, refusals, clean ends.

One job of four processes does what needs no torchrun; the literal command is run for the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from distributed_job import WORLD, job
from stores import make_store
from training_runs import (
    ROOT,
    SMALL,
    TORCHRUN,
    checkpoint,
    flags,
    free_ports,
    metrics,
    own_lines,
    quadrant_images,
    quadrant_store,
    run_here,
    torchrun,
    wait_until,
)


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
    make_store(folder / "one.zarr", {"train": (images[:1], labels[:1]), "val": (images[:5], labels[:5])})
    (folder / "ports").write_text(" ".join(map(str, free_ports(WORLD + 2))))
    mp.start_processes(job, (folder,), nprocs=WORLD, start_method="forkserver")
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
    """float32: 1e-5 of the largest gradient."""
    for rank in range(world_size):
        errors = results[rank][f"gradients {world_size}"]
        assert max(errors.values()) < 1e-5
        assert ("accumulated" in errors) == (world_size == 2)


def test_4097_samples_on_4_ranks_with_global_batch_1024(results: list[dict[str, Any]]) -> None:
    assert [result["4097"] for result in results] == [0] * WORLD
    assert results[0]["run"][-1]["step"] == 4


def test_a_refusal_inside_the_group_ends_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        code, line = result["refusal"]
        assert code == 2
        assert "world size 4 is larger than the 1 samples" in line
        assert line.count("\n") == 1


def test_no_stride_warnings_from_ddp(results: list[dict[str, Any]]) -> None:
    assert results[0]["warnings"] == results[1]["warnings"] == 0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrant_store(tmp_path_factory.mktemp("data") / "quadrants.zarr")


def test_the_literal_command_then_resume_on_one_rank(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks; then, from mid-epoch, one takes both shares: the same weights but for float32 rounding."""
    out = tmp_path / "run"
    fields = {"data": store, "out": out, "epochs": 2, "pad": 1, "flip": 0.5, "checkpoint_every": 3}
    done = torchrun(2, fields)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/2") == 1
    whole = checkpoint(out)
    os.replace(out / "previous.pt", out / "last.pt")
    assert run_here(**fields, resume="auto") == 0
    assert "1 epoch, 15 steps done" in capsys.readouterr().out
    resumed = checkpoint(out)
    assert resumed["data"] == whole["data"]
    for name, value in resumed["model"].items():
        assert torch.allclose(value, whole["model"][name], rtol=1e-4, atol=1e-5)


def test_a_refusal_is_one_line_from_rank_0_and_ends_all_ranks(tmp_path: Path) -> None:
    done = torchrun(2, {"data": tmp_path / "s.zarr", "pad": -1})
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    assert "pad" in line


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
    state = checkpoint(tmp_path)
    assert f"step {state['step']:,}," in line
    assert state["sums"].shape == (2, 4)
