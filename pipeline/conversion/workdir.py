"""The work folder `<DST>.work/`: where everything unfinished lives, and who may write there.

lock                     flock: exclusive for a plain run, shared for parts; the workers don't inherit it
part-I-of-N.lock         flock of one part
commit.lock              flock of whoever commits
runs/<run name>          exists while the run lives; workers look for it before each image and rename
classes.json             class ids and names
<split>/plan.json        what identifies the conversion
<split>/samples.npz      keys, labels and order, by slot
<split>/receipts/C.json  chunk C is finished, with what was learnt about it
<split>/split/           the future split: finished chunk files, and at commit everything else
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Error, UsageError
from pipeline.store.atomic import remove_temps
from pipeline.store.locks import flock

NAME_BYTES, PATH_BYTES = 255, 4095
"""The longest name and path that file systems take, in bytes."""
LONGEST_ENDING = ".errors.jsonl.tmp-0123456789ab"
"""The longest that is appended to the name of DST: the list of errors, while it is written."""
LONGEST_BELOW = 400
"""Bytes that paths in the work folder are longer than DST at most: a split's name and a temp file of a chunk."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """Part I of N of a conversion's chunks, I from 1: chunks whose number is I - 1 modulo N."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From "I/N".

        Raises:
            UsageError: not two integers with 1 <= I <= N.
        """
        try:
            index, count = (int(word) for word in text.split("/"))
        except ValueError:
            raise UsageError(f"--part {text}: must be I/N, such as 1/4") from None
        if not 1 <= index <= count:
            raise UsageError(f"--part {text}: I must be from 1 to N")
        return cls(index, count)

    def has(self, chunk: int) -> bool:
        return chunk % self.count == self.index - 1


class SplitWork:
    """The work folder of one split of one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / "plan.json"
        self.samples = path / "samples.npz"
        self.receipts = path / "receipts"
        self.staged = path / "split"
        self.images = self.staged / "images"

    def make(self) -> None:
        self.receipts.mkdir(parents=True, exist_ok=True)
        self.images.mkdir(parents=True, exist_ok=True)

    def remove_temps(self) -> None:
        """Delete the temp files of killed runs; no other run may be alive."""
        for folder in (self.path, self.receipts, self.images):
            remove_temps(folder)

    def chunk(self, chunk: int) -> Path:
        return self.images / f"c.{chunk}.0.0.0"

    def receipt(self, chunk: int) -> Path:
        return self.receipts / f"{chunk}.json"


class Workspace:
    """The work folder of one store."""

    def __init__(self, dst: Path) -> None:
        self.dst = dst
        self.path = dst.with_name(dst.name + ".work")
        self.errors = dst.with_name(dst.name + ".errors.jsonl")
        self.classes = self.path / "classes.json"

    def split(self, name: str) -> SplitWork:
        return SplitWork(self.path / name)

    def begun(self) -> list[str]:
        """Splits that were begun and aren't committed yet, sorted."""
        return sorted(plan.parent.name for plan in self.path.glob("*/plan.json"))

    @contextlib.contextmanager
    def run(self, part: Part | None) -> Iterator[Path]:
        """Hold the lock for a plain run (`part` None) or a part; yields the run's liveness file, whose name is unique.

        Raises:
            UsageError: a folder of that name is there already, and isn't a work folder.
            Error: another run is alive that may not run beside this one.
        """
        self._check_ours()
        try:
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(_locked(self.path / "lock", shared=part is not None)):
                    raise Error(
                        f"{self.dst}: another conversion into it is running ({self.path / 'lock'} is held); "
                        "wait for it or stop it"
                    )
                prefix = "all."
                if part is not None:
                    prefix = f"part-{part.index}-of-{part.count}."
                    if not stack.enter_context(_locked(self.path / f"{prefix}lock")):
                        raise Error(f"{self.dst}: part {part.index}/{part.count} is running already; wait or stop it")
                runs = self.path / "runs"
                runs.mkdir(exist_ok=True)
                for stale in runs.iterdir():  # holding the lock proves that these runs are dead
                    if part is None or stale.name.startswith((prefix, "all.")):
                        stale.unlink(missing_ok=True)
                liveness_file = runs / (prefix + secrets.token_hex(8))
                liveness_file.touch()
                stack.callback(_unlink, liveness_file)
                yield liveness_file
        finally:
            self._remove_if_done()

    def _check_ours(self) -> None:
        """Refuse a folder that isn't a work folder: its content would be deleted. A work folder has a file `lock`."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UsageError(f"{self.path}: exists and is not a folder; move it away or choose another DST")
        if self.path.exists() and any(self.path.iterdir()) and not (self.path / "lock").is_file():
            raise UsageError(f"{self.path}: exists and is not a work folder; move it away or choose another DST")

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Hold the commit lock; waits while another process has it."""
        with _locked(self.path / "commit.lock", wait=True):
            yield

    def _remove_if_done(self) -> None:
        """Delete the work folder when nothing in it is unfinished and nobody uses it."""
        if not self.path.exists() or self.begun():
            return
        with contextlib.suppress(OSError), _locked(self.path / "lock") as held:
            if held and not self.begun():
                shutil.rmtree(self.path, ignore_errors=True)

    def num_finished(self) -> int:
        """Chunks that are finished and not committed yet, of all splits."""
        return sum(1 for _ in self.path.glob("*/receipts/*.json"))

    def forget_settings(self) -> None:
        """Where no chunk is finished, forget the settings of the run that began; no other run may be alive."""
        if not self.num_finished():
            for split in self.begun():
                shutil.rmtree(self.split(split).path, ignore_errors=True)
            _unlink(self.classes)

    def part_count(self) -> int | None:
        """N of the parts that ran here, as far as their locks tell."""
        locks = self.path.glob("part-*-of-*.lock")
        counts = [int(lock.name.removesuffix(".lock").split("-")[3].rstrip(".")) for lock in locks]
        return max(counts, default=None)


def store_paths(dst: str | os.PathLike[str], sizes: Sequence[int]) -> list[Path]:
    """One store per size: `{size}` in DST is replaced.

    Raises:
        UsageError: several sizes and no `{size}` in DST, or no folder of that name can be made.
    """
    text = os.fspath(dst)
    if len(sizes) > 1 and "{size}" not in text:
        raise UsageError(f"{text}: with several sizes DST must hold {{size}}, such as data/imagenet-{{size}}.zarr")
    if _URL.match(text):
        raise UsageError(f"{text}: DST must be a local folder; convert there, then `python -m pipeline copy` it")
    paths = [Path(os.path.abspath(text.replace("{size}", str(size)))) for size in sizes]
    if not text.strip() or text.endswith(".work") or not paths[0].name:
        raise UsageError(f"DST {text!r}: not a usable name for a store")
    for path in paths:
        _check_length(path)
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{path}: a link that leads nowhere; choose another DST")
        nearest = next(parent for parent in path.parents if parent.exists())
        if not nearest.is_dir():
            raise UsageError(f"{path}: {nearest} is not a folder; choose another DST")
    return paths


def _check_length(path: Path) -> None:
    """Raise UsageError where the names beside DST, or the paths in its work folder, would be too long to make."""
    longest = max(len(os.fsencode(name)) for name in (*path.parent.parts, f"{path.name}{LONGEST_ENDING}"))
    whole = len(os.fsencode(path)) + LONGEST_BELOW
    for what, length, most in (("a name in it", longest, NAME_BYTES), ("the path", whole, PATH_BYTES)):
        if length > most:
            raise UsageError(f"{path}: {what} is {length - most} bytes too long; choose a shorter DST")


def check_split_name(name: str) -> None:
    """Raise UsageError unless a split may have that name: it becomes a folder in the store and in the work folder."""
    reserved = ("runs", "lock", "commit.lock", "overwritten", "zarr.json")
    if not name or name.startswith((".", "__", "part-")) or name in reserved or not set(name).isdisjoint("/\\\0"):
        raise UsageError(f"--split {name!r}: can't be a split's name; use one such as train, val or test")


def _is_at(fd: int, path: Path) -> bool:
    """The open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False, wait: bool = False) -> Iterator[bool]:
    """Hold a lock on the file, which is made where it is missing; yields False when another process has it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if not flock(fd, shared=shared, wait=wait):
                yield False
                return
            # Whoever held it may have deleted the file before letting go: then another file has that name now.
            if _is_at(fd, path):
                yield True
                return
        finally:
            os.close(fd)
