"""Locks between processes that end with the process, however it ends."""

from __future__ import annotations

from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no flock: two runs in one place aren't noticed there
    fcntl = None  # type: ignore[assignment]


def flock(file: IO[str] | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file or descriptor until it is closed; False when another process holds it.

    Args:
        file: stays locked for as long as it is open; a process that is started meanwhile doesn't inherit it.
        shared: with others that lock it so, too.
        wait: until it is free.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
