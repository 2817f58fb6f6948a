"""WebDataset shards."""

import json

import numpy as np
import pytest
from layouts import samples, tar_bytes

from pipeline.errors import UsageError
from pipeline.sources import UNLABELLED, open_source


def write_shard(path, *files):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes([(name, content.encode()) for name, content in files]))
    return path


def test_cls_labels_keep_their_numbers(tmp_path):
    path = write_shard(
        tmp_path / "x.tar",
        ("b/000.jpg", "first"),
        ("b/000.cls", "10\n"),
        ("a/001.cls", "2"),
        ("a/001.PNG", "second"),
        ("002.jpeg", "third"),
        ("002.cls", "-1"),
        ("002.json", '{"caption": "x"}'),
        ("002.txt", "words"),
        ("__info__.json", "{}"),
        ("README", "hello"),
        ("._003.jpg", "dross"),
        ("004.cls", "1"),
    )
    found = open_source(path)
    assert found.kind == "webdataset"
    assert found.class_ids == [str(i) for i in range(11)]
    assert samples(found.splits["train"]) == [
        (b"b/000", 10, b"first"),
        (b"a/001", 2, b"second"),
        (b"002", UNLABELLED, b"third"),
    ]
    assert found.ignored == {"sample without an image": 1, "file of a sample that isn't used": 4}


@pytest.mark.parametrize(
    ("content", "label"),
    [
        ("7", 7),
        ('{"label": 7, "width": 3}', 7),
        ('{"cls": "7"}', 7),
        ('{"class_id": 7}', 7),
        ('{"label": null, "class": 7}', 7),
        ('{"label": -1}', UNLABELLED),
    ],
)
def test_json_labels(tmp_path, content, label):
    found = open_source(write_shard(tmp_path / "x.tar", ("1.jpg", "i"), ("1.json", content)))
    assert found.kind == "webdataset"
    assert found.splits["train"].labels.tolist() == [label]


def test_text_labels_are_class_ids(tmp_path):
    path = write_shard(tmp_path / "x.tar", *_samples({"1": "dog", "2": "cat", "3": "dog", "4": "-1"}))
    found = open_source(path)
    assert found.class_ids == ["cat", "dog"]
    assert found.splits["train"].labels.tolist() == [1, 0, 1, UNLABELLED]


def _samples(labels):
    for key, label in labels.items():
        yield f"{key}.jpg", f"image {key}"
        yield f"{key}.cls", label


def test_extensions_are_all_after_the_first_dot(tmp_path):
    path = write_shard(
        tmp_path / "x.tar",
        ("d.1/a.b/k.left.png", "left"),
        ("d.1/a.b/k.jpg", "main"),
        ("d.1/a.b/k.cls", "0"),
    )
    assert samples(open_source(path).splits["train"]) == [(b"d.1/a.b/k", 0, b"main")]
    write_shard(path, ("k.image.jpg", "main"), ("k.cls", "0"))
    assert samples(open_source(path, "webdataset").splits["train"]) == [(b"k", 0, b"main")]
    write_shard(path, ("k.jpg", "1"), ("k.png", "2"), ("k.cls", "0"))
    with pytest.raises(UsageError, match=r"x.tar: sample k has the images jpg and png; keep one"):
        open_source(path)


def test_shards_in_order_and_splits_by_name(tmp_path):
    write_shard(tmp_path / "in1k-train-01.tar", *_samples({"c": "1", "d": "0"}))
    write_shard(tmp_path / "in1k-train-00.tar", *_samples({"z": "2", "a": "0"}))
    write_shard(tmp_path / "in1k-validation-00.tar", *_samples({"v": "2"}))
    found = open_source(tmp_path)
    assert list(found.splits) == ["train", "val"]
    assert [sample[:2] for sample in samples(found.splits["train"])] == [(b"z", 2), (b"a", 0), (b"c", 1), (b"d", 0)]
    assert samples(found.splits["val"]) == [(b"v", 2, b"image v")]
    only = open_source(tmp_path, splits=["val"])
    assert list(only.splits) == ["val"]
    assert only.class_ids == ["0", "1", "2"]


def test_val_label_out_of_trains_range(tmp_path):
    write_shard(tmp_path / "train.tar", *_samples({"a": "0", "b": "1"}))
    write_shard(tmp_path / "val.tar", *_samples({"v": "1", "w": "2"}))
    with pytest.raises(UsageError, match=r"val.tar: w: label 2 is out of range; labels go from 0 to 1"):
        open_source(tmp_path)


def test_keys_that_shards_share_get_the_shards_name(tmp_path):
    write_shard(tmp_path / "s0.tar", *_samples({"000": "0", "001": "1"}))
    write_shard(tmp_path / "s1.tar", *_samples({"000": "1"}))
    found = open_source(tmp_path)
    assert [key for key, _, _ in samples(found.splits["train"])] == [b"s0/000", b"s0/001", b"s1/000"]


def test_a_sample_twice_in_a_shard(tmp_path):
    write_shard(tmp_path / "x.tar", *_samples({"a": "0"}), ("a.jpg", "again"))
    with pytest.raises(UsageError, match=r"a.jpg is twice in it"):
        open_source(tmp_path)
    write_shard(tmp_path / "x.tar", *_samples({"a": "0", "b": "1"}), *_samples({"a": "1"}))
    with pytest.raises(UsageError, match=r"a.jpg is twice in it"):
        open_source(tmp_path)


def test_labels_for_some_samples_only(tmp_path):
    write_shard(tmp_path / "x.tar", *_samples({"a": "0"}), ("b.jpg", "image b"), ("c.jpg", "image c"))
    with pytest.raises(UsageError, match=r"x.tar: b: no .cls, and no label in a .json"):
        open_source(tmp_path)


def test_no_labels_at_all(tmp_path):
    found = open_source(
        write_shard(tmp_path / "x.tar", ("a.jpg", "1"), ("a.json", "{}"), ("b.jpg", "2")), "webdataset", unlabelled=True
    )
    assert found.splits["train"].labels.tolist() == [UNLABELLED] * 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("b.cls", "", r"x.tar: b.cls: empty"), ("b.json", "{label:", r"x.tar: b.json: not JSON")],
)
def test_damaged_labels(tmp_path, name, content, message):
    write_shard(tmp_path / "x.tar", *_samples({"a": "0"}), ("b.jpg", "image b"), (name, content))
    with pytest.raises(UsageError, match=message):
        open_source(tmp_path)


def test_annotations_beside_images_make_no_webdataset(tmp_path):
    write_shard(tmp_path / "x.tar", ("cat/1.jpg", "1"), ("cat/1.json", json.dumps({"boxes": []})), ("dog/2.jpg", "2"))
    found = open_source(tmp_path / "x.tar")
    assert found.kind == "tar"
    assert found.class_ids == ["cat", "dog"]
    forced = open_source(tmp_path / "x.tar", "webdataset", unlabelled=True)
    assert forced.kind == "webdataset"
    assert forced.splits["train"].labels.tolist() == [UNLABELLED] * 2


def test_stamps_are_of_the_image(tmp_path):
    source = open_source(write_shard(tmp_path / "x.tar", *_samples({"a": "0", "bb": "1"}))).splits["train"]
    assert source.change_stamps(np.array([0, 1]))[:, 0].tolist() == [7, 8]
