"""The optimizer and its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.config import Config


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: weight decay for matrices and kernels, none for norms, biases and other vectors."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; the loop sets the learning rate of each step."""
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=(config.momentum, 0.999))
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, nesterov=config.nesterov)
