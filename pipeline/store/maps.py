"""Read-only memory maps of equally long files that keep no file descriptor.

Python 3.11's `mmap` holds one descriptor per map, and a small cache of maps costs 40 % of the reading speed, so the
files are mapped through libc. Where there is no libc (Windows) numpy's memmap serves instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.errors import StoreError

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2**21
"""The kernel maps so much at once where a file is cached in pieces of it, and mapped at a multiple of it."""
MADV_WILLNEED = getattr(mmap, "MADV_WILLNEED", 3)
_MAP_FIXED = 0x10  # on Linux, macOS and BSD
_MAP_FAILED = ctypes.c_void_p(-1).value


def _load_libc() -> ctypes.CDLL | None:
    if sys.platform == "win32":
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return libc


LIBC = _load_libc()
MADVISE_ADDRESS: int | None = ctypes.cast(LIBC.madvise, ctypes.c_void_p).value if LIBC is not None else None
"""The libc function's address, for compiled callers; None where there is none."""


class _Mapping:
    """A range of addresses, mapped to nothing yet; given up when nobody refers to it any more."""

    def __init__(self, length: int, where: str) -> None:
        assert LIBC is not None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        address = LIBC.mmap(None, length, 0, flags, -1, 0)
        if address is None or address == _MAP_FAILED:
            why = os.strerror(ctypes.get_errno())
            raise StoreError(f"{where}: {length:,} bytes can't be mapped ({why}); check `ulimit -v`")
        self.address = int(address)
        finalizer = weakref.finalize(self, LIBC.munmap, address, length)
        finalizer.atexit = False  # the process's end unmaps; threads may still read until then


class ChunkMaps:
    """Maps of `paths`, each exactly `chunk_bytes` long, all made at once.

    Attributes:
        addresses: int64 (chunks,), the address of each map's first byte, for compiled readers.
        chunk_bytes: length of each map in bytes.

    The maps live as long as this object and every array that `chunk` gave out, also when the files are deleted or
    replaced meanwhile, and are inherited by a fork. Address space is not memory: pages belong to the page cache, which
    the kernel takes back whenever it is needed elsewhere.

    Raises:
        StoreError: a file that is missing, short or can't be mapped.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._views: dict[int, np.ndarray] = {}
        if LIBC is None:
            self._views = {i: np.memmap(path, np.uint8, "r", shape=(chunk_bytes,)) for i, path in enumerate(paths)}
            self.addresses = np.array([view.ctypes.data for view in self._views.values()], np.int64)
            return
        step = HUGE_BYTES if chunk_bytes >= HUGE_BYTES else PAGE_BYTES
        stride = -(-chunk_bytes // step) * step
        self._mapping = _Mapping(len(paths) * stride + step, f"{paths[0]} ..." if paths else "no files")
        first = -(-self._mapping.address // step) * step
        self.addresses = first + np.arange(len(paths)) * stride
        self._map_all(paths)

    def _map_all(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        for path, address in zip(paths, self.addresses.tolist(), strict=True):
            self._map(path, address)

    def arrive(self, positions: np.ndarray, stopped: Callable[[], bool]) -> None:
        """Wait for the files that hold `positions`, int64 (n,) bytes counted through all chunks; here all are there.

        Args:
            stopped: asked while waiting; True ends it with a UsageError.
        """

    def _map(self, path: str | os.PathLike[str], address: int) -> None:
        assert LIBC is not None
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise StoreError(f"{path}: can't be opened ({error.strerror}); restore it or convert again") from None
        try:
            if os.fstat(fd).st_size < self.chunk_bytes:
                raise StoreError(f"{path}: shorter than {self.chunk_bytes:,} bytes; restore the file or convert again")
            flags = mmap.MAP_SHARED | _MAP_FIXED
            mapped = LIBC.mmap(address, self.chunk_bytes, mmap.PROT_READ, flags, fd, 0)
        finally:
            os.close(fd)
        if mapped != address:
            code = ctypes.get_errno()
            raise StoreError(f"{path}: can't be mapped ({os.strerror(code)}); check `ulimit -v` and vm.max_map_count")

    def __len__(self) -> int:
        return len(self.addresses)

    def chunk(self, chunk: int) -> np.ndarray:
        """uint8 (chunk_bytes,): a read-only view of one chunk."""
        view = self._views.get(chunk)
        if view is None:
            buffer = (ctypes.c_uint8 * self.chunk_bytes).from_address(int(self.addresses[chunk]))
            buffer._mapping = self._mapping  # type: ignore[attr-defined]  # the view keeps the maps alive
            view = np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)  # can't be made writable again
            self._views[chunk] = view
        return view

    def locate(self, positions: np.ndarray, extent: int) -> np.ndarray:
        """int64 (n,): the addresses of `positions`, int64 (n,) bytes counted through all chunks end to end.

        Raises:
            IndexError: `extent` bytes from there aren't all in one chunk.
        """
        chunk, start = np.divmod(positions, self.chunk_bytes)
        if len(positions) and not (
            chunk.min() >= 0 and chunk.max() < len(self) and start.max() + extent <= self.chunk_bytes
        ):
            raise IndexError(f"{extent} bytes from {positions.min()}..{positions.max()} lie outside the chunks")
        return self.addresses[chunk] + start


def page_ranges(addresses: np.ndarray, extent: int, gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The memory that holds `extent` bytes from each address, from the beginnings of pages on.

    Args:
        addresses: int64 (n,).
        extent: bytes, the same for all.
        gap: ranges at most this many bytes apart become one.

    Returns:
        int64 (m,) addresses and int64 (m,) lengths, ascending and disjoint.
    """
    addresses = np.sort(addresses)
    first, end = addresses & -PAGE_BYTES, addresses + extent
    new = np.ones(len(addresses), bool)  # begins a range
    new[1:] = first[1:] > end[:-1] + gap
    starts = first[new]
    return starts, end[np.roll(new, -1)] - starts


def will_need(addresses: np.ndarray, extent: int, gap: int = 0) -> None:
    """Ask the kernel to read these bytes into the page cache, without waiting; does nothing where it can't.

    Args: as for `page_ranges`.
    """
    if LIBC is None:
        return
    for start, length in zip(*(a.tolist() for a in page_ranges(addresses, extent, gap)), strict=True):
        LIBC.madvise(start, length, MADV_WILLNEED)
