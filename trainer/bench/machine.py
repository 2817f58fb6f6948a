"""The machine that a benchmark runs on: its name, its cores, its page cache."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """What the figures were measured on: processor, cores, memory in bytes, system, Python."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = lines[0] if lines else name
    return {
        "processor": name,
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def evict(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Empty the page cache of these files; pages that a process has mapped stay."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Call work(0) .. work(count - 1) in threads of their own and wait for all."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def on_cores(count: int, turn: int = 0) -> Iterator[None]:
    """Keep the block, and threads that it starts, on so many cores, where the system can do that.

    Args:
        turn: processes with different turns use different cores, while there are some.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    start = turn * count % len(before)
    os.sched_setaffinity(0, sorted(before, reverse=True)[start : start + count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bytes_read() -> int:
    """Bytes that this process has read from disk so far; -1 where the system doesn't say."""
    if sys.platform != "linux":
        return -1
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512
