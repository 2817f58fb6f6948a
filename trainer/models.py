"""Models by name, and weights from files: torchvision's classifiers, timm's, and our own networks."""

from __future__ import annotations

import difflib
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from pipeline.errors import Error, UsageError
from pipeline.text import one_line
from trainer.augment import DeviceTransform
from trainer.config import Config
from trainer.networks import OWN, add_blurpool, zero_init_residual


def make_model(config: Config, num_classes: int, size: int) -> nn.Module:
    """The model that a config asks for, as `build_model` has it, with the changes that it names."""
    model = build_model(config.model, num_classes, size)
    if config.blurpool:
        add_blurpool(model)
    if config.zero_init_residual:
        zero_init_residual(model, config.model)
    return model


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
def check_size(model: nn.Module, name: str, size: int, batch_size: int = 2) -> None:
    """Raise UsageError unless the model takes images of that size, and can be trained on batches of that size."""
    image = torch.zeros(1, 3, size, size, device=next(model.parameters()).device)
    try:
        model.eval()(image)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise _refused_size(name, size, error) from error
    try:
        if batch_size == 1:
            deepcopy(model).train()(image)
    except ValueError as error:  # batch norm of a single value
        raise UsageError(f"--model {name}: can't train on 1 sample per rank and step; give 2 or more") from error


def _refused_size(name: str, size: int, error: Exception) -> UsageError:
    reason = one_line(error)[:120]
    return UsageError(f"--model {name}: can't take {size}x{size} images ({reason}); change --crop")


def _timm_model(name: str, num_classes: int, known: list[str]) -> nn.Module:
    try:
        import timm
    except ImportError:
        names, note = [*OWN, *known], "; timm isn't installed"
    else:
        names, note = list(dict.fromkeys([*OWN, *known, *timm.list_models()])), ""
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


def all_finite(model: nn.Module) -> bool:
    """Whether no parameter has an element that is infinite or NaN; the device is asked once."""
    return bool(torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).all())


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
    except Exception as error:  # of bytes that are no pickle the unpickler raises kinds of all sorts
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
