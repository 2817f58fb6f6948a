"""The format as others read it: one picture per read for every Zarr reader; stores of version 1 go on working."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from folders import same_tree
from range_server import serving
from stores import as_format_1, edit_attributes, make_images, make_store, three_class_store
from zarr.storage import LocalStore, WrapperStore

from pipeline.commands.chunk_codec import codec_arguments
from pipeline.commands.copy_store import copy_store
from pipeline.commands.info import store_info
from pipeline.commands.report import write_report
from pipeline.commands.verify import verify
from pipeline.errors import StoreError
from pipeline.store.attributes import attributes_digest
from pipeline.store.format import CODECS, chunk_index
from pipeline.store.reader import open_store

SIZE = 32
IMAGE_BYTES = SIZE * SIZE * 3
K = 8
NUM = 21
INDEX_BYTES = 16 * K + 4


@pytest.fixture
def images() -> np.ndarray:
    return make_images(NUM, size=SIZE)


@pytest.fixture
def store(tmp_path: Path, images: np.ndarray) -> Path:
    return three_class_store(tmp_path / "a.zarr", images, K)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# The index


def test_the_index_is_zarr_pythons(tmp_path: Path, images: np.ndarray) -> None:
    array = zarr.create_array(
        tmp_path / "x", shape=(K, SIZE, SIZE, 3), shards=(K, SIZE, SIZE, 3), chunks=(1, SIZE, SIZE, 3), dtype="uint8",
        compressors=None,
    )  # fmt: skip
    array[...] = images[:K]
    (file,) = [path for path in (tmp_path / "x" / "c").rglob("*") if path.is_file()]
    assert file.read_bytes() == images[:K].tobytes() + chunk_index(K, IMAGE_BYTES)


def test_the_checksum_is_crc_32c() -> None:
    def crc32c(data: bytes) -> int:  # bit by bit, of the reversed polynomial 0x1EDC6F41
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    assert crc32c(b"123456789") == 0xE3069283  # the check value of the CRC catalogue
    index = chunk_index(3, 100)
    assert struct.unpack("<7Q", index[:-4] + bytes(8))[:6] == (0, 100, 100, 100, 200, 100)
    assert struct.unpack("<I", index[-4:])[0] == crc32c(index[:-4])


@pytest.mark.parametrize("position", [-1, -4, -5, -INDEX_BYTES])
def test_verify_notices_an_altered_index(store: Path, position: int) -> None:
    path = store / "train" / "images" / "c.1.0.0.0"
    flip(path, position)
    assert verify(store, quiet=True)["problems"] == [f"{path}: altered (the index at its end isn't that of its images)"]


def test_a_file_without_its_index_is_named(store: Path) -> None:
    path = store / "train" / "images" / "c.1.0.0.0"
    path.write_bytes(path.read_bytes()[:-INDEX_BYTES])
    with pytest.raises(StoreError, match=r"c\.1\.0\.0\.0: short chunk, 24,576 of 24,708 bytes"):
        open_store(store)["train"]


# Other readers: one picture costs its own bytes and the index


class CountingStore(WrapperStore[Any]):
    """Counts the bytes that are read from chunk files."""

    bytes_read = 0

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        value = await super().get(key, *args, **kwargs)
        if value is not None and not key.endswith("zarr.json"):
            CountingStore.bytes_read += len(value)
        return value


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
def test_zarr_python_reads_one_picture_alone(store: Path, tmp_path: Path, images: np.ndarray, codec: str) -> None:
    copy_store(store, tmp_path / "b.zarr", codec=codec, quiet=True)
    array: Any = zarr.open_group(CountingStore(LocalStore(tmp_path / "b.zarr")), mode="r")["train/images"]
    CountingStore.bytes_read = 0
    assert np.array_equal(array[13], images[13])
    if codec == "none":
        assert CountingStore.bytes_read == IMAGE_BYTES + INDEX_BYTES
    assert IMAGE_BYTES // 2 < CountingStore.bytes_read < 1.1 * IMAGE_BYTES + INDEX_BYTES  # noise can't be compressed
    CountingStore.bytes_read = 0
    old: Any = zarr.open_group(CountingStore(LocalStore(as_format_1(store))), mode="r")["train/images"]
    assert np.array_equal(old[13], images[13])
    assert CountingStore.bytes_read == K * IMAGE_BYTES


@pytest.fixture
def server(store: Path) -> Iterator[tuple[str, list[int]]]:
    """The store behind a web server, and the lengths of its answers about chunk files."""
    with serving(store) as served:
        yield served


def test_tensorstore_reads_one_picture_alone(server: tuple[str, list[int]], images: np.ndarray) -> None:
    ts = pytest.importorskip("tensorstore")
    address, lengths = server
    spec = {"driver": "zarr3", "kvstore": {"driver": "http", "base_url": address, "path": "/train/images/"}}
    array = ts.open(spec, read=True).result()
    assert array.chunk_layout.read_chunk.shape == (1, SIZE, SIZE, 3)
    assert np.array_equal(array[13].read().result(), images[13])
    assert sum(lengths) == IMAGE_BYTES + INDEX_BYTES


# Copies


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
def test_version_1_becomes_version_2(store: Path, tmp_path: Path, codec: str) -> None:
    copy_store(store, tmp_path / "same.zarr", quiet=True)
    assert same_tree(store, tmp_path / "same.zarr")
    as_format_1(store)
    copy_store(store, tmp_path / "b.zarr", codec=codec, quiet=True)
    assert verify(tmp_path / "b.zarr", quiet=True)["problems"] == []
    copy_store(tmp_path / "b.zarr", tmp_path / "c.zarr", quiet=True)
    assert same_tree(tmp_path / "same.zarr", tmp_path / "c.zarr")


def test_a_split_that_the_root_lists_is_not_lost(store: Path, tmp_path: Path) -> None:
    (store / "val").rename(tmp_path / "val")
    assert verify(store, quiet=True)["problems"] == [f"{store}: split val is missing"]
    with pytest.raises(StoreError, match="val missing, which the root lists"):
        copy_store(store, tmp_path / "b.zarr", quiet=True)
    (tmp_path / "val").rename(store / "val")
    edit_attributes(store / "zarr.json", lambda attributes: attributes.update(splits=["train"]))
    assert verify(store, quiet=True)["problems"] == [f"{store}: split val is not listed in zarr.json"]


@pytest.mark.filterwarnings("ignore")  # zarr's, of consolidated metadata
def test_copy_takes_splits_from_the_folder(tmp_path: Path, images: np.ndarray) -> None:
    both = {"train": (images, [0] * NUM), "val": (images[:3], [0, 0, 0])}
    store = as_format_1(make_store(tmp_path / "a.zarr", both, chunk_images=K))
    (store / "val").rename(tmp_path / "val")
    zarr.consolidate_metadata(store)
    (tmp_path / "val").rename(store / "val")
    copy_store(store, tmp_path / "b.zarr", quiet=True)
    assert open_store(tmp_path / "b.zarr").splits == ["train", "val"]


# Version 1


def test_version_1_opens_and_verifies(store: Path, images: np.ndarray) -> None:
    as_format_1(store)
    opened = open_store(store)
    assert opened.version == 1
    train = opened["train"]
    assert train.file_bytes == train.chunk_bytes == train.chunk_path(0).stat().st_size
    assert all(np.array_equal(train.image(i), images[i]) for i in range(NUM) if i != 4)
    assert verify(store, quiet=True)["problems"] == []
    assert store_info(store)["format_version"] == 1
    flip(train.chunk_path(2), 5)
    assert len(verify(store, quiet=True)["problems"]) == 1


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
def test_compressed_version_1_opens_and_becomes_version_2(
    store: Path, tmp_path: Path, images: np.ndarray, codec: str
) -> None:
    copy_store(store, tmp_path / "same.zarr", quiet=True)
    as_format_1(store)
    for name in ("train", "val"):
        folder = store / name / "images"
        whole = zarr.open_array(folder, mode="r")
        pixels, chunks = whole[...], whole.chunks
        shutil.rmtree(folder)
        array = zarr.create_array(
            folder, shape=pixels.shape, chunks=chunks, dtype="uint8", fill_value=0, **codec_arguments(codec),
            chunk_key_encoding={"name": "default", "separator": "."}, config={"write_empty_chunks": True},
        )  # fmt: skip
        array[...] = pixels
    train = open_store(store)["train"]
    assert not train.is_raw
    assert np.array_equal(train.read_image(13), images[13])
    assert verify(store, quiet=True)["problems"] == []
    assert "data:image" in write_report(store).read_text()
    copy_store(store, tmp_path / "c.zarr", quiet=True)
    assert same_tree(tmp_path / "same.zarr", tmp_path / "c.zarr")
    path = train.chunk_path(1)
    path.write_bytes(path.read_bytes()[:-9])
    assert [line.split(":")[0] for line in verify(store, quiet=True)["problems"]] == [str(path)]


# Attributes


def test_the_digest_of_attributes_is_of_their_json(store: Path) -> None:
    attributes = json.loads((store / "zarr.json").read_text())["attributes"]
    assert attributes["splits"] == ["train", "val"]
    assert attributes["attributes_sha256"] == attributes_digest(attributes)
    assert attributes_digest({"b": [1.5, "é"], "a": None, "attributes_sha256": "x"}) == (
        "4f88a8a6862b85dbcd4bff8f7eebddca4eedba17dcf8931a9a182a9a381175e1"
    )


@pytest.mark.parametrize("file", ["zarr.json", "train/zarr.json"])
def test_altered_attributes_are_refused(store: Path, file: str) -> None:
    text = (store / file).read_text()
    for old, new in (("class002", "class003"), ("truncated", "truncatee"), ('"crop"', '"stretch"'), ("0.5", "0.6")):
        if old in text:
            (store / file).write_text(text.replace(old, new, 1))
            with pytest.raises(StoreError, match="attributes are altered"):
                _ = open_store(store)["train"]
