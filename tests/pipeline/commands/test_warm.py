"""`warm`: what it reads, how much, and what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from bench.synthetic import random_store
from stores import make_images, make_store

from pipeline.cli import main
from pipeline.commands import warm as warm_module
from pipeline.commands.copy_store import copy_store
from pipeline.commands.warm import warm, warm_text
from pipeline.errors import StoreNotFoundError, UsageError
from pipeline.store import page_cache
from pipeline.store.maps import HUGE_BYTES
from pipeline.store.page_cache import cached_shares, usable_bytes
from pipeline.store.reader import Split, open_store

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into Linux's page cache")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight chunks of 5 MB."""
    return random_store(tmp_path_factory.mktemp("data") / "s.zarr", 8 * 102, size=128, chunk_bytes=5_013_504)


def evict(split: Split) -> None:
    """Out of the page cache, or skip the test where that can't be had."""
    for chunk in range(split.num_chunks):
        fd = os.open(split.chunk_path(chunk), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if cached_shares(split) != (0, 0):
        pytest.skip("this file system keeps files in memory")


@linux
@pytest.mark.parametrize("refused", [False, True])
def test_a_cold_store_is_in_memory_afterwards(store, monkeypatch, refused):
    split = open_store(store)["train"]
    evict(split)
    if refused:  # an old kernel
        monkeypatch.setattr(page_cache, "MADV_HUGEPAGE", 9999)
    result = warm(store, quiet=True)["train"]
    assert (result["chunk_files_read"], result["chunk_files"]) == (8, 8)
    assert result["in_memory"] == 1
    assert 0 <= result["in_2mb_pages"] <= 1


@linux
def test_looking_reads_nothing(store):
    split = open_store(store)["train"]
    evict(split)
    assert cached_shares(split) == (0, 0)
    split.maps.chunk(2).sum()
    cached, _ = cached_shares(split) or (None, None)
    assert cached == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("available", "size_limit", "read"),
    [
        (None, None, 8),
        (10**12, None, 8),
        (16_000_000, None, 3),
        (10**12, 0.011, 2),
        (16_000_000, 0.011, 2),
        (0, None, 0),
    ],
)
def test_no_more_than_fits_is_read(store, monkeypatch, available, size_limit, read):
    chunks = []
    monkeypatch.setattr(warm_module, "usable_bytes", lambda: available)
    monkeypatch.setattr(warm_module, "read_chunks", lambda split, count, advance: chunks.append(count))
    result = warm(store, size_limit=size_limit, quiet=True)
    assert chunks == [read]
    assert result["train"]["chunk_files_read"] == read
    assert ("the rest" in warm_text(result)) == (read < 8)


def test_splits_share_the_room(tmp_path, monkeypatch):
    images = make_images(12)
    path = make_store(tmp_path / "s.zarr", {"train": (images, np.zeros(12)), "val": (images, np.zeros(12))})
    monkeypatch.setattr(warm_module, "usable_bytes", lambda: 3600)  # four chunks of 768
    assert [part["chunk_files_read"] for part in warm(path, quiet=True).values()] == [3, 1]
    assert list(warm(path, split=["val"], quiet=True)) == ["val"]
    assert warm(path, quiet=True)["val"]["in_memory"] is None  # too small to look at


def test_the_command(store, capsys):
    assert main(["warm", str(store), "--split", "train"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("train: 8 of 8 chunk files read")
    assert "816 images" in err
    assert main(["warm", str(store), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_padding_and_a_split_named_twice_count_once(tmp_path, capsys):
    small = make_store(tmp_path / "s.zarr", {"train": (make_images(9), np.zeros(9))}, chunk_images=4)
    assert main(["warm", str(small), "--split", "train", "--split", "train"]) == 0
    out, err = capsys.readouterr()
    assert out.count("train: 3 of 3 chunk files read") == 1
    assert err.count("images in") == 1
    assert "train: 9 images in" in err


def test_wrong_use_is_one_line(store, tmp_path):
    small = make_store(tmp_path / "s.zarr", {"train": (make_images(4), np.zeros(4))})
    copy_store(small, tmp_path / "zstd.zarr", codec="zstd", n_jobs=1, quiet=True)
    with pytest.raises(UsageError, match="compressed"):
        warm(tmp_path / "zstd.zarr")
    with pytest.raises(UsageError, match="--size-limit -1"):
        warm(store, size_limit=-1)
    with pytest.raises(StoreNotFoundError, match="no split 'test'"):
        warm(store, split=["test"])


def test_maps_begin_at_large_pages(store):
    maps = open_store(store)["train"].maps
    assert (maps.addresses % HUGE_BYTES == 0).all()
    assert len(np.unique(maps.addresses)) == 8


@linux
def test_available_memory_is_known():
    assert 10**7 < (usable_bytes() or 0) < 10**14
