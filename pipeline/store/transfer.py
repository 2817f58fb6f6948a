"""Bringing stores from and to other places: many files at once, and what networks and disks say, in one line."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from pipeline.errors import Error
from pipeline.text import one_line

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def failures(where: Path, then: str) -> Iterator[None]:
    """Raise what the network or the disk says as an Error: what, where, and `then` as what to do.

    Args:
        where: named where the failure names no file.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        what, why = str(getattr(error, "filename", None) or where), getattr(error, "strerror", None) or one_line(error)
        if isinstance(error, FileNotFoundError):
            why, then = "not found", "check the address, and that its bucket exists" if "://" in what else then
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            then = f"make room; {then}"
        raise Error(f"{what}: {why}; {then}") from error


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Results of `work` on each item, begun in this order, as they are done.

    After an error, or when the caller breaks off, no more is begun, and what runs is waited for.
    """
    with ThreadPoolExecutor(max(1, min(threads, len(items)))) as pool:
        try:
            for done in as_completed([pool.submit(work, item) for item in items]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
