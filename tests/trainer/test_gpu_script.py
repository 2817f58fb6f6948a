"""The script for machines with a GPU: what of it runs without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=Path(gpu.__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tests.gpu: no CUDA device here")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_its_store_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "COMMON", [*gpu.COMMON, "--device=cpu"])
    store = gpu.make(tmp_path)
    gpu.torchrun(2, store, tmp_path / "run", "--epochs=1", "--global-batch=128")
    assert [line["step"] for line in gpu.epochs(tmp_path / "run")] == [15]
    lines = gpu.torchrun(1, store, tmp_path / "none", "--eval-only", f"--weights={tmp_path / 'run' / 'best.pt'}")
    assert "503 samples" in lines.splitlines()[-1]


def test_what_it_hooks_into_is_there():
    from trainer.stop import LossWatch
    from trainer.training import TrainingRun

    assert callable(LossWatch.record_step)
    assert callable(LossWatch.sync)
    assert callable(TrainingRun._finish_epoch)


def test_a_failing_command_is_one_line():
    with pytest.raises(AssertionError) as caught:
        gpu.python([sys.executable, "-c", "import sys; print('a'); sys.exit('b')"])
    assert str(caught.value) == "a | b"
