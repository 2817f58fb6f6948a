"""Samples inside uncompressed archives, indexed from their headers and read in place."""

from __future__ import annotations

import os
import posixpath
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import BadSample, Error, UsageError
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder
from pipeline.sources.files import bad_sample
from pipeline.sources.indexed import Indexed
from pipeline.sources.names import text
from pipeline.sources.tarfiles import members, pread

MAX_OPEN_ARCHIVES = 256
_MAX_HOPS = 8
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@dataclass
class Table:
    """Files of one or more archives, N of them.

    Attributes:
        names: their paths, or keys made of them.
        archive: int32 (N,), the archive that each lies in.
        offset: int64 (N,), its first byte there, or -1 for a link that leads nowhere.
        size: int64 (N,), its bytes.
    """

    names: ByteStrings
    archive: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    def take(self, indices: np.ndarray, names: ByteStrings | None = None) -> Table:
        """The files at `indices`, int64 (M,), under their names or others."""
        names = self.names.take(indices) if names is None else names
        return Table(names, self.archive[indices], self.offset[indices], self.size[indices])


class ArchiveSource(Indexed):
    """Samples that are byte ranges of a few large files.

    Args:
        archives: paths of the archives.
        table: where each sample lies; the names are the keys.
        labels: int32 (N,), class indices or -2.
    """

    def __init__(self, archives: list[str], table: Table, labels: np.ndarray) -> None:
        super().__init__(table.names, labels)
        self.archives = archives
        self.archive = table.archive
        self.offset = table.offset
        self.size = table.size
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_fds", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _fds={}, _lock=threading.Lock())

    def __del__(self) -> None:
        for fd in vars(self).get("_fds", {}).values():
            os.close(fd)

    def _open(self, archive: int) -> int:
        try:
            return os.open(self.archives[archive], _FLAGS)
        except OSError as error:
            raise Error(f"{self.archives[archive]}: {error.strerror}; put the archive back and rerun") from None

    def _pread(self, archive: int, size: int, offset: int) -> bytes:
        fd = self._fds.get(archive)
        if fd is None:
            fd = self._open(archive)
            with self._lock:
                kept = len(self._fds) < MAX_OPEN_ARCHIVES and self._fds.setdefault(archive, fd) == fd
            if not kept:
                try:
                    return pread(fd, size, offset)
                finally:
                    os.close(fd)
        return pread(fd, size, offset)

    def read(self, i: int) -> bytes:
        archive, offset, size = int(self.archive[i]), int(self.offset[i]), int(self.size[i])
        if offset < 0:
            raise BadSample("missing", f"{text(self.key(i))}: a link that leads nowhere in {self.archives[archive]}")
        if size == 0:
            raise BadSample("empty", f"{text(self.key(i))} in {self.archives[archive]}")
        try:
            data = self._pread(archive, size, offset)
        except OSError as error:
            raise bad_sample(error, os.fsencode(self.archives[archive])) from None
        if len(data) < size:
            raise Error(f"{self.archives[archive]}: shorter than when it was indexed; put it back and rerun")
        return data

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): the sample's size and its archive's modification time in ns."""
        times = np.full(len(self.archives), -1, np.int64)
        for archive in np.unique(self.archive[indices]).tolist():
            try:
                times[archive] = os.stat(self.archives[archive]).st_mtime_ns
            except OSError:
                continue
        stamps = np.stack([self.size[indices], times[self.archive[indices]]], axis=1)
        stamps[stamps[:, 1] == -1] = -1
        return stamps


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of an archive, for reading its headers."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the path and its permissions") from None
    try:
        yield fd
    finally:
        os.close(fd)


class TableBuilder:
    """Collects files of archives into a `Table`; links within an archive get the bytes they lead to.

    Attributes:
        folders: (archive, path) of the folders that are members themselves, as empty ones must be.
    """

    def __init__(self) -> None:
        self.names = ByteStringsBuilder()
        self._archive, self._offset, self._size = array("i"), array("q"), array("q")
        self._links: list[tuple[int, bytes]] = []
        self.folders: list[tuple[int, bytes]] = []

    def add(self, name: bytes, archive: int, offset: int, size: int) -> None:
        self.names.append(name)
        self._archive.append(archive)
        self._offset.append(offset)
        self._size.append(size)

    def add_archive(self, path: str, archive: int) -> None:
        """Index a tar file as archive number `archive`."""
        with opened(path) as fd:
            for member in members(fd, path):
                if member.kind == "file":
                    self.add(member.name, archive, member.offset, member.size)
                elif member.kind == "folder":
                    self.folders.append((archive, member.name))
                else:  # a link, or a device: a name without bytes of its own
                    if member.kind == "symlink":
                        target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.target))
                        self._links.append((len(self.names), target))
                    elif member.kind == "link":
                        self._links.append((len(self.names), posixpath.normpath(member.target)))
                    self.add(member.name, archive, -1, 0)

    def build(self) -> Table:
        names = self.names.build()
        table = Table(
            names,
            np.array(self._archive, np.int32),
            np.array(self._offset, np.int64),
            np.array(self._size, np.int64),
        )
        if self._links:
            self._follow(table)
        return table

    def _follow(self, table: Table) -> None:
        wanted = {(int(table.archive[i]), target) for i, target in self._links}
        place = {
            (int(table.archive[i]), name): i
            for i, name in enumerate(table.names)
            if (int(table.archive[i]), name) in wanted
        }
        for _ in range(_MAX_HOPS):  # a link may lead to a link
            for i, target in self._links:
                to = place.get((int(table.archive[i]), target))
                if to is not None:
                    table.offset[i], table.size[i] = table.offset[to], table.size[to]
