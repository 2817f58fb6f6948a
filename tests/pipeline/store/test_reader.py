import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from stores import make_images, make_store

from pipeline.errors import StoreError, StoreNotFoundError
from pipeline.store.reader import open_store


@pytest.fixture
def images() -> np.ndarray:
    return make_images(11)


@pytest.fixture
def store_path(tmp_path: Path, images: np.ndarray) -> Path:
    splits = {"val": (images[:3], [0, 1, -2]), "train": (images, [i % 3 for i in range(11)])}
    return make_store(tmp_path / "a.zarr", splits, bad={"train": [4]}, class_ids=["cat", "dog", "eel"])


def test_reads_what_was_written(store_path: Path, images: np.ndarray) -> None:
    store = open_store(store_path)
    assert store.splits == list(store) == ["train", "val"]
    assert store.class_ids == ["cat", "dog", "eel"]
    train = store["train"]
    assert (train.num_samples, train.num_valid, train.num_chunks) == (11, 10, 3)
    assert train.labels.tolist() == [0, 1, 2, 0, -1, 2, 0, 1, 2, 0, 1]
    assert train.labels.dtype == np.int32
    assert train.valid_slots.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert train.key(10) == b"train/000010.png"
    for i in train.valid_slots.tolist():
        assert np.array_equal(train.image(i), images[i])
    assert not train.image(4).any()
    assert store["val"].num_valid == 3  # an unlabelled sample is served


def test_memory_map_equals_zarr(store_path: Path) -> None:
    group = zarr.open_group(store_path, mode="r")
    for name in ("train", "val"):
        split = open_store(store_path)[name]
        through_zarr = group[f"{name}/images"][:]
        assert np.array_equal(np.stack([split.image(i) for i in range(len(split))]), through_zarr)
        assert np.array_equal(group[f"{name}/labels"][:], split.labels)
        blob, offsets = group[f"{name}/keys"][:], group[f"{name}/key_offsets"][:]
        assert [blob[offsets[i] : offsets[i + 1]].tobytes() for i in range(len(split))] == [
            split.key(i) for i in range(len(split))
        ]


def test_chunks_are_bare_bytes_with_zero_padding(store_path: Path, images: np.ndarray) -> None:
    file = (store_path / "train" / "images" / "c.2.0.0.0").read_bytes()
    last, index = file[: 4 * images[0].nbytes], file[4 * images[0].nbytes :]
    assert last == images[8:].tobytes() + bytes(images[0].nbytes)
    assert np.frombuffer(index[:-4], "<u8").reshape(4, 2).tolist() == [[i * 192, 192] for i in range(4)]
    digests = open_store(store_path)["train"].digests
    assert digests[2].tobytes() == hashlib.sha256(last).digest()


def test_images_cannot_be_written(store_path: Path) -> None:
    image = open_store(store_path)["train"].image(0)
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        image.flags.writeable = True


def test_a_view_outlives_the_store(store_path: Path, images: np.ndarray) -> None:
    image = open_store(store_path)["train"].image(9)
    assert np.array_equal(image, images[9])


def test_pickle_is_small_and_opens_again(store_path: Path, images: np.ndarray) -> None:
    split = open_store(store_path)["train"]
    split.image(0)
    data = pickle.dumps(split)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).image(1), images[1])


@pytest.mark.parametrize("i", [-1, 11])
def test_slots_outside_are_index_errors(store_path: Path, i: int) -> None:
    split = open_store(store_path)["train"]
    with pytest.raises(IndexError, match="outside 0..10"):
        split.image(i)
    with pytest.raises(IndexError, match="outside 0..10"):
        split.key(i)


def test_missing_and_short_chunks_are_named_on_opening(store_path: Path) -> None:
    folder = store_path / "train" / "images"
    (folder / "c.0.0.0.0").unlink()
    (folder / "c.1.0.0.0").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"c\.0\.0\.0\.0: missing chunk; .*c\.1\.0\.0\.0: short chunk, 5 of 836 bytes"):
        open_store(store_path)["train"]
    assert open_store(store_path)["val"].num_samples == 3


def test_a_short_label_file_is_named(store_path: Path) -> None:
    (store_path / "train" / "labels" / "c.0").write_bytes(bytes(40))
    with pytest.raises(StoreError, match=r"labels/c\.0: 40 of 44 bytes"):
        open_store(store_path)["train"]


def test_damaged_metadata_is_one_line(store_path: Path) -> None:
    (store_path / "train" / "zarr.json").write_text("{")
    with pytest.raises(StoreError, match=r"train/zarr\.json: unreadable metadata"):
        open_store(store_path)["train"]


def test_what_is_not_a_store_is_explained(tmp_path: Path, store_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="no store there; check the path"):
        open_store(tmp_path / "nothing")
    (tmp_path / "b.zarr.work").mkdir()
    with pytest.raises(StoreNotFoundError, match="isn't finished"):
        open_store(tmp_path / "b.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreNotFoundError, match="not a store"):
        open_store(tmp_path / "folder")
    zarr.create_group(tmp_path / "other.zarr")
    with pytest.raises(StoreNotFoundError, match="not one that"):
        open_store(tmp_path / "other.zarr")
    with pytest.raises(StoreNotFoundError, match=r"no split 'test' \(complete splits: train, val\)"):
        open_store(store_path)["test"]


def test_paths_without_a_name_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, Path("/")):
        monkeypatch.chdir(folder)
        for path in (".", "", "/"):
            with pytest.raises(StoreNotFoundError, match=r"not a store \(no zarr.json in it\)"):
                open_store(path)
    monkeypatch.chdir(tmp_path)
    Path(f"{tmp_path}.work").mkdir()
    with pytest.raises(StoreNotFoundError, match="its conversion isn't finished"):
        open_store(".")


def test_another_version_is_refused(store_path: Path) -> None:
    metadata = json.loads((store_path / "zarr.json").read_text())
    metadata["attributes"]["format_version"] = 3
    (store_path / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match="format version 3, this software reads 1 and 2"):
        open_store(store_path)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("pipeline.store.reader", ["joblib", "PIL", "zarr", "torch", "scipy"]),
        ("trainer.dataset", ["joblib", "PIL", "zarr"]),
        ("pipeline.conversion.api", ["torch", "torchvision", "trainer"]),
        ("pipeline.cli", ["torch", "torchvision", "trainer"]),
    ],
)
def test_import_directions(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]"
