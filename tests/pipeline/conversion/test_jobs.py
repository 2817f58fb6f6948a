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
    run(source, tmp_path / "a.zarr", on_error="skip")
    train = open_store(tmp_path / "a.zarr")["train"]
    bad = train.attrs["bad_samples"]
    assert {(sample["key"], sample["reason"]) for sample in bad} == {(k, "crashed-decoder") for k in ("7", "40")}
    assert train.num_valid == NUM - 2
    for slot in range(NUM):
        key = int(train.key(slot))
        assert (train.image(slot) == (0 if key in source.deadly else key)).all()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".work")] == []


@pytest.mark.slow
def test_a_worker_that_dies_once_costs_nothing(tmp_path: Path) -> None:
    run(Samples(), tmp_path / "a.zarr")
    report = run(Samples(deadly=(30,), once=tmp_path / "died"), tmp_path / "b.zarr")
    assert (tmp_path / "died").exists()
    assert report.bad == []
    assert same_tree(tmp_path / "a.zarr", tmp_path / "b.zarr")


def test_deaths_before_any_sample_end_the_conversion(tmp_path: Path) -> None:
    class Killed(Samples):
        def __setstate__(self, state: dict[str, Any]) -> None:
            os._exit(1)

    with pytest.raises(backends.WorkerDiedError, match="a worker process died"):
        run(Killed(), tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.slow
def test_deaths_at_ever_other_samples_end_the_conversion(tmp_path: Path) -> None:
    class Unlucky(Samples):
        def __len__(self) -> int:
            return 640  # chunks of ten

        def __getitem__(self, i: int) -> Any:
            deaths = len(list(tmp_path.glob("death-*")))
            if i == deaths and os.getpid() != self.maker:
                (tmp_path / f"death-{i}").touch()
                os._exit(1)
            return super().__getitem__(i)

    with pytest.raises(Error, match=r"the process that converts chunk 0 was killed \d times"):
        run(Unlucky(), tmp_path / "a.zarr", no_shuffle=True)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize("deadly", [1, 33], ids=["in the first chunk", "later"])
def test_a_single_process_names_the_sample_when_it_is_rerun(tmp_path: Path, deadly: int) -> None:
    store = tmp_path / "a.zarr"
    script = f"""
import os, signal, traceback
import numpy as np
from pipeline import convert
class Samples:
    def __len__(self):
        return 70
    def __getitem__(self, i):
        if i == {deadly} and "convert_chunk" in [frame.name for frame in traceback.extract_stack()]:
            os.kill(os.getpid(), signal.SIGSEGV)
        return np.full((6, 6, 3), i, np.uint8), 0
convert(Samples(), {os.fspath(store)!r}, size=6, n_jobs=1, on_error="skip", no_shuffle=True, quiet=True)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGSEGV
    assert not store.exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, "Traceback" in again.stderr, "Fatal" in again.stderr) == (0, False, False), again.stderr
    train = open_store(store)["train"]
    assert [(bad["key"], bad["reason"]) for bad in train.attrs["bad_samples"]] == [(str(deadly), "crashed-decoder")]


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
