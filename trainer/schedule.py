"""The learning rate of each step; the run report draws it from here, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "linear": lambda share: 1 - share,
}
"""Share of the steps after the warm-up that are done -> share of the peak rate."""


def learning_rate(step: int, total_steps: int, warmup_steps: float, peak: float, schedule: str = "cosine") -> float:
    """Rate of step number `step`, from 0: linear warm-up, then to 0 by half a cosine (Loshchilov & Hutter, SGDR, 2017)
    or, with the schedule `linear`, in a straight line."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    share = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * SCHEDULES[schedule](share)
