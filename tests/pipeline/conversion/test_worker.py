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
