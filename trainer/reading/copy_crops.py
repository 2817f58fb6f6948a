"""Copying a batch's crops out of the memory maps: the one thing the CPU does per image.

`copy_crops` hands a whole batch to a small compiled loop that runs without the GIL. What makes it fast (measured on a
2-core EPYC, crop 224 of 256 px; images/s of one thread):

* 32-byte vectors by rows                                                                            37,000
* stores that go past the cache to memory ("non-temporal"): a batch is larger than the cache and its
  reader is a device or another core, so fetching each destination line first is wasted              48,000
* four images at a time, a vector of each in turn: more reads from memory under way (eight: 14,000)  64,000
* each of the four a row further than the one before, because addresses that are equal modulo 4096
  get in each other's way, and whole 256 px images all are: for those 40,000 instead of             4,000

On a 2-core Xeon (Emerald Rapids), whose memory bandwidth other machines share, one to four images at a time, with and
without prefetching, are all within 15 % of each other (40,000 to 65,000); without non-temporal stores 42,000.

Rows are copied one by one even where an image is contiguous: a single large memcpy falls into `rep movsb`, which is
three times slower on some processors. The loop is LLVM assembly and compiled in 20 ms at the first use, through
llvmlite alone: numba would take a second to load for the same loop. Where it can't be compiled numpy copies.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pipeline.store import maps
from pipeline.store.maps import MADVISE_ADDRESS, ChunkMaps

ALIGN = 64
"""Alignment in bytes of a batch's memory, for the vector stores; a cache line."""

_LANES = 4
_STAGGER_BYTES = 512
_VECTORS = {32: "<4 x i64>", 16: "<2 x i64>", 8: "i64"}


# Arguments: source addresses (int64 x n), n > 0, destination, rows per image, bytes per row, bytes between rows of the
# source, and by how many rows each lane is ahead of the one before, 3 * stagger < rows. The destination is one run of
# n * rows * row_bytes bytes. A line with $ stands for one line per lane; the last group repeats the last image where n
# is no multiple.
_GATHER = """
define void @NAME(ptr %sources, i64 %n, ptr %destination, i64 %rows, i64 %row_bytes, i64 %stride,
                   i64 %stagger) {
entry:
  %image_bytes = mul i64 %rows, %row_bytes
  %last = sub i64 %n, 1
  %head = and i64 %row_bytes, -WIDTH
  br label %group
group:
  %i = phi i64 [0, %entry], [%i.next, %group.end]
  %ahead$ = add i64 %i, $
  %image$ = call i64 @llvm.umin.i64(i64 %ahead$, i64 %last)
  %place$ = getelementptr i64, ptr %sources, i64 %image$
  %image.from$ = load ptr, ptr %place$
  %offset$ = mul i64 %image$, %image_bytes
  %image.to$ = getelementptr i8, ptr %destination, i64 %offset$
  %lead$ = mul i64 %stagger, $
  br label %row
row:
  %r = phi i64 [0, %group], [%r.next, %row.end]
  %r.ahead$ = add i64 %r, %lead$
  %r.wrapped$ = sub i64 %r.ahead$, %rows
  %r.inside$ = icmp ult i64 %r.ahead$, %rows
  %r$ = select i1 %r.inside$, i64 %r.ahead$, i64 %r.wrapped$
  %skip.from$ = mul i64 %r$, %stride
  %skip.to$ = mul i64 %r$, %row_bytes
  %from$ = getelementptr i8, ptr %image.from$, i64 %skip.from$
  %to$ = getelementptr i8, ptr %image.to$, i64 %skip.to$
  %any = icmp ne i64 %head, 0
  br i1 %any, label %vector, label %tail
vector:
  %k = phi i64 [0, %row], [%k.next, %vector]
  %s$ = getelementptr i8, ptr %from$, i64 %k
  %d$ = getelementptr i8, ptr %to$, i64 %k
  %v$ = load VECTOR, ptr %s$, align 1
  store VECTOR %v$, ptr %d$, STORE
  %k.next = add i64 %k, WIDTH
  %vectors.left = icmp ult i64 %k.next, %head
  br i1 %vectors.left, label %vector, label %tail
tail:
  %t = phi i64 [0, %row], [%k.next, %vector], [%t.next, %byte]
  %bytes.left = icmp ult i64 %t, %row_bytes
  br i1 %bytes.left, label %byte, label %row.end
byte:
  %sb$ = getelementptr i8, ptr %from$, i64 %t
  %db$ = getelementptr i8, ptr %to$, i64 %t
  %b$ = load i8, ptr %sb$
  store i8 %b$, ptr %db$
  %t.next = add i64 %t, 1
  br label %tail
row.end:
  %r.next = add i64 %r, 1
  %rows.left = icmp ult i64 %r.next, %rows
  br i1 %rows.left, label %row, label %group.end
group.end:
  %i.next = add i64 %i, LANES
  %images.left = icmp ult i64 %i.next, %n
  br i1 %images.left, label %group, label %exit
exit:
  fence seq_cst
  ret void
}
"""


def _gather(name: str, width: int, store: str) -> str:
    """LLVM assembly of a copy loop in vectors of `width` bytes, whose stores have the attributes `store`."""
    lines = []
    for line in _GATHER.splitlines():
        lines += [line.replace("$", str(lane)) for lane in range(_LANES)] if "$" in line else [line]
    text = "\n".join(lines) + "\n"
    for mark, value in (
        ("NAME", name),
        ("WIDTH", width),
        ("VECTOR", _VECTORS[width]),
        ("LANES", _LANES),
        ("STORE", store),
    ):
        text = text.replace(mark, str(value))
    return text


_ADVISE = """
define void @advise(ptr %madvise, ptr %starts, ptr %lengths, i64 %n, i32 %advice) {
entry:
  br label %range
range:
  %i = phi i64 [0, %entry], [%i.next, %range]
  %ps = getelementptr i64, ptr %starts, i64 %i
  %pl = getelementptr i64, ptr %lengths, i64 %i
  %start = load ptr, ptr %ps
  %length = load i64, ptr %pl
  %ignored = call i32 %madvise(ptr %start, i64 %length, i32 %advice)
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %range, label %exit
exit:
  ret void
}
"""


class Compiled(NamedTuple):
    """The compiled functions, and the engine that owns their code."""

    gather: dict[int, Callable[..., None]]
    """By the alignment of all destination rows in bytes: 32, 16, 8 with non-temporal stores, 1 without."""
    advise: Callable[..., None]
    engine: Any


@lru_cache(maxsize=1)
def compiled() -> Compiled | None:
    """Compile at the first use in a process; None where llvmlite is missing or refuses the platform."""
    try:
        import llvmlite.binding as llvm  # type: ignore[import-untyped]

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        loops = [_gather(f"gather{align}", align, f"align {align}, !nontemporal !0") for align in _VECTORS]
        module = llvm.parse_assembly(
            "declare i64 @llvm.umin.i64(i64, i64)\n!0 = !{i32 1}\n"
            + "".join(loops)
            + _gather("gather1", 32, "align 1")
            + _ADVISE
        )
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except (ImportError, OSError, RuntimeError) as error:
        logging.getLogger(__name__).warning("no compiled copy (%s): numpy copies, less than half as fast", error)
        return None
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    gather = ctypes.CFUNCTYPE(None, pointer, word, pointer, word, word, word, word)
    advise = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, word, ctypes.c_int)
    return Compiled(
        {align: gather(engine.get_function_address(f"gather{align}")) for align in (*_VECTORS, 1)},
        advise(engine.get_function_address("advise")),
        engine,
    )


def aligned_empty(count: int) -> np.ndarray:
    """uint8 (count,) of uninitialised memory that begins on a cache line (in huge pages where numpy asks for them)."""
    memory = np.empty(count + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + count]


def copy_crops(addresses: np.ndarray, out: np.ndarray, row_stride: int) -> None:
    """Copy one crop per image into a batch, by `compiled()`, which must not be None.

    Args:
        addresses: int64 (n,), C-contiguous, where each crop begins (see `ChunkMaps.locate`, which checks them).
        out: uint8 (n, rows, columns, channels), C-contiguous and writable.
        row_stride: bytes from one row of a stored image to the next.
    """
    code = compiled()
    assert code is not None
    count, rows, columns, channels = out.shape
    assert out.flags.c_contiguous
    assert out.flags.writeable
    assert addresses.flags.c_contiguous
    assert len(addresses) == count
    if count == 0:
        return
    destination, row_bytes = out.ctypes.data, columns * channels
    align = next((width for width in _VECTORS if (destination | row_bytes) % width == 0), 1)
    stagger = min(-(-_STAGGER_BYTES // row_bytes), (rows - 1) // (_LANES - 1))
    code.gather[align](addresses.ctypes.data, count, destination, rows, row_bytes, row_stride, stagger)


def copy_crops_numpy(chunks: ChunkMaps, positions: np.ndarray, out: np.ndarray, row_stride: int) -> None:
    """The same as `copy_crops`, in numpy: the reference for tests, and the Dataset's way, which needs no compiler.

    Args:
        positions: int64 (n,), the byte where each crop begins, counted through all chunks end to end.
    """
    count, rows, columns, channels = out.shape
    row_bytes = columns * channels
    assert out.flags.c_contiguous
    out_rows = out.reshape(count, rows, row_bytes)
    half = row_bytes // 2  # two halves of each row: numpy would join whole rows into one memcpy, see above
    for i, position in enumerate(positions.tolist()):
        chunk, start = divmod(position, chunks.chunk_bytes)
        row, column = divmod(start, row_stride)
        image = chunks.chunk(chunk).reshape(-1, row_stride)[row : row + rows, column : column + row_bytes]
        if row_bytes == row_stride:
            np.copyto(out_rows[i, :, :half], image[:, :half])
            np.copyto(out_rows[i, :, half:], image[:, half:])
        else:
            np.copyto(out_rows[i], image)


def will_need(addresses: np.ndarray, extent: int, gap: int = 0) -> None:
    """`pipeline.store.maps.will_need` without the GIL: hundreds of system calls."""
    code = compiled()
    if code is None or MADVISE_ADDRESS is None:
        return maps.will_need(addresses, extent, gap)
    starts, lengths = maps.page_ranges(addresses, extent, gap)
    if len(starts):
        code.advise(MADVISE_ADDRESS, starts.ctypes.data, lengths.ctypes.data, len(starts), maps.MADV_WILLNEED)
    return None
