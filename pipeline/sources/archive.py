"""Samples inside uncompressed tar archives, indexed from their headers and read in place.

What the kinds of archives (`tar`, `webdataset`, `imagenet`) share: the table of members, and the source made of it.
"""

from __future__ import annotations

import os
import posixpath
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.errors import BadSample, Error, UsageError
from pipeline.sources import names
from pipeline.sources.base import Indexed
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate, path_order
from pipeline.sources.files import MAX_FILE_BYTES, ask_ahead, bad_sample, file_stamps, open_regular, opened
from pipeline.sources.ignored import Ignored
from pipeline.sources.labels import LabelColumn
from pipeline.sources.tar_headers import members, pread
from pipeline.text import as_text

MAX_OPEN_ARCHIVES = 256
_MAX_HOPS = 8


@dataclass
class Table:
    """Files of one or more archives, N of them.

    Attributes:
        names: their paths, or keys made of them.
        archive: int32 (N,), the archive that each lies in.
        offset: int64 (N,), its first byte there, or -1 for a link that leads nowhere.
        size: int64 (N,), its bytes.
        contents: of small files that are no images, such as labels, what is in them; else empty.
    """

    names: ByteStrings
    archive: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    contents: ByteStrings

    def take(self, indices: np.ndarray, names: ByteStrings | None = None) -> Table:
        """The files at `indices`, int64 (M,), under their names or others; contents may be left out."""
        if names is None and np.array_equal(indices, np.arange(len(self.names))):
            return self  # a copy of a million rows is 90 MB
        names = self.names.take(indices) if names is None else names
        nothing = ByteStrings(np.empty(0, np.uint8), np.zeros(len(indices) + 1, np.int64))
        return Table(names, self.archive[indices], self.offset[indices], self.size[indices], nothing)

    def images(self, ignored: Ignored) -> np.ndarray:
        """int64: the rows that are image candidates; the rest is counted."""
        keep = np.zeros(len(self.names), bool)
        for i, name in enumerate(self.names):
            if why := names.why_ignored(name):
                ignored.add(why, name)
            else:
                keep[i] = True
        return np.flatnonzero(keep)

    def sorted(self, archives: Sequence[str]) -> Table:
        """The files in the order of a sorted walk."""
        table = self.take(path_order(self.names))
        if twice := first_duplicate(table.names):
            first, second = (archives[table.archive[i]] for i in twice)
            where = f"in {first} and in {second}" if first != second else f"twice in {first}"
            name = as_text(table.names[twice[0]])
            raise UsageError(f"{name} is {where}; delete one of them (`tar --delete`) or unpack the archive")
        return table


class TableBuilder:
    """Collects files of archives into a `Table`; links within an archive get the bytes they lead to.

    Attributes:
        folders: (archive, path) of the folders that are members themselves, as empty ones must be.
    """

    def __init__(self) -> None:
        self._names, self._contents = ByteStringsBuilder(), ByteStringsBuilder()
        self._archive, self._offset, self._size = array("i"), array("q"), array("q")
        self._links: list[tuple[int, bytes]] = []
        self.folders: list[tuple[int, bytes]] = []

    def add_archive(
        self, path: str, archive: int, where: str = "", start: int = 0, end: int | None = None, prefix: bytes = b""
    ) -> None:
        """Index a tar file, or the part `start` to `end` of it, as archive number `archive`.

        `where` names it in errors, `prefix` goes before the names.
        """
        with opened(path) as fd:
            for member in members(fd, where or path, start, end):
                name, target, offset = prefix + member.name, b"", member.offset
                if member.kind == "folder":
                    self.folders.append((archive, name))
                    continue
                if member.kind != "file":  # a link, or a device: a name without bytes of its own
                    offset = -1
                    if member.kind == "symlink":
                        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.target))
                    elif member.kind == "link":
                        target = posixpath.normpath(prefix + member.target)
                    if target:
                        self._links.append((len(self._names), target))
                self._names.append(name)
                self._archive.append(archive)
                self._offset.append(offset)
                self._size.append(member.size if offset >= 0 else 0)
                self._contents.append(b"" if names.is_image(name) else member.content)

    def build(self) -> Table:
        """The table; the builder can't be appended to afterwards."""
        archive, offset, size = (np.array(column) for column in (self._archive, self._offset, self._size))
        table = Table(self._names.build(), archive, offset, size, self._contents.build())
        wanted = {(int(table.archive[i]), target) for i, target in self._links}
        place = {}
        for i, name in enumerate(table.names if wanted else ()):
            if (int(table.archive[i]), name) in wanted:
                place[int(table.archive[i]), name] = i
        for _ in range(_MAX_HOPS):  # a link may lead to a link
            for i, target in self._links:
                to = place.get((int(table.archive[i]), target))
                if to is not None:
                    table.offset[i], table.size[i] = table.offset[to], table.size[to]
        return table


@dataclass(eq=False)
class ArchiveSource(Indexed):
    """Samples that are byte ranges of the files `archives`; the arrays are those of a `Table`."""

    archives: list[str]
    archive: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    _fds: dict[int, int] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_fds": {}}

    def __del__(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def _pread(self, archive: int, size: int, offset: int) -> bytes:
        fd = self._fds.get(archive)
        if fd is None:
            try:
                fd = open_regular(self.archives[archive])
            except OSError as error:
                raise Error(f"{self.archives[archive]}: {error.strerror}; put the archive back and rerun") from None
            # Another thread may have opened it meanwhile.
            if len(self._fds) >= MAX_OPEN_ARCHIVES or self._fds.setdefault(archive, fd) != fd:
                try:
                    return pread(fd, size, offset)
                finally:
                    os.close(fd)
        return pread(fd, size, offset)

    def read(self, i: int) -> bytes:
        archive, offset, size = int(self.archive[i]), int(self.offset[i]), int(self.size[i])
        if offset < 0:
            raise BadSample("missing", f"{as_text(self.key(i))}: a link that leads nowhere in {self.archives[archive]}")
        if size == 0:
            raise BadSample("empty", f"{as_text(self.key(i))} in {self.archives[archive]}")
        if size > MAX_FILE_BYTES:
            raise BadSample("unsupported", f"{as_text(self.key(i))} in {self.archives[archive]}: {size:,} bytes")
        try:
            data = self._pread(archive, size, offset)
        except OSError as error:
            raise bad_sample(error, os.fsencode(self.archives[archive])) from None
        if len(data) < size:
            raise Error(f"{self.archives[archive]}: shorter than when it was indexed; put it back and rerun")
        return data

    def read_ahead(self, i: int) -> None:
        """Of an archive that a first sample was read from."""
        fd = self._fds.get(int(self.archive[i]))
        if fd is not None and self.offset[i] >= 0:
            ask_ahead(fd, int(self.offset[i]), int(self.size[i]))

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): the sample's size and its archive's modification time in ns."""
        used, place = np.unique(self.archive[indices], return_inverse=True)
        times = file_stamps([self.archives[i] for i in used.tolist()])[place, 1]
        return np.stack([np.where(times == -1, -1, self.size[indices]), times], axis=1)


@dataclass
class ArchivePart:
    """A split made of files in archives; the table's names are the keys."""

    archives: list[str]
    table: Table
    column: LabelColumn = field(default_factory=LabelColumn)

    def where(self, i: int) -> str:
        return f"{self.archives[self.table.archive[i]]}: {as_text(self.table.names[i])}"

    def source(self, labels: np.ndarray) -> ArchiveSource:
        table = self.table
        return ArchiveSource(table.names, labels, self.archives, table.archive, table.offset, table.size)
