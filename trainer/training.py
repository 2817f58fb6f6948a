"""Training: the whole loop is in `train`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipeline.atomic import write_bytes
from pipeline.errors import UsageError
from pipeline.store import Split
from trainer.augment import make_mix
from trainer.checkpoint import RunFolder
from trainer.config import Config
from trainer.metrics import Metrics, peak_memory_bytes
from trainer.models import load_weights
from trainer.ranks import Ranks, from_rank_0, gather
from trainer.session import Session, learning_rate
from trainer.watch import BROKEN, GO, STOP, LossWatch, Signals, Stopped


def evaluate_only(config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
    """Evaluate --weights on the val split and say the figures."""
    session = Session(config, ranks, device, say)
    figures = session.evaluate(session.model)
    assert figures is not None
    say(
        f"{config.model} on {figures['val_samples']:,} samples: loss {figures['val_loss']:.4f}, "
        f"top-1 {figures['val_top1']:.2%}, top-5 {figures['val_top5']:.2%}"
    )


@dataclass
class State:
    """Where a run stands: epochs and steps done, the best accuracy, and this rank's sums of the epoch under way."""

    epoch: int = 0
    step: int = 0
    best: float = -1.0
    loss_sum: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def sums(self) -> list[float]:
        return [self.loss_sum, self.samples, self.seconds, self.wait_seconds]

    @sums.setter
    def sums(self, values: list[float]) -> None:
        self.loss_sum, self.samples, self.seconds, self.wait_seconds = values


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of what is random in a step beyond the pixels (dropout, mixup, cutmix), so that no state need be saved."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def train(config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
    """Train as the config says, from the start or from a checkpoint.

    Raises:
        UsageError: wrong use, before the first step.
        Error: a loss that isn't finite, or a checkpoint that can't be written.
        Stopped: after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    session = Session(config, ranks, device, say)
    loaders, batching, raw = session.loaders(), session.batching, session.model
    steps_per_epoch = loaders[0].data.num_samples // batching.global_batch
    total_steps = config.epochs * steps_per_epoch
    warmup_steps = config.warmup_epochs * steps_per_epoch
    peak = config.lr * batching.global_batch / 256
    optimizer = session.optimizer()
    ema = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True) if config.ema else None
    evaluated: nn.Module = ema.module if ema else raw
    mix = make_mix(config, len(session.class_ids))

    # The folder, and where to go on from: rank 0 alone reads and writes there.
    store_name = Path(config.store_path(session.stages[-1].size)).stem
    out = Path(config.out or f"runs/{store_name}-{config.model}")
    folder = RunFolder(out, wait_seconds=config.timeout + 60) if ranks.rank == 0 else None
    found = from_rank_0(folder and folder.find(config.resume), ranks)
    state = State()
    if found:
        path, saved = found
        _check_same(config, saved["config"], f"--resume {path}")
        load_weights(raw, saved["model"], f"--resume {path}", new_head=False)
        optimizer.load_state_dict(saved["optimizer"])
        if ema:
            ema.module.load_state_dict(saved["ema"])
            ema.n_averaged.fill_(saved["ema_steps"])
        state.epoch, state.step, state.best = saved["epoch"], saved["step"], saved["best"]
        sums = saved["sums"].numpy()  # (ranks, 4); on another number of ranks rank 0 takes them all
        if len(sums) != ranks.world_size:
            whole = [*sums[:, :2].sum(0), *sums[:, 2:].max(0)]
            sums = np.vstack([whole, np.zeros((ranks.world_size - 1, 4))])
        state.sums = sums[ranks.rank].tolist()
        loaders[session.stages.index(config.stage(state.epoch))].load_state_dict(saved["data"])
        say(f"resuming from {path}: {state.epoch} of {config.epochs} epochs and {state.step:,} steps are done")

    if config.compile:
        raw.compile()
        evaluated.compile()
    ddp: DistributedDataParallel | None = None
    if ranks.world_size > 1:
        ids = None if device.type == "cpu" else [device.index]
        ddp = DistributedDataParallel(raw, device_ids=ids, gradient_as_bucket_view=True)
    model: nn.Module = ddp or raw
    say(
        f"{config.model}: {sum(p.numel() for p in raw.parameters()):,} parameters, {len(session.class_ids):,} classes; "
        f"{ranks.world_size} x {device.type}; output in {out}"
    )
    say(
        f"global batch {batching.global_batch:,} = {ranks.world_size} ranks x {batching.batch_size} samples x "
        f"{batching.accumulation} micro-steps; lr {config.lr:g} per 256 samples = {peak:g} at its peak; "
        f"{steps_per_epoch:,} steps an epoch, {total_steps:,} in all"
    )

    signals = Signals()
    watch = LossWatch(ranks, signals, lambda slots: _name_samples(loaders[0].data.split, slots))
    metrics: Metrics | None = None
    loader = loaders[0]

    def settle(*, save: bool = True) -> None:
        """Bring the sums up to date, save a checkpoint, and stop if any rank has to."""
        loss_sum, verdict = watch.settle()
        state.loss_sum += loss_sum
        if verdict == BROKEN:
            raise watch.error()
        if save or verdict == STOP:
            all_sums = torch.from_numpy(gather(state.sums, ranks))
            if folder:
                folder.save(
                    {
                        "epoch": state.epoch,
                        "step": state.step,
                        "best": state.best,
                        "sums": all_sums,
                        "data": loader.state_dict(),
                        "model": raw.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "ema": ema.module.state_dict() if ema else None,
                        "ema_steps": int(ema.n_averaged) if ema else 0,
                        "config": asdict(config),
                        "class_ids": session.class_ids,
                    }
                )
        if verdict == STOP:
            raise Stopped(signals.received, state.step)

    with contextlib.ExitStack() as stack:
        stack.enter_context(signals)
        if folder:
            stack.callback(folder.close)
            header = "# The run's config; usable with --config.\n"
            write_bytes(out / "config.yaml", (header + yaml.safe_dump(asdict(config), sort_keys=False)).encode())
            metrics = Metrics(out, state.epoch, state.step, total_steps)
            stack.callback(metrics.close)
        profiler = stack.enter_context(_profiler(out)) if config.profile and folder else None

        for epoch in range(state.epoch, config.epochs):
            stage = config.stage(epoch)
            if loader is not loaders[session.stages.index(stage)]:
                loader.close()
                loader = loaders[session.stages.index(stage)]
            crop = stage.crop or loader.data.crop_shape[0]
            raw.train()
            losses: list[torch.Tensor] = []
            slots: list[np.ndarray] = []
            mark, waited = time.perf_counter(), loader.wait_seconds
            if loader.epoch <= epoch:  # later when a signal came after the epoch's last step, before its evaluation
                loader.set_epoch(epoch)
                for micro_step, (images, labels) in enumerate(loader, 1):
                    if not losses:
                        torch.manual_seed(step_seed(config.seed, state.step, ranks.rank))
                    at_boundary = micro_step % batching.accumulation == 0
                    x = session.pixels.training(images, loader.indices, epoch, crop)
                    x, target = mix(x, labels) if mix else (x, labels)
                    with ddp.no_sync() if ddp and not at_boundary else contextlib.nullcontext():
                        with torch.autocast(device.type, torch.bfloat16, enabled=session.amp):
                            loss = F.cross_entropy(
                                model(x), target, reduction="none", label_smoothing=config.label_smoothing
                            )
                        (loss.mean() / batching.accumulation).backward()
                    losses.append(loss.detach())
                    slots.append(loader.indices)
                    if not at_boundary:
                        continue

                    rate = learning_rate(state.step, total_steps, warmup_steps, peak)
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    if config.clip_grad:
                        nn.utils.clip_grad_norm_(raw.parameters(), config.clip_grad)
                    optimizer.step()
                    optimizer.zero_grad()
                    if ema:
                        ema.update_parameters(raw)
                    state.step += 1
                    loss_sum, verdict = watch.follow(state.step, torch.cat(losses), slots)
                    losses, slots = [], []
                    now = time.perf_counter()
                    state.loss_sum += loss_sum
                    state.samples += batching.batch_size * batching.accumulation
                    state.seconds += now - mark
                    state.wait_seconds += loader.wait_seconds - waited
                    mark, waited = now, loader.wait_seconds
                    if metrics:
                        metrics.step(state.step, watch.loss, rate)
                    if profiler:
                        profiler.step()
                    if verdict != GO or state.step % config.checkpoint_every == 0:
                        settle()

            settle(save=False)
            state.seconds += time.perf_counter() - mark  # until the device has done the last step
            figures = session.evaluate(evaluated, stopped=lambda: bool(signals.received))
            if figures is None:
                settle()
                raise AssertionError("settle raises when a rank stopped")
            rows = gather([*state.sums, peak_memory_bytes(device)], ranks)  # (ranks, 5)
            line = {
                "epoch": epoch + 1,
                "step": state.step,
                "train_loss": float(rows[:, 0].sum() / rows[:, 1].sum()),
                **{key: figures[key] for key in ("val_loss", "val_top1", "val_top5")},
                "lr": learning_rate(state.step - 1, total_steps, warmup_steps, peak),
                "images_per_second": float(rows[:, 1].sum() / rows[:, 2].max()),
                "data_wait_share": float((rows[:, 3] / rows[:, 2]).max()),
                "peak_memory_bytes": int(rows[:, 4].max()),
            }
            state.epoch, state.sums = epoch + 1, [0.0] * 4
            if not line["val_top1"] <= state.best:  # better, or there is no val split
                state.best = line["val_top1"]
                if folder:
                    folder.save_best(evaluated.state_dict())
            if metrics:
                metrics.epoch(line)
            say(_describe(line, config.epochs))
            settle()
    say(f"done: best top-1 {state.best:.2%}; weights in {out}/best.pt, curves in {out}/curves.png")


def _describe(line: dict[str, Any], epochs: int) -> str:
    return (
        f"epoch {line['epoch']}/{epochs}: train loss {line['train_loss']:.4f}, val loss {line['val_loss']:.4f}, "
        f"top-1 {line['val_top1']:.2%}, top-5 {line['val_top5']:.2%}; {line['images_per_second']:,.0f} images/s, "
        f"data wait {line['data_wait_share']:.1%}, peak memory {line['peak_memory_bytes'] / 1e9:.2f} GB"
    )


def _check_same(config: Config, saved: dict[str, Any], source: str) -> None:
    """Raise UsageError where the checkpoint is of another kind of run; the loader checks data, seed, batch."""
    for name in ("model", "optimizer", "ema"):
        if saved[name] != getattr(config, name):
            raise UsageError(
                f"{source}: its {name} is {saved[name]}, this run's {getattr(config, name)}; resume with the same, or "
                "start from its weights with --weights"
            )


def _name_samples(split: Split, slots: np.ndarray, most: int = 4) -> str:
    names = [split.key(slot).decode(errors="replace") for slot in slots[:most].tolist()]
    return ", ".join(names) + (f" and {len(slots) - most} more" if len(slots) > most else "")


def _profiler(out: Path) -> torch.profiler.profile:
    """Records steps 6 to 10."""
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=3, warmup=2, active=5, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(out / "trace.json")),
    )
