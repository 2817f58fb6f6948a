"""The official archives, built in small: three classes whose numbers are in another order than their ids.

Worked out by hand: the ids sort to n01440764 (0), n02100735 (1), n02119789 (2); the ground truth 3, 1, 2, 3 means
n01440764, n02119789, n02100735, n01440764, so the validation labels are 0, 2, 1, 0.
"""

import gzip
import hashlib
import io
import tarfile

import pytest
from layouts import SYNSETS, meta_mat, samples, tar_bytes, val_name, write_devkit, write_files, write_imagenet

from pipeline.errors import UsageError
from pipeline.sources import UNLABELLED, imagenet, open_source

TRAIN = [
    (b"n01440764/n01440764_10.JPEG", 0, b"n01440764 10"),
    (b"n01440764/n01440764_3.JPEG", 0, b"n01440764 3"),
    (b"n02100735/n02100735_2.JPEG", 1, b"n02100735 2"),
    (b"n02100735/n02100735_7.JPEG", 1, b"n02100735 7"),
    (b"n02119789/n02119789_1.JPEG", 2, b"n02119789 1"),
]
VAL = [(val_name(i).encode(), label, f"val {i}".encode()) for i, label in ((1, 0), (2, 2), (3, 1), (4, 0))]
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


@pytest.fixture
def root(tmp_path):
    return write_imagenet(tmp_path / "imagenet")


def test_labels_keys_and_bytes(root):
    found = open_source(root)
    assert found.kind == "imagenet"
    assert found.class_ids == ["n01440764", "n02100735", "n02119789"]
    assert found.class_names == ["tench, Tinca tinca", "English setter", "kit fox, Vulpes macrotis"]
    assert list(found.splits) == ["train", "val"]
    assert samples(found.splits["train"]) == TRAIN
    assert samples(found.splits["val"]) == VAL
    assert found.notes == []


def test_equals_the_unpacked_class_folders(root, tmp_path):
    for key, _, content in TRAIN:
        path = tmp_path / "folder/train" / key.decode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder = open_source(tmp_path / "folder")
    archives = open_source(root)
    assert samples(folder.splits["train"]) == samples(archives.splits["train"])
    assert folder.class_ids == archives.class_ids


def test_one_archive_alone(root):
    train = open_source(root / "ILSVRC2012_img_train.tar")
    assert samples(train.splits["train"]) == TRAIN
    val = open_source(root / "ILSVRC2012_img_val.tar")
    assert list(val.splits) == ["val"]
    assert samples(val.splits["val"]) == VAL
    assert val.class_ids == train.class_ids


def test_train_needs_no_devkit_and_val_says_what_is_missing(root):
    (root / DEVKIT).unlink()
    assert open_source(root, splits=["train"]).class_names is None
    with pytest.raises(UsageError, match=rf"{DEVKIT}: missing, it has the labels of .*val.tar"):
        open_source(root)


def test_only_the_wanted_split_is_indexed(root):
    (root / "ILSVRC2012_img_val.tar").write_bytes(b"")
    assert samples(open_source(root, splits=["train"]).splits["train"]) == TRAIN
    write_imagenet(root)
    found = open_source(root, splits=["val"])
    assert samples(found.splits["val"]) == VAL
    assert found.class_ids == ["n01440764", "n02100735", "n02119789"]


def test_renamed_train_archive_is_known_by_its_content(root):
    (root / "ILSVRC2012_img_train.tar").rename(root / "imagenet.tar")
    found = open_source(root / "imagenet.tar")
    assert found.kind == "imagenet"
    assert samples(found.splits["train"]) == TRAIN


@pytest.mark.parametrize("place", ["", "train/"])
def test_class_archives_taken_out_of_the_train_archive(root, place):
    with tarfile.open(root / "ILSVRC2012_img_train.tar") as archive:
        archive.extractall(root / place, filter="data")
    (root / "ILSVRC2012_img_train.tar").unlink()
    assert samples(open_source(root).splits["train"]) == TRAIN


def test_unpacked_train_with_packed_val(root):
    (root / "ILSVRC2012_img_train.tar").unlink()
    write_files(root, *(f"train/{key.decode()}" for key, _, _ in TRAIN))
    found = open_source(root)
    assert [(key, label) for key, label, _ in samples(found.splits["train"])] == [sample[:2] for sample in TRAIN]
    assert samples(found.splits["val"]) == VAL
    assert samples(open_source(root, splits=["val"]).splits["val"]) == VAL


def test_flat_val_folder_gets_its_labels_from_the_devkit(tmp_path):
    write_devkit(tmp_path / DEVKIT, [3, 1, 2, 3])
    write_files(tmp_path, *(f"train/{key.decode()}" for key, _, _ in TRAIN))
    write_files(tmp_path, *(f"val/{val_name(i)}" for i in (1, 2, 3, 4)))
    found = open_source(tmp_path)
    assert found.kind == "imagenet"
    assert found.splits["val"].labels.tolist() == [0, 2, 1, 0]
    assert found.class_names is not None


def test_flat_val_folder_without_the_devkit_says_what_would_label_it(tmp_path):
    write_files(tmp_path, "train/n01440764/1.JPEG", f"val/{val_name(1)}")
    found = open_source(tmp_path)
    assert found.kind == "folder"
    assert found.splits["val"].labels.tolist() == [UNLABELLED]
    assert found.notes[0] == f"val: ImageNet's validation images; {DEVKIT} beside it would label them"


def test_unpacked_devkit(root):
    with tarfile.open(root / DEVKIT) as archive:
        archive.extractall(root, filter="data")
    (root / DEVKIT).unlink()
    assert samples(open_source(root).splits["val"]) == VAL


def test_both_archive_and_folder(root):
    write_files(root, "train/n01440764/part.JPEG")
    found = open_source(root)
    assert samples(found.splits["train"]) == TRAIN
    assert found.notes == [f"{root}/train: passed over, ILSVRC2012_img_train.tar is read instead"]


def test_labels_go_by_the_number_in_the_name(root):
    val = {val_name(number): f"val {number}".encode() for number in (4, 2)}
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(val))
    found = open_source(root)
    assert samples(found.splits["val"]) == [VAL[1], VAL[3]]
    assert "2 images, 4 lines of ground truth" in found.notes[0]


def test_test_archive_is_unlabelled_and_explained(root):
    content = {f"test/ILSVRC2012_test_{i:08d}.JPEG": b"%d" % i for i in (2, 1)}
    path = root / "ILSVRC2012_img_test_v10102019.tar"
    path.write_bytes(tar_bytes(content))
    found = open_source(root)
    assert list(found.splits) == ["train", "val", "test"]
    assert samples(found.splits["test"]) == [
        (b"ILSVRC2012_test_00000001.JPEG", UNLABELLED, b"1"),
        (b"ILSVRC2012_test_00000002.JPEG", UNLABELLED, b"2"),
    ]
    assert any("the test images have no public labels" in note for note in found.notes)
    assert "test" not in open_source(root, splits=["train", "val"]).splits
    assert list(open_source(path).splits) == ["test"]
    (root / "ILSVRC2012_img_test.tar").write_bytes(tar_bytes(content))
    with pytest.raises(UsageError, match="both hold the test images"):
        open_source(root)


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train_t3.tar", "ILSVRC2012_devkit_t3.tar.gz"])
def test_task_3_is_explained(root, name):
    (root / name).write_bytes(tar_bytes({"n02085620.tar": tar_bytes({"n02085620_1.JPEG": b"dog"})}))
    with pytest.raises(UsageError, match=rf"{name}: of task 3 \(dog breeds\)"):
        open_source(root / name)
    found = open_source(root)
    assert samples(found.splits["train"]) == TRAIN
    assert found.notes == [f"{root / name}: belongs to task 3 (dog breeds), which isn't converted"]


def test_task_3_alone(tmp_path):
    (tmp_path / "ILSVRC2012_img_train_t3.tar").write_bytes(tar_bytes({}))
    wrong(tmp_path, r"no images found; .*_t3.tar: belongs to task 3 \(dog breeds\), which isn't converted; check")


@pytest.mark.parametrize("name", ["ILSVRC2010_images_val.tar", DEVKIT, "ILSVRC2012_bbox_train_v2.tar.gz"])
def test_other_official_files_are_explained(root, name):
    with pytest.raises(UsageError):
        write_devkit(root / name, [1])
        open_source(root / name)


def wrong(root, match):
    with pytest.raises(UsageError, match=match) as caught:
        open_source(root)
    assert "\n" not in str(caught.value)


def test_devkit_of_another_year(root):
    write_devkit(root / DEVKIT, [3, 1, 2, 3], prefix="ILSVRC2010")
    wrong(root, "of another year or task .*get ILSVRC2012_devkit_t12.tar.gz")
    (root / DEVKIT).rename(root / "ILSVRC2010_devkit-1.0.tar.gz")
    wrong(root, "ILSVRC2010_devkit-1.0.tar.gz: a devkit of another year or task")
    write_devkit(root / DEVKIT, [3, 1, 2, 3])
    assert samples(open_source(root).splits["val"]) == VAL


def test_meta_of_another_year_under_the_right_names(root):
    top = "ILSVRC2012_devkit_t12/data"
    files = {f"{top}/meta.mat": meta_mat(prefix="ILSVRC2010"), f"{top}/ILSVRC2012_validation_ground_truth.txt": b"1\n"}
    (root / DEVKIT).write_bytes(gzip.compress(tar_bytes(files)))
    wrong(root, "the synsets in data/meta.mat have no ILSVRC2012_ID, so it is of another year")


@pytest.mark.parametrize("name", ["meta.mat", "ground_truth.txt"])
def test_devkit_without_a_file(root, name):
    write_devkit(root / DEVKIT, [3, 1, 2, 3], drop=name)
    wrong(root, rf"no data/\S*{name} in it")


def test_damaged_devkit(root):
    content = (root / DEVKIT).read_bytes()
    (root / DEVKIT).write_bytes(content[: len(content) // 2])
    wrong(root, rf"{DEVKIT}: can't be read")
    (root / DEVKIT).write_bytes(b"<html>not found</html>")
    wrong(root, rf"{DEVKIT}: can't be read")
    top = "ILSVRC2012_devkit_t12/data"
    files = {f"{top}/meta.mat": b"nonsense" * 50, f"{top}/ILSVRC2012_validation_ground_truth.txt": b"1\n"}
    (root / DEVKIT).write_bytes(gzip.compress(tar_bytes(files)))
    wrong(root, r"data/meta.mat can't be read")


@pytest.mark.parametrize(
    ("line", "shown"), [(5, "'5'"), (0, "'0'"), (-1, "'-1'"), ("n01440764", "'n01440764'"), (4, "'4'")]
)
def test_ground_truth_out_of_range(root, line, shown):
    write_devkit(root / DEVKIT, [3, line, 2, 3])
    wrong(root, rf"ground_truth.txt, line 2: {shown} isn't the number of one of the 3 classes")


def test_fewer_lines_than_images(root):
    write_devkit(root / DEVKIT, [3, 1, 2])
    wrong(root, rf"{val_name(4)} has no ground truth in .*{DEVKIT} \(3 lines\)")


def test_foreign_names_in_val(root):
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes({"ILSVRC2010_val_00000001.JPEG": b"1"}))
    wrong(root, "ILSVRC2010_val_00000001.JPEG has no ground truth")


def test_class_that_train_lacks(root):
    train = {"n01440764.tar": tar_bytes({"n01440764_1.JPEG": b"1"})}
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(train))
    wrong(root, rf"{val_name(2)}: class 'n02119789' and 1 more isn't in the class list")


def test_devkit_with_one_class(tmp_path):
    write_devkit(tmp_path / DEVKIT, [7], synsets=[(7, "n01440764", "tench", 0)])
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes({val_name(1): b"1"}))
    found = open_source(tmp_path)
    assert (found.class_ids, found.class_names) == (["n01440764"], ["tench"])


def test_truncated_class_archive_inside(root):
    inner = tar_bytes({"n01440764_1.JPEG": b"x" * 3000})
    train = {"n01440764.tar": inner[:2000], "n02100735.tar": tar_bytes({"n02100735_1.JPEG": b"1"})}
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(train))
    wrong(root, r"ILSVRC2012_img_train.tar: n01440764.tar: truncated, n01440764_1.JPEG needs")


def test_truncated_train_archive(root):
    path = root / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:-20480])
    wrong(root, r"ILSVRC2012_img_train.tar: truncated")


def test_duplicates(root):
    inner = tar_bytes([("n01440764_1.JPEG", b"1"), ("n01440764_1.JPEG", b"2")])
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes({"n01440764.tar": inner}))
    wrong(root, r"n01440764/n01440764_1.JPEG is twice in")
    twice = [("n01440764.tar", tar_bytes({"1.JPEG": b"1"})), ("x/n01440764.tar", tar_bytes({"2.JPEG": b"2"}))]
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(twice))
    wrong(root, r"n01440764.tar is twice in it")


def test_train_archive_of_something_else(root):
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes({"n01440764/1.JPEG": b"1"}))
    wrong(root, "no class archives nXXXXXXXX.tar in it")


def test_other_members_are_counted(root):
    train = {"n01440764.tar": tar_bytes({"n01440764_1.JPEG": b"1", "._x.JPEG": b"2", "r.txt": b"3"}), "notes.txt": b""}
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(train))
    found = open_source(root, splits=["train"])
    assert len(found.splits["train"]) == 1
    assert found.ignored == {"file that is no class archive": 1, "dot-file": 1, "file that is no image": 1}


def test_check_md5(root, monkeypatch):
    with pytest.raises(UsageError, match=r"train.tar: its MD5 sum is \w{32}, not 1d675b47d978889d74fa0da5fadfb00e"):
        open_source(root, check_md5=True)
    names = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar", imagenet.NAME: DEVKIT}
    sums = {role: hashlib.md5((root / name).read_bytes()).hexdigest() for role, name in names.items()}
    monkeypatch.setattr(imagenet, "MD5", sums)
    assert samples(open_source(root, check_md5=True).splits["val"]) == VAL
    monkeypatch.setitem(sums, "val", "0" * 32)
    assert open_source(root, splits=["train"], check_md5=True).kind == "imagenet"
    with pytest.raises(UsageError, match=r"val.tar: its MD5 sum"):
        open_source(root, check_md5=True)


def test_check_md5_is_for_these_archives_only(tmp_path):
    write_files(tmp_path, "a/1.jpg")
    with pytest.raises(UsageError, match="--check-md5: only the official ImageNet archives"):
        open_source(tmp_path, check_md5=True)


def test_layouts_match_the_real_kit():
    """The helper's own claim: its meta.mat is read by scipy as the fields that the kit documents."""
    from scipy.io import loadmat

    synsets = loadmat(io.BytesIO(meta_mat()), squeeze_me=True)["synsets"]
    assert [str(wnid) for wnid in synsets["WNID"]] == [row[1] for row in SYNSETS]
    assert synsets.dtype.names[:3] == ("ILSVRC2012_ID", "WNID", "words")
