"""Copying a batch's crops out of the memory maps: the one thing the CPU does per image.

`copy_crops` hands a whole batch to a small compiled loop that runs without the GIL. Three things make it fast (measured
on a 2-core EPYC, crop 224 of 256 px, relative to the same loop in 8-byte words):

* 32-byte vectors, 1.35 times;
* stores that go past the cache to memory ("non-temporal"): a batch is larger than the cache and its reader is a device
  or another core, so fetching each destination line first is wasted, 1.25 times more;
* asking for the source four rows ahead, because the processor's own prefetcher stops at every 4 kB page, 1.1 times.

Rows are copied one by one even where an image is contiguous: a single large memcpy falls into `rep movsb`, which is
three times slower on some processors. The loop is LLVM assembly and compiled in 10 ms at the first use, through
llvmlite alone: numba would take a second to load for the same loop. Where it can't be compiled numpy copies.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pipeline.maps import MADV_WILLNEED, MADVISE_ADDRESS, ChunkMaps

ALIGN = 64
"""Alignment in bytes of a batch's memory, for the vector stores; a cache line."""

_VECTOR = 32
_AHEAD = 3072

# gather: source addresses (i64 x n), n, destination, rows per image, bytes per row, bytes between rows of the source.
# The destination is one run of n * rows * row_bytes bytes. %head is row_bytes rounded down to whole vectors.
_GATHER = """
define void @gather_{name}(ptr %sources, i64 %n, ptr %destination, i64 %rows, i64 %row_bytes, i64 %stride) {{
entry:
  %head = and i64 %row_bytes, -{vector}
  br label %image
image:
  %i = phi i64 [0, %entry], [%i.next, %image.end]
  %image.to = phi ptr [%destination, %entry], [%to.next, %image.end]
  %slot = getelementptr i64, ptr %sources, i64 %i
  %image.from = load ptr, ptr %slot
  br label %row
row:
  %r = phi i64 [0, %image], [%r.next, %row.end]
  %from = phi ptr [%image.from, %image], [%from.next, %row.end]
  %to = phi ptr [%image.to, %image], [%to.next, %row.end]
  %any = icmp ne i64 %head, 0
  br i1 %any, label %vector, label %tail
vector:
  %k = phi i64 [0, %row], [%k.next, %vector]
  %s = getelementptr i8, ptr %from, i64 %k
  %d = getelementptr i8, ptr %to, i64 %k
  %ahead = getelementptr i8, ptr %s, i64 {ahead}
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  %v = load <4 x i64>, ptr %s, align 1
  store <4 x i64> %v, ptr %d, {store}
  %k.next = add i64 %k, {vector}
  %vectors.left = icmp ult i64 %k.next, %head
  br i1 %vectors.left, label %vector, label %tail
tail:
  %t = phi i64 [0, %row], [%k.next, %vector], [%t.next, %byte]
  %bytes.left = icmp ult i64 %t, %row_bytes
  br i1 %bytes.left, label %byte, label %row.end
byte:
  %s1 = getelementptr i8, ptr %from, i64 %t
  %d1 = getelementptr i8, ptr %to, i64 %t
  %b = load i8, ptr %s1
  store i8 %b, ptr %d1
  %t.next = add i64 %t, 1
  br label %tail
row.end:
  %from.next = getelementptr i8, ptr %from, i64 %stride
  %to.next = getelementptr i8, ptr %to, i64 %row_bytes
  %r.next = add i64 %r, 1
  %rows.left = icmp ult i64 %r.next, %rows
  br i1 %rows.left, label %row, label %image.end
image.end:
  %i.next = add i64 %i, 1
  %images.left = icmp ult i64 %i.next, %n
  br i1 %images.left, label %image, label %exit
exit:
  fence seq_cst
  ret void
}}
"""

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

    gather_stream: Callable[..., None]
    gather_plain: Callable[..., None]
    advise: Callable[..., None]
    engine: Any


@lru_cache(maxsize=1)
def compiled() -> Compiled | None:
    """Compile at the first use in a process; None where llvmlite is missing or refuses the platform."""
    try:
        import llvmlite.binding as llvm  # type: ignore[import-untyped]

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        stream, plain = (
            _GATHER.format(name=name, vector=_VECTOR, ahead=_AHEAD, store=store)
            for name, store in (("stream", f"align {_VECTOR}, !nontemporal !0"), ("plain", "align 1"))
        )
        declarations = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n!0 = !{i32 1}\n"
        module = llvm.parse_assembly(declarations + stream + plain + _ADVISE)
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except (ImportError, OSError, RuntimeError) as error:
        logging.getLogger(__name__).warning("no compiled copy (%s): numpy copies, about half as fast", error)
        return None
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    gather = ctypes.CFUNCTYPE(None, pointer, word, pointer, word, word, word)
    advise = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, word, ctypes.c_int)
    return Compiled(
        gather(engine.get_function_address("gather_stream")),
        gather(engine.get_function_address("gather_plain")),
        advise(engine.get_function_address("advise")),
        engine,
    )


def aligned_empty(count: int) -> np.ndarray:
    """uint8 (count,) of uninitialised memory that begins on a cache line (in huge pages where numpy asks for them)."""
    memory = np.empty(count + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + count]


def copy_crops(maps: ChunkMaps, positions: np.ndarray, out: np.ndarray, row_stride: int) -> None:
    """Copy one crop per image into a batch.

    Args:
        maps: the split's maps.
        positions: int64 (n,), the byte where each crop begins, counted through all chunks end to end.
        out: uint8 (n, rows, columns, channels), C-contiguous and writable.
        row_stride: bytes from one row of a stored image to the next.
    """
    code = compiled()
    if code is None:
        return copy_crops_numpy(maps, positions, out, row_stride)
    count, rows, columns, channels = out.shape
    row_bytes = columns * channels
    assert out.flags.c_contiguous
    assert out.flags.writeable
    assert out.dtype == np.uint8
    assert len(positions) == count
    if count == 0:
        return None
    chunk, start = np.divmod(positions, maps.chunk_bytes)
    extent = (rows - 1) * row_stride + row_bytes
    assert chunk.min() >= 0
    assert chunk.max() < len(maps)
    assert start.max() + extent <= maps.chunk_bytes
    sources = np.ascontiguousarray(maps.addresses[chunk] + start)
    destination = out.ctypes.data
    whole_vectors = row_bytes % _VECTOR == 0 and destination % _VECTOR == 0
    gather = code.gather_stream if whole_vectors else code.gather_plain
    gather(sources.ctypes.data, count, destination, rows, row_bytes, row_stride)
    return None


def copy_crops_numpy(maps: ChunkMaps, positions: np.ndarray, out: np.ndarray, row_stride: int) -> None:
    """The same as `copy_crops`, in numpy: the reference for tests, and the Dataset's way, which needs no compiler."""
    count, rows, columns, channels = out.shape
    row_bytes = columns * channels
    assert out.flags.c_contiguous
    out_rows = out.reshape(count, rows, row_bytes)
    half = row_bytes // 2  # two halves of each row: numpy would join whole rows into one memcpy, see above
    for i, position in enumerate(positions.tolist()):
        chunk, start = divmod(position, maps.chunk_bytes)
        row, column = divmod(start, row_stride)
        image = maps.chunk(chunk).reshape(-1, row_stride)[row : row + rows, column : column + row_bytes]
        if row_bytes == row_stride:
            np.copyto(out_rows[i, :, :half], image[:, :half])
            np.copyto(out_rows[i, :, half:], image[:, half:])
        else:
            np.copyto(out_rows[i], image)


def will_need(maps: ChunkMaps, positions: np.ndarray, extent: int, gap: int = 0) -> None:
    """`maps.will_need` without the GIL: hundreds of system calls that must not wait for it one by one."""
    code = compiled()
    if code is None or MADVISE_ADDRESS is None:
        return maps.will_need(positions, extent, gap)
    starts, lengths = maps.page_ranges(positions, extent, gap)
    if len(starts):
        code.advise(MADVISE_ADDRESS, starts.ctypes.data, lengths.ctypes.data, len(starts), MADV_WILLNEED)
    return None
