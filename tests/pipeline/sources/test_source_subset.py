"""Label order and subsets: the same for every source, so a folder stands for all."""

import pickle

import joblib
import numpy as np
import pytest
from layouts import samples, val_name, write_files, write_imagenet

from pipeline.errors import UsageError
from pipeline.sources import UNLABELLED, open_source


@pytest.fixture
def root(tmp_path):
    names = [f"{split}/{label}/{i}.jpg" for split in ("train", "val") for label in ("1", "2", "10") for i in range(3)]
    return write_files(tmp_path / "data", *names)


def lines(tmp_path, text):
    (tmp_path / "list.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path / "list.txt"


def shown(source):
    return [(key.decode(), label) for key, label, _ in samples(source)]


def test_numeric_order(root):
    assert open_source(root).class_ids == ["1", "10", "2"]
    found = open_source(root, class_order="numeric")
    assert found.class_ids == ["1", "2", "10"]
    assert shown(found.splits["val"])[::3] == [("1/0.jpg", 0), ("10/0.jpg", 2), ("2/0.jpg", 1)]
    write_files(root, "train/x/1.jpg")
    with pytest.raises(UsageError, match="--class-order numeric: class 'x' is no integer"):
        open_source(root, class_order="numeric")


def test_order_from_a_file_is_the_line_number(root, tmp_path):
    found = open_source(root, class_order=lines(tmp_path, "\ufeff# mine\r\n10\r\n\r\n77\r\n1\r\n2\r\n"))
    assert found.class_ids == ["10", "77", "1", "2"]
    assert [label for _, label in shown(found.splits["train"])[::3]] == [2, 0, 3]
    assert found.notes == ["train: 1 of 4 classes has no image (77); it keeps its label"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n2\n", r"--class-order .*list.txt: lacks class '10'; add it"),
        ("1\n2\n10\n2\n", "names class '2' more than once"),
        ("# nothing\n", "no class in it; write one class id per line"),
    ],
)
def test_bad_order_files(root, tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        open_source(root, class_order=lines(tmp_path, text))
    with pytest.raises(UsageError, match=r"--class-order .*nowhere: No such file"):
        open_source(root, class_order=tmp_path / "nowhere")


def test_classes_are_renumbered_in_sorted_order(root, tmp_path):
    found = open_source(root, classes=lines(tmp_path, "2\n10\n"))
    assert found.class_ids == ["10", "2"]
    wanted = [(f"{name}/{i}.jpg", label) for label, name in enumerate(("10", "2")) for i in range(3)]
    assert shown(found.splits["train"]) == wanted
    source = found.splits["val"]
    assert source.labels.dtype == np.int32
    blob, offsets = source.keys()
    assert blob.tobytes() == b"10/0.jpg10/1.jpg10/2.jpg2/0.jpg2/1.jpg2/2.jpg"
    assert offsets.tolist() == [0, 8, 16, 24, 31, 38, 45]


def test_classes_with_order(root, tmp_path):
    (tmp_path / "order.txt").write_text("2\n10\n")
    found = open_source(root, classes=lines(tmp_path, "10\n2\n"), class_order=tmp_path / "order.txt")
    assert found.class_ids == ["2", "10"]
    assert found.splits["train"].labels.tolist() == [1, 1, 1, 0, 0, 0]


def test_unknown_classes_are_all_named(root, tmp_path):
    with pytest.raises(UsageError, match=r"class '3', '4', '5' and 1 more not in .*data"):
        open_source(root, classes=lines(tmp_path, "1\n3\n4\n5\n6\n"))


@pytest.mark.parametrize(
    "text",
    [
        "n02119789\nn01440764\n",
        "n02119789 kit fox, Vulpes macrotis\nn01440764 tench, Tinca tinca\n",
        "n02119789,kit fox\nn01440764,tench\n",
        "kit fox, Vulpes macrotis\ntench, Tinca tinca\n",
    ],
)
def test_lists_of_imagenet_classes(tmp_path, text):
    found = open_source(write_imagenet(tmp_path / "imagenet"), classes=lines(tmp_path, text))
    assert found.class_ids == ["n01440764", "n02119789"]
    assert found.class_names == ["tench, Tinca tinca", "kit fox, Vulpes macrotis"]
    assert shown(found.splits["val"]) == [(val_name(1), 0), (val_name(2), 1), (val_name(4), 0)]


def test_limit_per_class(root):
    found = open_source(root, limit_per_class=2)
    assert shown(found.splits["train"]) == [
        (f"{name}/{i}.jpg", label) for label, name in enumerate(("1", "10", "2")) for i in (0, 1)
    ]
    assert len(found.splits["val"]) == 6
    assert len(open_source(root, limit_per_class=9).splits["train"]) == 9
    with pytest.raises(UsageError, match="--limit-per-class 0: must be at least 1"):
        open_source(root, limit_per_class=0)


def test_unlabelled_samples(root, tmp_path):
    write_files(root, *(f"test/{i}.jpg" for i in range(5)))
    limited = open_source(root, limit_per_class=2)
    assert shown(limited.splits["test"]) == [("0.jpg", UNLABELLED), ("1.jpg", UNLABELLED)]
    ordered = open_source(root, class_order="numeric")
    assert ordered.splits["test"].labels.tolist() == [UNLABELLED] * 5
    chosen = open_source(root, classes=lines(tmp_path, "1\n"))
    assert list(chosen.splits) == ["train", "val"]
    assert chosen.notes == ["test: no image of the chosen classes; the split is left out"]
    with pytest.raises(UsageError, match="no images in split 'test'"):
        open_source(root, classes=lines(tmp_path, "1\n"), splits=["train", "test"])


def test_a_subset_reads_stamps_and_pickles_as_its_source(root, tmp_path):
    whole = open_source(root).splits["train"]
    part = open_source(root, classes=lines(tmp_path, "2\n"), limit_per_class=2).splits["train"]
    assert part.change_stamps(np.array([1])).tolist() == whole.change_stamps(np.array([7])).tolist()
    assert samples(pickle.loads(pickle.dumps(part))) == samples(part)
    joblib.dump(part, tmp_path / "index")
    assert samples(joblib.load(tmp_path / "index", mmap_mode="r")) == samples(part)
