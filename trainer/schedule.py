"""The learning rate of each step; the run report draws it from here, without torch."""

from __future__ import annotations

import math


def learning_rate(step: int, total_steps: int, warmup_steps: float, peak: float) -> float:
    """Rate of step number `step`, from 0: linear warm-up, then half a cosine to 0 (Loshchilov & Hutter, SGDR, 2017)."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))
