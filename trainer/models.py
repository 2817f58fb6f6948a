"""Models by name, and weights from files: torchvision's classifiers, timm's, and three of our own."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from pipeline.errors import Error, UsageError
from trainer.augment import DeviceTransform


class ResNetSmall(nn.Module):
    """A nine-layer ResNet for 32-px images: four 3x3 layers with pooling, and two residual blocks between them.

    After D. Page, How to Train Your ResNet (2018), which has width 64 (6.6 M parameters); narrower ones suit a CPU.
    """

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = _conv(3, width)
        self.layer1 = nn.Sequential(_conv(width, 2 * width), nn.MaxPool2d(2))
        self.block1 = nn.Sequential(_conv(2 * width, 2 * width), _conv(2 * width, 2 * width))
        self.layer2 = nn.Sequential(_conv(2 * width, 4 * width), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(_conv(4 * width, 8 * width), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(_conv(8 * width, 8 * width), _conv(8 * width, 8 * width))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer1(self.stem(images))
        x = self.layer3(self.layer2(x + self.block1(x)))
        return self.fc((x + self.block2(x)).amax((2, 3))) / 8


def _conv(planes: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(planes, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def _flatten_linear(num_classes: int, size: int) -> nn.Module:
    """The two-layer network that DDP's textbook examples train on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 128), nn.ReLU(), nn.Linear(128, num_classes))


def _vit_s_16(num_classes: int, size: int) -> nn.Module:
    """ViT-S/16 as in Touvron et al., DeiT (2021), table 1; torchvision has only the larger ones."""
    return torchvision.models.VisionTransformer(size, 16, 12, 6, 384, 1536, num_classes=num_classes)


OWN: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet_small": lambda num_classes, _: ResNetSmall(num_classes, 16),
    "resnet_small_wide": lambda num_classes, _: ResNetSmall(num_classes, 64),
    "flatten_linear": _flatten_linear,
    "vit_s_16": _vit_s_16,
}


def build_model(name: str, num_classes: int, size: int) -> nn.Module:
    """A freshly initialised model with logits (N, num_classes) for float images (N, 3, size, size).

    Raises:
        UsageError: no such model (close matches are named), or one that can't be made for that size.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # the pretrained ones want pixels scaled to -1 ... 1, and do that to ImageNet's normalisation by themselves
        options = {"aux_logits": False, "transform_input": True, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": size}
    try:
        if name in OWN:
            model = OWN[name](num_classes, size)
        elif name in known:
            model = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
        else:
            model = _timm_model(name, num_classes, known)
    except (RuntimeError, AssertionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise _refused_size(name, size, error) from error
    check_size(model, name, size)
    return model


@torch.no_grad()
def check_size(model: nn.Module, name: str, size: int) -> None:
    """Raise UsageError unless the model takes images of that size."""
    try:
        model.eval()(torch.zeros(1, 3, size, size, device=next(model.parameters()).device))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise _refused_size(name, size, error) from error


def _refused_size(name: str, size: int, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())[:120]
    return UsageError(f"--model {name}: can't take {size}x{size} images ({reason}); change --crop")


def _timm_model(name: str, num_classes: int, known: list[str]) -> nn.Module:
    try:
        import timm
    except ImportError:
        names, note = [*OWN, *known], "; timm isn't installed"
    else:
        names, note = [*OWN, *known, *timm.list_models()], ""
        if name in names:
            return timm.create_model(name, num_classes=num_classes)
    close = difflib.get_close_matches(name, names, 3)
    listing = 'python -c "import torchvision; print(torchvision.models.list_models(module=torchvision.models))"'
    hint = f"use {', '.join(OWN)}, or one of those that `{listing}` prints"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    raise UsageError(f"--model {name}: unknown{note}; {hint}")


class SampleLosses(nn.Module):
    """The part of a step that is compiled: pixels in, each sample's loss out; its backward gives the gradients."""

    def __init__(self, model: nn.Module, transform: DeviceTransform, label_smoothing: float) -> None:
        super().__init__()
        self.model, self.transform, self.label_smoothing = model, transform, label_smoothing

    def forward(self, pixels: Tensor, mirrored: Tensor | None, target: Tensor) -> Tensor:
        """float32 (n,). Pixels as `DeviceTransform.augment` gives them; targets are labels (n,) or (n, classes)."""
        logits = self.model(self.transform.normalise(pixels, mirrored))
        return F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=self.label_smoothing)


def read_weights(source: str, name: str) -> dict[str, Tensor]:
    """A plain state dict out of a checkpoint of this trainer (its EMA where it has one), a file of weights, or
    torchvision's default pretrained weights for `name` (`source` is "torchvision").

    Raises:
        UsageError: nothing usable there.
    """
    if source == "torchvision":
        try:
            weights = torchvision.models.get_model_weights(name).DEFAULT
            return dict(weights.get_state_dict(progress=False, check_hash=True))
        except ValueError as error:
            raise UsageError(f"--weights torchvision: it has none for {name}; give a file") from error
        except OSError as error:
            raise Error(f"--weights torchvision: the download failed ({error}); check the network") from error
    try:
        state = torch.load(Path(source), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"--weights {source}: no such file") from None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"--weights {source}: not a readable file of weights; give a .pt of tensors only") from error
    if isinstance(state, dict) and "model" in state:
        average = state.get("ema") or {}
        averaged = {key.removeprefix("module."): average[key] for key in average if key.startswith("module.")}
        state = averaged or state["model"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError(f"--weights {source}: not a state dict")
    return state


def load_weights(model: nn.Module, state: dict[str, Tensor], source: str, *, new_head: bool) -> list[str]:
    """Load the state dict; with `new_head` leave out a classifier whose number of classes differs.

    Args:
        source: the flag and the file, for messages.

    Returns:
        The names left as they were (the new head), empty for a complete load.

    Raises:
        UsageError: other names or shapes than the model's, or another number of classes without `new_head`.
    """
    own = model.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    extra = [key for key in extra if not key.lower().startswith("aux")]  # heads that only training used
    if missing or extra:
        example = f"without {missing[0]}" if missing else f"with {extra[0]}"
        raise UsageError(f"{source}: of another model ({example}); check --model")
    other = [key for key in own if own[key].shape != state[key].shape]
    heads = [key for key in other if own[key].shape[1:] == state[key].shape[1:]]
    if heads != other or (other and not new_head):
        key = other[0] if heads == other else next(key for key in other if key not in heads)
        what = "the number of classes differs" if heads == other else "check --model and --crop"
        shapes = f"{tuple(state[key].shape)} in the file, {tuple(own[key].shape)} here"
        raise UsageError(f"{source}: {key} is {shapes}; {what}")
    model.load_state_dict({key: own[key] if key in other else state[key] for key in own})
    return other
