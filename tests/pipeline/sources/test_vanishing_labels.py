"""Labels neither vanish nor shift in silence: what may hold them is read, or named in a refusal."""

import json
import os
import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from layouts import tar_bytes, write_files

from pipeline import convert, open_store
from pipeline.commands.verify import verify
from pipeline.errors import UsageError
from pipeline.sources import UNLABELLED, open_source
from pipeline.sources.ignored import describe
from pipeline.sources.names import splits_among

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def labels(found, split="train"):
    return {found.splits[split].key(i).decode(): int(label) for i, label in enumerate(found.splits[split].labels)}


def refuses(src, *words, kind=None, **options):
    """The source is refused with all these words, and --unlabelled takes it."""
    with pytest.raises(UsageError) as caught:
        open_source(src, kind, **options)
    assert all(word in str(caught.value) for word in (*words, "--unlabelled")), str(caught.value)
    assert "\n" not in str(caught.value)
    found = open_source(src, kind, unlabelled=True, **options)
    assert any((np.asarray(source.labels) == UNLABELLED).all() for source in found.splits.values())


def write_table(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# --- WebDataset

IMAGES = [f"{i:04d}" for i in range(100)]


@pytest.mark.parametrize("order", ["images first", "labels first", "in pairs of two"])
def test_a_samples_files_need_not_lie_side_by_side(tmp_path, order):
    jpg = [(f"{key}.jpg", b"j" + key.encode()) for key in IMAGES]
    cls = [(f"{key}.cls", b"%d" % (i % 10)) for i, key in enumerate(IMAGES)]
    pairs = [file for i in range(0, 100, 2) for file in (*jpg[i : i + 2], *cls[i : i + 2])]
    files = {"images first": jpg + cls, "labels first": cls + jpg, "in pairs of two": pairs}[order]
    (tmp_path / "x.tar").write_bytes(tar_bytes(files))
    found = open_source(tmp_path / "x.tar")
    assert found.kind == "webdataset"
    assert labels(found) == {key: i % 10 for i, key in enumerate(IMAGES)}
    assert found.splits["train"].read(3) == b"j0003"


@pytest.mark.parametrize(
    ("image", "extension", "contents"),
    [
        ("jpg", "json", ['{"target": 3}', '{"target": 11}']),
        ("jpg", "json", ["3.0", '{"label": 11.0}']),
        ("input.jpg", "output.cls", ["3", "11"]),
        ("jpg", "cls", ["3.0", "11.0"]),
    ],
)
def test_other_forms_of_labels_are_read(tmp_path, image, extension, contents):
    files = [(f"{key}.{image}", b"j") for key in "ab"]
    files += [(f"{key}.{extension}", text.encode()) for key, text in zip("ab", contents, strict=True)]
    (tmp_path / "x.tar").write_bytes(tar_bytes(files))
    found = open_source(tmp_path / "x.tar")
    assert found.kind == "webdataset"
    assert labels(found) == {"a": 3, "b": 11}
    assert len(found.class_ids) == 12


@pytest.mark.parametrize(("extension", "text"), [("txt", "cat"), ("json", '{"kind": "cat"}'), ("xml", "<a/>")])
def test_what_lies_beside_images_in_a_tar_is_named(tmp_path, extension, text):
    files = [(f"{key}.{kind}", text.encode()) for key in "abcd" for kind in ("jpg", extension)]
    (tmp_path / "x.tar").write_bytes(tar_bytes(files))
    refuses(tmp_path / "x.tar", f".{extension}")
    refuses(tmp_path / "x.tar", f".{extension}", "--label-column", kind="webdataset")


@pytest.mark.parametrize(("extension", "text", "column"), [("txt", "{}", "txt"), ("json", '{{"kind": "{}"}}', "kind")])
def test_label_column_of_a_webdataset(tmp_path, extension, text, column):
    files = [(f"{key}.{kind}", text.format(key * 2).encode()) for key in "ab" for kind in ("jpg", extension)]
    (tmp_path / "x.tar").write_bytes(tar_bytes(files))
    found = open_source(tmp_path / "x.tar", "webdataset", label_column=column)
    assert (found.class_ids, labels(found)) == (["aa", "bb"], {"a": 0, "b": 1})
    assert open_source(tmp_path / "x.tar", label_column=column).kind == "webdataset"


def test_a_table_in_or_beside_a_tar_is_named(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_bytes({"train/1.jpg": b"1", "train.csv": b"id,label"}))
    refuses(tmp_path / "a.tar", "train.csv")
    (tmp_path / "b.tar").write_bytes(tar_bytes({"1.jpg": b"1"}))
    assert labels(open_source(tmp_path / "b.tar")) == {"1.jpg": UNLABELLED}
    write_table(tmp_path / "b_labels.csv", "id,label\n")
    refuses(tmp_path / "b.tar", "b_labels.csv")


# --- manifests


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_label_column_of_another_name(tmp_path, suffix):
    rows = [("1.jpg", "dog", 7), ("2.jpg", "cat", 8)]
    if suffix == ".csv":
        text = "Path,Species,width\n" + "".join(f"{path},{label},{width}\n" for path, label, width in rows)
    else:
        text = "".join(json.dumps({"path": path, "Species": label, "width": w}) + "\n" for path, label, w in rows)
    path = write_table(tmp_path / f"x{suffix}", text)
    refuses(path, "species", "width", "--label-column")
    found = open_source(path, label_column="Species")
    assert (found.class_ids, labels(found)) == (["cat", "dog"], {"1.jpg": 1, "2.jpg": 0})
    with pytest.raises(UsageError, match=r"no column for the label among path, species, width"):
        open_source(path, label_column="nothing")


def test_an_image_column_of_another_name(tmp_path):
    path = write_table(tmp_path / "x.csv", "where,path,label\n1.jpg,old/1.jpg,a\n")
    assert labels(open_source(path, image_column="where")) == {"1.jpg": 0}
    with pytest.raises(UsageError, match="no column for the image among where"):
        open_source(path, image_column="photo")


def test_labels_that_begin_later_are_not_dropped(tmp_path):
    path = write_table(tmp_path / "x.jsonl", '{"path": "1.jpg"}\n{"path": "2.jpg", "label": "a"}\n')
    with pytest.raises(UsageError, match="line 1: no label, but line 2 has one"):
        open_source(path)


def test_paths_alone_are_unlabelled(tmp_path):
    assert labels(open_source(write_table(tmp_path / "x.csv", "path\n1.jpg\n"))) == {"1.jpg": UNLABELLED}


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        (["0.0", "1.0", "10.0", "2.0"], [0, 1, 10, 2]),
        (["0", "1.0", "10", "2."], [0, 1, 10, 2]),
        (["3.0", "3", "-1.0", "-1"], [3, 3, UNLABELLED, UNLABELLED]),
        (["07", "1", "10", "2"], [0, 1, 2, 3]),  # ids: text
        (["1.0b", "1", "10", "2"], [1, 0, 2, 3]),
    ],
)
def test_whole_numbers_in_a_table(tmp_path, stated, wanted):
    text = "path,label\n" + "".join(f"{i}.jpg,{label}\n" for i, label in enumerate(stated))
    assert list(labels(open_source(write_table(tmp_path / "x.csv", text))).values()) == wanted


@pytest.mark.parametrize("odd", ["0.5", "nan", "NA", "None", "9" * 5000, "1e-3", "-2"])
def test_one_odd_label_among_numbers_is_named_with_its_line(tmp_path, odd):
    text = f"path,label\n1.jpg,10\n2.jpg,{odd}\n3.jpg,9\n" if "e" not in odd else "path,label\n0.jpg,1\n2.jpg,1.5e-3\n"
    with pytest.raises(UsageError, match=r"x.csv, line 3: label ") as caught:
        open_source(write_table(tmp_path / "x.csv", text))
    assert len(str(caught.value)) < 300


# --- tables beside images


def test_metadata_of_hugging_faces_form_is_read(tmp_path):
    write_files(tmp_path, "train/0.jpg", "train/1.jpg", "val/a/2.jpg", "val/3.jpg", "test/4.jpg")
    os.rename(tmp_path / "val/a/2.jpg", tmp_path / "val/2.jpg")
    os.rmdir(tmp_path / "val/a")
    write_table(tmp_path / "train/metadata.csv", "file_name,label\n0.jpg,dog\n1.jpg,cat\n")
    lines = [{"file_name": "2.jpg", "label": "dog"}, {"file_name": "3.jpg", "label": "cat"}]
    write_table(tmp_path / "val/metadata.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_table(tmp_path / "metadata.csv", "file_name,label\ntest/4.jpg,cat\n")
    found = open_source(tmp_path)
    assert found.class_ids == ["cat", "dog"]
    assert labels(found) == {"0.jpg": 1, "1.jpg": 0}
    assert labels(found, "val") == {"2.jpg": 1, "3.jpg": 0}
    assert labels(found, "test") == {"4.jpg": 0}
    write_table(tmp_path / "train/metadata.csv", "file_name,label\n0.jpg,dog\n")
    with pytest.raises(UsageError, match=r"train/metadata.csv: doesn't list 1.jpg"):
        open_source(tmp_path)


def test_metadata_with_whole_numbers(tmp_path):
    write_files(tmp_path, "0.jpg", "1.jpg", "2.jpg")
    write_table(tmp_path / "metadata.csv", "label,file_name\n10,0.jpg\n2,1.jpg\n-1,2.jpg\n")
    assert labels(open_source(tmp_path)) == {"0.jpg": 10, "1.jpg": 2, "2.jpg": UNLABELLED}
    write_table(tmp_path / "metadata.csv", "label,file_name,kind\n10,0.jpg,b\n2,1.jpg,a\n-1,2.jpg,a\n")
    assert labels(open_source(tmp_path, label_column="kind")) == {"0.jpg": 1, "1.jpg": 0, "2.jpg": 0}


def test_metadata_beside_class_folders_of_another_split(tmp_path):
    write_files(tmp_path, "train/0.jpg", "train/1.jpg", "val/dog/2.jpg")
    write_table(tmp_path / "train/metadata.csv", "file_name,label\n0.jpg,dog\n1.jpg,cat\n")
    found = open_source(tmp_path)
    assert (found.class_ids, labels(found, "val")) == (["cat", "dog"], {"dog/2.jpg": 1})


def test_metadata_without_labels_is_named(tmp_path):
    write_files(tmp_path, "0.jpg", "1.jpg")
    write_table(tmp_path / "metadata.csv", "file_name,text\n0.jpg,a dog\n1.jpg,a cat\n")
    refuses(tmp_path, "metadata.csv")
    assert labels(open_source(tmp_path, label_column="text")) == {"0.jpg": 1, "1.jpg": 0}


@pytest.mark.parametrize(
    "table",
    ["train.csv", "train/labels.tsv", "labels.json", "annotations/train_gt.txt", "train_list.txt", "meta.mat"],
)
def test_a_table_beside_unlabelled_images_is_named(tmp_path, table):
    write_files(tmp_path, "train/0.jpg", "train/1.jpg", "README.txt", "LICENSE.md", "license.txt", table)
    refuses(tmp_path, table)


def test_one_split_without_labels_is_enough(tmp_path):
    write_files(tmp_path, "train/cat/0.jpg", "val/1.jpg", "val.csv")
    refuses(tmp_path, "no image of val", "val.csv")
    assert labels(open_source(tmp_path, splits=["train"])) == {"cat/0.jpg": 0}


def test_a_folder_given_alone_names_the_table_that_is_named_after_it(tmp_path):
    write_files(tmp_path, "photos/0.jpg", "photos_labels.csv", "others.csv")
    refuses(tmp_path / "photos", "photos_labels.csv")
    os.unlink(tmp_path / "photos_labels.csv")
    assert labels(open_source(tmp_path / "photos")) == {"0.jpg": UNLABELLED}


def test_one_annotation_an_image_is_named(tmp_path):
    write_files(tmp_path, *(f"{i}.{kind}" for i in range(3) for kind in ("jpg", "txt")))
    refuses(tmp_path, "3 .txt files")


@pytest.mark.parametrize("other", ["readme.txt", "LICENSE.txt", "notes.txt", ".hidden.csv", "thumbs.db"])
def test_other_files_beside_images_dont_matter(tmp_path, other):
    write_files(tmp_path, "0.jpg", "1.jpg", other)
    assert labels(open_source(tmp_path)) == {"0.jpg": UNLABELLED, "1.jpg": UNLABELLED}


def test_what_lies_beside_split_folders_is_counted(tmp_path):
    write_files(tmp_path, "train/x/1.jpg", "val/x/1.jpg", "extra.jpg", "labels.csv", "notes/a.txt")
    said = describe(open_source(tmp_path).ignored)
    assert all(name in said for name in ("extra.jpg", "labels.csv", "notes"))


def test_a_single_class_beside_a_table_is_pointed_out(tmp_path):
    write_files(tmp_path, "images/1.jpg", "images/2.jpg", "labels.csv")
    (warning,) = open_source(tmp_path).warnings
    assert "one class" in warning
    assert "labels.csv" in warning


# --- parquet

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_parquet(path, features=(), **columns):
    rows = {}
    for name, values in columns.items():
        is_image = isinstance(values[0], bytes)
        rows[name] = pa.array([{"bytes": v, "path": None} for v in values], IMAGE) if is_image else pa.array(values)
    table = pa.table(rows)
    if features:
        info = {"features": {name: {"_type": kind} for name, kind in dict(features).items()}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": info})})
    pq.write_table(table, path)
    return path


def test_two_columns_of_a_kind_are_refused_without_a_flag(tmp_path):
    features = {"mask": "Image", "photo": "Image", "coarse": "ClassLabel", "fine": "ClassLabel"}
    columns = {"mask": [b"m0", b"m1"], "photo": [b"p0", b"p1"], "coarse": [0, 0], "fine": [1, 2]}
    path = write_parquet(tmp_path / "x.parquet", features, **columns)
    with pytest.raises(UsageError, match="mask and photo may both be the image; name one with --image-column"):
        open_source(path)
    with pytest.raises(UsageError, match="coarse and fine may both be the label; name one with --label-column"):
        open_source(path, image_column="photo")
    found = open_source(path, image_column="photo", label_column="fine")
    assert found.splits["train"].labels.tolist() == [1, 2]
    assert found.splits["train"].read(1) == b"p1"
    with pytest.raises(UsageError, match="--label-column nothing: no such column"):
        open_source(path, image_column="photo", label_column="nothing")


def test_a_parquet_without_labels(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", image=[b"1", b"2"])
    assert open_source(path).splits["train"].labels.tolist() == [UNLABELLED] * 2
    path = write_parquet(tmp_path / "y.parquet", image=[b"1", b"2"], species=["dog", "cat"])
    refuses(path, "species", "--label-column")
    assert open_source(path, label_column="species").splits["train"].labels.tolist() == [1, 0]


def test_whole_numbers_as_floats_in_parquet(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", image=[b"1", b"2", b"3"], label=[10.0, 2.0, None])
    assert open_source(path).splits["train"].labels.tolist() == [10, 2, UNLABELLED]


def test_the_store_says_which_columns_were_used_and_verify_uses_them(tmp_path):
    from PIL import Image

    write_files(tmp_path, "x/1.png", "x/2.png")
    for i in (1, 2):
        Image.new("RGB", (9, 9), (i * 50, 0, 0)).save(tmp_path / f"x/{i}.png")
    path = write_table(tmp_path / "x/list.csv", "where,kind\n1.png,b\n2.png,a\n")
    convert(path, tmp_path / "x.zarr", size=8, n_jobs=1, quiet=True, image_column="where", label_column="kind")
    assert open_store(tmp_path / "x.zarr")["train"].attrs["recipe"]["label_column"] == "kind"
    assert not verify(tmp_path / "x.zarr", against=path, quiet=True)["problems"]


# --- class folders and splits


def test_a_class_folder_that_is_a_dangling_link_keeps_its_place(tmp_path):
    write_files(tmp_path, "src/a/1.jpg", "src/c/1.jpg")
    (tmp_path / "src/b").symlink_to(tmp_path / "gone")
    (tmp_path / "src/notes.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "src/loop").symlink_to("loop")
    found = open_source(tmp_path / "src")
    assert found.class_ids == ["a", "b", "c", "loop"]
    assert labels(found) == {"a/1.jpg": 0, "c/1.jpg": 2}
    assert any("b, loop" in note for note in found.notes)
    assert "2 links that lead nowhere (b, loop)" in describe(found.ignored)


def test_a_split_folder_that_is_a_dangling_link_is_an_error(tmp_path):
    write_files(tmp_path, "val/a/1.jpg")
    (tmp_path / "train").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="train: can't be listed"):
        open_source(tmp_path)


@pytest.mark.parametrize(("train", "val"), [(NFC, NFD), (NFD, NFC), ("cat", "cat "), (" cat", "cat")])
def test_classes_that_look_the_same_are_matched_across_splits(tmp_path, train, val):
    write_files(tmp_path / "x", f"train/{train}/1.jpg", "train/dog/1.jpg", f"val/{val}/1.jpg", "val/dog/1.jpg")
    found = open_source(tmp_path / "x")
    assert found.class_ids == sorted([train, "dog"])
    assert list(labels(found, "val").values()) == list(labels(found).values())
    write_table(
        tmp_path / "m.jsonl",
        "".join(
            json.dumps({"path": f"{split}.jpg", "label": name, "split": split}) + "\n"
            for split, name in (("train", train), ("val", val))
        ),
    )
    assert labels(open_source(tmp_path / "m.jsonl"), "val") == {"val.jpg": 0}


@pytest.mark.parametrize("other", [NFD, NFC + " "])
def test_classes_of_one_split_that_look_the_same_are_refused(tmp_path, other):
    write_files(tmp_path / "x", f"{NFC}/1.jpg", f"{other}/1.jpg")
    with pytest.raises(UsageError, match=r"read the same .*; rename one"):
        open_source(tmp_path / "x")
    with pytest.raises(UsageError, match="sample 1 of train: .* read the same"):
        open_source([(b"x", NFC), (b"y", other)])


@pytest.mark.parametrize(
    ("folders", "wanted"),
    [
        (["training_set", "test_set"], {"training_set": "train", "test_set": "test"}),
        (["imagenet21k_train", "imagenet21k_val", "small"], {"imagenet21k_train": "train", "imagenet21k_val": "val"}),
        (["train2017", "val2017"], {"train2017": "train", "val2017": "val"}),
        (["training", "validation"], {"training": "train", "validation": "val"}),
        (["train", "x_val", "y_train"], {"train": "train"}),
        (["steam_train", "bullet_train"], {}),
        (["val_a", "test_a"], {}),
        (["steam_train", "glass_test"], {}),
    ],
)
def test_names_of_split_folders(folders, wanted):
    found = splits_among(folder.encode() for folder in folders)
    assert {folder.decode(): split for folder, split in found.items()} == wanted


def test_split_folders_by_what_differs_in_their_names(tmp_path):
    files = [f"{split}/{name}/{i}.jpg" for split in ("training_set", "test_set") for name in "ab" for i in range(2)]
    write_files(tmp_path / "x", *files)
    (tmp_path / "x.tar").write_bytes(tar_bytes([(name, b"1") for name in files]))
    for src in (tmp_path / "x", tmp_path / "x.tar"):
        found = open_source(src)
        assert list(found.splits) == ["train", "test"]
        assert labels(found, "test") == {"a/0.jpg": 0, "a/1.jpg": 0, "b/0.jpg": 1, "b/1.jpg": 1}
        assert found.warnings == []
    write_files(tmp_path / "x", "small_classes/a/1.jpg")
    with pytest.raises(UsageError, match="small_classes"):
        open_source(tmp_path / "x")
    assert len(open_source(tmp_path / "x", splits=["train", "test"]).splits["train"]) == 4


def test_the_advice_names_the_folder_that_holds_the_most(tmp_path):
    write_files(tmp_path, "few/cat/1.jpg", *(f"many/{name}/{i}.jpg" for name in ("cat", "dog") for i in range(4)))
    (warning,) = open_source(tmp_path).warnings
    assert f"give {tmp_path / 'many'} as SRC" in warning


def test_labels_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes("path,label\n1.jpg,dog\n2.jpg,café\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin.csv, line 3: .*UTF-8"):
        open_source(path)
    with pytest.raises(UsageError, match="sample 1 of train: .*UTF-8"):
        open_source([(b"x", "a"), (b"y", "\ud800")])
    path.write_bytes("path,label\n1é.jpg,dog\n".encode("latin-1"))  # paths may be any bytes
    assert open_source(path).splits["train"].key(0) == "1é.jpg".encode("latin-1")


@pytest.mark.parametrize("cell", ["", "a/b", ".x"])
def test_a_split_cell_that_names_none(tmp_path, cell):
    path = write_table(tmp_path / "x.csv", f"path,label,split\n1.jpg,a,train\n2.jpg,a,{cell}\n")
    with pytest.raises(UsageError, match="line 3: split "):
        open_source(path)
