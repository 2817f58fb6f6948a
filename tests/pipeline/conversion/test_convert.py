import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import make_folder, make_image, same_tree, tree
from PIL import Image
from stores import as_format_1

from pipeline import convert, open_store
from pipeline.commands.verify import verify
from pipeline.conversion.commit import BadSamplesError, commit
from pipeline.conversion.names import Part
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, StoreError, UsageError

COUNTS = {"train": {"cat": 30, "dog": 25, "eel": 15}, "val": {"cat": 3, "dog": 4, "eel": 1}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"), COUNTS)


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that every other way to convert must equal byte for byte."""
    store = tmp_path_factory.mktemp("reference") / "a.zarr"
    run(source, store)
    return store


def run(source: Any, store: Path, **options: Any) -> Any:
    return convert(source, store, **{"size": 16, "n_jobs": 1, "quiet": True, **options})


def leftovers(store: Path) -> list[str]:
    return sorted(child.name for child in store.parent.iterdir() if child.name != store.name)


def test_store_holds_every_image(source: Path, reference: Path) -> None:
    store = open_store(reference)
    assert store.splits == ["train", "val"]
    assert store.class_ids == ["cat", "dog", "eel"]
    assert leftovers(reference) == []
    for name, classes in COUNTS.items():
        split = store[name]
        assert split.num_samples == split.num_valid == sum(classes.values())
        keys = [split.key(i).decode() for i in range(len(split))]
        in_order = sorted(f"{cls}/{i:03d}.jpg" for cls, count in classes.items() for i in range(count))
        assert sorted(keys) == in_order
        assert (keys == in_order) == (name == "val")  # train is shuffled, val keeps the source's order
        for slot, key in enumerate(keys):
            assert split.labels[slot] == store.class_ids.index(key.split("/")[0])
            with Image.open(source / name / key) as image:
                assert split.source_size[slot].tolist() == [image.height, image.width]
                # torchvision's Resize(16) and CenterCrop(16), in two steps.
                short, long = sorted(image.size)
                scaled = {short: 16, long: int(16 * long / short)}
                resized = image.resize((scaled[image.width], scaled[image.height]), Image.Resampling.BICUBIC)
            left, top = (round((side - 16) / 2) for side in resized.size)
            expected = resized.crop((left, top, left + 16, top + 16))
            assert np.abs(split.image(slot).astype(int) - np.asarray(expected)).mean() < 1


def test_statistics_and_digests_are_exact(reference: Path) -> None:
    train = open_store(reference)["train"]
    pixels = np.stack([train.image(i) for i in range(len(train))]).reshape(-1, 3) / 255
    assert train.mean == pytest.approx(pixels.mean(0), abs=1e-12)
    assert train.std == pytest.approx(pixels.std(0), abs=1e-12)
    for chunk in range(train.num_chunks):
        file = train.chunk_path(chunk).read_bytes()
        data, index = file[: train.chunk_bytes], file[train.chunk_bytes :]
        assert hashlib.sha256(data).digest() == train.digests[chunk].tobytes()
        assert len(data) == train.chunk_images * 16 * 16 * 3
        assert len(index) == 16 * train.chunk_images + 4


def test_nothing_of_the_run_is_stored(reference: Path, source: Path) -> None:
    for name, data in tree(reference).items():
        if name.endswith("zarr.json"):
            for word in (os.fspath(source), os.fspath(reference), "loky", "n_jobs"):
                assert word.encode() not in data, name


@pytest.mark.parametrize("options", [{"n_jobs": 2}, {"n_jobs": 3, "on_error": "skip"}])
def test_workers_make_no_difference(source: Path, reference: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    run(source, tmp_path / "b.zarr", **options)
    assert same_tree(reference, tmp_path / "b.zarr")


def test_moved_source_makes_no_difference(source: Path, reference: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "elsewhere")
    run(tmp_path / "elsewhere", tmp_path / "b.zarr")
    assert same_tree(reference, tmp_path / "b.zarr")


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_make_no_difference(source: Path, reference: Path, tmp_path: Path, order: tuple[int, ...]) -> None:
    store = tmp_path / "b.zarr"
    for step, part in enumerate(order):
        report = run(source, store, part=f"{part}/3")
        assert (report.committed == ["train", "val"]) == (step == 2)
        assert (store / "train").exists() == (step == 2)
    assert same_tree(reference, store)
    assert leftovers(store) == []


def test_finished_conversion_is_left_alone(source: Path, reference: Path, tmp_path: Path) -> None:
    before = tree(reference)
    report = run(source, reference)
    assert (report.num_images, report.committed) == (0, ["train", "val"])
    assert tree(reference) == before
    assert leftovers(reference) == []


def test_splits_one_after_the_other(source: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "b.zarr"
    run(source, store, split="val")
    assert open_store(store).splits == ["val"]
    run(source, store)
    assert same_tree(reference, store)


def test_sizes_share_order_and_bad_slots(source: Path, reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with-bad"
    shutil.copytree(source, folder)
    (folder / "train" / "dog" / "003.jpg").write_bytes(b"")
    run(folder, tmp_path / "s-{size}.zarr", size=[12, 16, 24], on_error="skip")
    splits = [open_store(tmp_path / f"s-{size}.zarr")["train"] for size in (12, 16, 24)]
    assert len({split.fingerprint for split in splits}) == 1
    assert len({split.chunk_images for split in splits}) == 1
    assert [split.image_shape[0] for split in splits] == [12, 16, 24]
    single = tmp_path / "single.zarr"
    run(folder, single, on_error="skip")
    assert np.array_equal(open_store(single)["train"].image(5), splits[1].image(5))


def test_bad_samples_stop(source: Path, reference: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "source", tmp_path / "b.zarr"
    shutil.copytree(source, folder)
    good = (folder / "train" / "cat" / "007.jpg").read_bytes()
    (folder / "train" / "cat" / "007.jpg").write_bytes(good[:-45])
    (folder / "val" / "dog" / "001.jpg").write_bytes(b"<html>not found</html>")
    with pytest.raises(BadSamplesError, match=r"2 bad samples, nothing committed \(first: train/cat/007.jpg"):
        run(folder, store, n_jobs=2)
    assert not store.exists()
    lines = [json.loads(line) for line in (tmp_path / "b.zarr.errors.jsonl").read_text().splitlines()]
    assert [(line["split"], line["key"], line["reason"]) for line in lines] == [
        ("train", "cat/007.jpg", "truncated"),
        ("val", "dog/001.jpg", "not-an-image"),
    ]
    # Mended, only the affected chunks are done again, and the store is as if nothing had happened.
    shutil.copy(source / "train" / "cat" / "007.jpg", folder / "train" / "cat" / "007.jpg")
    shutil.copy(source / "val" / "dog" / "001.jpg", folder / "val" / "dog" / "001.jpg")
    report = run(folder, store)
    assert report.num_images <= 3
    assert same_tree(reference, store)
    assert leftovers(store) == ["source"]


def test_bad_samples_skipped(source: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "source", tmp_path / "b.zarr"
    shutil.copytree(source, folder)
    (folder / "train" / "cat" / "007.jpg").write_bytes(b"")
    with pytest.raises(BadSamplesError):
        run(folder, store)
    report = run(folder, store, on_error="skip")
    assert report.num_images <= 2
    train = open_store(store)["train"]
    assert (train.num_samples, train.num_valid) == (70, 69)
    (bad,) = train.attrs["bad_samples"]
    assert (bad["key"], bad["reason"]) == ("cat/007.jpg", "empty")
    assert train.labels[bad["slot"]] == -1
    assert not train.image(bad["slot"]).any()
    assert train.key(bad["slot"]) == b"cat/007.jpg"
    pixels = np.stack([train.image(i) for i in train.valid_slots.tolist()]) / 255
    assert train.mean == pytest.approx(pixels.mean((0, 1, 2)), abs=1e-12)
    listed = (tmp_path / "b.zarr.errors.jsonl").read_text()
    assert "cat/007.jpg" in listed
    run(folder, store)  # finished already
    assert (tmp_path / "b.zarr.errors.jsonl").read_text() == listed


def test_a_bad_file_that_was_deleted_is_said(source: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "source", tmp_path / "b.zarr"
    shutil.copytree(source, folder)
    (folder / "train" / "cat" / "007.jpg").write_bytes(b"")
    with pytest.raises(BadSamplesError):
        run(folder, store)
    (folder / "train" / "cat" / "007.jpg").unlink()
    with pytest.raises(Error, match="the source had 70 samples, has 69 now; .*--on-error skip"):
        run(folder, store)
    for path in list((folder / "train" / "cat").iterdir())[:20]:  # smaller chunks, too
        path.unlink()
    with pytest.raises(Error, match="the source had 70 samples, has 49 now"):
        run(folder, store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter": "box"}, "geometry.filter was bicubic, is box now"),
        ({"seed": 5}, "recipe.seed was 0, is 5 now"),
        ({"no_shuffle": True}, "recipe.shuffled was True, is False now"),
        ({"chunk_mb": 0.0008}, "recipe.chunk_images was 2, is 1 now"),
        ({"max_pixels": 10_000}, "recipe.max_pixels was .* is 10000 now"),
    ],
)
def test_another_recipe_is_refused(source: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    store = tmp_path / "b.zarr"
    run(source, store, part="1/2")
    for part in ("2/2", None):
        with pytest.raises(Error, match=message) as caught:
            run(source, store, part=part, **change)
        assert "\n" not in str(caught.value)
    run(source, store)
    with pytest.raises(Error, match=r"use another DST, or .*--overwrite"):
        run(source, store, **change)
    run(source, store, **change, overwrite=True)
    assert open_store(store).splits == ["train", "val"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 24}, "size: the store has 16, this conversion asks for 24"),
        ({"fit": "pad", "channels": "gray"}, "fit: the store has crop, this conversion asks for pad"),
        ({"exif_transpose": True}, "exif_transpose: the store has False, this conversion asks for True"),
    ],
)
def test_another_geometry_names_the_first_difference_only(
    source: Path, reference: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(Error) as caught:
        run(source, reference, **change)
    assert str(caught.value) == f"{reference}: {message}; use another DST, or convert all splits again with --overwrite"


def test_other_classes_are_named_on_both_sides(source: Path, reference: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    os.rename(tmp_path / "source" / "train" / "dog", tmp_path / "source" / "train" / "doe")
    with pytest.raises(Error, match=r"store has 3 .*only here: 'dog'\), this .* 3 .*only here: 'doe'\).*--overwrite"):
        run(tmp_path / "source", reference, split="train")
    shutil.rmtree(tmp_path / "source" / "train" / "eel")
    with pytest.raises(Error, match=r"store has 3 .*only here: 'dog', 'eel'\), this .* 2 .*only here: 'doe'\)"):
        run(tmp_path / "source", reference, split="train")
    for name in ("dog", "eel"):
        (tmp_path / "source" / "train" / name).mkdir()
    with pytest.raises(Error, match=r"store has 3 classes, this .* 4 .*only here: 'doe'\)"):
        run(tmp_path / "source", reference, split="train")


def test_overwrite_of_one_split_keeps_the_others(source: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    shutil.copytree(reference, store)
    shutil.copytree(source, tmp_path / "source")
    make_image(999).save(tmp_path / "source" / "val" / "cat" / "000.jpg")
    run(tmp_path / "source", store, split="val", overwrite=True)
    assert open_store(store).splits == ["train", "val"]
    assert same_tree(store / "train", reference / "train")
    assert not same_tree(store / "val", reference / "val")
    with pytest.raises(Error, match="size: the store has 16, this conversion asks for 24"):
        run(source, store, split="val", overwrite=True, size=24)
    run(source, store, split="val", overwrite=True)
    assert same_tree(store, reference)


def test_a_store_in_its_own_source_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    (tmp_path / "link").symlink_to(folder)
    for src, dst in (
        (folder, folder / "a.zarr"),
        (folder, tmp_path / "link" / "b" / "a.zarr"),
        (tmp_path / "link", folder / "a"),
    ):
        with pytest.raises(UsageError, match=r"inside SRC .*; choose a DST outside of it"):
            run(src, dst)
    assert same_tree(folder, source)


def test_a_split_without_metadata_names_the_way_out(source: Path, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    shutil.copytree(reference, store)
    for damage in (Path.unlink, lambda path: path.write_text("{}"), lambda path: path.write_text("{")):
        damage(store / "train" / "zarr.json")
        with pytest.raises(Error, match="restore it, or convert with --overwrite"):
            run(source, store)
        run(source, store, overwrite=True)
        assert same_tree(store, reference)


def test_another_source_is_refused(source: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "source", tmp_path / "b.zarr"
    shutil.copytree(source, folder)
    run(folder, store, part="1/2")
    os.rename(folder / "train" / "cat" / "001.jpg", folder / "train" / "cat" / "zzz.jpg")
    with pytest.raises(Error, match="the source has other files now"):
        run(folder, store)
    os.rename(folder / "train" / "cat" / "zzz.jpg", folder / "train" / "cat" / "001.jpg")
    os.rename(folder / "train" / "cat" / "001.jpg", folder / "train" / "dog" / "a.jpg")
    with pytest.raises(Error, match="the source has other files now"):
        run(folder, store)


def test_other_software_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "b.zarr", part="1/2")
    run(source, tmp_path / "c.zarr", split="train")
    monkeypatch.setattr("pipeline.conversion.api.software_versions", lambda: {"numpy": "0.1"})
    with pytest.raises(Error, match=r"software\..* was .*, is .* now"):
        run(source, tmp_path / "b.zarr")
    with pytest.raises(Error, match=r"train was made with .*, not .*; install that version"):
        run(source, tmp_path / "c.zarr", split="val")
    with pytest.raises(Error, match=r"worker on .*: .* the run's is .*; install the same versions"):
        run(source, tmp_path / "d.zarr")


def test_changed_file_redoes_only_its_chunk(source: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "source", tmp_path / "b.zarr"
    shutil.copytree(source, folder)
    run(folder, store, part="1/2")
    make_image(999).save(folder / "train" / "cat" / "000.jpg")
    work = Workspace(store).split("train")
    kept = {path.name: path.stat().st_mtime_ns for path in work.receipts.iterdir()}
    run(folder, store, part="1/2")
    again = {path.name: path.stat().st_mtime_ns for path in work.receipts.iterdir()}
    assert sum(kept[name] != again[name] for name in kept) <= 1
    run(folder, store)
    other = tmp_path / "c.zarr"
    run(folder, other)
    assert same_tree(store, other)


def test_file_that_changes_while_converting_stops_the_commit(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = tmp_path / "source", tmp_path / "b.zarr"
    shutil.copytree(source, folder)
    from pipeline.conversion import jobs as execution

    run_jobs = execution.run_jobs

    def change_afterwards(*args: Any) -> Any:
        yield from run_jobs(*args)
        make_image(998).save(folder / "train" / "eel" / "002.jpg")

    monkeypatch.setattr(execution, "run_jobs", change_afterwards)
    with pytest.raises(Error, match=r"train: eel/002.jpg changed meanwhile; rerun"):
        run(folder, store)
    assert not store.exists()
    monkeypatch.undo()
    assert run(folder, store).num_images <= 3
    run(folder, tmp_path / "c.zarr")
    assert same_tree(store, tmp_path / "c.zarr")


@pytest.mark.parametrize("num", [1, 3, 7, 63, 64, 65, 129])
def test_few_images_with_many_workers(tmp_path: Path, num: int) -> None:
    samples = [(np.full((5, 5, 3), i, np.uint8), i % 2) for i in range(num)]
    run(samples, tmp_path / "a.zarr", size=4)
    if num in (3, 65):
        run(samples, tmp_path / "b.zarr", size=4, n_jobs=2)
        assert same_tree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    train = open_store(tmp_path / "a.zarr")["train"]
    assert train.num_valid == num
    assert sorted(int(train.image(i)[0, 0, 0]) for i in range(num)) == list(range(num))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_chunk_boundaries(tmp_path: Path, extra: int) -> None:
    num = 130 + extra  # chunks of 2 or 3 images
    run([(np.full((4, 4, 3), i, np.uint8), 0) for i in range(num)], tmp_path / "a.zarr", size=4, no_shuffle=True)
    train = open_store(tmp_path / "a.zarr")["train"]
    assert [int(train.image(i)[0, 0, 0]) for i in range(num)] == list(range(num))
    last = np.fromfile(train.chunk_path(train.num_chunks - 1), np.uint8, train.chunk_bytes)
    last = last.reshape(train.chunk_images, -1)
    assert not last[num - (train.num_chunks - 1) * train.chunk_images :].any()


def test_an_all_black_dataset_is_complete(tmp_path: Path) -> None:
    run([(np.zeros((4, 4, 3), np.uint8), 0)] * 5, tmp_path / "a.zarr", size=4)
    train = open_store(tmp_path / "a.zarr")["train"]
    assert (train.num_valid, train.mean, train.std) == (5, [0.0] * 3, [0.0] * 3)


def test_all_samples_bad(tmp_path: Path) -> None:
    run([(b"x", 0), (b"", 1)], tmp_path / "a.zarr", size=4, on_error="skip")
    assert open_store(tmp_path / "a.zarr")["train"].num_valid == 0


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(source, tmp_path / "a.zarr", dry_run=True, quiet=False, n_jobs=5000)
    assert list(tmp_path.iterdir()) == []
    text = capsys.readouterr().err
    assert "train: 70 images of 3 classes (15 to 30 a class)" in text
    assert "35 chunk files of 2 images" in text
    assert "dry run:" in text
    assert "with 35 jobs (an estimate" in text  # no more than there are chunks


def test_announced_bytes_are_the_bytes_written(
    source: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(source, reference.with_name("other.zarr"), dry_run=True, quiet=False)
    announced = int(capsys.readouterr().err.split("train: ")[2].split(" bytes")[0].replace(",", ""))
    written = sum(len(data) for name, data in tree(reference / "train").items() if not name.endswith("zarr.json"))
    assert announced == written


def test_too_little_space_is_said_before_the_first_image(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.conversion.preflight.free_space", lambda folder: (1000, 1000))
    with pytest.raises(Error, match=r"bytes are needed and 1,000 are free; make room or choose another DST"):
        run(source, tmp_path / "a.zarr", size=24)  # no chunk of which is there: nothing to go on with
    monkeypatch.setattr("pipeline.conversion.preflight.free_space", lambda folder: (10**12, 10))
    with pytest.raises(Error, match=r"files are needed and 10 are free; give a larger --chunk-mb"):
        run(source, tmp_path / "a.zarr")


def test_a_second_conversion_is_refused(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    with Workspace(store).run(None), pytest.raises(Error, match="another conversion into it is running"):
        run(source, store)
    with Workspace(store).run(Part(1, 2)):
        with pytest.raises(Error, match="another conversion into it is running"):
            run(source, store)
        with pytest.raises(Error, match="part 1/2 is running already"):
            run(source, store, part="1/2")
        run(source, store, part="2/2")
    run(source, store)
    assert open_store(store).splits == ["train", "val"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "--size 0: must be 1 to 4096"),
        ({"size": []}, "--size: at least one"),
        ({"size": [8, 16]}, "DST must hold {size}"),
        ({"fit": "zoom"}, "--fit zoom: must be one of crop, stretch, pad"),
        ({"part": "0/4"}, "--part 0/4: I must be from 1 to N"),
        ({"part": "5/4"}, "--part 5/4: I must be from 1 to N"),
        ({"part": "x"}, "--part x: must be I/N"),
        ({"backend": "mpi"}, "--backend mpi: must be one of"),
        ({"scheduler": "tcp://x:1"}, "--scheduler tcp://x:1: goes with --backend dask or ray"),
        ({"n_jobs": 0}, "--n-jobs 0: must be a number of processes"),
        ({"on_error": "ignore"}, "--on-error ignore"),
        ({"part": "1/2", "overwrite": True}, "--overwrite can't go with --part"),
    ],
)
def test_wrong_use_is_one_line(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(source, tmp_path / "a.zarr", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_strangers_folder_is_never_deleted(source: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(UsageError, match="not a"):
            run(source, tmp_path / "precious", **options)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").touch()
    with pytest.raises((UsageError, StoreError)):
        run(source, tmp_path / "file")


def test_an_interrupted_overwrite_can_be_rerun(
    source: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "a.zarr"
    run(source, store)
    rmtree = shutil.rmtree

    def stopped(path: Path, **options: Any) -> None:
        if (path / "zarr.json").exists():
            (path / "zarr.json").unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(source, store, overwrite=True)
    monkeypatch.undo()
    assert all(open_store(store)[split].num_valid for split in open_store(store).splits)  # no half of one
    run(source, store, overwrite=True)
    assert same_tree(reference, store)
    assert leftovers(store) == []


def test_python_samples(tmp_path: Path) -> None:
    jpeg = tmp_path / "a.jpg"
    make_image(0).save(jpeg)
    samples = [(jpeg.read_bytes(), 0), (str(jpeg), 1), (np.asarray(make_image(1)), 0), (make_image(2), 2)]
    run(samples, tmp_path / "a.zarr", no_shuffle=True, n_jobs=2)
    train = open_store(tmp_path / "a.zarr")["train"]
    assert train.labels.tolist() == [0, 1, 0, 2]
    assert np.array_equal(train.image(0), train.image(1))
    assert train.num_valid == 4


def test_a_store_of_format_1_gets_no_new_split(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    run(source, store, split="train", on_error="skip")
    as_format_1(store)
    run(source, store, split="train", on_error="skip")  # finished already
    with pytest.raises(Error, match="has format 1, new splits have 2; .*pipeline copy"):
        run(source, store, split="val", on_error="skip")
    assert open_store(store).splits == ["train"]


def test_the_root_lists_a_split_before_it_appears(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "a.zarr"
    run(source, store, split="val", on_error="skip")
    assert open_store(store).attrs["splits"] == ["val"]
    with monkeypatch.context() as patch, pytest.raises(Error, match="killed"):
        patch.setattr("pipeline.conversion.commit.publish", _killed)
        run(source, store, split="train", on_error="skip")
    assert open_store(store).attrs["splits"] == ["train", "val"]
    assert verify(store, quiet=True)["problems"] == [f"{store}: split train is missing"]
    run(source, store, split="train", on_error="skip")
    assert verify(store, quiet=True)["problems"] == []
    run(source, tmp_path / "b.zarr", on_error="skip")
    assert same_tree(store, tmp_path / "b.zarr")


def _killed(*_: object) -> None:
    raise Error("killed")


def test_chunks_of_another_format_are_not_committed(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    with pytest.raises(BadSamplesError):
        run([(b"x", 0), (np.zeros((4, 4, 3), np.uint8), 0)], store, size=4)
    plan = tmp_path / "a.zarr.work" / "train" / "plan.json"
    plan.write_text(plan.read_text().replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(Error, match="writes format 1"):
        commit(store, on_error="skip", quiet=True)
