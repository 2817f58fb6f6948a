"""Models by name and weights from files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models import regnet

from pipeline.errors import UsageError
from trainer.augment import IMAGENET_MEAN, IMAGENET_STD
from trainer.models import build_model, load_weights, read_weights
from trainer.networks import OWN
from trainer.optimizer import parameter_groups


@pytest.mark.parametrize("name", ["resnet_small", "resnet_small_wide", "flatten_linear", "vit_s_16", "resnet18"])
def test_logits_have_a_column_per_class(name: str) -> None:
    model = build_model(name, 7, 32)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*torchvision.models.list_models(module=torchvision.models), *OWN])
def test_every_model_builds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, so that those of gigabytes can be made too; `build_model` runs a batch of one through it."""
    block_widths = regnet.BlockParams.from_init_params

    def on_the_cpu(*args: Any, **options: Any) -> regnet.BlockParams:  # it computes numbers of channels with tensors
        with torch.device("cpu"):
            return block_widths(*args, **options)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", on_the_cpu)
    with torch.device("meta"):
        model = build_model(name, 10, 224)
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 10)


SMALL = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "googlenet": 32,
    "inception_v3": 75,
    "maxvit_t": 224,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnext50_32x4d": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 64,
    "swin_v2_t": 64,
    "vgg11": 32,
    "vit_b_16": 32,
    "wide_resnet50_2": 32,
    **dict.fromkeys(OWN, 32),
}
"""The smallest model of each family -> a size of images."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_step_of_each_family(name: str) -> None:
    """Train mode gives logits alone (no auxiliary heads), and every parameter gets a gradient."""
    torch.manual_seed(0)
    size = SMALL[name]
    model = build_model(name, 10, size).train()
    logits = model(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 10)
    F.cross_entropy(logits, torch.tensor([3, 4])).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_families_are_complete() -> None:
    def families(names: Iterable[str]) -> set[str]:
        return {match[0] for name in names if (match := re.match("[a-z]+(_v[23])?", name))}

    assert families(torchvision.models.list_models(module=torchvision.models)) <= families(SMALL)


def test_googlenet_scales_pixels_as_their_weights_want() -> None:
    pixels = torch.rand(1, 3, 32, 32)
    normal = (pixels - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)) / torch.tensor(IMAGENET_STD).view(3, 1, 1)
    scaled = build_model("googlenet", 3, 32)._transform_input(normal)  # type: ignore[operator]
    assert torch.allclose(scaled, 2 * pixels - 1, atol=1e-5)


def test_timm_by_name() -> None:
    pytest.importorskip("timm")
    assert build_model("resnet10t", 3, 32).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("resnet51", 32, ["--model resnet51", "unknown", "resnet50"]),
        ("resnet_smal", 32, ["did you mean resnet_small"]),
        ("qqqqq", 32, ["--model qqqqq", "unknown", "resnet_small, ", "list_models("]),
        ("alexnet", 16, ["--model alexnet", "16x16", "--crop"]),
        ("vit_b_16", 40, ["--model vit_b_16", "40x40"]),
    ],
)
def test_refused_models(name: str, size: int, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(name, 3, size)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_decay_on_norms_and_biases() -> None:
    model = build_model("resnet_small", 5, 32)
    decayed, free = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"])
    norms = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert norms <= {names[id(p)] for p in free["params"]}
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def test_head_replaced_where_classes_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, model = build_model("resnet18", 10, 32), build_model("resnet18", 3, 32)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    head = model.fc.weight.clone()  # type: ignore[union-attr, operator]
    weights = read_weights(str(tmp_path / "w.pt"), "resnet18")
    assert load_weights(model, weights, "--weights w.pt", new_head=True) == ["fc.weight", "fc.bias"]
    assert torch.equal(model.conv1.weight, source.conv1.weight)  # type: ignore[arg-type, union-attr]
    assert torch.equal(model.fc.weight, head)  # type: ignore[arg-type, union-attr]
    with pytest.raises(UsageError, match=r"w.pt: fc.weight is \(10, 512\) in the file, \(3, 512\) here; the number of"):
        load_weights(model, weights, "--weights w.pt", new_head=False)
    with pytest.raises(UsageError, match=r"of another model"):
        load_weights(build_model("resnet34", 10, 32), weights, "--weights w.pt", new_head=True)


def test_unusable_weights(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"not a checkpoint")
    odd = tmp_path / "odd.pt"
    odd.write_bytes(b"hi\n")  # to a pickle: take what was never kept
    for path in (tmp_path / "none.pt", bad, odd, tmp_path):
        with pytest.raises(UsageError, match="--weights"):
            read_weights(str(path), "resnet18")
    torch.save({"a": 1}, bad)
    with pytest.raises(UsageError, match="not a state dict"):
        read_weights(str(bad), "resnet18")
    with pytest.raises(UsageError, match="none for resnet_small"):
        read_weights("torchvision", "resnet_small")
