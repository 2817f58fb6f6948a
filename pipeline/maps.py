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
from collections.abc import Sequence

import numpy as np

from pipeline.errors import StoreError

PAGE_BYTES = mmap.PAGESIZE
MADV_WILLNEED = getattr(mmap, "MADV_WILLNEED", 3)
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


def _unmap(addresses: Sequence[int], length: int) -> None:
    assert LIBC is not None
    for address in addresses:
        LIBC.munmap(address, length)


class ChunkMaps:
    """Maps of `paths`, each exactly `chunk_bytes` long, all made at once.

    Attributes:
        addresses: int64 (chunks,), the address of each map's first byte, for compiled readers.
        chunk_bytes: length of each map in bytes.

    The maps live as long as this object and every array that `chunk` gave out. Address space is not memory: pages
    belong to the page cache, which the kernel takes back whenever it is needed elsewhere.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._arrays: list[np.ndarray] = []
        if LIBC is None:
            self._arrays = [np.memmap(path, np.uint8, "r", shape=(chunk_bytes,)) for path in paths]
            self.addresses = np.array([array.ctypes.data for array in self._arrays], np.int64)
            return
        addresses: list[int] = []
        try:
            for path in paths:
                addresses.append(self._map(path))
        except BaseException:
            _unmap(addresses, chunk_bytes)
            raise
        self.addresses = np.array(addresses, np.int64)
        self._finalizer = weakref.finalize(self, _unmap, addresses, chunk_bytes)
        self._finalizer.atexit = False  # the process's end unmaps; arrays may still be read by other threads until then

    def _map(self, path: str | os.PathLike[str]) -> int:
        assert LIBC is not None
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            if os.fstat(fd).st_size < self.chunk_bytes:
                raise StoreError(f"{path}: shorter than {self.chunk_bytes:,} bytes; restore the file or convert again")
            address = LIBC.mmap(None, self.chunk_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise StoreError(f"{path}: can't be mapped ({os.strerror(code)}); check `ulimit -v` and vm.max_map_count")
        return int(address)

    def __len__(self) -> int:
        return len(self.addresses)

    def chunk(self, chunk: int) -> np.ndarray:
        """uint8 (chunk_bytes,): a read-only view of one chunk."""
        if self._arrays:
            return self._arrays[chunk]
        buffer = (ctypes.c_uint8 * self.chunk_bytes).from_address(int(self.addresses[chunk]))
        buffer._maps = self  # the view keeps the maps alive
        return np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)  # can't be made writable again
