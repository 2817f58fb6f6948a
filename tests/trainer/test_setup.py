"""What is decided before the first step, and what a run needs on devices and ranks that aren't here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import make_store
from torch import nn
from training_runs import checkpoint, flags, metrics, quadrant_images, quadrant_store, refusal, run_here

from pipeline.errors import Error
from trainer import networks, run_folder
from trainer import ranks as ranks_module
from trainer.config import Config, Stage
from trainer.main import main
from trainer.metrics import peak_memory_bytes
from trainer.models import all_finite
from trainer.networks import WhitenedNet
from trainer.ranks import Ranks, process_group
from trainer.run_folder import RunFolder
from trainer.setup import TrainingSetup
from trainer.stop import Stopped
from trainer.training import TrainingRun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrant_store(tmp_path_factory.mktemp("data") / "quadrants-8.zarr")


def run_of(store: Path, **fields: Any) -> TrainingRun:
    config = Config(str(store), **{"model": "flatten_linear", "global_batch": 16, "epochs": 2, **fields})
    return TrainingRun(TrainingSetup(config, Ranks(), CPU, lambda _: None), None, lambda _: None)


def test_model_and_batches_are_channels_last(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(store, model="resnet_small", mixup=0.2)
    assert run.raw.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    layouts = []
    run.raw.register_forward_pre_hook(lambda _, x: layouts.append(x[0].stride(1)))
    run.fit()
    assert set(layouts) == {1}


def test_whitened_patches_have_no_correlation(store: Path) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(64, 3, 16, 16) + 2 * torch.randn(64, 1, 16, 16)
    net = WhitenedNet(10)
    net.whiten(mixed)
    with torch.no_grad():
        out = net.whitening(mixed)[:, :12].transpose(0, 1).flatten(1)
    assert torch.allclose(out @ out.T / out.shape[1], torch.eye(12), atol=0.02)
    assert not net.whitening.weight.requires_grad
    whitened = run_of(quadrant_store(store.parent / "q-32.zarr", size=32), model="whitened_net")
    torch.manual_seed(0)
    assert not torch.equal(whitened.raw.whitening.weight, WhitenedNet(4).whitening.weight)


def test_sync_bn(store: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = Config(str(store), model="resnet_small", sync_bn=True)
    setup = TrainingSetup(config, Ranks(world_size=2), torch.device("meta"), lambda _: None)
    norms = [m for m in setup.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert {type(norm) for norm in norms} == {nn.SyncBatchNorm}
    with pytest.raises(Error, match="--sync-bn"):
        TrainingSetup(config, Ranks(world_size=2), CPU, lambda _: None)


def test_one_sample_is_refused_where_batch_norm_needs_more(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, data=store, out=tmp_path / "run", model="resnet18", batch_size=1)
    assert "1 sample per rank and step" in line
    assert run_here(data=store, out=tmp_path / "run", batch_size=1, epochs=1) == 0  # without batch norm


def test_a_store_for_evaluation_alone_needs_no_train_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quadrant_store(tmp_path / "s-8.zarr", size=8)
    make_store(tmp_path / "s-16.zarr", {"val": quadrant_images(37, 16)}, class_ids=[f"quadrant{i}" for i in range(4)])
    stages, data = "[{epoch: 0, size: 8}]", tmp_path / "s-{size}.zarr"
    fields = {"data": data, "stages": stages, "model": "resnet_small", "eval_size": 16, "out": tmp_path / "run"}
    assert run_here(**fields) == 0
    assert metrics(tmp_path / "run")[-1]["val_top1"] is not None
    make_store(tmp_path / "s-20.zarr", {"val": quadrant_images(37, 16)}, class_ids=list("abcd"))
    assert "other classes" in refusal(capsys, **{**fields, "eval_size": 20, "out": tmp_path / "other"})


def pooled(classes: int, size: int) -> nn.Module:
    """The least that takes pictures of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))


def test_each_crop_size_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up after eight graphs, behind one warning, and goes on uncompiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    torch._dynamo.reset()
    store = quadrant_store(tmp_path / "s.zarr", size=24, train=16)
    stages = [Stage(i, crop=8 + i) for i in range(11)]
    monkeypatch.setitem(networks.OWN, "pooled", pooled)
    run = run_of(store, model="pooled", compile=True, stages=stages, epochs=11, eval_every=11)
    run.fit()
    assert len(graphs) == 11


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {8, 16}),
        ({"checkpoint_every": 3}, {3, 6, 8, 9, 12, 15, 16}),
        ({"checkpoint_minutes": 1e-9}, {*range(1, 17)}),
    ],
)
def test_when_checkpoints_are_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, float], wanted: set[int]
) -> None:
    steps = []
    monkeypatch.setattr(RunFolder, "save", lambda self, state, best=None: steps.append(state["step"]))
    assert run_here(data=store, out=tmp_path, **fields) == 0
    assert set(steps) == wanted


def test_a_checkpoint_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weight, write = RunFolder(tmp_path), torch.zeros(3), run_folder._write

    def late(*args: Any) -> None:
        weight.fill_(1)  # the next step
        write(*args)

    monkeypatch.setattr(run_folder, "_write", late)
    folder.save({"weight": weight}, best={"weight": weight})
    folder.wait()
    folder.close()
    assert checkpoint(tmp_path)["weight"].sum() == 0
    assert torch.load(tmp_path / "best.pt")["weight"].sum() == 0


def test_diverged_weights_are_never_saved(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finite loss, then a step that isn't: the checkpoint of before stays, from which a run can go on."""
    assert run_here(data=store, out=tmp_path, epochs=1) == 0
    before = (tmp_path / "last.pt").read_bytes()
    fields = {"data": store, "out": tmp_path, "resume": "auto", "checkpoint_every": 1, "warmup_epochs": 0}
    line = refusal(capsys, code=1, lr=3e38, global_batch=16, weight_decay=3e38, **fields)
    assert "not finite after step 9" in line
    assert line.endswith("go on with --resume auto")
    assert (tmp_path / "last.pt").read_bytes() == before
    assert run_here(**fields) == 0


def test_all_finite() -> None:
    model = nn.Linear(2, 2)
    assert all_finite(model)
    model.bias.data[1] = float("nan")
    assert not all_finite(model)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resume_takes_the_configs_optimizer_options(
    store: Path, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"data": store, "out": tmp_path, "optimizer": optimizer, "lr": 0.01}
    assert run_here(**fields, epochs=1, weight_decay=0.5, momentum=0.9) == 0
    assert run_here(**fields, weight_decay=0.25, momentum=0.5, resume="auto") == 0
    assert "weight_decay 0.5 -> 0.25" in capsys.readouterr().out
    groups = checkpoint(tmp_path)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert {group["momentum"] if optimizer == "sgd" else group["betas"][0] for group in groups} == {0.5}


def test_a_lone_error_is_said_without_waiting_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed = []
    monkeypatch.setattr(ranks_module.dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(ranks_module.dist, "destroy_process_group", lambda: destroyed.append(True))
    for error in (RuntimeError("alone"), Error("alone")):
        with pytest.raises(type(error)), process_group(Ranks(world_size=2), CPU, 5):
            raise error
    assert destroyed == []
    with pytest.raises(Stopped), process_group(Ranks(world_size=2), CPU, 5):
        raise Stopped(15, 3)
    with process_group(Ranks(world_size=2), CPU, 5):
        pass
    assert len(destroyed) == 2


def test_an_out_that_holds_nothing_is_named(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mistyped\x1b[31m"
    assert run_here(data=store, out=out, resume="auto", epochs=1) == 0
    text = capsys.readouterr().out
    assert "no checkpoint there" in text
    assert "\x1b" not in text
    assert run_here(data=store, out=out, resume="auto") == 0
    assert "no checkpoint there" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lock", "starts.jsonl", "metrics.jsonl", "last.pt"])
def test_nothing_is_written_through_links(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    target, out = tmp_path / "target", tmp_path / "run"
    target.write_text("precious")
    out.mkdir()
    (out / name).symlink_to(target)
    assert name in refusal(capsys, data=store, out=out)
    assert target.read_text() == "precious"


def test_only_own_temp_files_are_deleted(tmp_path: Path) -> None:
    own, others = f"last.pt.tmp-{'0a' * 6}", ("notes.tmp-backup", f"other.pt.tmp-{'0a' * 6}", "last.pt.tmp-mine")
    for name in (own, *others):
        (tmp_path / name).write_text("x")
    RunFolder(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "lock"}


def test_memory_of_mapped_files_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(200 << 20))
    before = peak_memory_bytes(CPU)
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    assert int(mapped[::4096].sum()) == 0
    assert peak_memory_bytes(CPU) - before < 100 << 20
    held = np.ones(200 << 20, np.uint8)
    assert peak_memory_bytes(CPU) - before > 150 << 20
    del held


def test_flags_of_every_kind_reach_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(data=tmp_path / "nowhere\x07.zarr")) == 2
    assert "\x07" not in capsys.readouterr().err


def test_a_subset_is_a_text_or_an_array(store: Path, tmp_path: Path) -> None:
    slots = [5, 3, 5, *range(20, 40)]
    (tmp_path / "slots.txt").write_text("\n".join(map(str, slots)))
    np.save(tmp_path / "slots.npy", slots)
    for name in ("slots.txt", "slots.npy"):
        data = run_of(store, subset=str(tmp_path / name)).loader.data
        assert data.slots.tolist() == slots


@pytest.mark.parametrize("content", ["cat\n", "1 2\n3\n", "10000\n", "0.5\n", None])
def test_a_wrong_subset_is_one_line(store: Path, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "slots.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(Error) as caught:
        run_of(store, subset=str(file))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--subset {file}: ")
    assert caught.value.exit_code == 2
