"""Samples that are files: read once each, whatever they turn out to be, without ever hanging."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pipeline.errors import BadSample
from pipeline.sources import names
from pipeline.sources.base import Indexed
from pipeline.sources.byte_strings import ByteStrings
from pipeline.text import as_text

MAX_FILE_BYTES = 1 << 31  # more is no image but, say, a sparse file that would use up the memory
_REASONS = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ENAMETOOLONG: "missing",
    errno.ELOOP: "not-a-file",
    errno.ENXIO: "not-a-file",  # a socket, or a device without a driver
    errno.ENODEV: "not-a-file",
    errno.EISDIR: "not-a-file",
    errno.EACCES: "unreadable",
    errno.EPERM: "unreadable",
    errno.EIO: "unreadable",
    errno.ESTALE: "unreadable",
}
# O_NONBLOCK: opening a FIFO without a writer returns at once instead of waiting for one for ever.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def bad_sample(error: OSError, path: bytes) -> BadSample:
    """The outcome of a sample whose file gave this error; faults of the machine (descriptors, memory) are raised."""
    reason = _REASONS.get(error.errno or 0)
    if reason is None:
        raise error
    return BadSample(reason, f"{as_text(path)}: {error.strerror}")


def read_file(path: bytes) -> bytes:
    """A regular file's bytes.

    Raises:
        BadSample: missing, unreadable, empty, or not a regular file.
    """
    try:
        fd = os.open(path, OPEN_FLAGS)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadSample("not-a-file", as_text(path))
            if status.st_size > MAX_FILE_BYTES:
                raise BadSample("unsupported", f"{as_text(path)}: {status.st_size:,} bytes")
            # One byte more than the size: the end is then seen without a second read.
            data = os.read(fd, status.st_size + 1)
            if len(data) != status.st_size:
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


def file_stamps(paths: Iterable[bytes | str], count: int) -> np.ndarray:
    """int64 (count, 2): size and modification time in ns of each file; (-1, -1) where it can't be looked at."""
    stamps = np.full((count, 2), -1, np.int64)
    for row, path in enumerate(paths):
        try:
            status = os.stat(path)
        except OSError:
            continue
        stamps[row] = status.st_size, status.st_mtime_ns
    return stamps


class FileSource(Indexed):
    """One file per sample; its key is its path below `root`.

    Args:
        root: the folder that keys are relative to.
        keys: paths, unique, with `/` between folders. An absolute path stands for itself.
        labels: int32 (N,), class indices or -2.
    """

    def __init__(self, root: bytes, keys: ByteStrings, labels: np.ndarray) -> None:
        super().__init__(keys, labels)
        self.root = root

    def path(self, i: int) -> bytes:
        return os.path.join(self.root, self.names[i])

    def read(self, i: int) -> bytes:
        return read_file(self.path(i))

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): size and modification time in ns of each file."""
        return file_stamps(map(self.path, indices.tolist()), len(indices))


def data_files(src: Path, suffix: str) -> list[Path]:
    """`src` itself, or the visible files with the suffix below it, sorted as `path_order` does."""
    if not src.is_dir():
        return [src]
    found = []
    for path in src.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(src).parts)
        if path.suffix.lower() == suffix and not hidden:
            found.append(path)
    return sorted(found, key=lambda path: [os.fsencode(part) for part in path.parts])


def split_of_data_file(path: Path, src: Path) -> str | None:
    """The split that the file's name, or that of a folder below SRC, says."""
    relative = path.relative_to(src) if path != src else Path(path.name)
    return names.split_of_file(os.fsencode(relative.with_suffix("")))
