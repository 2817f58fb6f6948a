"""How many samples make a step, and how they are split over ranks and micro-steps."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import UsageError
from trainer.config import Config

LARGEST_MICRO_BATCH = 256
"""Default limit of samples per rank and micro-step: ResNet-50 at 224 px in bf16 then fits into 40 GB."""


@dataclass(frozen=True)
class Batching:
    """G = `global_batch` = ranks x `batch_size` x `accumulation`."""

    global_batch: int
    batch_size: int
    accumulation: int

    @classmethod
    def choose(cls, config: Config, world_size: int) -> Batching:
        """G stays the same on fewer ranks, which then accumulate gradients.

        Raises:
            UsageError: numbers that don't divide.
        """
        if config.eval_only:
            size = config.batch_size or LARGEST_MICRO_BATCH
            return cls(size * world_size, size, 1)
        total = config.global_batch or (config.batch_size * world_size if config.batch_size else 256)
        if total % world_size:
            near = max(total // world_size, 1) * world_size
            raise UsageError(f"--global-batch {total}: not divisible by {world_size} ranks; --global-batch {near} is")
        share = total // world_size
        size = config.batch_size or max(n for n in range(1, min(share, LARGEST_MICRO_BATCH) + 1) if share % n == 0)
        if share % size:
            near = max(n for n in range(1, min(share, size) + 1) if share % n == 0)
            raise UsageError(
                f"--batch-size {size}: doesn't divide the {share} samples that a rank takes of --global-batch {total} "
                f"(ranks: {world_size}); --batch-size {near} does"
            )
        return cls(total, size, share // size)
