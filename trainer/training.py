"""Training: `train` sets a run up, and `TrainingRun.fit` is the whole loop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipeline.errors import UsageError
from pipeline.store.atomic import write_bytes
from pipeline.text import counted
from trainer.augment import make_mix
from trainer.config import Config, dump
from trainer.loader import Loader
from trainer.metrics import Metrics, peak_memory_bytes
from trainer.models import load_weights
from trainer.ranks import Ranks, all_gather, broadcast_object, device_name
from trainer.report.provenance import record_start
from trainer.report.records import config_text
from trainer.run_folder import LAST, PREVIOUS, RunFolder, unwritable
from trainer.setup import TrainingSetup, learning_rate, make_optimizer
from trainer.stop import BROKEN, GO, STOP, LossWatch, Signals, Stopped


def evaluate_only(config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
    """Evaluate --weights on the val split and say the figures."""
    session = TrainingSetup(config, ranks, device, say)
    figures = session.evaluate(session.model)
    assert figures is not None
    say(
        f"{config.model} on {figures['val_samples']:,} samples: loss {figures['val_loss']:.4f}, "
        f"top-1 {figures['val_top1']:.2%}, top-5 {figures['val_top5']:.2%}"
    )


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


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of what is random in a step beyond the pixels (dropout, mixup, cutmix), so that no state need be saved."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def train(config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
    """Train as the config says, from the start or from a checkpoint.

    Raises:
        UsageError: wrong use, before the first step.
        Error: a loss that isn't finite, or a folder or checkpoint that can't be written.
        Stopped: after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    session = TrainingSetup(config, ranks, device, say)
    data_path = Path(config.store_path(session.stages[-1].size)).absolute().resolve()
    out = Path(config.out or f"runs/{data_path.stem}-{config.model}")
    with contextlib.ExitStack() as stack:
        folder = RunFolder(out, wait_seconds=config.timeout / 2) if ranks.rank == 0 else None  # rank 0 alone writes
        if folder:
            stack.callback(folder.close)
        found = broadcast_object(folder and folder.find(config.resume), ranks)
        run = TrainingRun(session, found, say)
        run.saved = found is not None and found[0].parent.resolve() == out.resolve()
        if run.state.epoch >= config.epochs:
            say(
                f"{out}: finished, {run.state.epoch} of --epochs {config.epochs} are done; nothing was trained or "
                f"changed. To go on set --epochs above {run.state.epoch}"
            )
            return
        for loader in run.loaders:
            stack.callback(loader.close)
        say(
            f"{config.model}: {sum(p.numel() for p in run.raw.parameters()):,} parameters, "
            f"{counted(len(session.class_ids), 'class', 'classes')}; {ranks.world_size} x {device.type}; output in "
            f"{out}"
        )
        say(
            f"global batch {run.batching.global_batch:,} = {counted(ranks.world_size, 'rank')} x "
            f"{counted(run.batching.batch_size, 'sample')} x {counted(run.batching.accumulation, 'micro-step')}; "
            f"lr {config.lr:g} per 256 samples, {run.peak_lr:g} at its peak; {counted(run.steps_per_epoch, 'step')} an "
            f"epoch, {run.total_steps:,} in all"
        )
        data = run.loaders[0].data
        if config.augment == "crop" and not config.pad and data.crop_shape == data.split.image_shape:
            say(
                "note: crops are whole images, which only flips vary; --pad or a larger store gains accuracy (measured)"
            )
        stack.enter_context(run.signals)  # until curves are drawn
        if folder:
            try:
                run.report_into(folder, found and found[0])
            except OSError as error:
                raise unwritable(out, error) from error
            assert run.metrics is not None
            stack.callback(run.metrics.close)
            if config.profile:
                run.profiler = stack.enter_context(_profiler(out))
            folder.begun = True
        run.fit()
        best = "" if math.isnan(run.state.best) else f"best top-1 {run.state.best:.2%}; "
        say(f"done: {best}weights in {out}/best.pt, curves in {out}/curves.png")


class TrainingRun:
    """A run from its start, or from where a checkpoint left it: what is set up once, and `fit`, the loop."""

    folder: RunFolder | None = None
    metrics: Metrics | None = None
    profiler: torch.profiler.profile | None = None
    saved = False
    """`--resume auto` finds a checkpoint."""

    def __init__(
        self, session: TrainingSetup, found: tuple[Path, dict[str, Any]] | None, say: Callable[[str], None]
    ) -> None:
        config, ranks, device = session.config, session.ranks, session.device
        self.config, self.session, self.ranks, self.device = config, session, ranks, device
        self.signals, self.say, self.state = Signals(), say, State()
        self.loaders, self.batching, self.raw = session.loaders(), session.batching, session.model
        self.loader = self.loaders[0]
        self.steps_per_epoch = self.loader.data.num_samples // self.batching.global_batch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.peak_lr = config.lr * self.batching.global_batch / 256
        self.optimizer = make_optimizer(config, self.raw)
        self.ema: AveragedModel | None = None
        if config.ema:
            self.ema = AveragedModel(self.raw, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)
        self.evaluated: nn.Module = self.ema.module if self.ema else self.raw
        if found:
            self._restore(*found)
        # Each crop size gets kernels of its own; evaluation stays eager, its last batch would need others again.
        self.model = cast(nn.Module, torch.compile(self.raw, dynamic=False)) if config.compile else self.raw
        if ranks.world_size > 1:
            ids = None if device.type == "cpu" else [device.index]
            self.model = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        self.watch = LossWatch(ranks, self.signals, self._name_samples)

    def _restore(self, path: Path, saved: dict[str, Any]) -> None:
        source, before, state = f"--resume {path}", saved["config"], self.state
        for name, now in asdict(self.config).items():
            if before.get(name) == now:
                continue
            if name in ("model", "optimizer", "ema"):  # the loader checks data, seed, order and global batch
                raise UsageError(
                    f"{source}: its {name} is {before.get(name)}, this run's {now}; resume with the same, or start a "
                    "new run from its weights with --weights"
                )
            if name not in ("out", "resume", "weights"):
                self.say(f"changed since the checkpoint: {name} {config_text(before.get(name))} -> {config_text(now)}")
        load_weights(self.raw, saved["model"], source, new_head=False)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.ema:
            self.ema.load_state_dict(saved["ema"])
        state.epoch, state.step, state.best = saved["epoch"], saved["step"], saved["best"]
        sums = saved["sums"].numpy()  # (ranks, 4); on another number of ranks rank 0 takes them all
        if len(sums) == self.ranks.world_size:
            state.sums = sums[self.ranks.rank]
        elif self.ranks.rank == 0:
            state.sums = np.concatenate([sums[:, :2].sum(0), sums[:, 2:].max(0)])
        try:
            self._stage_loader(state.epoch).load_state_dict(saved["data"])
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from error
        if path.name == PREVIOUS and path.with_name(LAST).exists() and Path(self.config.resume or "").name != PREVIOUS:
            self.say(f"note: {path.with_name(LAST)} is damaged: its steps since {PREVIOUS} are done again")
        self.say(f"resuming from {path}: {state.epoch} of {self.config.epochs} epochs, {state.step:,} steps are done")

    def report_into(self, folder: RunFolder, checkpoint: Path | None) -> None:
        """Write what a run's folder holds before the first step, on rank 0; `checkpoint` is what the run resumes.

        Raises:
            OSError: the folder takes no files.
        """
        out, state = folder.path, self.state
        if checkpoint and not self.saved and not folder.adopt(checkpoint, state.epoch, state.best):
            state.best = State.best  # there is no file of the best epoch so far: the best of the coming ones counts
        header = "# The run's config; usable with --config.\n"
        write_bytes(out / "config.yaml", (header + dump(self.config)).encode())
        record_start(
            out,
            step=state.step,
            world_size=self.ranks.world_size,
            global_batch=self.batching.global_batch,
            device=device_name(self.device),
        )
        self.metrics = Metrics(out, state.epoch, state.step, self.total_steps, self.say)
        self.folder = folder

    def _stage_loader(self, epoch: int) -> Loader:
        return self.loaders[self.session.stages.index(self.config.stage(epoch))]

    def _name_samples(self, slots: np.ndarray, most: int = 4) -> str:
        names = [self.loader.data.split.key(slot).decode(errors="replace") for slot in slots[:most].tolist()]
        return ", ".join(names) + (f" and {len(slots) - most} more" if len(slots) > most else "")

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.total_steps, self.config.warmup_epochs * self.steps_per_epoch, self.peak_lr)

    def fit(self) -> None:
        """Train all epochs that are left."""
        config, state, pixels, batching = self.config, self.state, self.session.pixels, self.batching
        mix = make_mix(config, len(self.session.class_ids))
        for epoch in range(state.epoch, config.epochs):
            loader = self._stage_loader(epoch)
            if loader is not self.loader:
                self.loader.close()
                self.loader = loader
            crop = config.stage(epoch).crop or loader.data.crop_shape[0]
            self.raw.train()
            losses: list[torch.Tensor] = []
            slots: list[np.ndarray] = []
            mark, waited = time.perf_counter(), loader.wait_seconds
            trained = loader.epoch > epoch  # a signal came after the epoch's last step, before its evaluation
            if not trained:
                loader.set_epoch(epoch)
            for micro_step, (images, labels) in enumerate(() if trained else loader, 1):
                if not losses:
                    torch.manual_seed(step_seed(config.seed, state.step, self.ranks.rank))
                ends_step = micro_step % batching.accumulation == 0
                if isinstance(self.model, DistributedDataParallel):
                    self.model.require_backward_grad_sync = ends_step  # what DDP's no_sync() sets
                x = pixels.training(images, loader.indices, epoch, crop)
                x, target = mix(x, labels) if mix else (x, labels)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.session.amp):
                    logits = self.model(x)
                loss = F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=config.label_smoothing)
                (loss.mean() / batching.accumulation).backward()
                losses.append(loss.detach())
                slots.append(loader.indices)
                if not ends_step:
                    continue

                rate = self._rate(state.step)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                if config.clip_grad:
                    nn.utils.clip_grad_norm_(self.raw.parameters(), config.clip_grad)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.ema:
                    self.ema.update_parameters(self.raw)
                state.step += 1
                loss_sum, verdict = self.watch.record_step(state.step, torch.cat(losses), slots)
                losses, slots = [], []
                now = time.perf_counter()
                samples = batching.batch_size * batching.accumulation
                state.sums += loss_sum, samples, now - mark, loader.wait_seconds - waited
                mark, waited = now, loader.wait_seconds
                if self.metrics:
                    self.metrics.step(state.step, self.watch.loss, rate)
                if self.profiler:
                    self.profiler.step()
                if verdict != GO or state.step % config.checkpoint_every == 0:
                    self.sync_and_checkpoint()

            self.sync_and_checkpoint(save=False)
            state.sums[2] += time.perf_counter() - mark  # until the device has done the last step
            figures = self.session.evaluate(self.evaluated, stopped=lambda: bool(self.signals.received))
            if figures is None:
                self.sync_and_checkpoint()  # raises Stopped
            else:
                self._finish_epoch(figures)
                self.sync_and_checkpoint()

    def sync_and_checkpoint(self, *, save: bool = True) -> None:
        """Bring the sums up to date, save a checkpoint, and stop if any rank has to."""
        loss_sum, verdict = self.watch.sync()
        self.state.sums[0] += loss_sum
        if verdict == BROKEN:
            raise self.watch.error(self.saved)
        if save or verdict == STOP:
            self._save()
        if verdict == STOP:
            raise Stopped(self.signals.received, self.state.step)

    def _save(self) -> None:
        sums = torch.from_numpy(all_gather(self.state.sums, self.ranks))
        self.saved = True
        if self.folder:
            self.folder.save(
                {
                    **vars(self.state),
                    "sums": sums,
                    "data": self.loader.state_dict(),
                    "model": self.raw.state_dict(),
                    "ema": self.ema.state_dict() if self.ema else None,
                    "optimizer": self.optimizer.state_dict(),
                    "config": asdict(self.config),
                    "class_ids": self.session.class_ids,
                }
            )

    def _finish_epoch(self, figures: dict[str, Any]) -> None:
        state = self.state
        rows = all_gather([*state.sums, peak_memory_bytes(self.device)], self.ranks)  # (ranks, 5)
        line = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "train_loss": float(rows[:, 0].sum() / rows[:, 1].sum()),
            **{key: figures[key] for key in ("val_loss", "val_top1", "val_top5")},
            "lr": self._rate(state.step - 1),
            "images_per_second": float(rows[:, 1].sum() / rows[:, 2].max()),
            "data_wait_share": float((rows[:, 3] / np.maximum(rows[:, 2], 1e-9)).max()),
            "peak_memory_bytes": int(rows[:, 4].max()),
        }
        state.epoch, state.sums = state.epoch + 1, np.zeros(4)
        if not line["val_top1"] <= state.best:  # better, or there is no val split
            state.best = line["val_top1"]
            if self.folder:
                self.folder.save_best(self.evaluated.state_dict())
        if self.metrics:
            self.metrics.epoch(line)
        evaluated = ""
        if self.session.val:
            evaluated = f", val loss {line['val_loss']:.4f}, top-1 {line['val_top1']:.2%}, top-5 {line['val_top5']:.2%}"
        self.say(
            f"epoch {line['epoch']}/{self.config.epochs}: train loss {line['train_loss']:.4f}{evaluated}; "
            f"{line['images_per_second']:,.0f} images/s, data wait {line['data_wait_share']:.1%}, "
            f"peak memory {line['peak_memory_bytes'] / 1e9:.2f} GB"
        )


def _profiler(out: Path) -> torch.profiler.profile:
    """Records steps 6 to 10."""
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=3, warmup=2, active=5, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(out / "trace.json")),
    )
