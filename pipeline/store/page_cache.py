"""A store in the kernel's page cache: how much of it is there, in which pages, and reading it in.

Linux caches a file in pieces (folios) of 4 kB to 2 MB, as large as it was read in. What lies in 2 MB pieces is mapped
by one entry instead of 512: the first touch of an image costs next to nothing, and the processor's table of addresses
(TLB) reaches 512 times as far. Pieces stay as they are until they are evicted.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pipeline.store.format import images_in_chunk
from pipeline.store.maps import HUGE_BYTES, LIBC, PAGE_BYTES, ChunkMaps
from pipeline.store.reader import Split

MADV_HUGEPAGE = 14
THREADS = 4
"""Files read at once: a disk works on several requests."""
USABLE = 0.9
"""Share of the available memory that is filled."""
BLOCKS = 256
"""Blocks of 2 MB that are looked at, spread evenly over a split."""


def usable_bytes() -> float | None:
    """Memory that the page cache may take and leave enough to programs; None where the system doesn't say."""
    try:
        free = int(re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    except (OSError, IndexError):
        return None
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return USABLE * free


def read_chunk(split: Split, chunk: int) -> None:
    """Read a chunk file of a raw split into the page cache, in large pieces where the kernel can."""
    maps = ChunkMaps([split.chunk_path(chunk)], split.chunk_bytes)
    if LIBC is not None:
        LIBC.madvise(int(maps.addresses[0]), split.chunk_bytes, MADV_HUGEPAGE)
    maps.chunk(0)[::PAGE_BYTES].max()  # a virtual machine, too, gives some memory only when each page is touched


def read_chunks(split: Split, count: int, advance: Callable[[int], None]) -> None:
    """Read the first chunk files, several at a time; `advance` gets the number of images after each."""
    with ThreadPoolExecutor(THREADS) as pool:
        for chunk, _ in enumerate(pool.map(lambda chunk: read_chunk(split, chunk), range(count))):
            advance(images_in_chunk(chunk, split.chunk_images, split.num_samples))


def cached_shares(split: Split) -> tuple[float, float] | None:
    """How much of a raw split lies in the page cache, and how much is mapped by 2 MB pages, each from 0 to 1.

    Looks at some blocks of 2 MB, and reads nothing. None where the system can't tell, or the files are too small.
    """
    if LIBC is None or not hasattr(LIBC, "mincore") or split.chunk_bytes < HUGE_BYTES:
        return None
    maps = ChunkMaps([split.chunk_path(chunk) for chunk in range(split.num_chunks)], split.chunk_bytes)
    per_chunk = split.chunk_bytes // HUGE_BYTES
    chosen = np.unique(np.linspace(0, len(maps) * per_chunk - 1, BLOCKS).astype(np.int64))
    addresses = maps.addresses[chosen // per_chunk] + chosen % per_chunk * HUGE_BYTES
    pages = (ctypes.c_uint8 * (HUGE_BYTES // PAGE_BYTES))()
    cached = 0.0
    for address in addresses.tolist():
        if LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_BYTES), pages):
            return None
        share = float((np.frombuffer(pages, np.uint8) & 1).mean())
        cached += share
        if share == 1:
            ctypes.c_uint8.from_address(address).value  # noqa: B018 - the touch maps the block, by one page if it can
    return cached / len(addresses), _huge_bytes(maps) / (len(addresses) * HUGE_BYTES)


def _huge_bytes(maps: ChunkMaps) -> int:
    """Bytes of these maps that are mapped by 2 MB pages."""
    first, last = int(maps.addresses[0]), int(maps.addresses[-1])
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            if begin := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
                inside = first <= int(begin[1], 16) <= last
            elif inside and (size := re.match(r"(?:File|Shmem)PmdMapped: +(\d+) kB", line)):
                total += int(size[1]) * 1024
    return total
