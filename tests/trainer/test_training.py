"""Whole runs in one process: what they write, exact resume, refusals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from folders import tree
from stores import make_store
from training_runs import checkpoint, flags, metrics, quadrant_images, quadrant_store, refusal, run_here

from pipeline.errors import UsageError
from trainer import evaluation, main, run_folder, stop
from trainer.batching import Batching
from trainer.config import Config
from trainer.metrics import draw_curves
from trainer.report.records import load_runs
from trainer.schedule import learning_rate
from trainer.stop import LossWatch


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrant_store(tmp_path_factory.mktemp("data") / "quadrants-8.zarr")


RICH = {
    "model": "resnet_small",
    "pad": 1,
    "flip": 0.5,
    "ema": 0.9,
    "cutmix": 1.0,
    "mixup": 0.2,
    "batch_size": 4,
    "clip_grad": 1.0,
    "lr": 0.2,
}


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Bit for bit, but for clocks and for fields that name the folder or the way of starting."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key not in ("out", "resume", "checkpoint_every", "sums"):
                assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal when the step is done."""
    original = LossWatch.record_step

    def record_step(self: LossWatch, at: int, *args: Any) -> Any:
        if at == step:
            os.kill(os.getpid(), number)
        return original(self, at, *args)

    monkeypatch.setattr(stop.LossWatch, "record_step", record_step)


def test_a_run_learns_and_writes_what_it_promises(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run_here(data=store, out=out, epochs=5, profile=True) == 0
    lines = metrics(out)
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines] == [8, 16, 24, 32, 40]
    promised = "epoch step train_loss val_loss val_top1 val_top5 lr images_per_second data_wait_share peak_memory_bytes"
    assert all(name in lines[0] for name in promised.split(" "))
    assert lines[-1]["val_top1"] > 0.9
    assert lines[-1]["val_top5"] == 1.0
    assert 0 <= lines[-1]["data_wait_share"] <= 1
    assert len(load_runs([out])[0].rates_by_step(100)[0]) == 40  # the report finds the rates that the run had
    names = set(os.listdir(out))
    assert names >= {"config.yaml", "metrics.jsonl", "starts.jsonl", "last.pt", "previous.pt", "best.pt", "trace.json"}
    assert any(name.startswith("events.out.tfevents") for name in names)
    draw_curves(out / "curves.png", lines)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "global batch 16 = 1 rank x 16 samples x 1 micro-step; lr 0.5 per 256 samples, 0.03125 at its peak" in text
    assert "8 steps an epoch, 40 in all" in text
    assert run_here(data=store, config=out / "config.yaml", out=tmp_path / "again") == 0
    again = metrics(tmp_path / "again")
    for key in ("train_loss", "val_loss", "val_top1", "lr"):
        assert [line[key] for line in again] == [line[key] for line in lines]
    assert run_here(data=store, eval_only=True, weights=out / "best.pt") == 0
    best = max(line["val_top1"] for line in lines)
    assert "flatten_linear on 37 samples: loss" in (text := capsys.readouterr().out)
    assert f"top-1 {best:.2%}" in text


@pytest.mark.parametrize("step", [1, 6, 8, 11, 16])
def test_resume_at_any_step_is_bit_exact(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, whole: Path
) -> None:
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        assert run_here(data=store, out=out, **RICH) == 128 + signal.SIGTERM
    assert checkpoint(out)["step"] == step
    assert run_here(data=store, out=out, resume="auto", **RICH) == 0
    assert_same(checkpoint(out), checkpoint(whole))
    assert_same(torch.load(out / "best.pt"), torch.load(whole / "best.pt"))
    for line, wanted in zip(metrics(out), metrics(whole), strict=True):
        for key in ("epoch", "step", "train_loss", "val_loss", "val_top1", "lr"):
            assert line[key] == wanted[key]


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    assert run_here(data=store, out=out, **RICH) == 0
    return out


def test_a_signal_during_evaluation_evaluates_after_the_resume(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    original = evaluation.sync_buffers
    calls = 0

    def interrupt(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), signal.SIGINT)
        original(*args)

    monkeypatch.setattr(evaluation, "sync_buffers", interrupt)
    assert run_here(data=store, out=tmp_path, **RICH) == 128 + signal.SIGINT
    assert metrics(tmp_path) == []
    assert (checkpoint(tmp_path)["epoch"], checkpoint(tmp_path)["step"]) == (0, 8)
    assert run_here(data=store, out=tmp_path, resume="auto", **RICH) == 0
    assert_same(checkpoint(tmp_path), checkpoint(whole))
    assert [line["train_loss"] for line in metrics(tmp_path)] == [line["train_loss"] for line in metrics(whole)]


def test_a_damaged_checkpoint_is_named(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run_here(data=store, out=out, epochs=2) == 0
    (out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:-100])
    assert run_here(data=store, out=out, epochs=3, resume="auto") == 0
    said = capsys.readouterr().out
    assert f"note: {out}/last.pt is damaged: its steps since previous.pt are done again" in said
    assert f"resuming from {out}/previous.pt" in said
    chosen = f"{out}/./previous.pt"  # the same file by another name, and no last resort
    assert run_here(data=store, out=tmp_path / "other", epochs=3, resume=chosen) == 0
    assert "is damaged" not in capsys.readouterr().out


def test_a_run_into_a_store_is_refused(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(store))
    for out in (store, store / "runs" / "first"):
        assert f"--out {out}: lies in a store, {store}; choose another folder" in refusal(capsys, data=store, out=out)
    assert sorted(os.listdir(store)) == before


def test_resume_cuts_metrics_back(store: Path, tmp_path: Path) -> None:
    assert run_here(data=store, out=tmp_path, epochs=3) == 0
    early = (tmp_path / "previous.pt").read_bytes()  # after epoch 2
    last = metrics(tmp_path)[-1]
    (tmp_path / "last.pt").write_bytes(early)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "st')
    assert run_here(data=store, out=tmp_path, epochs=3, resume=tmp_path / "last.pt") == 0
    assert [line["epoch"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert metrics(tmp_path)[-1]["train_loss"] == last["train_loss"]


def test_a_resume_never_drops_epochs_behind_a_broken_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(data=store, out=tmp_path) == 0
    file = tmp_path / "metrics.jsonl"
    broken = "oops\n" + file.read_text()
    file.write_text(broken)
    line = refusal(capsys, code=1, data=store, out=tmp_path, epochs=3, resume="auto")
    assert "metrics.jsonl: line 1 is broken" in line
    assert file.read_text() == broken


def test_resume_of_a_finished_run_and_a_longer_one(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(data=store, out=tmp_path) == 0
    before = checkpoint(tmp_path)
    assert run_here(data=store, out=tmp_path, resume="auto") == 0
    assert_same(checkpoint(tmp_path), before)
    assert run_here(data=store, out=tmp_path, resume="auto", epochs=3) == 0
    assert "changed since the checkpoint: epochs 2 -> 3" in capsys.readouterr().out
    assert [line["epoch"] for line in metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(("fields", "noted"), [({}, True), ({"pad": 1}, False), ({"crop": 6}, False)])
def test_crops_that_cannot_vary_are_noted(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, int], noted: bool
) -> None:
    assert run_here(data=store, out=tmp_path / "run", epochs=1, **fields) == 0
    assert ("note: crops are whole images" in capsys.readouterr().out) == noted


def test_a_finished_run_stays_as_it_is(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(data=store, out=tmp_path) == 0
    before = tree(tmp_path)
    assert run_here(data=store, out=tmp_path, resume="auto", lr=0.25) == 0
    assert tree(tmp_path) == before
    assert "2 epochs done, --epochs 2; nothing was trained or changed. To go on set --epochs" in capsys.readouterr().out
    assert run_here(data=store, out=tmp_path, resume="auto", epochs=1) == 0
    assert tree(tmp_path) == before
    out = capsys.readouterr().out
    assert "2 epochs done, --epochs 1" in out
    assert " of 1" not in out


def test_accumulation_keeps_the_global_batch(store: Path, tmp_path: Path) -> None:
    """The same steps in one, two or four micro-steps; float32, so 1e-5 of rounding."""
    runs = {size: tmp_path / str(size) for size in (16, 8, 4)}
    for size, out in runs.items():
        assert run_here(data=store, out=out, batch_size=size, epochs=1, flip=0.5, pad=1) == 0
    wanted = checkpoint(runs[16])["model"]
    for size in (8, 4):
        for name, value in checkpoint(runs[size])["model"].items():
            assert torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.05, "nesterov": False},
        {"nesterov": True, "flip_eval": True, "ema": 0.5, "normalize": "imagenet"},
        {"augment": "rrc", "crop": 6, "rrc_scale": 0.5, "order": "windowed", "window": 2, "threads": 2},
        {"crop": 6, "eval_crop": 6, "amp": True, "mixup": 0.1},
    ],
    ids=["adamw", "nesterov", "rrc", "amp"],
)
def test_options_train(store: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert run_here(data=store, out=tmp_path, **{"epochs": 4, "lr": 0.5, **fields}) == 0
    losses = [line["train_loss"] for line in metrics(tmp_path)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("fields", [{}, {"ema": 0.9, "compile": True}], ids=["plain", "ema-compiled"])
def test_best_weights_load_strictly_into_torchvision(
    store: Path, tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # without minutes of C++
    assert run_here(data=store, out=tmp_path, model="resnet18", epochs=1, global_batch=64, **fields) == 0
    for weights in (torch.load(tmp_path / "best.pt"), checkpoint(tmp_path)["model"]):
        torchvision.models.resnet18(num_classes=4).load_state_dict(weights, strict=True)


def test_fine_tuning_replaces_the_head(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = quadrant_images(64)
    other = make_store(tmp_path / "two.zarr", {"train": (images, labels % 2), "val": (images, labels % 2)})
    assert run_here(data=other, out=tmp_path / "a", model="resnet_small", epochs=1) == 0
    weights = tmp_path / "a" / "best.pt"
    assert run_here(data=store, out=tmp_path / "b", model="resnet_small", epochs=1, weights=weights) == 0
    assert "new head: fc.weight, fc.bias" in capsys.readouterr().out
    line = refusal(capsys, data=store, model="resnet_small", eval_only=True, weights=weights)
    assert "the number of classes differs" in line


def test_progressive_resolution(tmp_path: Path) -> None:
    for size in (8, 16):
        quadrant_store(tmp_path / f"q-{size}.zarr", size=size)
    out, data = tmp_path / "run", str(tmp_path / "q-{size}.zarr")
    stages = "[{epoch: 0, size: 8}, {epoch: 1, size: 16, crop: 12}]"
    fields = {"data": data, "stages": stages, "model": "resnet_small", "epochs": 3, "out": out}
    assert run_here(**fields) == 0
    whole = checkpoint(out)
    assert [line["step"] for line in metrics(out)] == [8, 16, 24]
    os.replace(out / "previous.pt", out / "last.pt")
    assert run_here(**fields, resume="auto") == 0
    assert_same(checkpoint(out), whole)


def test_a_store_without_val(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "s.zarr", {"train": quadrant_images(40)})
    assert run_here(data=store, out=tmp_path / "run") == 0
    output = capsys.readouterr().out
    assert "no split val" in output
    assert "nan" not in output
    assert metrics(tmp_path / "run")[-1]["val_top1"] is None
    assert (tmp_path / "run" / "best.pt").exists()


@pytest.mark.parametrize("labelled", [True, False])
def test_a_labelled_test_split_serves_where_there_is_no_val(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labelled: bool
) -> None:
    images, labels = quadrant_images(37, seed=2)
    splits = {"train": quadrant_images(130, seed=1), "test": (images, labels if labelled else labels * 0 - 2)}
    make_store(tmp_path / "a.zarr", splits, class_ids=["a", "b", "c", "d"])
    assert run_here(data=tmp_path / "a.zarr", out=tmp_path / "run", epochs=1, warmup_epochs=0) == 0
    assert ("no split val" in capsys.readouterr().out) == (not labelled)


def test_a_loss_that_is_not_finite_stops_with_step_and_keys(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, code=1, data=store, out=tmp_path, lr=1e30, warmup_epochs=0)
    assert "not finite at step" in line
    assert "train/0" in line
    assert line.endswith("set --clip-grad, and start again")
    assert not (tmp_path / "last.pt").exists()
    assert run_here(data=store, out=tmp_path, epochs=1) == 0
    line = refusal(capsys, code=1, data=store, out=tmp_path, lr=1e30, resume="auto")
    assert line.endswith("go on with --resume auto")


def no_space(*args: Any, **options: Any) -> None:
    raise OSError(28, os.strerror(28))


def test_a_full_disk_during_the_run_is_the_last_word(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_folder.torch, "save", no_space)
    monkeypatch.setattr("trainer.metrics.draw_curves", no_space)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", no_space)
    line = refusal(capsys, code=1, data=store, out=tmp_path)
    assert line.endswith("best.pt: the checkpoint can't be written (No space left on device); earlier ones are kept")


def test_curves_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"epoch": 1, "train_loss": 1.0, "val_loss": 1.0, "val_top1": 0.5, "val_top5": None}
    monkeypatch.setattr("pipeline.store.atomic.os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        draw_curves(tmp_path / "curves.png", [line])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["trainer.metrics.write_bytes", "trainer.metrics.record_start"])
def test_a_full_disk_before_the_start_leaves_no_folder(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(place, no_space)
    line = refusal(capsys, code=1, data=store, out=out)
    assert line.startswith(f"trainer: --out {out}: can't be written (No space left on device); make room there")
    assert not out.exists()


@pytest.mark.parametrize("best_is_there", [True, False])
def test_a_resume_into_another_folder_takes_best_and_metrics_along(
    store: Path, tmp_path: Path, best_is_there: bool
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert run_here(data=store, out=old, epochs=5) == 0
    if not best_is_there:
        (old / "best.pt").unlink()
    before = max(line["val_top1"] for line in metrics(old))
    assert run_here(data=store, out=new, epochs=6, lr=1e-9, resume=old) == 0  # learns no more
    assert [line["epoch"] for line in metrics(new)] == [1, 2, 3, 4, 5, 6]
    if best_is_there:
        assert checkpoint(new)["best"] == before
        assert (new / "best.pt").read_bytes() == (old / "best.pt").read_bytes()
    else:
        assert checkpoint(new)["best"] == metrics(new)[-1]["val_top1"]
        assert_same(torch.load(new / "best.pt"), checkpoint(new)["model"])


def test_a_val_split_without_labels_is_no_val(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = quadrant_images(37)
    splits = {"train": quadrant_images(130), "val": (images, labels * 0 - 2)}
    store = make_store(tmp_path / "s.zarr", splits, class_ids=["a", "b", "c", "d"])
    out = tmp_path / "run"
    assert run_here(data=store, out=out) == 0
    text = capsys.readouterr().out
    assert text.count("val has no labels: training without evaluation") == 1
    assert "nan" not in text
    assert metrics(out)[-1]["val_top1"] is None
    line = refusal(capsys, data=store, eval_only=True, weights=out / "best.pt")
    assert "val has no labels; --eval-only needs a val split" in line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x"}, "RANK='x' in the environment: must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment, WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment without RANK and MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29400"}, "without MASTER_ADDR"),
    ],
)
def test_wrong_variables_of_torchrun(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr(main, "GRACE_SECONDS", 0.0)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = refusal(capsys, data=store, out=tmp_path / "run")
    assert words in line
    assert line.endswith("; start with torchrun")


def test_a_group_that_never_formed_is_no_lost_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise torch.distributed.DistNetworkError("timed out")

    monkeypatch.setattr("trainer.ranks.dist.init_process_group", refuse)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    line = refusal(capsys, code=1, data=store, out=tmp_path / "run", timeout=7)
    assert "the group of 2 ranks didn't form within --timeout 7 seconds (timed out); check that all were" in line


def test_an_interrupt_before_the_first_step_is_one_line(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.training.TrainingSetup", interrupt)
    out = tmp_path / "run"
    assert refusal(capsys, code=130, data=store, out=out) == "trainer: interrupted before the first step"
    line = refusal(capsys, code=130, data=store, eval_only=True, weights="w.pt")
    assert line == "trainer: interrupted"


@pytest.mark.parametrize(
    ("fields", "world_size", "wanted"),
    [
        ({}, 1, (256, 256, 1)),
        ({"global_batch": 1024}, 8, (1024, 128, 1)),
        ({"global_batch": 1024}, 1, (1024, 256, 4)),
        ({"global_batch": 6 * 257}, 2, (6 * 257, 3, 257)),
        ({"batch_size": 32}, 4, (128, 32, 1)),
        ({"global_batch": 96, "batch_size": 8}, 3, (96, 8, 4)),
        ({"eval_only": True, "weights": "w.pt"}, 3, (768, 256, 1)),
    ],
)
def test_batch_sizes(fields: dict[str, Any], world_size: int, wanted: tuple[int, int, int]) -> None:
    chosen = Batching.choose(Config("s", **fields), world_size)
    assert (chosen.global_batch, chosen.batch_size, chosen.accumulation) == wanted


@pytest.mark.parametrize(
    ("fields", "ranks", "words"),
    [
        ({}, 3, "--global-batch 256: not divisible by 3 ranks; --global-batch 255 is"),
        ({"global_batch": 2}, 4, "--global-batch 4 is"),
        ({"global_batch": 64, "batch_size": 48}, 2, "--batch-size 48: doesn't divide the 32 samples that a rank takes"),
        ({"global_batch": 64, "batch_size": 24}, 2, "of --global-batch 64 (ranks: 2); --batch-size 16 does"),
    ],
)
def test_batch_sizes_that_do_not_fit_name_some_that_do(fields: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Batching.choose(Config("s", **fields), ranks)
    assert words in str(caught.value)


def test_learning_rate_schedule() -> None:
    rates = [learning_rate(step, 100, 10, 2.0) for step in range(100)]
    assert rates[0] == pytest.approx(2.0 / 11)
    assert max(rates) == rates[10] == 2.0
    assert all(a < b for a, b in zip(rates[:10], rates[1:11], strict=True))
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[55] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.01
    assert learning_rate(0, 10, 0, 1.0) == 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"crop": 9}, ["crop 9: images of", "are 8x8; choose 8 or less"]),
        ({"crop": 9, "eval_crop": 8}, ["--crop 9: images of", "are 8x8; choose 8 or less"]),
        ({"augment": "rrc", "crop": 9, "eval_crop": 8}, ["--crop 9: images of", "8x8"]),
        ({"eval_crop": 9}, ["--eval-crop 9: images of", "8x8"]),
        ({"stages": "[{epoch: 0, crop: 9}]", "eval_crop": 8}, ["--stages: crop 9: images of", "8x8"]),
        ({"pad": 8}, ["--pad 8"]),
        ({"model": "resnet_small", "crop": 6, "eval_crop": 8}, ["--model resnet_small", "6x6", "--crop"]),
        ({"model": "resnet51"}, ["--model resnet51", "resnet50"]),
        ({"global_batch": 256}, ["--global-batch 256: larger than the 130 samples", "use --global-batch 128"]),
        ({"global_batch": 192, "batch_size": 96}, ["--global-batch 192", "--global-batch 128 --batch-size 128"]),
        ({"global_batch": 16, "batch_size": 5}, ["--batch-size 5", "--global-batch 16"]),
        ({"device": "xpu"}, ["--device xpu", "--device auto"]),
        ({"weights": "/nowhere.pt"}, ["--weights /nowhere.pt"]),
        ({"resume": "/nowhere.pt"}, ["--resume /nowhere.pt", "no checkpoint"]),
        ({"data": "/nowhere.zarr"}, ["/nowhere.zarr", "no store there"]),
        ({"no_such_field": 3}, ["--no-such-field"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], words: list[str]
) -> None:
    out = tmp_path / "run"
    line = refusal(capsys, **{"data": store, "out": out, **fields})
    assert line.startswith("trainer: ")
    assert all(word in line for word in words), line
    assert not re.search(r"\w\(|<", line)  # no object's repr
    assert not out.exists()


def test_refused_resumes(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run_here(data=store, out=out, epochs=1) == 0
    assert "add --resume auto" in refusal(capsys, data=store, out=out)
    other = quadrant_store(tmp_path / "other.zarr", train=131)
    again = {"out": out, "resume": "auto", "epochs": 2}
    line = refusal(capsys, data=other, **again)
    assert re.search(r"--resume .*last\.pt: another store \(its samples differ: \w{8}, this run's \w{8}\)", line)
    assert "seed is 0, this run's 1" in refusal(capsys, data=store, seed=1, **again)
    assert "global batch is 16, this run's 32" in refusal(capsys, data=store, **again, global_batch=32)
    assert "its model is flatten_linear" in refusal(capsys, data=store, model="resnet_small", **again)
    assert "its ema is 0.0" in refusal(capsys, data=store, ema=0.9, **again)
    images, labels = quadrant_images(130, seed=1)
    fewer = make_store(tmp_path / "fewer.zarr", {"train": (images, labels // 2), "val": (images, labels // 2)})
    assert "the number of classes differs" in refusal(capsys, data=fewer, **again)


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(data=tmp_path, debug=True) == 2
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_errors_are_one_line_too(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def run(*args: Any) -> None:
            raise error

        return run

    for error, words in (
        (torch.OutOfMemoryError("CUDA out of memory"), "smaller --batch-size"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "lost contact with another rank"),
        (RuntimeError("Application timeout caused pair closure"), "lost contact with another rank"),
        (KeyError("x"), "KeyError: 'x' (--debug shows the traceback)"),
    ):
        monkeypatch.setattr(main, "_run", fail(error))
        assert words in refusal(capsys, code=1, data=store, out=tmp_path)


def test_numpy_is_not_in_checkpoints(store: Path, whole: Path) -> None:
    def walk(value: Any) -> None:
        assert not isinstance(value, np.generic)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)

    walk(checkpoint(whole))


RECIPES = sorted((Path(__file__).parents[2] / "trainer" / "recipes").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_run_their_first_steps(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text()
    imagenet = "ImageNet," in text
    several = "{size}" in text
    for size in (256, 292) if several else (256 if imagenet else 32,):
        images, labels = quadrant_images(8, size)
        splits = {"train": (images, labels), "val": (images[:3], labels[:3])}
        if size == 292:
            del splits["train"]
        make_store(tmp_path / f"s-{size}.zarr", splits, class_ids=list("abcd"))
    data = tmp_path / ("s-{size}.zarr" if several else f"s-{size}.zarr")
    fields = {"config": recipe, "data": data, "out": tmp_path / "run", "global_batch": 4, "batch_size": 2}
    stages = ", size: 256" if several else ""
    epochs = 2 if "stages:" in text else 1
    if epochs == 2:
        fields["stages"] = f"[{{epoch: 0{stages}, crop: 160}}, {{epoch: 1{stages}, crop: 192}}]"
    args = flags(**fields, epochs=epochs, warmup_epochs=0, compile=False, device="cpu")
    assert main.main(args) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 2 * epochs
