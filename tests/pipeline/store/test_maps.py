"""Maps without descriptors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import StoreError
from pipeline.store import maps as maps_module
from pipeline.store.maps import PAGE_BYTES, ChunkMaps, page_ranges, will_need


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three files of 10,000 bytes: all 0, all 1, all 2."""
    made = [tmp_path / f"c.{i}.0.0.0" for i in range(3)]
    for i, path in enumerate(made):
        path.write_bytes(bytes([i]) * 10_000)
    return made


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_chunks_are_read_only_views(paths):
    maps = ChunkMaps(paths, 10_000)
    assert len(maps) == 3
    for i in range(3):
        view = maps.chunk(i)
        assert view.dtype == np.uint8
        assert view.shape == (10_000,)
        assert (view == i).all()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 9
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_no_descriptor_is_kept(paths):
    before = descriptors()
    maps = ChunkMaps(paths * 50, 10_000)
    assert descriptors() == before
    assert len(maps) == 150


def test_maps_outlive_their_files(paths):
    maps = ChunkMaps(paths, 10_000)
    for path in paths:
        path.unlink()
        path.write_bytes(bytes([9]) * 10_000)
    assert [int(maps.chunk(i)[-1]) for i in range(3)] == [0, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_views_keep_the_maps_and_their_end_undoes_them(paths):
    maps = ChunkMaps(paths, 10_000)
    view = maps.chunk(1)[5_000:]
    del maps
    gc.collect()
    assert mapped(paths[1])
    assert (view == 1).all()
    del view
    gc.collect()
    assert not mapped(paths[1])


def test_a_missing_file_is_one_line_and_leaves_nothing_mapped(paths):
    paths[2].unlink()
    with pytest.raises(StoreError, match=r"c\.2\.0\.0\.0: can't be opened \(No such file"):
        ChunkMaps(paths, 10_000)
    gc.collect()
    if sys.platform == "linux":
        assert not mapped(paths[0])


def test_a_short_file_is_never_mapped(paths):
    paths[1].write_bytes(b"x" * 9_999)
    with pytest.raises(StoreError, match=r"c\.1\.0\.0\.0: shorter than 10,000 bytes"):
        ChunkMaps(paths, 10_000)


def test_a_refusal_by_the_system_is_one_line(paths, monkeypatch):
    class Full:
        @staticmethod
        def mmap(*args: object) -> int:
            maps_module.ctypes.set_errno(12)
            return -1 & (2**64 - 1)

        @staticmethod
        def munmap(*args: object) -> None:
            pass

    monkeypatch.setattr(maps_module, "LIBC", Full)
    with pytest.raises(StoreError, match=r"can't be mapped \(Cannot allocate memory\); check `ulimit -v`"):
        ChunkMaps(paths, 10_000)


def test_numpy_maps_where_there_is_no_libc(paths, monkeypatch):
    monkeypatch.setattr(maps_module, "LIBC", None)
    maps = ChunkMaps(paths, 10_000)
    assert [int(maps.chunk(i)[7]) for i in range(3)] == [0, 1, 2]
    assert not maps.chunk(0).flags.writeable
    will_need(maps.addresses, 100)
    assert [maps.chunk(i).ctypes.data for i in range(3)] == maps.addresses.tolist()


def _read_in_child(maps: ChunkMaps, queue: multiprocessing.Queue) -> None:
    queue.put([int(maps.chunk(i)[3]) for i in range(3)])


def test_a_fork_inherits_the_maps(paths):
    maps = ChunkMaps(paths, 10_000)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(maps, queue))
    child.start()
    assert queue.get(timeout=60) == [0, 1, 2]
    child.join()
    assert (maps.chunk(2) == 2).all()  # the child's end unmapped nothing here


def test_positions_become_addresses(paths):
    maps = ChunkMaps(paths, 10_000)
    addresses = maps.locate(np.array([0, 9_990, 10_000, 29_989]), 10)
    assert addresses.tolist() == [
        maps.addresses[0],
        maps.addresses[0] + 9_990,
        maps.addresses[1],
        maps.addresses[2] + 9_989,
    ]
    assert len(maps.locate(np.empty(0, np.int64), 10)) == 0


@pytest.mark.parametrize("position", [-1, 9_991, 29_991, 30_000])
def test_positions_outside_a_chunk_are_refused(paths, position):
    with pytest.raises(IndexError, match="outside"):
        ChunkMaps(paths, 10_000).locate(np.array([5, position]), 10)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 200 * PAGE_BYTES), min_size=1, max_size=40),
    st.integers(1, 10 * PAGE_BYTES),
    st.integers(0, 20 * PAGE_BYTES),
)
def test_ranges_cover_what_is_asked_and_little_else(positions, extent, gap):
    addresses = np.array(positions, np.int64)
    starts, lengths = page_ranges(addresses, extent, gap)
    ends = starts + lengths
    assert (starts % PAGE_BYTES == 0).all()
    assert (starts[1:] > ends[:-1] + gap).all()  # ascending, disjoint, merged
    for address in positions:
        assert ((starts <= address) & (address + extent <= ends)).any()
    spare = PAGE_BYTES + gap
    covered = np.zeros(ends.max() + 1, bool)
    for address in positions:
        covered[max(0, address - spare) : address + extent + spare] = True
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        assert covered[start:end].all()


def test_asking_ahead_reads_the_same(paths):
    maps = ChunkMaps(paths, 10_000)
    will_need(maps.locate(np.array([0, 12_000]), 5_000), 5_000)
    assert (maps.chunk(1) == 1).all()
