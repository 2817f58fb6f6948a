"""One chunk file being written: blocks of images, a running digest, running sums.

Whole pages go to the disk past the page cache where the file system allows that (O_DIRECT): filling the cache with
pages that nobody reads again costs more CPU time than the digest does, and would push out the images that are still
to be read. One block is on its way to the disk while the next one is filled.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np

from pipeline.image.statistics import channel_sums
from pipeline.store.format import chunk_index
from pipeline.store.geometry import Geometry

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BLOCK_BYTES = 2_000_000  # small enough to stay in a core's cache between resize, sums and digest
PAGE_BYTES = 4096  # a multiple of every disk's sector; O_DIRECT wants offset, length and address aligned to it


class ChunkWriter:
    """Takes a chunk's images one by one and writes them to an open file.

    Leave its `with` block before the file is closed: until then a block may be on its way.

    Args:
        file: open for writing, at its start, with nothing written through its buffer.
        geometry: of the images.
        chunk_images: slots per chunk, K.

    Attributes:
        sums, squares: int64 (C,), over the images placed so far (padding left out).
        sha256: of all images written, in hexadecimal; the index is no part of it.
    """

    def __init__(self, file: BinaryIO, geometry: Geometry, chunk_images: int) -> None:
        # Blocks of whole pages, so that only a chunk's end goes through the page cache.
        unit = PAGE_BYTES // math.gcd(geometry.image_bytes, PAGE_BYTES)
        block_images = max(1, min(chunk_images, BLOCK_BYTES // geometry.image_bytes) // unit * unit)
        self._blocks = [self._new_block(block_images, geometry) for _ in range(2)]
        self._used = 0
        self._fd = file.fileno()
        self._offset = 0
        self._direct = False  # the file's flag as it is now
        self._may_direct = fcntl is not None and hasattr(os, "O_DIRECT")
        self._writer = ThreadPoolExecutor(1, "chunk-writer")
        self._pending: Future[None] | None = None
        self._digest = hashlib.sha256()
        self._index = chunk_index(chunk_images, geometry.image_bytes)
        self.sums = np.zeros(geometry.num_channels, np.int64)
        self.squares = np.zeros(geometry.num_channels, np.int64)

    @staticmethod
    def _new_block(block_images: int, geometry: Geometry) -> np.ndarray:
        """Zeros, uint8 (block_images, S, S, C), that begin at a page's start."""
        pages = mmap.mmap(-1, block_images * geometry.image_bytes)
        return np.frombuffer(pages, np.uint8).reshape(block_images, *geometry.image_shape)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def next_slot(self) -> np.ndarray:
        """uint8 (S, S, C): where the next image goes."""
        slot: np.ndarray = self._blocks[0][self._used]
        return slot

    def mark_filled(self) -> None:
        """The image in the next slot is complete."""
        self._used += 1
        if self._used == len(self._blocks[0]):
            self._flush()

    def finish(self, num_padding: int) -> None:
        """Write what is left, `num_padding` zero images and the index, and wait until the file has everything."""
        if self._used:
            self._flush()
        while num_padding > 0:
            count = min(num_padding, len(self._blocks[0]))
            self._blocks[0][:count] = 0
            self._write(self._blocks[0][:count])
            num_padding -= count
        self._wait()
        self._write_all(self._index)

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._writer.shutdown(wait=True)

    def _flush(self) -> None:
        images = self._blocks[0][: self._used]
        self._used = 0
        sums, squares = channel_sums(images)
        self.sums += sums
        self.squares += squares
        self._write(images)

    def _write(self, images: np.ndarray) -> None:
        """Begin to write the images, once those before are written; the next ones go into the other block."""
        self._digest.update(images)
        self._wait()
        self._pending = self._writer.submit(self._write_all, images)
        self._blocks.reverse()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_all(self, images: np.ndarray | bytes) -> None:
        data = memoryview(images).cast("B")
        while data:
            self._set_direct(self._offset % PAGE_BYTES == 0 and len(data) % PAGE_BYTES == 0)
            try:
                written = os.write(self._fd, data)
            except OSError as error:
                if not (self._direct and error.errno == errno.EINVAL):
                    raise
                self._may_direct = False  # the file system takes the flag, but refuses such writes
                continue
            self._offset += written
            data = data[written:]

    def _set_direct(self, wanted: bool) -> None:
        wanted = wanted and self._may_direct
        if wanted == self._direct:
            return
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags)
            self._direct = wanted
        except OSError:
            self._may_direct = False
