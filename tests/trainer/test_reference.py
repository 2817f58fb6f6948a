"""Every config field does what plain PyTorch does: the trainer against `reference`, on one and two ranks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.multiprocessing as mp
from stores import make_store
from torch.nn.parallel import DistributedDataParallel
from training_runs import checkpoint, free_ports, metrics, quadrant_images

from trainer import networks
from trainer.config import Config, Stage
from trainer.ranks import Ranks
from trainer.training import train

BASE: dict[str, Any] = {
    "model": "flatten_linear",
    "epochs": 2,
    "global_batch": 16,
    "batch_size": 4,
    "lr": 2.0,
    "warmup_epochs": 0.5,
    "device": "cpu",
}
RESNET = {"model": "tiny_resnet", "lr": 0.5}
GROWING = [Stage(0, 12, 8), Stage(1, 16, 12)]

CASES: dict[str, dict[str, Any]] = {
    "data": {},
    "model": RESNET,
    "epochs": {"epochs": 3},
    "global_batch": {"global_batch": 32},
    "batch_size": {"batch_size": None},
    "lr": {"lr": 0.3},
    "optimizer": {"optimizer": "adamw", "lr": 0.02, "momentum": 0.8, "weight_decay": 0.5},
    "momentum": {"momentum": 0.5},
    "nesterov": {"nesterov": True},
    "weight_decay": {"weight_decay": 0.1},
    "warmup_epochs": {"warmup_epochs": 1.25},
    "schedule": {"schedule": "linear"},
    "label_smoothing": {"label_smoothing": 0.0},
    "clip_grad": {"clip_grad": 0.05},
    "ema": {**RESNET, "ema": 0.9},
    "crop": {**RESNET, "crop": 8, "eval_crop": 12},
    "eval_crop": {**RESNET, "crop": 8, "eval_crop": 11},
    "pad": {"pad": 2},
    "flip": {"flip": 0.2},
    "alternate_flip": {"alternate_flip": True, "epochs": 3},
    "augment": {"augment": "rrc", "crop": 8},
    "rrc_scale": {"augment": "rrc", "crop": 8, "rrc_scale": 0.5},
    "randaugment": {"randaugment": 12, "pad": 1},
    "random_erasing": {"random_erasing": 0.6},
    "resample": {"augment": "rrc", "resample": "cubic"},
    "eval_resize": {"data": "stretched-12.zarr", **RESNET, "augment": "rrc", "eval_resize": 16, "eval_crop": 12},
    "mixup": {"mixup": 0.4},
    "cutmix": {"cutmix": 1.0, "mixup": 0.2},
    "normalize": {"normalize": "imagenet"},
    "flip_eval": {"flip_eval": True},
    "eval_every": {"eval_every": 2, "epochs": 3},
    "seed": {"seed": 5},
    "subset": {"subset": "subset.txt"},
    "order": {"order": "windowed"},
    "window": {"order": "windowed", "window": 2},
    "amp": {"amp": True},
    "stages": {**RESNET, "epochs": 2, "data": "s-{size}.zarr", "stages": GROWING, "eval_size": 12, "eval_crop": 12},
    "eval_size": {**RESNET, "epochs": 2, "data": "s-{size}.zarr", "stages": GROWING, "eval_size": 20, "eval_crop": 18},
    "blurpool": {**RESNET, "blurpool": True},
    "zero_init_residual": {**RESNET, "zero_init_residual": True},
    "weights": {"weights": "weights.pt"},
}
"""Field -> a run in which it isn't the default."""

WITHOUT_EFFECT = {
    "out": "elsewhere",
    "threads": 2,
    "warm": "never",
    "device": "cpu",
    "compile": True,
    "checkpoint_every": 3,
    "checkpoint_minutes": 1e-9,
    "profile": True,
    "timeout": 100.0,
    "debug": True,
    "sync_bn": True,
}
"""Fields that change no figure: compared with the same reference. On several ranks test_setup looks at sync_bn."""

NO_RUN_OF_ITS_OWN = {"resume", "eval_only", "cache"}
"""test_training and test_cache compare runs with these fields with runs without."""

RECIPES = {
    "resnet": {**RESNET, "augment": "rrc", "rrc_scale": 0.35, "blurpool": True, "schedule": "linear",
               "flip_eval": True},
    "vit": {"optimizer": "adamw", "lr": 0.002, "clip_grad": 1.0, "label_smoothing": 0.0, "augment": "rrc", "mixup": 0.2,
            "randaugment": 9, "random_erasing": 0.2},
    "cifar": {**RESNET, "nesterov": True, "pad": 2, "alternate_flip": True, "flip_eval": True, "amp": True, "ema": 0.9,
              "schedule": "linear", "epochs": 2},
}  # fmt: skip
TWO_RANKS = ["data", "batch_size", "ema", "clip_grad", "cutmix", "augment", "order", "model", "amp", "eval_every"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of 130 + 36 images, also in growing sizes; that of 20 px has no train split."""
    folder = tmp_path_factory.mktemp("reference")
    for size in (12, 16, 20):
        splits = {"train": quadrant_images(130, size, seed=1), "val": quadrant_images(37, size, seed=2)}
        if size == 20:
            del splits["train"]
        make_store(folder / f"s-{size}.zarr", splits, chunk_images=16, class_ids=list("abcd"), bad={"val": [4]})
        if size == 12:
            make_store(folder / "stretched-12.zarr", splits, chunk_images=16, class_ids=list("abcd"), fit="stretch")
    torch.manual_seed(99)
    torch.save(reference.make_model("flatten_linear", 4, 12).state_dict(), folder / "weights.pt")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(networks.OWN, "tiny_resnet", lambda classes, size: reference.tiny_resnet(classes))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # without minutes of C++


def config_of(case: dict[str, Any], folder: Path, out: Path) -> Config:
    given = {"data": "s-12.zarr", "out": str(out), **BASE, **case}
    given["data"] = str(folder / given["data"])
    if "weights" in given:
        given["weights"] = str(folder / given["weights"])
    if "subset" in given:
        given["subset"] = str(folder / given["subset"])
        np.savetxt(given["subset"], np.arange(129, 29, -1), "%d")
    return Config(**given)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of the weights that differ most, relative to the largest weight."""
    assert a.keys() == b.keys()
    scale = max(float(value.abs().max()) for key, value in a.items() if "weight" in key)
    floats = [key for key in a if a[key].is_floating_point()]
    return max(float((a[key] - b[key]).abs().max()) for key in floats) / scale


def tolerance(config: Config) -> float:
    """float32 in another order of sums; batch norm on few samples, bfloat16 and RandAugment magnify that."""
    if config.model == "tiny_resnet":
        return 5e-2 if config.amp else 5e-3
    return 1e-3 if config.amp else 5e-3 if config.randaugment and config.augment == "rrc" else 2e-5


def reference_run(config: Config, world_size: int = 1, **changes: Any) -> reference.Result:
    """Without the fields that change no figure; each run is done once."""
    given = {name: value for name, value in {**asdict(config), **changes}.items() if name not in WITHOUT_EFFECT}
    return _reference_run(json.dumps(given), world_size)


@cache
def _reference_run(given: str, world_size: int) -> reference.Result:
    return reference.train(json.loads(given), json.loads(given)["data"], world_size)


def assert_as_reference(config: Config, out: Path, world_size: int = 1) -> None:
    wanted = reference_run(config, world_size)
    state, bound = checkpoint(out), tolerance(config)
    assert distance(wanted.weights, state["model"]) < bound
    if config.ema:
        average = {key.removeprefix("module."): value for key, value in state["ema"].items() if "module." in key}
        assert distance(wanted.average, average) < bound
    for line, figures in zip(metrics(out), wanted.lines, strict=True):
        assert line["lr"] == pytest.approx(figures["lr"])
        assert (line["epoch"], line["step"]) == (figures["epoch"], figures["step"])
        assert line["train_loss"] == pytest.approx(figures["train_loss"], rel=bound)
        for key in ("val_loss", "val_top1", "val_top5"):
            if key not in figures:
                assert line[key] is None
            else:
                assert line[key] == pytest.approx(figures[key], rel=bound, abs=0 if bound < 1e-3 else 0.03)


def test_every_field_has_a_reference() -> None:
    assert {*CASES, *WITHOUT_EFFECT} | NO_RUN_OF_ITS_OWN == {item.name for item in fields(Config)}


@pytest.mark.parametrize("name", [*CASES, *RECIPES])
def test_a_field_does_what_plain_torch_does(name: str, folder: Path, tmp_path: Path) -> None:
    config = config_of({**CASES, **RECIPES}[name], folder, tmp_path)
    train(config, Ranks(), torch.device("cpu"), lambda line: None)
    assert_as_reference(config, tmp_path)


NOTHING_TO_SEE = (
    "data",
    "model",
    "batch_size",
    "stages",
    "eval_size",
    "eval_crop",
    "eval_every",
    "epochs",
    "global_batch",
)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOTHING_TO_SEE])
def test_the_reference_tells_a_field_from_its_default(name: str, folder: Path, tmp_path: Path) -> None:
    """Or the comparison would pass for a trainer that ignores it."""
    config = config_of(CASES[name], folder, tmp_path)
    default = {item.name: item.default for item in fields(Config)}[name]
    with_field, without = reference_run(config), reference_run(config, **{name: BASE.get(name, default)})
    figures = [abs(a["val_loss"] - b["val_loss"]) for a, b in zip(with_field.lines, without.lines, strict=True)]
    weights = max(distance(with_field.weights, without.weights), distance(with_field.average, without.average))
    assert max(weights, *figures) > 4 * tolerance(config)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_changes_no_figure(name: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / (WITHOUT_EFFECT[name] if name == "out" else "run")
    config = config_of({} if name == "out" else {name: WITHOUT_EFFECT[name]}, folder, out)
    train(config, Ranks(), torch.device("cpu"), lambda line: None)
    assert_as_reference(config, out)


def job(rank: int, folder: Path, port: int) -> None:
    """One of two processes, which train all cases one after the other."""
    from trainer.ranks import process_group

    torch.set_num_threads(1)
    networks.OWN["tiny_resnet"] = lambda classes, size: reference.tiny_resnet(classes)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    ranks = Ranks(rank, rank, 2, 2)
    synced, forward = [], DistributedDataParallel.forward

    def noted(self: DistributedDataParallel, *args: Any) -> Any:
        synced.append(self.require_backward_grad_sync)
        return forward(self, *args)

    DistributedDataParallel.forward = noted  # type: ignore[method-assign]
    with process_group(ranks, torch.device("cpu"), 120):
        for name in TWO_RANKS:
            config = config_of(CASES[name], folder, folder / name)
            train(config, ranks, torch.device("cpu"), lambda line: None)
            (folder / f"synced-{name}-{rank}").write_text(" ".join(map(str, synced)))
            synced.clear()


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    mp.start_processes(job, (folder, free_ports(1)[0]), nprocs=2, start_method="forkserver")
    return folder


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_do_what_plain_torch_does(name: str, two_ranks: Path) -> None:
    config = config_of(CASES[name], two_ranks, two_ranks / name)
    assert_as_reference(config, two_ranks / name, world_size=2)


def test_gradients_are_exchanged_once_a_step(two_ranks: Path) -> None:
    for rank in (0, 1):
        synced = (two_ranks / f"synced-data-{rank}").read_text().split()  # two micro-steps each
        assert synced == ["False", "True"] * 16
