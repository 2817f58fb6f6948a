"""Models by name and weights from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from pipeline.errors import UsageError
from trainer.models import build_model, load_weights, parameter_groups, read_weights


@pytest.mark.parametrize("name", ["resnet_small", "resnet_small_wide", "flatten_linear", "vit_s_16", "resnet18"])
def test_logits_have_a_column_per_class(name: str) -> None:
    model = build_model(name, 7, 32)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_every_torchvision_classifier(name: str) -> None:
    if any(word in name for word in ("vit_h", "vit_l", "regnet_y_128gf", "convnext_large", "_l", "vgg")):
        pytest.skip("gigabytes")
    build_model(name, 3, 96 if name == "inception_v3" else 64)


def test_timm_by_name() -> None:
    pytest.importorskip("timm")
    assert build_model("resnet10t", 3, 32).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("resnet51", 32, ["--model resnet51", "unknown", "resnet50"]),
        ("resnet_smal", 32, ["did you mean resnet_small"]),
        ("qqqqq", 32, ["--model qqqqq", "unknown"]),
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
    for path in (tmp_path / "none.pt", bad, tmp_path):
        with pytest.raises(UsageError, match="--weights"):
            read_weights(str(path), "resnet18")
    torch.save({"a": 1}, bad)
    with pytest.raises(UsageError, match="not a state dict"):
        read_weights(str(bad), "resnet18")
    with pytest.raises(UsageError, match="none for resnet_small"):
        read_weights("torchvision", "resnet_small")
