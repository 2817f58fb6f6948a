import errno
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from folders import make_folder, same_tree, tree
from stores import make_images, make_store

import pipeline.commands.copy_store as copy_module
from pipeline import convert, open_store
from pipeline.commands.copy_store import copy_store
from pipeline.conversion import preflight
from pipeline.errors import Error, StoreError, StoreNotFoundError, UsageError
from pipeline.store import transfer
from pipeline.store.format import CODECS, chunk_name


@pytest.fixture
def images() -> np.ndarray:
    # Smooth, so that it can be compressed.
    return np.sort(make_images(11, size=16).reshape(11, 16, 48), axis=2).reshape(11, 16, 16, 3)


@pytest.fixture
def store(tmp_path: Path, images: np.ndarray) -> Path:
    splits = {"train": (images, [i % 3 for i in range(11)]), "val": (images[:3] * 0, [0, 1, 2])}
    return make_store(tmp_path / "a.zarr", splits, bad={"train": [4]})


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")  # read here without our filter
@pytest.mark.parametrize("codec", CODECS)
def test_there_and_back(store: Path, images: np.ndarray, tmp_path: Path, codec: str) -> None:
    copy_store(store, tmp_path / "b.zarr", codec=codec, quiet=True)
    group = zarr.open_group(tmp_path / "b.zarr", mode="r")
    through_zarr = group["train/images"][:]
    assert np.array_equal(through_zarr[5:], images[5:])
    assert not through_zarr[4].any()
    assert len(list((tmp_path / "b.zarr" / "val" / "images").glob("c.*"))) == 1  # an all-zero chunk exists, too
    copy_store(tmp_path / "b.zarr", tmp_path / "c.zarr", quiet=True)
    assert same_tree(store, tmp_path / "c.zarr")
    assert not list(tmp_path.glob("*.work"))


def test_codecs_compress(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    copy_store(store, tmp_path / "said.zarr", codec="max")
    before, after = re.findall(r"[\d,]{4,}", capsys.readouterr().err.rpartition("codec max")[2])
    assert int(after.replace(",", "")) < int(before.replace(",", ""))
    for codec in CODECS:
        copy_store(store, tmp_path / f"{codec}.zarr", codec=codec, quiet=True)
        sizes[codec] = sum(f.stat().st_size for f in (tmp_path / f"{codec}.zarr" / "train" / "images").glob("c.*"))
    assert sizes["max"] < sizes["none"]
    assert sizes["zstd"] < sizes["none"]


def test_a_compressed_store_says_how_to_train_from_it(store: Path, tmp_path: Path) -> None:
    copy_store(store, tmp_path / "b.zarr", codec="zstd", quiet=True)
    with pytest.raises(StoreError, match=r"compressed \(zstd\).*pipeline copy .*b\.zarr NEW\.zarr --codec none"):
        open_store(tmp_path / "b.zarr")["train"].image(0)


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_damage_is_found_before_it_is_copied(
    store: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, put = threading.Event(), copy_module._put

    def slow_put(file: Path, data: bytes) -> None:  # one is being written when the other turns out to be damaged
        if file.name == "c.0.0.0.0" and file.parent.name == "images":
            begun.set()
            time.sleep(0.3)
        put(file, data)

    def late_read(self: Path) -> bytes:
        if self == path:
            assert begun.wait(10)
        return read_bytes(self)

    read_bytes = Path.read_bytes
    monkeypatch.setattr(copy_module, "_put", slow_put)
    path = store / "train" / "images" / "c.1.0.0.0"
    good = path.read_bytes()
    if damage == "flip":
        data = bytearray(good)
        data[0] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    monkeypatch.setattr(Path, "read_bytes", late_read)
    with pytest.raises(StoreError, match=r"a\.zarr/train: chunk c\.1\.0\.0\.0 is missing or altered"):
        copy_store(store, tmp_path / "b.zarr", codec="zstd", n_jobs=2, quiet=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.zarr", "b.zarr.work"]
    left = tree(tmp_path / "b.zarr.work" / ".copy")
    assert f"train/images/{chunk_name(0)}" in left  # was waited for
    assert not any(name.startswith("val/images/c.") or name == "zarr.json" for name in left)
    time.sleep(0.4)
    assert tree(tmp_path / "b.zarr.work" / ".copy") == left
    monkeypatch.undo()
    path.write_bytes(good)
    copy_store(store, tmp_path / "b.zarr", codec="zstd", quiet=True)
    assert not (tmp_path / "b.zarr.work").exists()


@pytest.mark.parametrize("codec", ["zstd", "blosc", "max"])
def test_a_chunk_that_cannot_be_decoded_is_named(store: Path, tmp_path: Path, codec: str) -> None:
    copy_store(store, tmp_path / "b.zarr", codec=codec, quiet=True)
    path = tmp_path / "b.zarr" / "train" / "images" / "c.1.0.0.0"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StoreError) as caught:
        copy_store(tmp_path / "b.zarr", tmp_path / "c.zarr", quiet=True)
    assert str(caught.value).startswith(f"{path}: can't be decoded (")
    assert str(caught.value).endswith("take that file from a good copy of the store, then copy again")


def test_wrong_use(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--codec gzip: must be one of none, zstd, blosc, max"):
        copy_store(store, tmp_path / "b.zarr", codec="gzip")
    with pytest.raises(UsageError, match="exists already; choose another DST"):
        copy_store(store, store)
    with pytest.raises(UsageError, match=r"sub: lies in the store that is copied; choose a DST outside .*a\.zarr"):
        copy_store(store, store / "train" / "sub")
    make_store(tmp_path / "other.zarr", {"train": (make_images(3), [0, 1, 2])})
    for inside in (tmp_path / "other.zarr" / "sub.zarr", f"local://{tmp_path}/other.zarr/sub.zarr"):
        with pytest.raises(UsageError, match=r"sub.zarr: lies in a store, which it would damage; choose a DST outside"):
            copy_store(store, inside)
    shutil.rmtree(tmp_path / "other.zarr")
    with pytest.raises(UsageError, match="--n-jobs can't be 0"):
        copy_store(store, tmp_path / "b.zarr", n_jobs=0)
    assert not (store / "train" / "sub.work").exists()
    with pytest.raises(StoreNotFoundError, match="no store there"):
        copy_store(tmp_path / "nothing", tmp_path / "b.zarr")
    with pytest.raises(UsageError, match=r"nosuch://x: no store can be opened at such a URL"):
        copy_store(store, "nosuch://x")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.zarr"]


class Puts:
    """Notes which chunk files are written, and after `most` of them fails as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> None:
        self.names: list[str] = []
        self.most = most
        self._put = copy_module._put
        monkeypatch.setattr(copy_module, "_put", self)

    def __call__(self, file: Path, data: bytes) -> None:
        if file.name.startswith("c.") and file.parent.name == "images":
            if len(self.names) == self.most:
                raise OSError(errno.ENOSPC, "No space left on device", str(file))
            self.names.append(f"{file.parent.parent.name}/{file.name}")
        self._put(file, data)


@pytest.mark.parametrize("codec", ["none", "max"])
def test_an_interrupted_copy_goes_on(
    store: Path, tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_store(store, tmp_path / "whole.zarr", codec=codec, quiet=True)
    Puts(monkeypatch, most=2)
    with pytest.raises(Error, match=r"No space left on device; make room; the copy isn't finished, run it again"):
        copy_store(store, tmp_path / "b.zarr", codec=codec, n_jobs=1, quiet=True)
    with pytest.raises(StoreNotFoundError, match="its copy isn't finished"):
        open_store(tmp_path / "b.zarr")
    staged = tmp_path / "b.zarr.work" / ".copy" / "train"
    (staged / "images" / "c.2.0.0.0.tmp-0123").write_bytes(b"killed")
    first = staged / "images" / chunk_name(0)
    first.write_bytes(first.read_bytes()[:-1] + b"x")  # altered: in raw files the index
    labels = staged / "labels" / "c.0"
    labels.write_bytes(labels.read_bytes()[:5])
    monkeypatch.undo()
    puts = Puts(monkeypatch)
    copy_store(store, tmp_path / "b.zarr", codec=codec)
    assert sorted(puts.names) == ["train/c.0.0.0.0", "train/c.2.0.0.0", "val/c.0.0.0.0"]
    assert "4 chunks as written (1 of them were there already)" in capsys.readouterr().err
    assert same_tree(tmp_path / "whole.zarr", tmp_path / "b.zarr")
    assert not (tmp_path / "b.zarr.work").exists()


def test_a_copy_that_was_begun_otherwise_is_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    Puts(monkeypatch, most=2)
    with pytest.raises(Error, match="No space left"):
        copy_store(store, tmp_path / "b.zarr", codec="zstd", quiet=True)
    monkeypatch.undo()
    begun = tree(tmp_path / "b.zarr.work" / ".copy")
    with pytest.raises(UsageError, match=r"no part of this copy; choose another DST, or delete .*b\.zarr\.work/\.copy"):
        copy_store(store, tmp_path / "b.zarr")
    with pytest.raises(UsageError, match="an unfinished copy into it lies in"):
        convert(folder, tmp_path / "b.zarr", size=16, n_jobs=1, quiet=True)
    assert tree(tmp_path / "b.zarr.work" / ".copy") == begun
    copy_store(store, tmp_path / "b.zarr", codec="zstd", quiet=True)
    assert not (tmp_path / "b.zarr.work").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", {"train": {"cat": 3, "dog": 3}})


def test_what_will_not_fit_is_not_begun(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = sum(file.stat().st_size for file in store.glob("*/images/c.*"))
    monkeypatch.setattr(preflight, "free_space", lambda folder: (need - 1, 0))
    with pytest.raises(Error, match=f"{need:,} bytes are needed and {need - 1:,} are free; make room"):
        copy_store(store, tmp_path / "b.zarr", quiet=True)
    monkeypatch.setattr(preflight, "free_space", lambda folder: (need, 0))
    copy_store(store, tmp_path / "b.zarr", quiet=True)
    assert same_tree(store, tmp_path / "b.zarr")


def test_a_conversion_that_was_begun_is_kept(store: Path, tmp_path: Path, folder: Path) -> None:
    options = {"size": 16, "n_jobs": 1, "quiet": True}
    convert(folder, tmp_path / "b.zarr", part="1/2", **options)
    with pytest.raises(UsageError, match="an unfinished conversion into it lies in"):
        copy_store(store, tmp_path / "b.zarr", quiet=True)
    convert(folder, tmp_path / "b.zarr", part="2/2", **options)
    assert open_store(tmp_path / "b.zarr")["train"].num_valid == 6


def test_a_link_that_leads_nowhere_and_a_fifo_are_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "b.zarr").symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists already"):
        copy_store(store, tmp_path / "b.zarr", quiet=True)
    chunk = store / "train" / "images" / chunk_name(0)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(StoreError, match=r"c\.0\.0\.0\.0 is missing or altered"):
        copy_store(store, tmp_path / "c.zarr", quiet=True)


def test_altered_small_arrays_are_not_copied(store: Path, tmp_path: Path) -> None:
    labels = store / "train" / "labels" / "c.0"
    labels.write_bytes(bytes(reversed(labels.read_bytes())))
    with pytest.raises(StoreError, match=r"train/labels: altered"):
        copy_store(store, tmp_path / "b.zarr", quiet=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.zarr"]


def test_what_reads_back_otherwise_is_an_error(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = copy_module._put

    def lose(file: Path, data: bytes) -> None:
        put(file, data[:-1] + b"x" if file.name == "c.1.0.0.0" else data)

    monkeypatch.setattr(copy_module, "_put", lose)
    with pytest.raises(Error, match=r"c\.1\.0\.0\.0: reads back otherwise"):
        copy_store(store, tmp_path / "b.zarr", quiet=True)
    assert not (tmp_path / "b.zarr").exists()


def test_a_copy_to_a_url_goes_on(
    store: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Puts(monkeypatch, most=2)
    with pytest.raises(Error, match="No space left"):
        copy_store(store, url, n_jobs=1, quiet=True)
    with pytest.raises(StoreNotFoundError, match="no store there"):
        copy_store(url, tmp_path / "back.zarr", quiet=True)
    with pytest.raises(UsageError, match=r"images/zarr\.json: no part of this copy"):
        copy_store(store, url, codec="zstd", quiet=True)
    monkeypatch.undo()
    puts = Puts(monkeypatch)
    copy_store(store, url)
    assert sorted(puts.names) == ["train/c.2.0.0.0", "val/c.0.0.0.0"]
    assert "4 chunks as written (2 of them were there already)" in capsys.readouterr().err
    copy_store(url, tmp_path / "back.zarr", quiet=True)
    assert same_tree(store, tmp_path / "back.zarr")


def test_threads_are_no_more_than_memory_holds_chunks_for(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int) -> None:
            at_once.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(transfer, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(copy_module.joblib, "effective_n_jobs", lambda n_jobs: 8 if n_jobs < 0 else n_jobs)
    monkeypatch.setattr(copy_module, "MEMORY_BYTES", 2 * 4 * open_store(store)["train"].chunk_bytes)
    copy_store(store, tmp_path / "b.zarr", quiet=True)
    copy_store(store, tmp_path / "c.zarr", n_jobs=3, quiet=True)
    assert at_once == [2, 1, 3, 1]  # of three chunks and one


def test_file_urls_are_folders(store: Path, tmp_path: Path) -> None:
    copy_store(store.as_uri(), (tmp_path / "b c.zarr").as_uri(), quiet=True)
    assert same_tree(store, tmp_path / "b c.zarr")
    assert open_store((tmp_path / "b c.zarr").as_uri()).path == tmp_path / "b c.zarr"


@pytest.mark.filterwarnings("ignore")  # of botocore's own
def test_object_store_there_and_back(store: Path, tmp_path: Path, bucket: str) -> None:
    copy_store(store, f"{bucket}/a.zarr", codec="max", quiet=True)
    with pytest.raises(UsageError, match="a store is there already"):
        copy_store(store, f"{bucket}/a.zarr", quiet=True)
    copy_store(f"{bucket}/a.zarr", tmp_path / "back.zarr", quiet=True)
    assert same_tree(store, tmp_path / "back.zarr")
    with pytest.raises(StoreNotFoundError, match="no store there"):
        copy_store(f"{bucket}/other.zarr", tmp_path / "x.zarr", quiet=True)
    shutil.rmtree(tmp_path / "back.zarr")
