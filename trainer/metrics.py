"""What a run reports: lines on the terminal, metrics.jsonl, TensorBoard events and a picture of the curves."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from pipeline.errors import Error
from pipeline.store.atomic import atomic_file, write_bytes
from pipeline.text import counted, duration
from trainer.flags import dump
from trainer.ranks import device_name
from trainer.report.provenance import record_start
from trainer.report.records import CONFIG, METRICS, append_json_line, json_lines
from trainer.run_folder import RunFolder, unwritable

if TYPE_CHECKING:
    from trainer.training import TrainingRun


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory allocated so far on a GPU; on the CPU what the process holds now beside the files that it maps.

    Of pages of mapped files, such as the store's, the kernel frees those that others need. (macOS: the largest resident
    set so far.)
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Metrics:
    """Rank 0's reports into a run's folder.

    Args:
        folder: the run's folder.
        epochs_done: what the run resumes from; later lines of metrics.jsonl are cut off.
        step: optimizer steps done; later TensorBoard events are hidden.
        total_steps: of the whole run, for the time left.
        say: prints a line; where there is no terminal for a progress bar it tells every half minute how far it is.
    """

    def __init__(self, folder: Path, epochs_done: int, step: int, total_steps: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, for rank 0 alone

        self._file, self._curves = folder / METRICS, folder / "curves.png"
        kept = [line for line in json_lines(self._file)[0] if line["epoch"] <= epochs_done]
        write_bytes(self._file, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._events = SummaryWriter(str(folder), purge_step=step)
        self._say, self._total_steps, self._first = say, total_steps, step
        self._start = self._said_at = time.monotonic()
        self._bar = tqdm(total=total_steps, initial=step, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05)

    def step(self, step: int, lr: float, loss: float, loss_step: int) -> None:
        """Count a step; `loss` is the newest that is known, that of the step `loss_step`."""
        self._bar.update(step - self._bar.n)
        if step % 10 == 0:
            self._bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.3g}")
            self._event("step/loss", loss, loss_step)
            self._event("step/lr", lr, step)
        now = time.monotonic()
        if self._bar.disable and now > self._said_at + 30 and math.isfinite(loss):
            left = duration((self._total_steps - step) * (now - self._start) / (step - self._first))
            self._say(f"step {step:,} of {self._total_steps:,}: loss {loss:.4f}, lr {lr:.3g}, {left} left")
            self._said_at = now

    def epoch(self, line: dict[str, Any]) -> None:
        """Append one epoch; figures that aren't finite become null."""
        line = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        try:
            append_json_line(self._file, line)
        except OSError as error:
            raise unwritable(self._file, error) from error
        for key, value in line.items():
            if value is not None and key not in ("epoch", "step"):
                self._event(f"epoch/{key}", value, line["step"])

    def _event(self, name: str, value: float, step: int) -> None:
        try:
            self._events.add_scalar(name, value, step)
        except OSError as error:  # of an earlier event, which a thread of TensorBoard's wrote
            raise unwritable(Path(self._events.log_dir) / "events.out.tfevents", error) from error

    def close(self) -> None:
        """Close the files and draw the curves. A failure is said, not raised: it would hide what ended the run."""
        self._bar.close()
        for name, finish in (("events", self._events.close), (self._curves.name, self._draw)):
            try:
                finish()
            except (OSError, Error) as error:
                self._say(f"note: {self._curves.parent}: {name} can't be written ({error})")

    def _draw(self) -> None:
        lines, _ = json_lines(self._file)
        if lines:
            draw_curves(self._curves, lines)


def draw_curves(path: Path, lines: list[dict[str, Any]]) -> None:
    """Losses and accuracies by epoch as a PNG, written whole or not at all; the colours are those of the run report."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    ink, soft, grid, colours = "#1b1f23", "#59626d", "#ece9e2", ("#0072b2", "#d55e00")
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    panels: list[tuple[Any, str, dict[str, str]]] = [
        (loss, "Loss", {"val_loss": "validation", "train_loss": "training"}),
        (accuracy, "Validation accuracy", {"val_top1": "top-1", "val_top5": "top-5"}),
    ]
    for axes, title, names in panels:
        for (key, name), colour in zip(names.items(), colours, strict=True):
            known = [line for line in lines if line[key] is not None]  # an epoch without evaluation is no gap
            values = [line[key] for line in known]
            if key == "val_top5" and set(values) == {1.0}:
                continue  # says nothing: with five classes or fewer it is always 1
            axes.plot([line["epoch"] for line in known], values, color=colour, linewidth=2, marker=".", label=name)
        axes.set_title(title, loc="left", color=ink, fontweight="bold")
        axes.set_xlabel("epoch", color=soft)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(axis="y", color=grid)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=soft, length=0)
        axes.legend(frameon=False, labelcolor=ink)
    accuracy.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def open_reports(run: TrainingRun, folder: RunFolder, checkpoint: Path | None) -> Metrics:
    """Write what a run's folder holds before the first step; `checkpoint` is what the run goes on from.

    Raises:
        OSError: the folder takes no files.
    """
    out, state = folder.path, run.state
    if checkpoint and not run.saved and not folder.adopt(checkpoint, state.epoch, state.best):
        state.best = type(state).best  # there is no file of the best epoch so far: the best of the coming ones counts
    header = "# The run's config; usable with --config.\n"
    write_bytes(out / CONFIG, (header + dump(run.config)).encode())
    record_start(
        out,
        step=state.step,
        world_size=run.ranks.world_size,
        global_batch=run.batching.global_batch,
        device=device_name(run.device),
    )
    return Metrics(out, state.epoch, state.step, run.total_steps, run.say)


def describe_run(run: TrainingRun, out: Path) -> list[str]:
    """What a run will do, in lines for people; `out` is its folder."""
    config, batching, data = run.config, run.batching, run.loaders[0].data
    ranks, classes = run.ranks.world_size, len(run.setup.class_ids)
    model = (
        f"{config.model}: {sum(p.numel() for p in run.raw.parameters()):,} parameters, "
        f"{counted(classes, 'class', 'classes')}; {ranks} x {run.device.type}; output in {out}"
    )
    steps = (
        f"global batch {batching.global_batch:,} = {counted(ranks, 'rank')} x "
        f"{counted(batching.batch_size, 'sample')} x {counted(batching.accumulation, 'micro-step')}; "
        f"lr {config.lr:g} per 256 samples, {run.peak_lr:g} at its peak; {counted(run.steps_per_epoch, 'step')} an "
        f"epoch, {run.total_steps:,} in all"
    )
    lines = [model, steps]
    left = data.num_samples - run.steps_per_epoch * batching.global_batch
    if 4 * left > data.num_samples:
        lines.append(
            f"note: {left:,} of {data.num_samples:,} samples, others in each epoch, are left over from the last whole "
            "batch; a smaller --global-batch uses more"
        )
    if config.resume == "auto" and run.state.step == 0:
        lines.insert(0, f"note: {out}: no checkpoint there; this run starts afresh")
    if run.setup.stretched:
        lines.append("whole pictures from a store of --fit stretch: crops are resampled on the device, unstretched")
    elif data.crop_shape == data.split.image_shape and not (
        config.pad or config.augment == "rrc" or config.randaugment or config.random_erasing
    ):
        lines.append("note: crops are whole images, only flips vary them; --pad or a larger store gains accuracy")
    return lines


def describe_epoch(line: dict[str, Any], epochs: int) -> str:
    """A line of metrics.jsonl for people; `epochs` is the number of all."""
    evaluated = ""
    if math.isfinite(line["val_loss"]):
        evaluated = f", val loss {line['val_loss']:.4f}, top-1 {line['val_top1']:.2%}, top-5 {line['val_top5']:.2%}"
    return (
        f"epoch {line['epoch']}/{epochs}: train loss {line['train_loss']:.4f}{evaluated}; "
        f"{line['images_per_second']:,.0f} images/s, data wait {line['data_wait_share']:.1%}, "
        f"peak memory {line['peak_memory_bytes'] / 1e9:.2f} GB"
    )


def profiler(out: Path) -> torch.profiler.profile:
    """Writes a trace of steps 6 to 10 to OUT/trace.json."""
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=3, warmup=2, active=5, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(out / "trace.json")),
    )
