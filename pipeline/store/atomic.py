"""Writing files so that a reader, or a crash, never sees half of one: temp name, fsync, rename.

Chunks, JSON files and checkpoints all go through here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
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
        OSError: as the file system says (no space, read-only, ...); `path` is then as it was.
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
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    fsync_dir(path.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes, check: Callable[[], None] | None = None) -> None:
    """Write the bytes atomically and durably; `check` as in `atomic_file`."""
    with atomic_file(path, check=check) as file:
        file.write(data)


def write_json(
    path: str | os.PathLike[str], value: Any, *, indent: int | None = 2, check: Callable[[], None] | None = None
) -> None:
    """Write the value as JSON with a final newline, atomically and durably; `check` as in `atomic_file`."""
    write_bytes(path, (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode(), check)


def remove_temps(folder: str | os.PathLike[str]) -> int:
    """Delete temp files that a killed run left in the folder; returns how many."""
    count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if TEMP_MARK in entry.name and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
                count += 1
    return count
