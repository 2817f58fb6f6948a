"""The run's folder: who may write there, checkpoints that a crash can't spoil, and which one a run goes on from."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pipeline.errors import Error, UsageError
from pipeline.store.atomic import TEMP_MARK, atomic_file, write_bytes
from trainer.report.records import CONFIG, LOCK, METRICS, STARTS, json_lines

try:
    import fcntl
except ImportError:  # Windows has no flock: two runs into one folder aren't noticed there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
BEFORE_THE_START = (LOCK, BEST, METRICS, CONFIG, STARTS)
"""What a run writes before its first step, besides TensorBoard's events."""
OWN_NAMES = (*BEFORE_THE_START, LAST, PREVIOUS, "curves.png", "trace.json")


class RunFolder:
    """The folder `--out`, held by one live run at a time.

    Attributes:
        path: the folder, which is made, and removed again by `close` if the run didn't begin.
        begun: the run has begun, so `close` keeps the folder.
        restarted: torchrun started this run to replace one that it ended: after a failure, or because the number of
            machines changed (then the lock file names this same job).

    Args:
        wait_seconds: how long a restarted run waits for the one before to let go of the folder.

    Raises:
        UsageError: a live run holds it.
        Error: it can't be written to.
    """

    begun = False
    _writer: threading.Thread | None = None
    _failure: Error | None = None

    def __init__(self, path: Path, wait_seconds: float = 0.0) -> None:
        for folder in (path, *path.absolute().parents):
            if (folder / "zarr.json").exists():
                raise UsageError(f"--out {path}: lies in a store, {folder}; choose another folder")
        self.path = path
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in OWN_NAMES:
                if (path / name).is_symlink():
                    raise UsageError(f"--out {path}: {name} is a link, which would be written through; delete it")
            self._lock: IO[str] = open(path / LOCK, "a+", opener=_open_no_link)  # noqa: SIM115 - held until `close`
            self._lock.seek(0)
            holder = self._lock.read()
        except OSError as error:
            if self._made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise unwritable(path, error) from error
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # "none": a static rendezvous, which never regroups
        self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 or (job != "none" and job == holder)
        deadline = time.monotonic() + (wait_seconds if self.restarted else 0)
        while not self._try_lock():
            if time.monotonic() > deadline:
                self._lock.close()
                raise UsageError(f"--out {path}: another run is writing there; wait for it or choose another folder")
            time.sleep(0.2)
        try:
            self._lock.truncate(0)
            self._lock.write(job)
            self._lock.flush()
            self._remove_temps()
        except OSError as error:
            self.close()
            raise unwritable(path, error) from error

    def _remove_temps(self) -> None:
        """Delete what a killed run was writing, under the names of its own that `atomic_file` gives, and no others."""
        for name in os.listdir(self.path):
            stem, mark, token = name.partition(TEMP_MARK)
            if mark and stem in OWN_NAMES and re.fullmatch("[0-9a-f]{12}", token):
                (self.path / name).unlink()

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
        with contextlib.suppress(Error):  # whoever wants to know calls `wait` before
            self.wait()
        with contextlib.suppress(OSError):
            if self._made and not self._lock.closed and not self.begun:
                for name in os.listdir(self.path):
                    if name in BEFORE_THE_START or name.startswith("events.out.tfevents"):
                        (self.path / name).unlink()
                self.path.rmdir()
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses
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
        others = []
        for path in own:
            state = _load(path)
            if isinstance(state, dict):
                return path, state
            others.append(state)
        if own and all(others):
            raise UsageError(
                f"--resume {own[0]}: not a checkpoint ({others[0]}): use --weights with it, or --resume with {LAST}"
            )
        if own:
            raise UsageError(f"{' and '.join(map(str, own))}: damaged; resume from another checkpoint, or start afresh")
        return None

    def adopt(self, path: Path, epochs_done: int, best: float) -> bool:
        """Copy metrics.jsonl and best.pt from another run's folder; returns whether best.pt was copied.

        It isn't copied where a later epoch than the checkpoint's was better than `best`: it is of that epoch.

        Raises:
            OSError: a file can't be read or written.
        """
        source = path.parent
        lines, _ = json_lines(source / METRICS)
        if lines:
            write_bytes(self.path / METRICS, (source / METRICS).read_bytes())
        later = [line["val_top1"] or 0.0 for line in lines if line["epoch"] > epochs_done]
        if not (source / BEST).exists() or max(later, default=0.0) > best:
            return False
        write_bytes(self.path / BEST, (source / BEST).read_bytes())
        return True

    def save(self, state: dict[str, Any], best: dict[str, Tensor] | None = None) -> None:
        """Make a copy of `state` the newest checkpoint and keep the one before: at any moment one of them is complete.

        A thread writes it, while training goes on; an earlier write is waited for. `best` is a state dict that
        becomes best.pt first: plain weights on the CPU, which torchvision's model loads with strict=True.

        Raises:
            Error: the earlier one couldn't be written (no space left, or the like); those before are as they were.
        """
        self.wait()
        self.begun = True
        last, copied = self.path / LAST, deepcopy({"format": FORMAT, **state})
        weights = best and {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in best.items()}

        def keep_previous() -> None:
            if last.exists():
                os.replace(last, self.path / PREVIOUS)

        def write() -> None:
            try:
                if weights:
                    _write(self.path / BEST, weights)
                _write(last, copied, keep_previous)
            except Error as error:
                self._failure = error

        self._writer = threading.Thread(target=write, name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk.

        Raises:
            Error: it couldn't be written.
        """
        if self._writer:
            self._writer.join()
        failure, self._writer, self._failure = self._failure, None, None
        if failure:
            raise failure


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def unwritable(path: Path, error: OSError) -> Error:
    """What to raise where `--out`, or a file in it, can't be written."""
    room = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return Error(f"--out {path}: can't be written ({error.strerror or error}); {room}choose another folder")


def _write(path: Path, value: dict[str, Any], before_rename: Callable[[], None] | None = None) -> None:
    try:
        with atomic_file(path, check=before_rename) as file:
            torch.save(value, file)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns "no space" into a RuntimeError
        cause = error.__cause__ or error.__context__ or error
        reason = cause.strerror if isinstance(cause, OSError) else error
        raise Error(f"{path}: the checkpoint can't be written ({reason}); earlier ones are kept") from error


def _load(path: Path) -> dict[str, Any] | str:
    """A complete checkpoint, all tensors on the CPU; else why it is none, empty where the file is damaged."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"PK\x03\x04":  # of every file that torch.save writes
                return "" if path.name in (LAST, PREVIOUS) else "no file of torch's"
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # a wrong checksum; torch.load alone wouldn't notice
                return ""
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a spoilt file makes zipfile and the unpickler raise nearly anything
        return ""
    if not isinstance(state, dict) or "format" not in state:
        return "weights alone"
    return state if state["format"] == FORMAT else ""
