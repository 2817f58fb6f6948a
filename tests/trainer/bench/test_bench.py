"""`python -m pipeline bench`: that it measures, not what."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from stores import make_images, make_store

from pipeline.errors import UsageError
from trainer.bench import passes as measurement
from trainer.bench.command import bench, bench_text
from trainer.bench.machine import bytes_read, cores, describe, evict, on_cores, run_threads


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "PASS_SECONDS", 0.01)
    monkeypatch.setattr(measurement, "REPEATS", 1)


@pytest.mark.parametrize("label", [0, -2])
def test_every_figure_has_its_ceiling(tmp_path, label):
    images = make_images(70, 16)
    store = make_store(tmp_path / "s.zarr", {"train": (images, np.full(70, label))}, bad={"train": [0, 69]})
    result = json.loads(json.dumps(bench(store)))
    assert result["store"]["images_measured"] == result["store"]["batch_size"] == 68
    kinds = {(row["what"], row.get("order"), row["crop"]) for row in result["warm"]}
    assert kinds == {
        (what, order, crop)
        for what, order in (("bare copy", None), ("loader", "random"), ("loader", "windowed"))
        for crop in (14, 16)
    }
    assert {row["threads"] for row in result["warm"]} >= {1, min(cores(), 16)}
    assert all(row["images_per_second"] > 0 and row["of_ceiling"] > 0 for row in result["warm"])
    if result["cold"]:
        assert [row["what"] for row in result["cold"] if "of_ceiling" not in row] == [
            "sequential read",
            "16-thread random read",
        ]
    else:
        assert "page cache" in result["notes"][0]
    assert result["notes"][-1].startswith("68 images: too few for these figures to mean much")
    text = bench_text(result)
    assert text.splitlines()[-1] == result["sentence"]
    assert "one core feeds them 14-pixel crops at" in result["sentence"]
    for row in (*result["warm"], *result["cold"]):
        assert row["what"] in text


def test_another_split_stands_in_for_train(tmp_path):
    store = make_store(tmp_path / "s.zarr", {"val": (make_images(5, 8), np.zeros(5))})
    assert bench(store)["store"]["split"] == "val"


def test_nothing_to_measure_is_one_line(tmp_path, monkeypatch):
    store = make_store(tmp_path / "s.zarr", {"train": (make_images(2, 8), np.zeros(2))}, bad={"train": [0, 1]})
    with pytest.raises(UsageError, match="no samples to measure"):
        bench(store)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="bench needs torch: pip install"):
        bench(store)


def test_a_cache_that_stays_full_is_said(tmp_path, monkeypatch):
    store = make_store(tmp_path / "s.zarr", {"train": (make_images(20, 8), np.zeros(20))})
    monkeypatch.setattr(measurement, "evict", lambda paths: None)
    monkeypatch.setattr(measurement, "bytes_read", lambda: 0)
    result = bench(store)
    assert result["cold"] == []
    assert "could not be emptied" in result["notes"][0]
    assert "disk" not in result["sentence"]


def test_the_machine_describes_itself():
    description = describe()
    assert description["cores"] >= 1
    assert description["processor"]
    assert json.dumps(description)


def test_threads_all_run():
    seen: list[int] = []
    run_threads(5, seen.append)
    assert sorted(seen) == list(range(5))


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and read counters are Linux's")
def test_cores_are_given_back_and_reads_counted(tmp_path: Path):
    before = os.sched_getaffinity(0)
    with on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
    assert bytes_read() >= 0
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    evict([tmp_path / "f"])
    assert (tmp_path / "f").read_bytes() == b"x" * 10_000
