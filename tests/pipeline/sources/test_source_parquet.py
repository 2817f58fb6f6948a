"""Hugging Face parquet in small, written by pyarrow."""

import io
import json
import pickle
import random
import sys

import joblib
import numpy as np
import pytest
from layouts import samples, write_files
from PIL import Image

from pipeline import convert
from pipeline.commands.info import store_info, store_text
from pipeline.errors import BadSample, Error, UsageError
from pipeline.sources import UNLABELLED, open_source, parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
CLASSES = ["tench", "goldfish", "shark"]


def write(
    path, rows, *, classes=CLASSES, group=2, image_type=IMAGE, label_type=None, columns=("image", "label"), **more
):
    """rows: [(image, label)]"""
    label_type = label_type or pa.int64()
    features = {columns[0]: {"_type": "Image"}, columns[1]: {"names": classes, "_type": "ClassLabel"}}
    fields = [(columns[0], image_type), (columns[1], label_type), *((name, kind) for name, (kind, _) in more.items())]
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if classes else None
    arrays = [pa.array([row[i] for row in rows], kind) for i, kind in ((0, image_type), (1, label_type))]
    arrays += [pa.array(values, kind) for kind, values in more.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(arrays, schema=pa.schema(fields, metadata=metadata)), path, row_group_size=group)
    return path


def image(name, content=None):
    return {"bytes": (content or name).encode(), "path": name}


def test_labels_names_keys_and_bytes(tmp_path):
    write(tmp_path / "data/train-00001-of-00002.parquet", [(image("e.jpg"), 0)])
    rows = [(image("b.jpg"), 2), (image("a.jpg"), 0), (image("c.jpg"), 2)]
    write(tmp_path / "data/train-00000-of-00002.parquet", rows)
    write(tmp_path / "data/validation-00000-of-00001.parquet", [(image("v.jpg"), 1)])
    write(tmp_path / "data/test-00000-of-00001.parquet", [(image("t.jpg"), -1), (image("u.jpg"), None)])
    found = open_source(tmp_path)
    assert found.kind == "parquet"
    assert (found.class_ids, found.class_names) == (["0", "1", "2"], CLASSES)
    assert list(found.splits) == ["train", "val", "test"]
    assert samples(found.splits["train"]) == [
        (b"b.jpg", 2, b"b.jpg"),
        (b"a.jpg", 0, b"a.jpg"),
        (b"c.jpg", 2, b"c.jpg"),
        (b"e.jpg", 0, b"e.jpg"),
    ]
    assert samples(found.splits["val"]) == [(b"v.jpg", 1, b"v.jpg")]
    assert found.splits["test"].labels.tolist() == [UNLABELLED, UNLABELLED]


def test_one_file_and_splits_in_folders(tmp_path):
    path = write(tmp_path / "train/0000.parquet", [(image("a.jpg"), 1)])
    write(tmp_path / "test/0000.parquet", [(image("a.jpg"), 1)])
    assert list(open_source(tmp_path).splits) == ["train", "test"]
    path = path.rename(tmp_path / "0000.parquet")
    assert list(open_source(path).splits) == ["train"]
    assert list(open_source(path, splits=["val"]).splits) == ["val"]


@pytest.mark.parametrize("names", [[None, None, None], ["x", "x", "y"], ["x", "", "y"]])
def test_keys_without_names_of_their_own(tmp_path, names):
    rows = [({"bytes": b"x", "path": name}, 0) for name in names]
    write(tmp_path / "data/train-0.parquet", rows)
    write(tmp_path / "data/train-1.parquet", [(image("z"), 0)])
    keys = [key for key, _, _ in samples(open_source(tmp_path).splits["train"])]
    assert keys == [b"data/train-0.parquet/%d" % i for i in range(3)] + [b"data/train-1.parquet/0"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_plain_bytes(tmp_path, kind):
    write(tmp_path / "x.parquet", [(b"one", 1), (b"two", 0)], image_type=kind, classes=None)
    found = open_source(tmp_path / "x.parquet")
    assert samples(found.splits["train"]) == [(b"x.parquet/0", 1, b"one"), (b"x.parquet/1", 0, b"two")]
    assert found.class_names is None


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_labels_are_class_ids(tmp_path, kind):
    rows = [(image("1"), "dog"), (image("2"), "cat"), (image("3"), None)]
    write(tmp_path / "x.parquet", rows, label_type=kind, classes=None)
    found = open_source(tmp_path / "x.parquet")
    assert found.class_ids == ["cat", "dog"]
    assert found.splits["train"].labels.tolist() == [1, 0, UNLABELLED]


def test_small_integers_without_names(tmp_path):
    write(tmp_path / "x.parquet", [(image("1"), 10), (image("2"), 2)], label_type=pa.uint8(), classes=None)
    found = open_source(tmp_path / "x.parquet")
    assert found.splits["train"].labels.tolist() == [10, 2]
    assert len(found.class_ids) == 11


@pytest.mark.parametrize("columns", [("img", "fine_label"), ("image", "cls"), ("anything", "at all")])
def test_other_column_names(tmp_path, columns):
    extra = {"width": (pa.int32(), [5]), "note": (pa.string(), ["n"])}
    write(tmp_path / "x.parquet", [(image("1"), 1)], columns=columns, **extra)
    assert samples(open_source(tmp_path / "x.parquet").splits["train"]) == [(b"1", 1, b"1")]


def test_booleans_are_two_classes(tmp_path):
    rows = [(image("1"), True), (image("2"), False), (image("3"), True)]
    write(tmp_path / "x.parquet", rows, label_type=pa.bool_(), classes=None)
    found = open_source(tmp_path / "x.parquet")
    assert list(found.class_ids) == ["False", "True"]
    assert found.splits["train"].labels.tolist() == [1, 0, 1]


def test_columns_that_cannot_be_labels_are_not_pointed_to(tmp_path):
    write(tmp_path / "x.parquet", [(image("1"), [1])], label_type=pa.list_(pa.int64()), classes=None)
    with pytest.raises(UsageError, match=r"label: list.*booleans.*, or give --unlabelled$") as caught:
        open_source(tmp_path / "x.parquet")
    assert "--label-column" not in str(caught.value)
    with pytest.raises(UsageError, match=r"list<.*> can't be the label; columns that can be: none"):
        open_source(tmp_path / "x.parquet", label_column="label")
    with pytest.raises(UsageError, match="--label-column nix: no such column"):
        open_source(tmp_path / "x.parquet", label_column="nix")


def test_missing_columns_are_named_with_those_that_are_there(tmp_path):
    write(tmp_path / "x.parquet", [(image("1"), 1)], columns=("image", "score"), classes=None)
    with pytest.raises(UsageError, match="other columns .score.; name"):
        open_source(tmp_path / "x.parquet")
    assert open_source(tmp_path / "x.parquet", unlabelled=True).splits["train"].labels.tolist() == [UNLABELLED]
    write(tmp_path / "x.parquet", [("1.jpg", 1)], image_type=pa.string(), classes=None)
    with pytest.raises(UsageError, match=r"x.parquet: no column of images.* image: string, label: int64; for paths"):
        open_source(tmp_path / "x.parquet")
    write(tmp_path / "x.parquet", [(image("1"), 1.5)], label_type=pa.float64(), classes=None)
    with pytest.raises(UsageError, match="label 1.5 in label"):
        open_source(tmp_path / "x.parquet")


@pytest.mark.parametrize("metadata", [b"nonsense", b'{"info": null}', b"[]"])
def test_odd_metadata_is_passed_over(tmp_path, metadata):
    table = pa.table({"image": pa.array([image("1")], IMAGE), "label": [1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "x.parquet")
    assert open_source(tmp_path / "x.parquet").class_names is None


@pytest.mark.parametrize("label", [3, -2])
def test_label_out_of_range_names_the_row(tmp_path, label):
    rows = [(image(str(i)), 0) for i in range(4)] + [(image("x"), label)]
    write(tmp_path / "x.parquet", rows)
    with pytest.raises(UsageError, match=rf"x.parquet, sample 0 of row group 2: label {label}"):
        open_source(tmp_path / "x.parquet")


def test_files_that_disagree(tmp_path):
    write(tmp_path / "train-0.parquet", [(image("1"), 1)])
    write(tmp_path / "train-1.parquet", [(image("2"), 1)], classes=["a", "b", "c"])
    with pytest.raises(UsageError, match=r"train-1.parquet: has other columns or class names"):
        open_source(tmp_path)
    (tmp_path / "train-1.parquet").rename(tmp_path / "val-1.parquet")
    with pytest.raises(UsageError, match="name the classes in different ways"):
        open_source(tmp_path)


@pytest.mark.parametrize("kinds", [(pa.string(), pa.null()), (pa.list_(pa.int32()), pa.list_(pa.int64()))])
def test_spare_columns_may_differ_between_files(tmp_path, kinds):
    for number, kind in enumerate(kinds):
        write(tmp_path / f"train-{number}.parquet", [(image(str(number)), 1)], spare=(kind, [None]))
    assert samples(open_source(tmp_path).splits["train"]) == [(b"0", 1, b"0"), (b"1", 1, b"1")]


def test_rows_without_an_image(tmp_path):
    rows = [
        ({"bytes": None, "path": None}, 0),
        (None, 0),
        ({"bytes": b"", "path": "e.jpg"}, 0),
        ({"bytes": None, "path": "beside.jpg"}, 0),
        ({"bytes": None, "path": "gone.jpg"}, 0),
    ]
    write(tmp_path / "x.parquet", rows)
    write_files(tmp_path, "beside.jpg")
    source = open_source(tmp_path / "x.parquet").splits["train"]
    reasons = {}
    for i in (0, 1, 2, 4):
        with pytest.raises(BadSample) as caught:
            source.read(i)
        reasons[i] = caught.value.reason
    assert reasons == {0: "missing", 1: "missing", 2: "empty", 4: "missing"}
    assert source.read(3) == b"beside.jpg"


def test_damaged_file(tmp_path):
    path = write(tmp_path / "x.parquet", [(image(str(i), "x" * 500), 0) for i in range(40)])
    source = open_source(path).splits["train"]
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(UsageError, match=r"x.parquet: can't be read as parquet"):
        open_source(path)
    with pytest.raises(Error, match=r"x.parquet: can't be read as parquet"):
        source.read(0)
    path.write_bytes(b"PAR1" + bytes(300))
    with pytest.raises(UsageError, match=r"x.parquet: can't be read as parquet"):
        open_source(path)


def test_only_row_groups_are_read_and_few_are_kept(tmp_path, monkeypatch):
    rng = random.Random(0)
    contents = [rng.randbytes(10_000) for _ in range(40)]
    rows = [({"bytes": content, "path": f"{i}.jpg"}, 0) for i, content in enumerate(contents)]
    source = open_source(write(tmp_path / "x.parquet", rows, group=4)).splits["train"]
    read = []
    real = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, *a, **kw: (read.extend(kw["row_groups"]), real(self, *a, **kw))[1]
    )
    for name in ("read", "read_row_groups", "read_row_group"):
        monkeypatch.delattr(pq.ParquetFile, name)
    assert [source.read(i) for i in range(40)] == contents
    assert read == list(range(10))
    assert [source.read(i) for i in (39, 0)] == [contents[39], contents[0]]
    assert read == list(range(10))  # all fit into the cache
    monkeypatch.setattr(parquet, "CACHE_BYTES", 90_000)  # two groups of 40 kB
    read.clear()
    source = pickle.loads(pickle.dumps(source))
    for i in (0, 4, 0, 8, 0, 4):
        assert source.read(i) == contents[i]
    assert read == [0, 1, 2, 1]  # group 2 pushed 1 out; 0 had been used later
    assert len(source._groups) == 2


def test_large_images_are_shuffled_by_row_groups(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", [(image(f"{i}.jpg", "x" * 1000), i % 2) for i in range(10)], group=4)
    assert open_source(path).splits["train"].blocks is None
    monkeypatch.setattr(parquet, "CACHE_BYTES", 5000)
    assert open_source(path).splits["train"].blocks.tolist() == [0, 4, 8, 10]
    assert open_source(path, limit_per_class=3).splits["train"].blocks.tolist() == [0, 4, 6]


def test_the_store_says_what_was_shuffled_as_a_whole(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    rows = [({"bytes": buffer.getvalue(), "path": f"{i}.png"}, 0) for i in range(10)]
    for split in ("train", "val"):
        write(tmp_path / "data" / f"{split}.parquet", rows, group=4)

    def orders(name, **options):
        convert(tmp_path / "data", tmp_path / name, size=8, n_jobs=1, quiet=True, **options)
        return [json.loads((tmp_path / name / split / "zarr.json").read_text())["attributes"]["order"] for split in
                ("train", "val")]  # fmt: skip

    plain = {"shuffled": False, "seed": None}
    assert orders("small.zarr") == [{"shuffled": True, "seed": 0}, plain]
    monkeypatch.setattr(parquet, "CACHE_BYTES", 100)
    assert orders("large.zarr", seed=3) == [{"shuffled": True, "seed": 3, "blocks": "row groups"}, plain]
    assert orders("kept.zarr", no_shuffle=True) == [plain, plain]
    assert "order  shuffled by row groups, seed 3" in store_text(store_info(tmp_path / "large.zarr"))
    assert orders("large.zarr", seed=3)[0]["blocks"] == "row groups"  # finished already: not refused


def test_a_worker_maps_the_index_without_row_groups(tmp_path):
    path = write(tmp_path / "x.parquet", [(image("a.jpg", "x" * 100_000), 1), (image("b.jpg"), 0)])
    source = open_source(path).splits["train"]
    source.read(0)
    joblib.dump(source, tmp_path / "index")
    assert (tmp_path / "index").stat().st_size < 20_000
    assert samples(joblib.load(tmp_path / "index", mmap_mode="r")) == samples(source)


def test_stamps_are_of_the_file(tmp_path):
    write(tmp_path / "train-0.parquet", [(image("a"), 1)] * 3)
    write(tmp_path / "train-1.parquet", [(image("b"), 1)])
    source = open_source(tmp_path).splits["train"]
    sizes = [(tmp_path / f"train-{i}.parquet").stat().st_size for i in (0, 1)]
    assert source.change_stamps(np.array([3, 0, 2]))[:, 0].tolist() == [sizes[1], sizes[0], sizes[0]]
    (tmp_path / "train-0.parquet").unlink()
    assert source.change_stamps(np.array([0])).tolist() == [[-1, -1]]


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", [(image("a"), 1)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r'parquet needs pyarrow; run `pip install "efficient-imagenet\[parquet\]"`'):
        open_source(path)
