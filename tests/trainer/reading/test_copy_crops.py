"""The compiled copy against the numpy one and plain slicing."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.compiled.install import compile_library
from pipeline.compiled.library import COPY, cpu_flags
from pipeline.store.maps import ChunkMaps, page_ranges
from trainer.reading import copy_crops as kernel
from trainer.reading.batch_pool import ALIGN, aligned_empty
from trainer.reading.copy_crops import compiled, copy_crops, copy_crops_numpy, will_need

GUARD = 0xA5


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, ChunkMaps]:
    """129,600 random bytes in three files, and their maps."""
    folder = tmp_path_factory.mktemp("chunks")
    data = np.random.default_rng(0).integers(0, 256, 129_600, np.uint8)
    paths = [folder / str(i) for i in range(3)]
    for path, part in zip(paths, data.reshape(3, -1), strict=True):
        path.write_bytes(part.tobytes())
    return data, ChunkMaps(paths, 43_200)


def test_it_compiles_here():
    assert compiled() is not None


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_both_copies_equal_slicing(stored, data):
    flat, maps = stored
    channels = data.draw(st.sampled_from([1, 3]))
    size = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 12, 16, 24, 25, 30, 32, 48, 60, 64, 75, 96]))
    image_bytes = size * size * channels
    per_chunk = 43_200 // image_bytes
    images = flat.reshape(3, -1)[:, : per_chunk * image_bytes].reshape(-1, size, size, channels)
    rows, columns = data.draw(st.integers(1, size)), data.draw(st.integers(1, size))
    count = data.draw(st.integers(0, 9))
    picks = np.array(data.draw(st.lists(st.integers(0, len(images) - 1), min_size=count, max_size=count)), np.int64)
    top = np.array(data.draw(st.lists(st.integers(0, size - rows), min_size=count, max_size=count)), np.int64)
    left = np.array(data.draw(st.lists(st.integers(0, size - columns), min_size=count, max_size=count)), np.int64)
    want = [images[i, t : t + rows, x : x + columns] for i, t, x in zip(picks, top, left, strict=True)]
    want = np.array(want, np.uint8).reshape(count, rows, columns, channels)

    start = picks // per_chunk * 43_200 + picks % per_chunk * image_bytes
    positions = start + (top * size + left) * channels
    shift = data.draw(st.sampled_from([0, 0, 1, 8, 16]))  # of the destination from a cache line
    for copy in ("compiled", "numpy"):
        memory = aligned_empty(want.size + 64 + shift)
        memory[:] = GUARD
        out = memory[shift : shift + want.size].reshape(want.shape)
        if copy == "compiled":
            copy_crops(maps, positions, out, size * channels)
        else:
            copy_crops_numpy(maps, positions, out, size * channels)
        assert np.array_equal(out, want)
        assert (memory[:shift] == GUARD).all()
        assert (memory[shift + want.size :] == GUARD).all()


@pytest.mark.parametrize("options", [[], ["-msse4"], ["-mavx2"]], ids=str)
def test_every_build_copies_the_same(stored, monkeypatch, tmp_path, options):
    if {"-msse4": "sse4_2", "-mavx2": "avx2"}.get("".join(options), "") not in cpu_flags() | {""}:
        pytest.skip("not on this processor")
    built = ctypes.CDLL(str(compile_library(COPY, options, tmp_path)))
    for name, (result, *arguments) in COPY.functions.items():
        function = getattr(built, name)
        function.restype, function.argtypes = result, arguments
    monkeypatch.setattr(kernel, "compiled", lambda: built)
    positions = np.array([0, 1, 43_200, 43_200 + 7, 86_400])
    for columns in (32, 16, 8, 7, 1):
        outs = [aligned_empty(5 * 9 * columns).reshape(5, 9, columns, 1) for _ in range(2)]
        copy_crops(stored[1], positions, outs[0], 96)
        copy_crops_numpy(stored[1], positions, outs[1], 96)
        assert np.array_equal(*outs)


def test_memory_is_aligned():
    for count in (1, 63, 1000, 10_000_000):
        memory = aligned_empty(count)
        assert memory.ctypes.data % ALIGN == 0
        assert len(memory) == count


def test_asking_ahead_changes_nothing(stored):
    flat, maps = stored
    addresses = maps.locate(np.array([0, 5_000, 43_199, 120_000]), 1)
    will_need(addresses, 1)
    will_need(addresses[:0], 1)
    assert np.array_equal(np.concatenate([maps.chunk(i) for i in range(3)]), flat)


def test_without_a_compiler_asking_goes_through_libc(stored, monkeypatch):
    calls = []

    class Libc:
        @staticmethod
        def madvise(start: int, length: int, advice: int) -> None:
            calls.append((start, length, advice))

    monkeypatch.setattr(kernel, "compiled", lambda: None)
    monkeypatch.setattr(kernel.maps, "LIBC", Libc)
    addresses = stored[1].locate(np.array([100, 60_000]), 300)
    will_need(addresses, 300)
    starts, lengths = page_ranges(addresses, 300)
    assert calls == [(*pair, 3) for pair in zip(starts.tolist(), lengths.tolist(), strict=True)]
    monkeypatch.setattr(kernel.maps, "LIBC", None)
    will_need(addresses, 300)  # does nothing
    assert len(calls) == len(starts)


def test_a_missing_library_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(kernel, "load", lambda library: (None, "isn't installed"))
    compiled.cache_clear()
    try:
        assert compiled() is None
        assert compiled() is None
        assert len(caplog.records) == 1
        assert "isn't installed" in caplog.records[0].message
    finally:
        compiled.cache_clear()


@pytest.mark.parametrize("copy", ["compiled", "numpy"])
@pytest.mark.parametrize(
    ("positions", "out", "row_stride", "error"),
    [
        (np.array([0, 0], np.int32), np.zeros((2, 4, 4, 3), np.uint8), 36, ValueError),
        (np.array([0, 0, 0]), np.zeros((2, 4, 4, 3), np.uint8), 36, ValueError),
        (np.array([[0, 0]]), np.zeros((2, 4, 4, 3), np.uint8), 36, ValueError),
        (np.array([0, 0]), np.zeros((2, 4, 4, 3), np.int8), 36, ValueError),
        (np.array([0, 0]), np.zeros((2, 4, 8, 3), np.uint8)[:, :, ::2], 36, ValueError),
        (np.array([0, 0]), np.broadcast_to(np.zeros((1, 4, 4, 3), np.uint8), (2, 4, 4, 3)), 36, ValueError),
        (np.array([0, 0]), np.zeros((2, 4, 4, 3), np.uint8), 11, ValueError),
        (np.array([0, 43_100]), np.zeros((2, 4, 4, 3), np.uint8), 36, IndexError),
        (np.array([0, 129_600]), np.zeros((2, 4, 4, 3), np.uint8), 36, IndexError),
        (np.array([0, -1]), np.zeros((2, 4, 4, 3), np.uint8), 36, IndexError),
    ],
)
def test_what_c_cant_check_is_checked(stored, monkeypatch, copy, positions, out, row_stride, error):
    if copy == "numpy":
        monkeypatch.setattr(kernel, "compiled", lambda: None)
    before = out.copy()
    with pytest.raises(error):
        copy_crops(stored[1], positions, out, row_stride)
    read_only = np.zeros((1, 4, 4, 3), np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        copy_crops(stored[1], np.array([0]), read_only, 36)
    assert np.array_equal(out, before)


def test_numpy_copies_whole_images_in_halves(tmp_path: Path):
    image = np.arange(48, dtype=np.uint8)
    (tmp_path / "c").write_bytes(image.tobytes())
    out = np.zeros((1, 4, 4, 3), np.uint8)
    copy_crops_numpy(ChunkMaps([tmp_path / "c"], 48), np.array([0]), out, 12)
    assert np.array_equal(out.ravel(), image)
