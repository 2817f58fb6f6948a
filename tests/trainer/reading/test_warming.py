"""Reading into memory beside training: when, what, and that it ends."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from bench.synthetic import random_store
from stores import make_images, make_store

from pipeline.store.page_cache import cached_shares
from pipeline.store.reader import Split, open_store
from trainer.reading import warming
from trainer.reading.warming import warm_up


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """Four chunks of 3 MB."""
    folder = tmp_path_factory.mktemp("data")
    return open_store(random_store(folder / "s.zarr", 4 * 61, size=128, chunk_bytes=3_000_000))["train"]


@pytest.fixture
def said() -> list[str]:
    return []


def started() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "warm-up"]


@pytest.mark.parametrize(
    ("room", "cached", "reads"),
    [(1e12, 0.5, True), (1e12, 1.0, False), (1e6, 0.5, False), (None, 0.5, False), (1e12, None, False)],
)
def test_it_reads_what_fits_and_is_not_there(split, said, monkeypatch, room, cached, reads):
    read: list[int] = []
    monkeypatch.setattr(warming, "usable_bytes", lambda: room)
    monkeypatch.setattr(warming, "cached_shares", lambda split: None if cached is None else (cached, 0.0))
    monkeypatch.setattr(warming, "read_chunk", lambda split, chunk: read.append(chunk))
    warm_up([split, split], said.append)
    for thread in started():
        thread.join(60)
    assert read == ([0, 1, 2, 3] if reads else [])
    assert len(said) == reads


def test_it_ends_when_training_does(split, said, monkeypatch):
    read: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def read_chunk(split: Split, chunk: int) -> None:
        read.append(chunk)
        first.set()
        go_on.wait(60)

    monkeypatch.setattr(warming, "usable_bytes", lambda: 1e12)
    monkeypatch.setattr(warming, "cached_shares", lambda split: (0.0, 0.0))
    monkeypatch.setattr(warming, "read_chunk", read_chunk)
    stop = warm_up([split], said.append)
    first.wait(60)
    stop()
    go_on.set()
    for thread in started():
        thread.join(60)
    assert read == [0]


def test_small_stores_are_left_alone(tmp_path: Path, said):
    path = make_store(tmp_path / "s.zarr", {"train": (make_images(8), np.zeros(8))})
    assert cached_shares(open_store(path)["train"]) is None
    warm_up([open_store(path)["train"]], said.append)
    assert (said, started()) == ([], [])
