"""Hugging Face's datasets, straight from Arrow: the same squares as from the files that they hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline import convert, open_store
from pipeline.errors import UsageError
from pipeline.sources import open_source

datasets = pytest.importorskip("datasets")


def encoded(seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 7, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def made(count: int = 12, first: int = 0, **more: Any) -> Any:
    images = [{"bytes": encoded(first + i), "path": f"{first + i}.png"} for i in range(count)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "emu"])}
    features |= {name: datasets.Value("int64") for name in more}
    rows = {"image": images, "label": [(first + i) % 3 for i in range(count)], **more}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_squares_labels_and_names_are_those_of_the_files(tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=made(), validation=made(6, first=100))
    convert(both, tmp_path / "a.zarr", size=6, n_jobs=2, no_shuffle=True, quiet=True)
    store = open_store(tmp_path / "a.zarr")
    assert store.splits == ["train", "val"]
    assert store.class_names == ["cat", "dog", "emu"]
    for split, first, count in (("train", 0, 12), ("val", 100, 6)):
        items = [(encoded(first + i), (first + i) % 3) for i in range(count)]
        convert(items, tmp_path / "b.zarr", split=split, size=6, no_shuffle=True, quiet=True)
        part, expected = store[split], open_store(tmp_path / "b.zarr")[split]
        assert part.labels.tolist() == expected.labels.tolist()
        for i in range(count):
            assert part.key(i) == b"%d.png" % (first + i)
            assert np.array_equal(part.image(i), expected.image(i))


def test_a_transform_is_not_passed_over_in_silence() -> None:
    with pytest.raises(UsageError, match="train: has a transform"):
        open_source(made(3).with_transform(lambda batch: batch))
    assert len(open_source(made(3).with_format("numpy")).splits["train"]) == 3


def test_a_selection_from_files_on_disk(tmp_path: Path) -> None:
    """Its rows are asked for in the selection's order, by workers that open the Arrow files themselves."""
    made(40).save_to_disk(str(tmp_path / "saved"))
    part = datasets.load_from_disk(str(tmp_path / "saved")).shuffle(seed=3).select(range(20))
    convert(part, tmp_path / "a.zarr", size=6, n_jobs=2, no_shuffle=True, quiet=True)
    train = open_store(tmp_path / "a.zarr")["train"]
    assert train.labels.tolist() == part["label"]
    square = {"size": 6, "no_shuffle": True, "quiet": True}
    convert([(encoded(i), i % 3) for i in range(40)], tmp_path / "b.zarr", **square)
    whole = open_store(tmp_path / "b.zarr")["train"]
    for slot in range(20):
        number = int(train.key(slot).removesuffix(b".png"))
        assert np.array_equal(train.image(slot), whole.image(number))


def test_bad_rows_are_bad_samples(tmp_path: Path) -> None:
    images = [encoded(0), b"", None, b"no image", encoded(4)]
    rows = {"image": [image and {"bytes": image, "path": None} for image in images[:4]] + [None], "label": [0] * 5}
    rows["image"][1] = {"bytes": b"", "path": None}
    rows["image"][4] = {"bytes": None, "path": str(tmp_path / "gone.png")}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict(rows, features=kinds)
    convert(data, tmp_path / "a.zarr", size=6, on_error="skip", no_shuffle=True, quiet=True)
    bad = open_store(tmp_path / "a.zarr")["train"].attrs["bad_samples"]
    assert [(sample["key"], sample["reason"]) for sample in bad] == [
        ("1", "empty"),
        ("2", "missing"),
        ("3", "not-an-image"),
        ("4", "missing"),
    ]


def test_columns_are_asked_for_or_refused(tmp_path: Path) -> None:
    two = made(3).add_column("coarse", [0, 0, 1]).cast_column("coarse", datasets.ClassLabel(names=["pet", "bird"]))
    with pytest.raises(UsageError, match="coarse may both be the label; name one with --label-column"):
        open_source(two)
    assert open_source(two, label_column="coarse").class_names == ["pet", "bird"]
    unlabelled = made(3, price=[1, 2, 3]).remove_columns("label")
    with pytest.raises(UsageError, match="no image of train has a label.*price"):
        open_source(unlabelled)
    assert len(open_source(unlabelled, unlabelled=True).splits["train"]) == 3
    with pytest.raises(UsageError, match="no column of images"):
        open_source(made(3, price=[1, 2, 3]).remove_columns("image"))
    with pytest.raises(UsageError, match="give val twice"):
        open_source({"val": made(3), "validation": made(3)})
    with pytest.raises(UsageError, match="--source hugging-face"):
        open_source(str(tmp_path), "hugging-face")
    with pytest.raises(UsageError, match="--source folder: for paths, not for a Dataset in Python; leave it out"):
        open_source(made(3), "folder")


def test_columns_that_cannot_be_images_say_what_to_pass() -> None:
    text = datasets.Dataset.from_dict({"image": ["a.png"], "label": [True]})
    with pytest.raises(UsageError, match="cast_column") as caught:
        open_source(text)
    assert "--image-column" not in str(caught.value)
    found = open_source(text.cast_column("image", datasets.Image()))
    assert list(found.class_ids) == ["True"]


def test_a_stream_says_what_it_lacks() -> None:
    with pytest.raises(UsageError, match="an? IterableDataset, which has no length; load it without streaming"):
        open_source(made(3).to_iterable_dataset())
