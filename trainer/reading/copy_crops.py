"""Copying a batch's crops out of the memory maps: the one thing the CPU does per image.

`copy_crops` hands a whole batch to a compiled loop, `pipeline/compiled/copy.c`, that runs without the GIL. What makes
it fast (measured on a 2-core EPYC, crop 224 of 256 px; images/s of one thread):

* 32-byte vectors by rows                                                                            37,000
* stores that go past the cache to memory ("non-temporal"): a batch is larger than the cache and its
  reader is a device or another core, so fetching each destination line first is wasted              48,000
* four images at a time, a vector of each in turn: more reads from memory under way (eight: 14,000)  64,000
* each of the four a row further than the one before, because addresses that are equal modulo 4096
  get in each other's way, and whole 256 px images all are: for those 40,000 instead of             4,000

On a 2-core Xeon (Emerald Rapids), whose memory bandwidth other machines share, one to four images at a time, with and
without prefetching, are all within 15 % of each other (40,000 to 65,000); without non-temporal stores 42,000. There,
four loads before four stores are a tenth faster than one load and one store in turn.

Rows are copied one by one even where an image is contiguous: a single large memcpy falls into `rep movsb`, which is
three times slower on some processors. Where the library couldn't be built numpy copies.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import numpy as np

from pipeline.compiled.library import COPY, load
from pipeline.store import maps
from pipeline.store.maps import ChunkMaps

_LANES = 4
"""Images at a time, as in copy.c."""
_STAGGER_BYTES = 512


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled library, or None, after a warning, where it isn't installed."""
    library, why = load(COPY)
    if library is None:
        logging.getLogger(__name__).warning("no compiled copy (%s): numpy copies, less than half as fast", why)
    return library


def copy_crops(chunks: ChunkMaps, positions: np.ndarray, out: np.ndarray, row_stride: int) -> None:
    """Copy one crop per image into a batch.

    Args:
        positions: int64 (n,), the byte where each crop begins, counted through all chunks end to end.
        out: uint8 (n, rows, columns, channels), C-contiguous and writable.
        row_stride: bytes from one row of a stored image to the next.

    Raises:
        ValueError: arrays of another kind or shape, or rows longer than `row_stride`.
        IndexError: a crop that doesn't lie in one chunk.
    """
    count, rows, columns, channels = out.shape
    row_bytes = columns * channels
    if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out: must be uint8, C-contiguous and writable, not {out.dtype} with strides {out.strides}")
    if positions.dtype != np.int64 or positions.shape != (count,):
        raise ValueError(f"positions: must be int64 ({count},), not {positions.dtype} {positions.shape}")
    if row_bytes > row_stride:
        raise ValueError(f"rows of {row_bytes} bytes: longer than the {row_stride} of a stored row")
    if out.size == 0:
        return
    addresses = chunks.locate(positions, (rows - 1) * row_stride + row_bytes)
    library = compiled()
    if library is None:
        copy_crops_numpy(chunks, positions, out, row_stride)
        return
    stagger = min(-(-_STAGGER_BYTES // row_bytes), (rows - 1) // (_LANES - 1))
    library.copy_crops(addresses.ctypes.data, count, out.ctypes.data, rows, row_bytes, row_stride, stagger)


def copy_crops_numpy(chunks: ChunkMaps, positions: np.ndarray, out: np.ndarray, row_stride: int) -> None:
    """The same as `copy_crops` in numpy: where there is no compiled library, and the reference for tests."""
    count, rows, columns, channels = out.shape
    row_bytes = columns * channels
    out_rows = out.reshape(count, rows, row_bytes)
    half = row_bytes // 2  # two halves of each row: numpy would join whole rows into one memcpy, see above
    for i, position in enumerate(positions.tolist()):
        chunk, start = divmod(position, chunks.chunk_bytes)
        row, column = divmod(start, row_stride)
        image = chunks.chunk(chunk).reshape(-1, row_stride)[row : row + rows, column : column + row_bytes]
        np.copyto(out_rows[i, :, :half], image[:, :half])
        np.copyto(out_rows[i, :, half:], image[:, half:])


def will_need(addresses: np.ndarray, extent: int, gap: int = 0) -> None:
    """`pipeline.store.maps.will_need` without the GIL: hundreds of system calls."""
    library = compiled()
    if library is None:
        maps.will_need(addresses, extent, gap)
        return
    starts, lengths = maps.page_ranges(addresses, extent, gap)  # int64, as long as each other
    library.advise(starts.ctypes.data, lengths.ctypes.data, len(starts), maps.MADV_WILLNEED)
