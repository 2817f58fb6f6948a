"""Writing files so that a reader, or a crash, never sees half of one: temp name, fsync, rename.

Chunks, JSON files and checkpoints all go through here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

TEMP_MARK = ".tmp-"


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make renames inside the folder durable. Does nothing where folders can't be opened (Windows)."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_file(
    path: str | os.PathLike[str], *, temp_id: str | None = None, check: Callable[[], None] | None = None
) -> Iterator[BinaryIO]:
    """Open a temp file beside `path` for writing; on success fsync it and rename it to `path`, else remove it.

    Args:
        path: the final name.
        temp_id: part of the temp name, such as the run's id; random by default.
        check: called right before the rename; what it raises leaves `path` as it was.

    Raises:
        OSError: as the file system says (no space, read-only, ...), with the file's name; `path` is then as it was.
    """
    path = Path(path)
    temp = path.with_name(f"{path.name}{TEMP_MARK}{temp_id or secrets.token_hex(6)}")
    try:
        with open(temp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check()
        os.replace(temp, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        if isinstance(error, OSError) and error.errno and not error.filename:  # of a write or fsync
            error.filename = os.fspath(path)
        raise
    fsync_dir(path.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes, **options: Any) -> None:
    """Write the bytes atomically and durably; the options are those of `atomic_file`."""
    with atomic_file(path, **options) as file:
        file.write(data)


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2, **options: Any) -> None:
    """Write the value as JSON with a final newline, atomically and durably; the options are those of `atomic_file`."""
    write_bytes(path, (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode(), **options)


def remove_temps(folder: str | os.PathLike[str], keep: Container[str] = ()) -> list[str]:
    """Delete temp files that killed runs left in the folder, but not those whose id is in `keep`; returns the names."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            _, mark, temp_id = entry.name.rpartition(TEMP_MARK)
            if mark and temp_id not in keep and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
                names.append(entry.name)
    return names
