"""`--val-fraction` and `--val-per-class`: which samples become val, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from folders import make_folder, same_tree

from pipeline import convert, open_store
from pipeline.commands.verify import verify
from pipeline.errors import Error, UsageError
from pipeline.sources import SourceSet, ValSplit, open_source

SAMPLES = [(b"x", label, f"{label}/{i}") for label, count in enumerate((400, 200, 30)) for i in range(count)]


def keys(found: SourceSet, split: str) -> set[bytes]:
    source = found.splits[split]
    return {source.key(i) for i in range(len(source))}


def test_a_fraction_of_each_class_by_key_and_seed() -> None:
    found = open_source(SAMPLES, val_split=ValSplit(0.2, seed=3))
    val, train = keys(found, "val"), keys(found, "train")
    assert list(found.splits) == ["train", "val"]
    assert val.isdisjoint(train)
    assert len(val | train) == len(SAMPLES)
    for label, count in enumerate((400, 200, 30)):
        assert abs(np.count_nonzero(found.splits["val"].labels == label) - 0.2 * count) < 3 * np.sqrt(0.16 * count)
    # As documented, by other means.
    drawn = {
        key.encode()
        for _, _, key in SAMPLES
        if int(hashlib.sha256(b"3\0" + key.encode()).hexdigest()[:16], 16) / 2**64 < 0.2
    }
    assert val == drawn
    assert keys(open_source(SAMPLES, val_split=ValSplit(0.2, seed=4)), "val") != val


def test_more_files_move_no_other() -> None:
    before = open_source(SAMPLES, val_split=ValSplit(0.3))
    more = [(b"x", label, f"{label}/new{i}") for label in (0, 1, 2, 3) for i in range(50)]
    after = open_source([*more, *SAMPLES], val_split=ValSplit(0.3))
    assert keys(before, "val") < keys(after, "val")
    assert keys(before, "train") < keys(after, "train")


def test_a_number_of_each_class() -> None:
    found = open_source(SAMPLES, val_split=ValSplit(per_class=7))
    assert np.bincount(found.splits["val"].labels).tolist() == [7, 7, 7]
    more = open_source([(b"x", 0, "new"), *SAMPLES], val_split=ValSplit(per_class=7))
    assert len(keys(found, "val") - keys(more, "val")) <= 1
    both = open_source(SAMPLES, val_split=ValSplit(0.1, per_class=7))
    assert keys(both, "val") == keys(found, "val") | keys(open_source(SAMPLES, val_split=ValSplit(0.1)), "val")
    limited = open_source(SAMPLES, val_split=ValSplit(per_class=7), limit_per_class=5)
    assert [len(source) for source in limited.splits.values()] == [15, 15]


def test_classes_without_a_drawn_sample_are_noted() -> None:
    notes = open_source([*SAMPLES, (b"x", 3, "one")], val_split=ValSplit(0.01)).notes
    assert any("--val-per-class" in note for note in notes)


def test_unlabelled_samples_stay_in_train() -> None:
    found = open_source([*SAMPLES, *((b"x", -1, f"u{i}") for i in range(50))], val_split=ValSplit(0.5))
    assert found.splits["val"].labels.min() == 0
    assert np.count_nonzero(found.splits["train"].labels == -2) == 50


@pytest.mark.parametrize(
    ("samples", "wanted", "message"),
    [
        ({"train": SAMPLES, "val": SAMPLES}, ValSplit(0.1), "has a val split already"),
        ({"test": SAMPLES}, ValSplit(0.1), "no train split"),
        ([(b"x", -1)] * 9, ValSplit(0.1), "no image has a label"),
        (SAMPLES, ValSplit(per_class=30), "--val-per-class 30: class '2' has only 30 images"),
        (SAMPLES[:3], ValSplit(1e-9), "draws none of 3 images"),
        (SAMPLES[:3], ValSplit(1 - 1e-9), "draws all of 3 images"),
    ],
)
def test_refused(samples: object, wanted: ValSplit, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(samples, val_split=wanted)


@pytest.mark.parametrize("options", [{"val_fraction": 0}, {"val_fraction": 1.0}, {"val_per_class": 0}])
def test_values_out_of_range(options: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(options)).replace('_', '-')} "):
        convert(SAMPLES, tmp_path / "a.zarr", **options)


@pytest.mark.parametrize("below", ["", "train"])
def test_a_store_records_it_and_is_verified(tmp_path: Path, below: str) -> None:
    source = make_folder(tmp_path / "source", {below: {"a": 12, "b": 9}})
    for name, jobs in (("a", 1), ("b", 2)):
        convert(source, tmp_path / f"{name}.zarr", size=8, val_fraction=0.3, n_jobs=jobs, quiet=True)
    assert same_tree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    store = open_store(tmp_path / "a.zarr")
    assert store.splits == ["train", "val"]
    assert store["train"].num_samples + store["val"].num_samples == 21
    for split in store.splits:
        assert store[split].attrs["recipe"]["val_split"] == {"fraction": 0.3, "per_class": 0, "seed": 0}
    assert verify(store.path, against=source, quiet=True)["ok"]
    with pytest.raises(Error, match="recipe.val_split.fraction was 0.3, is 0.4 now"):
        convert(source, tmp_path / "a.zarr", size=8, val_fraction=0.4, quiet=True)
    convert(source, tmp_path / "plain.zarr", size=8, quiet=True)
    assert "val_split" not in open_store(tmp_path / "plain.zarr")["train"].attrs["recipe"]
