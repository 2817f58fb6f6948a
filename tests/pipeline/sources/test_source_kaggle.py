"""The Kaggle tree in small."""

import shutil

import pytest
from layouts import samples, val_name, write_files

from pipeline.errors import UsageError
from pipeline.sources import UNLABELLED, open_source

SOLUTION = """ImageId,PredictionString
ILSVRC2012_val_00000002,n02100735 85 1 499 272
ILSVRC2012_val_00000001,n01440764 111 108 441 193 n01440764 1 2 3 4
"""


@pytest.fixture
def root(tmp_path):
    data = "ILSVRC/Data/CLS-LOC"
    write_files(
        tmp_path,
        f"{data}/train/n01440764/n01440764_1.JPEG",
        f"{data}/train/n02100735/n02100735_1.JPEG",
        f"{data}/val/{val_name(1)}",
        f"{data}/val/{val_name(2)}",
        f"{data}/test/ILSVRC2012_test_00000001.JPEG",
        "ILSVRC/Annotations/CLS-LOC/train/n01440764/n01440764_1.xml",
    )
    (tmp_path / "LOC_val_solution.csv").write_text(SOLUTION)
    (tmp_path / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\nn02100735 English setter\n")
    return tmp_path


@pytest.mark.parametrize("below", ["", "ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"])
def test_labels_keys_and_names(root, below):
    found = open_source(root / below)
    assert found.kind == "kaggle"
    assert found.class_ids == ["n01440764", "n02100735"]
    assert found.class_names == ["tench, Tinca tinca", "English setter"]
    assert list(found.splits) == ["train", "val", "test"]
    shown = {split: [sample[:2] for sample in samples(source)] for split, source in found.splits.items()}
    assert shown == {
        "train": [(b"n01440764/n01440764_1.JPEG", 0), (b"n02100735/n02100735_1.JPEG", 1)],
        "val": [(val_name(1).encode(), 0), (val_name(2).encode(), 1)],
        "test": [(b"ILSVRC2012_test_00000001.JPEG", UNLABELLED)],
    }
    assert found.splits["val"].read(0) == f"ILSVRC/Data/CLS-LOC/val/{val_name(1)}".encode()


def test_only_val_has_trains_map(root):
    found = open_source(root, splits=["val"])
    assert list(found.splits) == ["val"]
    assert found.splits["val"].labels.tolist() == [0, 1]


def test_without_the_mapping_there_are_no_names(root):
    (root / "LOC_synset_mapping.txt").unlink()
    assert open_source(root).class_names is None


def test_without_the_solution(root):
    (root / "LOC_val_solution.csv").unlink()
    with pytest.raises(UsageError, match=r"LOC_val_solution.csv: missing, it has the labels of .*val"):
        open_source(root)
    assert list(open_source(root, splits=["train", "test"]).splits) == ["train", "test"]


def test_val_sorted_into_class_folders(root):
    val = root / "ILSVRC/Data/CLS-LOC/val"
    (val / "n02100735").mkdir()
    shutil.move(val / val_name(2), val / "n02100735")
    (val / val_name(1)).unlink()
    (root / "LOC_val_solution.csv").unlink()
    assert open_source(root).splits["val"].labels.tolist() == [1]


def test_image_that_the_solution_lacks(root):
    write_files(root, *(f"ILSVRC/Data/CLS-LOC/val/{val_name(i)}" for i in (7, 8)))
    with pytest.raises(UsageError, match=rf"{val_name(7)} and 1 more: not in .*LOC_val_solution.csv"):
        open_source(root)


def test_solution_that_lists_more(root):
    with open(root / "LOC_val_solution.csv", "a") as file:
        file.write("ILSVRC2012_val_00000003,n01440764 1 2 3 4\r\n")
    assert "1 image that" in open_source(root).notes[0]


def test_damaged_solution(root):
    (root / "LOC_val_solution.csv").write_text(SOLUTION + "ILSVRC2012_val_00000003\n")
    with pytest.raises(UsageError, match=r"LOC_val_solution.csv, line 4: not"):
        open_source(root)


def test_class_that_train_lacks(root):
    (root / "LOC_val_solution.csv").write_text(SOLUTION.replace("n02100735 85", "n09999999 85"))
    with pytest.raises(UsageError, match=rf"{val_name(2)}: class 'n09999999' isn't in"):
        open_source(root)


def test_no_tree(tmp_path):
    write_files(tmp_path, "a/1.jpg")
    with pytest.raises(UsageError, match="no ILSVRC/Data/CLS-LOC in it"):
        open_source(tmp_path, "kaggle")
