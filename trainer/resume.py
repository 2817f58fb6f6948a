"""What a checkpoint holds, and how a run goes on from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.errors import UsageError
from pipeline.text import counted
from trainer.models import load_weights
from trainer.optimizer import load_optimizer
from trainer.ranks import all_gather
from trainer.report.records import config_text
from trainer.run_folder import LAST, PREVIOUS

if TYPE_CHECKING:
    from trainer.training import TrainingRun


@dataclass
class State:
    """Where a run stands.

    Attributes:
        epoch, step: so many are done.
        best: top-1 of the best epoch.
        sums: float64 (4,), of this rank in the epoch under way: losses, samples, seconds, seconds of waiting for data.
    """

    epoch: int = 0
    step: int = 0
    best: float = -1.0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(4))


def checkpoint(run: TrainingRun) -> dict[str, Any]:
    """All that `restore` needs, with the sums of all ranks; each rank calls it."""
    return {
        **vars(run.state),
        "sums": torch.from_numpy(all_gather(run.state.sums, run.ranks)),
        "data": run.loader.state_dict(),
        "model": run.raw.state_dict(),
        "ema": run.ema.state_dict() if run.ema else None,
        "optimizer": run.optimizer.state_dict(),
        "config": asdict(run.config),
        "class_ids": run.setup.class_ids,
    }


def restore(run: TrainingRun, path: Path, saved: dict[str, Any]) -> None:
    """Let the run go on from the checkpoint, and say which fields of its config have changed.

    Raises:
        UsageError: it belongs to another model, optimizer, store, seed, order or global batch.
    """
    source, before, state = f"--resume {path}", saved["config"], run.state
    for name, now in asdict(run.config).items():
        if before.get(name) == now:
            continue
        if name in ("model", "optimizer", "ema"):  # the loader checks data, seed, order and global batch
            raise UsageError(
                f"{source}: its {name} is {before.get(name)}, this run's {now}; resume with the same, or start a "
                "new run from its weights with --weights"
            )
        if name not in ("out", "resume", "weights"):
            run.say(f"changed since the checkpoint: {name} {config_text(before.get(name))} -> {config_text(now)}")
    load_weights(run.raw, saved["model"], source, new_head=False)
    load_optimizer(run.optimizer, saved["optimizer"])
    if run.ema:
        run.ema.load_state_dict(saved["ema"])
    state.epoch, state.step, state.best = saved["epoch"], saved["step"], saved["best"]
    sums = saved["sums"].numpy()  # (ranks, 4); on another number of ranks rank 0 takes them all
    if len(sums) == run.ranks.world_size:
        state.sums = sums[run.ranks.rank]
    elif run.ranks.rank == 0:
        state.sums = np.concatenate([sums[:, :2].sum(0), sums[:, 2:].max(0)])
    try:
        run.stage_loader(state.epoch).load_state_dict(saved["data"])
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    if path.name == PREVIOUS and path.with_name(LAST).exists() and Path(run.config.resume or "").name != PREVIOUS:
        run.say(f"note: {path.with_name(LAST)} is damaged: its steps since {PREVIOUS} are done again")
    run.say(f"resuming from {path}: {counted(state.epoch, 'epoch')}, {counted(state.step, 'step')} done")
