"""Workers that die: what they died of is found, and the rest of the conversion isn't lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import same_tree

from pipeline import convert, open_store
from pipeline.conversion import backends
from pipeline.errors import Error

NUM = 70


class Samples:
    """Small images; reading some of them ends the process that does so, but for the one that made this."""

    def __init__(self, deadly: tuple[int, ...] = (), once: Path | None = None) -> None:
        self.deadly, self.once, self.maker = deadly, once, os.getpid()

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i in self.deadly and os.getpid() != self.maker and (self.once is None or not self.once.exists()):
            if self.once is not None:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        return np.full((6, 6, 3), i, np.uint8), i % 3


def run(source: Any, store: Path, **options: Any) -> Any:
    return convert(source, store, **{"size": 6, "n_jobs": 2, "quiet": True, **options})


def test_samples_that_crash_their_worker_are_named(tmp_path: Path) -> None:
    source = Samples(deadly=(7, 40))
    with pytest.raises(Error, match="2 bad samples") as caught:
        run(source, tmp_path / "a.zarr")
    assert "the process that decoded it died" in str(caught.value)
    run(source, tmp_path / "a.zarr", on_error="skip")
    train = open_store(tmp_path / "a.zarr")["train"]
    bad = train.attrs["bad_samples"]
    assert {(sample["key"], sample["reason"]) for sample in bad} == {(k, "crashed-decoder") for k in ("7", "40")}
    assert train.num_valid == NUM - 2
    for slot in range(NUM):
        key = int(train.key(slot))
        assert (train.image(slot) == (0 if key in source.deadly else key)).all()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".work")] == []


def test_a_worker_that_dies_once_costs_nothing(tmp_path: Path) -> None:
    run(Samples(), tmp_path / "a.zarr")
    report = run(Samples(deadly=(30,), once=tmp_path / "died"), tmp_path / "b.zarr")
    assert (tmp_path / "died").exists()
    assert report.bad == []
    assert same_tree(tmp_path / "a.zarr", tmp_path / "b.zarr")


def test_deaths_of_another_cause_end_the_conversion(tmp_path: Path) -> None:
    class Killed(Samples):
        def __getitem__(self, i: int) -> Any:
            if os.getpid() != self.maker:
                os._exit(1)
            return super().__getitem__(i)

        def __setstate__(self, state: dict[str, Any]) -> None:  # before any sample is read
            os._exit(1)

    with pytest.raises(Error, match=r"chunk \d+ was killed|a worker process died"):
        run(Killed(), tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


def test_a_single_process_names_the_sample_when_it_is_rerun(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_jobs
class Samples(test_jobs.Samples):
    def __getitem__(self, i):
        if i in self.deadly and sys.argv[1] == "die" and Path({str(tmp_path / "a.zarr.work")!r}).exists():
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(i)
test_jobs.run(Samples(deadly=(33,)), Path({str(tmp_path / "a.zarr")!r}), n_jobs=1, on_error="skip")
"""
    first = subprocess.run([sys.executable, "-c", script, "die"], capture_output=True, text=True, check=False)
    assert first.returncode == -signal.SIGSEGV
    second = subprocess.run([sys.executable, "-c", script, "live"], capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    train = open_store(tmp_path / "a.zarr")["train"]
    assert [(bad["key"], bad["reason"]) for bad in train.attrs["bad_samples"]] == [("33", "crashed-decoder")]


@pytest.mark.parametrize("name", ["KilledWorker", "WorkerCrashedError", "ActorDiedError"])
def test_a_death_on_a_cluster_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As Dask and Ray call it; neither package need be there."""
    base = type("RayActorError", (Exception,), {})
    death = type(name, (base if name == "ActorDiedError" else Exception,), {})

    def parallel(**options: Any) -> Any:
        def call(calls: Any) -> Any:
            raise death("gone")

        return call

    monkeypatch.setattr(backends.joblib, "Parallel", parallel)
    with pytest.raises(backends.WorkerDiedError):
        list(backends.run_jobs("dask", 2, str, [1, 2]))
