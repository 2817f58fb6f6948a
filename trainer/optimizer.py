"""The optimizer and its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.config import Config


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: weight decay for matrices and kernels, none for norms, biases and other vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; the loop sets the learning rate of each step."""
    groups = parameter_groups(model, config.weight_decay)
    fused = True if next(model.parameters()).is_cuda else None  # one kernel for all parameters
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=(config.momentum, 0.999), fused=fused)
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, nesterov=config.nesterov, fused=fused)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load moments from a state dict; weight decay, momentum and other options stay the optimizer's own."""
    own = [{key: group[key] for key in group if key not in ("params", "lr")} for group in optimizer.param_groups]
    groups = [{**saved, **options} for saved, options in zip(state["param_groups"], own, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})
