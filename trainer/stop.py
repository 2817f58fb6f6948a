"""Watches a run: losses that aren't finite, and signals; all ranks then stop at the same step."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import Error
from trainer.ranks import Ranks, all_gather

GO, SAVE, STOP, BROKEN = 0, 1, 2, 3
"""A rank's verdict after each step: go on, save, stop (a signal came), or a loss isn't finite. The highest counts."""


WARNINGS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals after which a run saves and ends; Slurm's --signal mostly names SIGUSR1."""


class Stopped(Error):  # noqa: N818 - someone asked for it
    """A signal ended the run after a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        number = number or signal.SIGTERM  # 0: it was another rank that got one
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step:,}, with a checkpoint; go on with --resume auto")
        self.exit_code = 128 + number


@contextlib.contextmanager
def sigterm_ends(then: str) -> Iterator[None]:
    """Within the block, which may wait long and in Python alone, SIGTERM raises an Error; `then` says how to go on."""

    def end(number: int, _: FrameType | None) -> None:
        error = Error(f"stopped by SIGTERM; {then}")
        error.exit_code = 128 + number
        raise error

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Signals:
    """Within the block a signal that would end the process only sets `received`; the loop stops after its step.

    These are SIGTERM, SIGINT (Ctrl-C), those that batch systems send ahead of their time limit, and SIGHUP (the
    terminal was closed), but that one not under nohup.
    """

    received: int = 0

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number

    def __enter__(self) -> Signals:
        numbers = [getattr(signal, name) for name in WARNINGS if hasattr(signal, name)]  # Windows has only two
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is Stopped:
            # Another rank's SIGTERM may have come first. Our own must not cut off what is still to be written.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def diverged(problem: str, saved: bool) -> Error:
    """What to raise where numbers aren't finite; `saved`: there is a checkpoint from before."""
    then = "go on with --resume auto" if saved else "start again"
    return Error(f"{problem}; lower --lr or set --clip-grad, and {then}")


class LossWatch:
    """Reads each step's losses one step late, so that the device never waits for the CPU, and exchanges verdicts.

    The ranks exchange the verdict of a step during the next step. So all of them stop at the same step.

    Args:
        name_samples: from store slots int64 (n,) to the words that an error shows.
        save_is_due: whether this rank's clock asks for a checkpoint.
    """

    def __init__(
        self,
        ranks: Ranks,
        signals: Signals,
        name_samples: Callable[[np.ndarray], str],
        save_is_due: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks, self._signals, self._name_samples = ranks, signals, name_samples
        self._save_is_due = save_is_due
        self._pending: tuple[int, Tensor, list[np.ndarray], Any] | None = None
        self._exchange: tuple[Tensor, Any] | None = None
        self._problem = ""
        self.loss, self.loss_step = math.nan, 0
        """Mean loss of the newest step that was read, on this rank, and which step that was."""

    def record_step(self, step: int, losses: Tensor, slots: list[np.ndarray]) -> tuple[float, int]:
        """Note the losses (n,) of a step; returns the sum of the previous step's and the ranks' verdict so far."""
        total = self._read()
        copy, event = losses.detach().to("cpu", non_blocking=True), None
        if losses.device.type != "cpu":
            event = torch.Event(losses.device)
            event.record()
        self._pending = (step, copy, slots, event)
        verdict = self._finish_exchange()
        if self._ranks.world_size == 1:
            return total, self._verdict()
        box = torch.tensor([self._verdict()])
        self._exchange = box, dist.all_reduce(box, dist.ReduceOp.MAX, async_op=True)
        return total, verdict

    def sync(self, saved: bool) -> tuple[float, bool]:
        """Read what is outstanding, on all ranks.

        Args:
            saved: there is a checkpoint to go on from, for the message.

        Returns:
            The last step's sum of losses, and whether a rank was told to stop.

        Raises:
            Error: a loss isn't finite.
        """
        total = self._read()
        self._finish_exchange()
        verdict = int(all_gather([self._verdict()], self._ranks).max())
        if verdict == BROKEN and not self._problem:
            raise Error("another rank's loss is not finite; see its message")
        if verdict == BROKEN:
            raise diverged(self._problem, saved)
        return total, verdict == STOP

    def _finish_exchange(self) -> int:
        if self._exchange is None:
            return GO
        box, work = self._exchange
        self._exchange = None
        work.wait()
        return int(box)

    def _verdict(self) -> int:
        if self._problem:
            return BROKEN
        return STOP if self._signals.received else SAVE if self._save_is_due() else GO

    def _read(self) -> float:
        if self._pending is None:
            return 0.0
        step, losses, slots, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        total = float(losses.double().sum())
        self.loss, self.loss_step = total / len(losses), step
        if not math.isfinite(total) and not self._problem:
            bad = np.concatenate(slots)[~losses.isfinite().numpy()]
            self._problem = f"the loss is not finite at step {step}, samples {self._name_samples(bad)}"
        return total
