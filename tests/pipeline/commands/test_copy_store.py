import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from folders import same_tree
from stores import make_images, make_store

import pipeline.commands.copy_store as copy_module
from pipeline import open_store
from pipeline.commands.copy_store import CODECS, copy_store
from pipeline.errors import StoreError, StoreNotFoundError, UsageError


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
    def write_slowly(*args: Any) -> None:  # so that one is being written when the other turns out to be damaged
        time.sleep(0.3)
        write_chunk(*args)

    write_chunk = copy_module._write_chunk
    monkeypatch.setattr(copy_module, "_write_chunk", write_slowly)
    path = store / "train" / "images" / "c.1.0.0.0"
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(StoreError, match=r"a\.zarr/train: chunk c\.1\.0\.0\.0 is missing or altered"):
        copy_store(store, tmp_path / "b.zarr", codec="zstd", n_jobs=2, quiet=True)
    time.sleep(0.4)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.zarr"]


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
    with pytest.raises(UsageError, match="--n-jobs can't be 0"):
        copy_store(store, tmp_path / "b.zarr", n_jobs=0)
    assert not (store / "train" / "sub.work").exists()
    with pytest.raises(StoreNotFoundError, match="no store there"):
        copy_store(tmp_path / "nothing", tmp_path / "b.zarr")
    with pytest.raises(UsageError, match=r"nosuch://x: no store can be opened at such a URL"):
        copy_store(store, "nosuch://x")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.zarr"]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A local S3-compatible server with an empty bucket; credentials come from the environment as with the real one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for name, value in {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        import boto3

        client = boto3.client("s3")
        for _ in range(100):
            try:
                client.create_bucket(Bucket="bucket")
                break
            except Exception:  # until the server listens
                assert server.poll() is None
                time.sleep(0.1)
        yield "s3://bucket"
    finally:
        server.terminate()
        server.wait(timeout=10)


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
