"""Which files lie in archives, found by a scan of their headers or taken from an earlier run's work folder.

An index file saves time and nothing depends on it. It is read only where it is the user's own, in a folder that nobody
else may write to, belongs to the same archives with the same sizes and times, and holds what can be true of them.
Else the archives are scanned.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from pipeline.sources.archive import Table, TableBuilder
from pipeline.sources.byte_strings import ByteStrings
from pipeline.sources.files import file_stamps, open_regular
from pipeline.store.atomic import atomic_file

VERSION = 1
"""Of what a scan finds; others' files aren't read."""
Index = tuple[Table, list[tuple[int, bytes]]]


def index_archives(
    archives: Sequence[str],
    kept: KeptIndex | None,
    name: str = "archives",
    scan: Callable[[TableBuilder], None] | None = None,
) -> Index:
    """All files in the archives, and their folders as `TableBuilder` has them.

    `kept` is asked first for what an earlier run found under `name`. `scan` is what adds the archives, if they aren't
    just added one by one.
    """
    stamps = file_stamps(archives, change_times=True)
    key = json.dumps([VERSION, [os.path.abspath(path) for path in archives], stamps.tolist()]).encode()
    index = kept.load(name, key, stamps[:, 0]) if kept else None
    if index is None:
        builder = TableBuilder()
        for number, path in enumerate(() if scan else archives):
            builder.add_archive(path, number)
        if scan:
            scan(builder)
        index = builder.build(), builder.folders
        if kept:
            kept.keep(name, key, index)
    return index


class KeptIndex:
    """Indices that are kept in a work folder, which need not be there yet: a file `.index-NAME.npz` each.

    With `scan` the archives are scanned, whatever is kept.
    """

    def __init__(self, folder: Path, *, scan: bool = False) -> None:
        self.folder, self.scan = folder, scan
        self._new: dict[str, dict[str, np.ndarray]] = {}

    def _path(self, name: str) -> Path:
        return self.folder / f".index-{name}.npz"

    def keep(self, name: str, key: bytes, index: Index) -> None:
        """Remember an index for `save`."""
        table, folders = index
        arrays = {"key": np.frombuffer(key, np.uint8)}
        arrays |= {"archive": table.archive, "offset": table.offset, "size": table.size}
        arrays["folder_archive"] = np.array([archive for archive, _ in folders], np.int32)
        texts = {"names": table.names, "contents": table.contents, "folders": ByteStrings.pack(f for _, f in folders)}
        for text, strings in texts.items():
            arrays[text], arrays[f"{text}_offsets"] = strings.arrays
        self._new[name] = arrays

    def save(self, temp_id: str) -> None:
        """Write what was remembered. The folder must be held by a run, whose id goes into the temp names."""
        for name, arrays in self._new.items():
            with suppress(OSError), atomic_file(self._path(name), temp_id=temp_id) as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        self._new.clear()

    def load(self, name: str, key: bytes, archive_bytes: np.ndarray) -> Index | None:
        """What was kept under these names, or None; `archive_bytes`, int64 (archives,), bounds it."""
        if self.scan:
            return None
        try:
            with open(self._path(name), "rb", opener=_open_own) as file, np.load(file, allow_pickle=False) as arrays:
                if any(member.compress_type for member in arrays.zip.infolist()) or arrays["key"].tobytes() != key:
                    return None
                return _checked(arrays, archive_bytes)
        except Exception:  # whatever numpy, and zipfile below it, make of a damaged file
            return None


def _open_own(path: str, flags: int) -> int:
    """Open a file that this user wrote, and that nobody else could have put there."""
    fd = open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))
    folder = os.lstat(os.path.dirname(path))
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o022
    if os.name != "nt" and not (private and folder.st_uid == os.fstat(fd).st_uid == os.geteuid()):
        os.close(fd)
        raise OSError("not this user's own")
    return fd


def _checked(arrays: dict[str, np.ndarray], archive_bytes: np.ndarray) -> Index | None:
    """An index file's arrays as an index; None where it can't be one of such archives."""
    texts = []
    for text in ("names", "contents", "folders"):
        blob, offsets = arrays[text], arrays[f"{text}_offsets"]
        if blob.dtype != np.uint8 or offsets.dtype != np.int64 or blob.ndim != 1 or offsets.ndim != 1:
            return None
        if offsets[0] != 0 or offsets[-1] != len(blob) or (offsets[1:] < offsets[:-1]).any():
            return None
        texts.append(ByteStrings(blob, offsets))
    found, contents, folders = texts
    archive, offset, size, above = (arrays[name] for name in ("archive", "offset", "size", "folder_archive"))
    if (archive.dtype, above.dtype, offset.dtype, size.dtype) != (np.int32, np.int32, np.int64, np.int64):
        return None
    if not archive.shape == offset.shape == size.shape == (len(found),) == (len(contents),):
        return None
    if above.shape != (len(folders),) or any(((a < 0) | (a >= len(archive_bytes))).any() for a in (archive, above)):
        return None
    end = archive_bytes[archive]
    if (offset < -1).any() or ((size < 0) | (size > end - offset)).any():
        return None
    return Table(found, archive, offset, size, contents), list(zip(above.tolist(), folders, strict=True))
