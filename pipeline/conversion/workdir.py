"""The work folder `<DST>.work/`: where everything unfinished lives, and who may write there.

lock                     flock: exclusive for a plain run, shared for parts; the workers don't inherit it
part-I-of-N.lock         flock of one part
commit.lock              flock of whoever commits
runs/<run name>          exists while the run lives; workers look for it before each image and rename
classes.json             class ids and names
.index-NAME.npz          which files lie in archives of the source
.copy/                   the future store that `copy` makes
<split>/plan.json        what identifies the conversion
<split>/samples.npz      keys, labels and order, by slot
<split>/receipts/C.json  chunk C is finished, with what was learnt about it
<split>/split/           the future split: finished chunk files, and at commit everything else
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from pipeline.conversion.names import Part
from pipeline.errors import Error, UsageError
from pipeline.progress import say
from pipeline.store.atomic import remove_temps
from pipeline.store.format import COPY
from pipeline.store.locks import flock

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system without locks says, such as Lustre mounted without `-o flock`."""
PRIVATE, WRITABLE_BY_OTHERS = 0o700, 0o022
NOT_THROUGH_LINKS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


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

    def remove_temps(self, live: Container[str]) -> set[int]:
        """Delete temp files of all runs but the live ones; returns the chunks that dead runs were converting."""
        remove_temps(self.path, live)
        remove_temps(self.receipts, live)
        return {int(name.split(".")[1]) for name in remove_temps(self.images, live) if name.startswith("c.")}

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
        self.runs = self.path / "runs"
        self.no_locks = ""  # why, where the file system has none

    def split(self, name: str) -> SplitWork:
        return SplitWork(self.path / name)

    def has_split(self, name: str) -> bool:
        """True where a split of that name is committed."""
        return (self.dst / name).exists()

    def live(self) -> set[str]:
        """Names of the runs that are alive, as far as is known."""
        return {file.name for file in self.runs.iterdir()}

    def begun(self) -> list[str]:
        """Splits that were begun and aren't committed yet, sorted."""
        names = (plan.parent.name for plan in self.path.glob("*/plan.json"))
        return sorted(name for name in names if not self.has_split(name))

    @contextlib.contextmanager
    def hold(self, *, shared: bool, needs_locks: bool) -> Iterator[None]:
        """Keep plain runs out of the work folder, and parts too unless `shared`. At the end delete it if all is done.

        Raises:
            UsageError: it isn't a work folder, or somebody else may have written there.
            Error: another run holds it, or locks are needed and the file system has none.
        """
        self._check_kind()
        usable = False
        try:
            with self._locked("lock", shared=shared, needed=needs_locks) as held:
                if not held:
                    raise Error(
                        f"{self.dst}: another conversion into it is running ({self.path / 'lock'} is held); "
                        "wait for it or stop it"
                    )
                self._check_private()
                if self.no_locks:
                    say(f"warning: {self.path}: no file locks here ({self.no_locks}); start no other run with that DST")
                usable = True
                yield
        finally:
            if usable:
                self._remove_if_done()

    @contextlib.contextmanager
    def run(self, part: Part | None, *, copying: bool = False) -> Iterator[str]:
        """Hold the work folder for a plain run (`part` None) or for a part; yields how the run's name begins.

        Raises:
            UsageError: a conversion was begun there, and this is a copy, or the other way round.
        """
        prefix = "all." if part is None else f"part-{part.index}-of-{part.count}."
        with self.hold(shared=part is not None, needs_locks=part is not None), contextlib.ExitStack() as stack:
            if other := self._other_work(copying):
                raise UsageError(
                    f"{self.dst}: an unfinished {other} into it lies in {self.path}; finish it with the command that "
                    "began it, delete that folder, or choose another DST"
                )
            if part is not None and not stack.enter_context(self._locked(f"{prefix}lock", needed=True)):
                raise Error(f"{self.dst}: part {part.index}/{part.count} is running already; wait or stop it")
            self.runs.mkdir(exist_ok=True)
            self._forget_runs("" if part is None else (prefix, "all."))
            stack.callback(self._forget_runs, prefix)
            yield prefix

    def _other_work(self, copying: bool) -> str:
        """The kind of unfinished work that a copy, or a conversion, mustn't delete at its end."""
        if copying:
            return "conversion" if self.begun() else ""
        return "copy" if (self.path / COPY).exists() else ""

    def _forget_runs(self, prefix: str | tuple[str, ...]) -> None:
        """Delete liveness files of runs that are dead, as the locks held prove, or that end now."""
        for file in self.runs.glob("*"):
            if file.name.startswith(prefix):
                _unlink(file)

    def _check_kind(self) -> None:
        """Refuse what isn't a work folder, which would be deleted at the end. A work folder has a file `lock`."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UsageError(f"{self.path}: exists and is not a folder; move it away or choose another DST")
        # NFS keeps a deleted file that is still open as .nfs...; empty folders are what is left afterwards.
        files = [entry for entry in _entries(self.path) if not entry.is_dir() and not entry.name.startswith(".nfs")]
        if files and not (self.path / "lock").is_file():
            raise UsageError(f"{self.path}: exists and is not a work folder; move it away or choose another DST")

    def _check_private(self) -> None:
        """Refuse a folder that somebody else could have put something into: workers load code from there."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{self.path}: is not a folder any more; choose another DST")
        if os.name != "nt" and (found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS):
            # Some file systems show every folder so: compare with a new one.
            with tempfile.TemporaryDirectory(dir=self.dst.parent) as made:
                new = os.stat(made)
            if found.st_uid != new.st_uid:
                raise UsageError(f"{self.path}: belongs to another user; choose another DST")
            if found.st_mode & ~new.st_mode & WRITABLE_BY_OTHERS:
                raise UsageError(
                    f"{self.path}: others may write there; if all in it is yours, run `chmod 700` on it, else choose "
                    "another DST"
                )
        for entry in _entries(self.path):
            if entry.is_symlink():
                raise UsageError(f"{entry.path}: a link in a work folder; delete it, or choose another DST")
        with contextlib.suppress(OSError):
            self.path.chmod(PRIVATE)

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Hold the commit lock; waits while another process has it."""
        with self._locked("commit.lock", wait=True):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, *, shared: bool = False, wait: bool = False, needed: bool = False) -> Iterator[bool]:
        """Hold a lock in the work folder, which is made where it is missing; yields False when it is held elsewhere."""
        path = self.path / name
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(PRIVATE)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | NOT_THROUGH_LINKS, 0o666)
            try:
                try:
                    held = flock(fd, shared=shared, wait=wait)
                except OSError as error:
                    error.filename = os.fspath(path)
                    if error.errno not in NO_LOCKS:
                        raise
                    if needed:
                        raise Error(
                            f"{path}: no file locks here ({error.strerror}), and --part needs them; mount the file "
                            "system with locks (Lustre: -o flock), or convert without --part"
                        ) from None
                    self.no_locks, held = error.strerror or str(error), True
                # Whoever held it may have deleted the file before letting go: then another file has that name now.
                if not held or _is_at(fd, path):
                    yield held
                    return
            finally:
                os.close(fd)

    def _remove_if_done(self) -> None:
        """Delete the work folder when nothing in it is unfinished and nobody uses it."""
        if not self.path.exists() or self.begun() or ((self.path / COPY).exists() and not self.dst.exists()):
            return
        with contextlib.suppress(OSError), self._locked("lock") as held:
            if held and not self.begun():
                shutil.rmtree(self.path, ignore_errors=True)

    def num_finished(self) -> int:
        """Chunks that are finished and not committed yet, of all splits."""
        return sum(1 for split in self.begun() for _ in self.split(split).receipts.glob("*.json"))

    def forget_settings(self) -> None:
        """Where no chunk is finished, forget the settings of the run that began; no other run may be alive."""
        if not self.num_finished():
            for split in self.begun():  # temp files stay: they tell which chunk a dead run was at
                _unlink(self.split(split).plan)
                _unlink(self.split(split).samples)
            _unlink(self.classes)

    def part_count(self) -> int | None:
        """N of the parts that ran here, as far as their locks tell."""
        locks = self.path.glob("part-*-of-*.lock")
        counts = [int(lock.name.removesuffix(".lock").split("-")[3].rstrip(".")) for lock in locks]
        return max(counts, default=None)


class Liveness:
    """The files that say that a run lives, one in each work folder, under a name that nobody can guess."""

    def __init__(self, workspaces: Sequence[Workspace], prefix: str) -> None:
        self.workspaces, self.prefix, self.name = workspaces, prefix, ""
        self.renew()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(workspace.runs / self.name) for workspace in self.workspaces)

    def renew(self) -> None:
        """Take another name: jobs that go by the old one stop before they write anything more."""
        old = self.files if self.name else ()
        self.name = self.prefix + secrets.token_hex(8)
        for file in self.files:
            Path(file).touch()
        for file in old:
            _unlink(Path(file))


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Everything below a folder, as far as it is there; links aren't followed."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            found.append(entry)
            if entry.is_dir(follow_symlinks=False):
                found += _entries(entry.path)
    return found


def _is_at(fd: int, path: Path) -> bool:
    """The open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
