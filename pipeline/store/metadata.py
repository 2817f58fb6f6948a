"""Reading a store's `zarr.json` files without trusting them: whatever lies there, the answer is quick and one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import StoreError
from pipeline.text import one_line

METADATA_BYTES = 1 << 28
"""A larger `zarr.json` is refused: a million classes and a million bad samples need less."""
RESTORE = "restore it, or convert with --overwrite"


def damaged(file: Path, error: ValueError) -> NoReturn:
    """Raise a StoreError about that file."""
    raise StoreError(f"{file}: {one_line(error)}; {RESTORE}") from None


def regular_size(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        FileNotFoundError, NotADirectoryError: nothing is there.
        StoreError: something else is there, such as a device, whose bytes never end.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise StoreError(f"{path}: unreadable ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path}: not a regular file")
    return found.st_size


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON object in the file.

    Raises:
        FileNotFoundError, NotADirectoryError: nothing is there.
        StoreError: it can't be read, is too large, or holds something else.
    """
    size = regular_size(path)
    if size > METADATA_BYTES:
        raise StoreError(f"{path}: {size:,} bytes of metadata, more than the {METADATA_BYTES:,} that are read")
    try:
        value = json.loads(path.read_bytes(), parse_constant=_no_constant)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: unreadable metadata ({one_line(error)}); {RESTORE}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: not a Zarr v3 metadata object; {RESTORE}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
