"""Samples that are files: read once each, whatever they turn out to be, without ever hanging."""

from __future__ import annotations

import errno
import os
import stat

import numpy as np

from pipeline.errors import BadSample
from pipeline.sources.byte_strings import ByteStrings
from pipeline.sources.indexed import Indexed
from pipeline.sources.names import text

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
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def bad_sample(error: OSError, path: bytes) -> BadSample:
    """The outcome of a sample whose file gave this error; faults of the machine (descriptors, memory) are raised."""
    reason = _REASONS.get(error.errno or 0)
    if reason is None:
        raise error
    return BadSample(reason, f"{text(path)}: {error.strerror}")


def read_file(path: bytes) -> bytes:
    """A regular file's bytes.

    Raises:
        BadSample: missing, unreadable, empty, or not a regular file.
    """
    try:
        fd = os.open(path, _FLAGS)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadSample("not-a-file", text(path))
            if status.st_size > MAX_FILE_BYTES:
                raise BadSample("unsupported", f"{text(path)}: {status.st_size:,} bytes")
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
        raise BadSample("empty", text(path))
    return data


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
        stamps = np.full((len(indices), 2), -1, np.int64)
        for row, i in enumerate(indices.tolist()):
            try:
                status = os.stat(self.path(i))
            except OSError:
                continue
            stamps[row] = status.st_size, status.st_mtime_ns
        return stamps
