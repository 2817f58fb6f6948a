"""What workers are handed: any source, by value where it must be, its large arrays as maps of one file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.conversion import worker
from pipeline.conversion.worker import load_inputs, save_inputs
from pipeline.errors import UsageError
from pipeline.image.decode import DecodeOptions
from pipeline.store.geometry import Geometry


def through_file(path: Path, source: Any, order: np.ndarray) -> tuple[Any, np.ndarray]:
    load_inputs.cache_clear()
    save_inputs(path, source, order, "run")
    return load_inputs(str(path))


def test_large_arrays_are_read_only_maps(tmp_path: Path) -> None:
    large = np.random.default_rng(0).integers(0, 2**60, (300, 400))
    source = {"large": large, "fortran": np.asfortranarray(large), "small": np.arange(3), "empty": np.empty((0, 2))}
    loaded, order = through_file(tmp_path / "a", source, np.arange(20_000))
    for name, array in source.items():
        assert np.array_equal(loaded[name], array)
    assert np.array_equal(order, np.arange(20_000))
    for array in (loaded["large"], loaded["fortran"], order):
        assert not array.flags.writeable
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / "a") in line]
    assert len(mapped) == 3
    load_inputs.cache_clear()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_many_arrays_take_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MIN_MAPPED_BYTES", 8)
    before = len(os.listdir("/proc/self/fd"))
    arrays = [np.full(10, i) for i in range(200)]
    loaded, _ = through_file(tmp_path / "a", arrays, np.arange(20))
    assert all(np.array_equal(one, other) for one, other in zip(arrays, loaded, strict=True))
    assert len(os.listdir("/proc/self/fd")) - before <= worker.MAX_MAPPED_ARRAYS
    load_inputs.cache_clear()


def test_code_goes_by_value(tmp_path: Path) -> None:
    factor = 3
    loaded, _ = through_file(tmp_path / "a", lambda x: factor * x, np.arange(2))
    assert loaded(2) == 6


def test_what_cannot_be_sent_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be pickled") as caught:
        save_inputs(tmp_path / "a", [threading.Lock()], np.arange(2), "run")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Asked:
    """A source that notes what it is asked for."""

    def __init__(self) -> None:
        self.labels, self.asked = np.zeros(40, np.int32), list[tuple[str, int]]()

    def __len__(self) -> int:
        return 40

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        return np.frombuffer(b"".join(map(self.key, range(40))), np.uint8), np.arange(41) * 2

    def key(self, i: int) -> bytes:
        return b"%02d" % i

    def read(self, i: int) -> np.ndarray:
        self.asked.append(("read", i))
        return np.full((4, 4, 3), i, np.uint8)

    def read_ahead(self, i: int) -> None:
        self.asked.append(("ahead", i))

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros((len(indices), 2), np.int64)


def test_samples_are_asked_for_ahead_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, order = Asked(), np.random.default_rng(0).permutation(40)
    monkeypatch.setattr(worker, "load_inputs", lambda path: (source, order))
    (tmp_path / "split" / "images").mkdir(parents=True)
    (tmp_path / "receipts").mkdir()
    task = worker.ChunkTask(
        "run", (), "", (str(tmp_path),), (Geometry(size=4),), DecodeOptions(), 40, worker.software_versions(), None
    )
    worker.convert_chunk(task, 0)
    assert [i for what, i in source.asked if what == "ahead"] == order.tolist()
    for place, i in enumerate(order.tolist()):
        before = source.asked[: source.asked.index(("read", i))]
        assert len([what for what, _ in before if what == "ahead"]) == min(40, place + 1 + worker.READ_AHEAD)
