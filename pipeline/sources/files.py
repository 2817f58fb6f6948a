"""Samples that are files: read once each, whatever they turn out to be, without ever hanging."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import BadSample, UsageError
from pipeline.sources import names
from pipeline.sources.base import Indexed
from pipeline.text import as_text

_FOLDERS_LOOKED_INTO = 100
STAT_THREADS = 16
MAX_FILE_BYTES = 1 << 31  # more is no image but, say, a sparse file that would use up the memory
_REASONS = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ENAMETOOLONG: "missing",
    errno.ELOOP: "not-a-file",
    errno.ENXIO: "not-a-file",  # a socket, or a device without a driver
    errno.ENODEV: "not-a-file",
    errno.EISDIR: "not-a-file",
}
"""Of other errors: `unreadable`."""
_MACHINE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
# O_NONBLOCK: opening a FIFO without a writer returns at once instead of waiting for one for ever.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | bytes | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor for reading a regular file; also an `opener` for `open`.

    Raises:
        OSError: it can't be opened or is no regular file, such as a FIFO or a device, whose bytes may never end.
    """
    try:
        fd = os.open(path, flags | _FLAGS)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.ENOENT, str(error)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENODEV, "not a regular file")
    return fd


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of a data file, for its index."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the path and its permissions") from None
    try:
        yield fd
    finally:
        os.close(fd)


def ask_ahead(fd: int, offset: int = 0, length: int = 0) -> None:
    """Let the system begin to read so many bytes of a file (0: all), where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def ask_ahead_file(path: bytes) -> None:
    with suppress(OSError):
        fd = open_regular(path)
        ask_ahead(fd)
        os.close(fd)


def bad_sample(error: OSError, path: bytes) -> BadSample:
    """The outcome of a sample whose file gave this error; faults of the machine (descriptors, memory) are raised."""
    if error.errno in _MACHINE:
        raise error
    return BadSample(_REASONS.get(error.errno or 0, "unreadable"), f"{as_text(path)}: {error.strerror}")


def read_file(path: bytes) -> bytes:
    """A regular file's bytes."""
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            if size > MAX_FILE_BYTES:
                raise BadSample("unsupported", f"{as_text(path)}: {size:,} bytes")
            # One byte more than the size: the end is then seen without a second read.
            data = os.read(fd, size + 1)
            if len(data) != size:
                parts = [data]
                while part := os.read(fd, 1 << 20):
                    parts.append(part)
                data = b"".join(parts)
        finally:
            os.close(fd)
    except OSError as error:
        raise bad_sample(error, path) from None
    if not data:
        raise BadSample("empty", as_text(path))
    return data


def file_stamps(paths: Sequence[bytes | str], *, change_times: bool = False) -> np.ndarray:
    """int64 (N, 2): size and modification time in ns of each file; (-1, -1) where it can't be looked at.

    With `change_times` int64 (N, 3): also the time of the last change of any kind, which no program can set.

    Many files are looked at in threads: on a network each look waits for the server.
    """
    stamps = np.full((len(paths), 3), -1, np.int64)

    def look(first: int, step: int) -> None:
        for row in range(first, len(paths), step):
            with suppress(OSError, ValueError):
                status = os.stat(paths[row])
                stamps[row] = status.st_size, status.st_mtime_ns, status.st_ctime_ns

    if len(paths) < 2 * STAT_THREADS:
        look(0, 1)
    else:
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            list(pool.map(look, range(STAT_THREADS), [STAT_THREADS] * STAT_THREADS))
    return stamps if change_times else np.ascontiguousarray(stamps[:, :2])


@dataclass(eq=False)
class FileSource(Indexed):
    """One file per sample; its key is its path below `root`. An absolute path stands for itself."""

    root: bytes

    def path(self, i: int) -> bytes:
        return os.path.join(self.root, self.names[i])

    def read(self, i: int) -> bytes:
        return read_file(self.path(i))

    def read_ahead(self, i: int) -> None:
        ask_ahead_file(self.path(i))

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): size and modification time in ns of each file."""
        return file_stamps([self.path(i) for i in indices.tolist()])


def entries_of(folder: bytes | str | os.PathLike[str]) -> Iterator[os.DirEntry[Any]]:
    """What lies in a folder; UsageError where it can't be listed."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        name = as_text(os.fsencode(folder))
        raise UsageError(f"{name}: can't be listed ({error.strerror}); check its permissions") from None


def data_files(src: Path, suffix: str) -> list[Path]:
    """`src` itself, or the visible files with the suffix below it, sorted as `path_order` does."""
    if not src.is_dir():
        return [src]
    found, folders = list[Path](), [src]
    while folders:
        folder = folders.pop()
        for entry in entries_of(folder):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                folders.append(folder / entry.name)
            elif entry.name.lower().endswith(suffix) and not entry.name.startswith("."):
                found.append(folder / entry.name)
    return sorted(found, key=lambda path: [os.fsencode(part) for part in path.parts])


def label_files(folder: Path, stem: str = "") -> list[str]:
    """What may hold labels in a folder and its sub-folders (one level).

    With a `stem` only files of the folder itself that are named after it, such as `train.csv` and `train_labels.txt`.
    """
    found: list[str] = []
    for depth, (path, folders, files) in zip(range(_FOLDERS_LOOKED_INTO), os.walk(folder), strict=False):
        if stem:
            files = [name for name in files if re.match(rf"{re.escape(stem)}([._-]|$)", name)]
        found += [os.path.join(path, name) for name in names.label_like(map(os.fsencode, files))]
        folders[:] = [] if depth or stem else sorted(folders)
    return found


def split_of_data_file(path: Path, src: Path) -> str | None:
    """The split that the file's name, or that of a folder below SRC, says."""
    relative = path.relative_to(src) if path != src else Path(path.name)
    return names.split_of_file(os.fsencode(relative.with_suffix("")))
