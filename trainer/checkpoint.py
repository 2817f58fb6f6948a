"""The run's folder: who may write there, checkpoints that a crash can't spoil, and which one a run goes on from."""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pipeline.atomic import atomic_file, remove_temps
from pipeline.errors import Error, UsageError

try:
    import fcntl
except ImportError:  # Windows has no flock: two runs into one folder aren't noticed there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
LAST, PREVIOUS, BEST, LOCK = "last.pt", "previous.pt", "best.pt", "lock"


class RunFolder:
    """The folder `--out`, held by one live run at a time.

    Attributes:
        path: the folder, which is made, and removed again by `close` if nothing was written into it.
        restarted: torchrun started this run in place of one that it ended: after a failure, or because machines
            came or went (then the job that last held the folder is this one).

    Args:
        wait_seconds: how long a restarted run waits for the one before to let go of the folder.

    Raises:
        UsageError: a live run holds it, or it can't be written to.
    """

    def __init__(self, path: Path, wait_seconds: float = 0.0) -> None:
        self.path = path
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(path / LOCK, "a+")  # noqa: SIM115 - held until `close`
            self._lock.seek(0)
            holder = self._lock.read()
        except OSError as error:
            raise UsageError(f"--out {path}: can't write there ({error.strerror})") from error
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # "none": a static rendezvous, which never regroups
        self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or (job != "none" and job == holder)
        deadline = time.monotonic() + (wait_seconds if self.restarted else 0)
        while not self._try_lock():
            if time.monotonic() > deadline:
                self._lock.close()
                raise UsageError(f"--out {path}: another run is writing there; wait for it or choose another folder")
            time.sleep(0.2)
        self._lock.truncate(0)
        self._lock.write(job)
        self._lock.flush()
        remove_temps(path)

    def _try_lock(self) -> bool:
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go of the folder; harmless when repeated."""
        with contextlib.suppress(OSError):
            if self._made and not self._lock.closed and os.listdir(self.path) == [LOCK]:  # refused before it began
                (self.path / LOCK).unlink()
                self.path.rmdir()
        self._lock.close()

    def find(self, resume: str | None) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint that a run with this `--resume` goes on from, as (path, state); None for a fresh start.

        Raises:
            UsageError: none where one was asked for, only damaged ones, or some in the folder and no `--resume`.
        """
        own = [self.path / name for name in (LAST, PREVIOUS) if (self.path / name).exists()]
        if resume is None and own and not self.restarted:
            raise UsageError(f"--out {self.path}: holds a run already; add --resume auto, or choose another folder")
        if resume not in (None, "auto") and not (self.restarted and own):
            where = Path(resume or "")
            own = [path for path in (where, where / LAST, where / PREVIOUS) if path.is_file()]
            if not own:
                raise UsageError(f"--resume {where}: no checkpoint there; check the path, or use --resume auto")
        for path in own:
            state = read_checkpoint(path)
            if state is not None:
                return path, state
        if own:
            raise UsageError(f"{' and '.join(map(str, own))}: damaged; resume from another checkpoint, or start afresh")
        return None

    def save(self, state: dict[str, Any]) -> None:
        """Make `state` the newest checkpoint and keep the one before; at any moment one of the two is complete.

        Raises:
            Error: no space left, or the like; the earlier checkpoints are as they were.
        """
        last = self.path / LAST

        def keep_previous() -> None:
            if last.exists():
                os.replace(last, self.path / PREVIOUS)

        _write(last, {"format": FORMAT, **state}, keep_previous)

    def save_best(self, weights: dict[str, Tensor]) -> None:
        """Write a plain state dict on the CPU, which torchvision's model loads with strict=True."""
        _write(self.path / BEST, {name: tensor.cpu().contiguous() for name, tensor in weights.items()})


def _write(path: Path, value: dict[str, Any], before_rename: Callable[[], None] = lambda: None) -> None:
    try:
        with atomic_file(path) as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
            before_rename()
    except (OSError, RuntimeError) as error:  # torch's zip writer turns "no space" into a RuntimeError
        cause = error.__cause__ or error.__context__ or error
        reason = cause.strerror if isinstance(cause, OSError) else error
        raise Error(f"{path}: the checkpoint can't be written ({reason}); earlier ones are kept") from error


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """A complete checkpoint with all tensors on the CPU; None where the file is damaged or something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # a wrong checksum; torch.load alone wouldn't notice
                return None
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a spoilt file makes zipfile and the unpickler raise nearly anything
        return None
    return state if isinstance(state, dict) and state.get("format") == FORMAT else None
