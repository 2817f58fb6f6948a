"""Training: `train` sets a run up, and `TrainingRun.fit` is the whole loop."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipeline.text import counted
from trainer.augment import make_mix, mirror, seed_step
from trainer.config import Config
from trainer.loader import Loader
from trainer.metrics import Metrics, describe_epoch, describe_run, open_reports, peak_memory_bytes, profiler
from trainer.models import SampleLosses, all_finite
from trainer.optimizer import make_optimizer
from trainer.ranks import Ranks, all_gather, broadcast_object
from trainer.reading.warming import warm_up
from trainer.resume import State, checkpoint, restore
from trainer.run_folder import RunFolder, unwritable
from trainer.schedule import learning_rate
from trainer.setup import TrainingSetup
from trainer.stop import GO, LossWatch, Signals, Stopped, diverged


def evaluate_only(config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
    """Evaluate --weights on the val split and say the figures."""
    setup = TrainingSetup(config, ranks, device, say)
    with contextlib.closing(setup):
        setup.bring([], 0)
        figures = setup.evaluate(setup.model)
    assert figures is not None
    say(
        f"{config.model} on {figures['val_samples']:,} samples: loss {figures['val_loss']:.4f}, "
        f"top-1 {figures['val_top1']:.2%}, top-5 {figures['val_top5']:.2%}"
    )


def train(config: Config, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> None:
    """Train as the config says, from the start or from a checkpoint.

    Raises:
        UsageError: wrong use, before the first step.
        Error: a loss that isn't finite, or a folder or checkpoint that can't be written.
        Stopped: after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    setup = TrainingSetup(config, ranks, device, say)
    data_path = Path(config.store_path(setup.stages[-1].size)).absolute().resolve()
    out = Path(config.out or f"runs/{data_path.stem}-{config.model}")
    with contextlib.ExitStack() as stack:
        stack.callback(setup.close)
        folder = RunFolder(out, wait_seconds=config.timeout / 2) if ranks.rank == 0 else None  # rank 0 alone writes
        if folder:
            stack.callback(folder.close)
        found = broadcast_object(folder and folder.find(config.resume), ranks)
        run = TrainingRun(setup, found, say)
        run.saved = found is not None and found[0].parent.resolve() == out.resolve()
        if run.state.epoch >= config.epochs:
            say(
                f"{out}: finished: {counted(run.state.epoch, 'epoch')} done, --epochs {config.epochs}; nothing was "
                f"trained or changed. To go on set --epochs above {run.state.epoch}"
            )
            return
        for loader in run.loaders:
            stack.callback(loader.close)
        for line in describe_run(run, out):
            say(line)
        setup.bring(run.loaders, run.state.epoch)
        if config.warm == "auto" and ranks.local_rank == 0 and (setup.cache is None or setup.cache.is_complete):
            datasets = [loader.data for loader in run.loaders] + ([setup.val] if setup.val else [])
            stack.callback(warm_up([data.split for data in datasets], say))
        stack.enter_context(run.signals)  # until curves are drawn
        if folder:
            try:
                run.metrics = open_reports(run, folder, found and found[0])
            except OSError as error:
                raise unwritable(out, error) from error
            stack.callback(run.metrics.close)
            run.folder = folder
            if config.profile:
                run.profiler = stack.enter_context(profiler(out))
            folder.begun = True
        try:
            run.fit()
        finally:
            if folder:
                folder.wait()
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
        self, setup: TrainingSetup, found: tuple[Path, dict[str, Any]] | None, say: Callable[[str], None]
    ) -> None:
        config, ranks, device = setup.config, setup.ranks, setup.device
        self.config, self.setup, self.ranks, self.device = config, setup, ranks, device
        self.signals, self.say, self.state = Signals(), say, State()
        self.loaders, self.batching, self.raw = setup.loaders(), setup.batching, setup.model
        self.loader = self.loaders[0]
        self.steps_per_epoch = self.loader.data.num_samples // self.batching.global_batch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.peak_lr = config.lr * self.batching.global_batch / 256
        self.optimizer = make_optimizer(config, self.raw)
        self.mix = make_mix(config, len(setup.class_ids))
        self.ema: AveragedModel | None = None
        if config.ema:
            self.ema = AveragedModel(self.raw, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)
        self.evaluated: nn.Module = self.ema.module if self.ema else self.raw
        if found:
            restore(self, *found)
        if config.compile:  # a graph for each crop size; beyond the limit torch would go on uncompiled
            torch._dynamo.config.recompile_limit = 8 + 2 * len(self.loaders)
        losses: nn.Module = SampleLosses(self.raw, setup.transform, config.label_smoothing)
        # Each crop size gets kernels of its own; evaluation stays eager, its last batch would need others again.
        self.losses = cast(nn.Module, torch.compile(losses, dynamic=False)) if config.compile else losses
        if ranks.world_size > 1:
            ids = None if device.type == "cpu" else [device.index]
            # running statistics are rank 0's at evaluation; older torch has only the argument's old name
            new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
            options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
            self.losses = DistributedDataParallel(self.losses, device_ids=ids, gradient_as_bucket_view=True, **options)
        self.saved_at = time.monotonic()
        self.watch = LossWatch(ranks, self.signals, self._name_samples, self._save_is_due)

    def stage_loader(self, epoch: int) -> Loader:
        """The loader that serves an epoch."""
        return self.loaders[self.setup.stages.index(self.config.stage(epoch))]

    def _name_samples(self, slots: np.ndarray, most: int = 4) -> str:
        names = [self.loader.data.split.key(slot).decode(errors="replace") for slot in slots[:most].tolist()]
        return ", ".join(names) + (f" and {len(slots) - most} more" if len(slots) > most else "")

    def _save_is_due(self) -> bool:
        minutes = self.config.checkpoint_minutes
        return minutes > 0 and time.monotonic() > self.saved_at + 60 * minutes

    def _rate(self, step: int) -> float:
        warmup_steps = self.config.warmup_epochs * self.steps_per_epoch
        return learning_rate(step, self.total_steps, warmup_steps, self.peak_lr, self.config.schedule)

    def fit(self) -> None:
        """Train all epochs that are left."""
        config, state, accumulation = self.config, self.state, self.batching.accumulation
        for epoch in range(state.epoch, config.epochs):
            loader = self.stage_loader(epoch)
            if loader is not self.loader:
                self.loader.close()
                self.loader = loader
            self.raw.train()
            losses: list[Tensor] = []
            slots: list[np.ndarray] = []
            mark, waited = time.perf_counter(), loader.wait_seconds
            trained = loader.epoch > epoch  # a signal came after the epoch's last step, before its evaluation
            if not trained:
                loader.set_epoch(epoch)
            for micro_step, (images, labels) in enumerate(() if trained else loader, 1):
                if not losses:
                    seed_step(config.seed, state.step, self.ranks.rank, self.device)
                ends_step = micro_step % accumulation == 0
                if isinstance(self.losses, DistributedDataParallel):
                    self.losses.require_backward_grad_sync = ends_step  # what DDP's no_sync() sets
                batch = self._augmented(images, labels, epoch)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setup.amp):
                    loss = self.losses(*batch)
                (loss.mean() / accumulation).backward()
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
                samples = self.batching.batch_size * accumulation
                state.sums += loss_sum, samples, now - mark, loader.wait_seconds - waited
                mark, waited = now, loader.wait_seconds
                if self.metrics:
                    self.metrics.step(state.step, rate, self.watch.loss, self.watch.loss_step)
                if self.profiler:
                    self.profiler.step()
                if verdict != GO or state.step % config.checkpoint_every == 0:
                    stopped = self._read_losses()
                    self._save()
                    if stopped:
                        raise Stopped(self.signals.received, state.step)

            stopped = self._read_losses()
            # until the device has done the last step, and knows how long it has waited
            state.sums[2:] += time.perf_counter() - mark, loader.wait_seconds - waited
            figures, best = None, False
            if not stopped:
                figures = self.setup.evaluate(self.evaluated, lambda: bool(self.signals.received), epoch + 1)
            if figures is not None:
                best = self._finish_epoch(figures)
            stopped = self._read_losses()
            self._save(best)
            if stopped:
                raise Stopped(self.signals.received, state.step)

    def _augmented(self, images: Tensor, labels: Tensor, epoch: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """The batch as `SampleLosses` takes it: pixels, which of them to mirror, and targets."""
        crop = self.config.stage(epoch).crop or self.loader.data.crop_shape[0]
        pixels, mirrored = self.setup.transform.augment(
            images, self.loader.indices, epoch, crop, self.loader.source_sizes
        )
        if self.mix is None:
            return pixels, mirrored, labels
        if mirrored is not None:
            pixels = mirror(pixels, mirrored)
        pixels, target = self.mix(pixels.float(), labels)
        return pixels, None, target

    def _read_losses(self) -> bool:
        """Wait for the last step's losses, of all ranks; returns whether a signal told one of them to stop.

        Raises:
            Error: a loss isn't finite.
        """
        loss_sum, stopped = self.watch.sync(self.saved)
        self.state.sums[0] += loss_sum
        return stopped

    def _save(self, best: bool = False) -> None:
        """Write a checkpoint, and the weights as the best ones where they are.

        Raises:
            Error: the weights have diverged, so that no run could go on from them; or an earlier write failed.
        """
        if not all_finite(self.raw):
            raise diverged(f"the weights are not finite after step {self.state.step}", self.saved)
        saved = checkpoint(self)  # all ranks take part
        self.saved, self.saved_at = True, time.monotonic()
        if self.folder:
            self.folder.save(saved, self.evaluated.state_dict() if best else None)

    def _finish_epoch(self, figures: dict[str, Any]) -> bool:
        """Report the epoch; returns whether its weights are the best so far."""
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
        skipped = self.setup.val is not None and math.isnan(line["val_top1"])
        best = not skipped and not line["val_top1"] <= state.best  # better, or there is no val split
        if best:
            state.best = line["val_top1"]
        if self.metrics:
            self.metrics.epoch(line)
        self.say(describe_epoch(line, self.config.epochs))
        return best
