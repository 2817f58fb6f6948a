"""Manifests: CSV and JSON lines as people and spreadsheets write them."""

import os

import pytest
from layouts import samples, write_files

from pipeline.errors import BadSample, UsageError
from pipeline.sources import UNLABELLED, open_source


def listed(path, content, **options):
    """[(key, label)] of the only split."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (source,) = open_source(path, **options).splits.values()
    return [(source.key(i), int(source.labels[i])) for i in range(len(source))]


def test_csv_with_ids(tmp_path):
    write_files(tmp_path, "a/1.jpg", "a/2.jpg")
    (tmp_path / "m.csv").write_text("path,label\na/2.jpg,dog\na/1.jpg,cat\n")
    found = open_source(tmp_path / "m.csv")
    assert (found.kind, found.class_ids) == ("manifest", ["cat", "dog"])
    assert samples(found.splits["train"]) == [(b"a/2.jpg", 1, b"a/2.jpg"), (b"a/1.jpg", 0, b"a/1.jpg")]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfpath,label\r\n1.jpg,dog\r\n2.jpg,cat\r\n",
        "\ufeffpath\tlabel\r\n1.jpg\tdog\r\n2.jpg\tcat\r\n".encode("utf-16-le"),
        b'"path","label"\n"1.jpg","dog"\n\n"2.jpg","cat"',
        b"Label; FileName\ndog;1.jpg\ncat; 2.jpg\n",
        b"id,file_name,class\n0,1.jpg, dog \n1,2.jpg,cat\n",
        b"1.jpg,dog\n2.jpg,cat\n",
        b'path, label\n1.jpg, "dog"\n2.jpg, cat\n',
    ],
)
def test_spellings_of_csv(tmp_path, content):
    assert listed(tmp_path / "m.csv", content) == [(b"1.jpg", 1), (b"2.jpg", 0)]


def test_tsv(tmp_path):
    assert listed(tmp_path / "m.tsv", "path\tlabel\na, b.jpg\tx\n") == [(b"a, b.jpg", 0)]


def test_names_with_spaces_commas_quotes_and_newlines(tmp_path):
    content = 'path,label\n my cat.jpg,a\n"x, y.jpg",a\n"say ""hi"".jpg",b\n"two\nlines.jpg",b\n'
    keys = [key for key, _ in listed(tmp_path / "m.csv", content)]
    assert keys == [b"my cat.jpg", b"x, y.jpg", b'say "hi".jpg', b"two\nlines.jpg"]


def test_names_that_are_not_utf8(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.jpg")
    with open(path, "wb") as file:
        file.write(b"content")
    (tmp_path / "m.csv").write_bytes(b"path,label\ncaf\xe9.jpg,caf\xc3\xa9\n")
    found = open_source(tmp_path / "m.csv")
    assert found.class_ids == ["café"]
    assert samples(found.splits["train"]) == [(b"caf\xe9.jpg", 0, b"content")]


def test_integers_keep_their_value(tmp_path):
    assert listed(tmp_path / "m.csv", "path,label\n1.jpg,10\n2.jpg,2\n3.jpg,-1\n") == [
        (b"1.jpg", 10),
        (b"2.jpg", 2),
        (b"3.jpg", UNLABELLED),
    ]
    found = open_source(tmp_path / "m.csv")
    assert found.class_ids == [str(i) for i in range(11)]
    assert "9 of 11 classes have no image (0, 1, 3 and 6 more)" in found.notes[0]


def test_integers_with_leading_zeros_are_ids(tmp_path):
    assert listed(tmp_path / "m.csv", "path,label\n1.jpg,010\n2.jpg,009\n") == [(b"1.jpg", 1), (b"2.jpg", 0)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1.jpg,3\n2.jpg,-2\n", r"m.csv, line 3: label -2"),
        ("1.jpg,20240101123\n", r"integer labels are class numbers"),
        ("1.jpg,a\n2.jpg,\n", r"m.csv, line 3: no label for 2.jpg; write the class, or -1 for none"),
        ("1.jpg,a\n,b\n", r"m.csv, line 3: no path"),
        ("1.jpg,a\nx, y.jpg,b\n", r"m.csv, line 3: 3 fields instead of 2; put fields that hold `,` into quotes"),
        ("1.jpg,a\n2.jpg\n", r"m.csv, line 3: 1 fields instead of 2"),
        ('1.jpg,a\n"2.jpg,b\n', r"m.csv, line 3: .*; check the quotes"),
        ("1.jpg,a\n2.jpg,b\n1.jpg,a\n", r"m.csv, line 4: lists 1.jpg again"),
        ("", r"m.csv: no images found"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(UsageError, match=message):
        listed(tmp_path / "m.csv", "path,label\n" + rows)


def test_no_path_column(tmp_path):
    with pytest.raises(UsageError, match=r"m.csv, line 2: no column for the image among id, label"):
        listed(tmp_path / "m.csv", "id,label\n1,2\n")


def test_without_labels(tmp_path):
    assert listed(tmp_path / "m.csv", "path\n1.jpg\n") == [(b"1.jpg", UNLABELLED)]
    assert listed(tmp_path / "m.csv", "1.jpg\n2.jpg\n") == [(b"1.jpg", UNLABELLED), (b"2.jpg", UNLABELLED)]


def test_every_missing_file_is_listed(tmp_path):
    write_files(tmp_path, "2.jpg")
    (tmp_path / "m.csv").write_text("path,label\n1.jpg,a\n2.jpg,a\n3.jpg,b\nno/4.jpg,b\n")
    source = open_source(tmp_path / "m.csv").splits["train"]
    assert source.read(1) == b"2.jpg"
    for i in (0, 2, 3):
        with pytest.raises(BadSample) as caught:
            source.read(i)
        assert caught.value.reason == "missing"
        assert source.key(i).decode() in caught.value.detail


def test_absolute_paths(tmp_path):
    write_files(tmp_path / "elsewhere", "1.jpg")
    (tmp_path / "m.csv").write_text(f"path,label\n{tmp_path}/elsewhere/1.jpg,a\n")
    assert open_source(tmp_path / "m.csv").splits["train"].read(0) == b"1.jpg"


def test_split_column(tmp_path):
    rows = "path,label,split\n1.jpg,b,train\n2.jpg,a,train\n1.jpg,b,validation\n3.jpg,a,extra\n"
    (tmp_path / "m.csv").write_text(rows)
    found = open_source(tmp_path / "m.csv")
    assert list(found.splits) == ["train", "val", "extra"]
    assert found.splits["val"].labels.tolist() == [1]
    only = open_source(tmp_path / "m.csv", splits=["val"])
    assert (list(only.splits), only.class_ids) == (["val"], ["a", "b"])
    (tmp_path / "m.csv").write_text(rows + "4.jpg,c,val\n")
    with pytest.raises(UsageError, match=r"m.csv, line 6: class 'c' isn't in train"):
        open_source(tmp_path / "m.csv")


def test_a_single_split_takes_the_name_asked_for(tmp_path):
    (tmp_path / "m.csv").write_text("path,label\n1.jpg,b\n")
    assert list(open_source(tmp_path / "m.csv", splits=["val"]).splits) == ["val"]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ('{"path": "1.jpg", "label": "b"}\r\n\r\n{"path": "2.jpg", "label": "a"}\r\n', [1, 0]),
        ('{"file_name": "1.jpg", "label": 5}\n{"file_name": "2.jpg", "label": 0}', [5, 0]),
        ('\ufeff{"image": "1.jpg", "Class": "x"}\n{"image": "2.jpg", "Class": "-1"}', [0, UNLABELLED]),
        ('{"path": "1.jpg"}\n{"path": "2.jpg"}\n', [UNLABELLED, UNLABELLED]),
        ('{"path": "1.jpg", "label": null}\n{"path": "2.jpg", "label": 1}\n', [UNLABELLED, 1]),
    ],
)
def test_json_lines(tmp_path, lines, wanted):
    assert listed(tmp_path / "m.jsonl", lines) == [(b"1.jpg", wanted[0]), (b"2.jpg", wanted[1])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"m.jsonl, line 2: not a JSON object"),
        ("[1]", r"m.jsonl, line 2: not a JSON object"),
        ('{"label": 1}', r"m.jsonl, line 2: no column for the image among label"),
        ('{"path": "2.jpg", "label": 1.5}', r"m.jsonl, line 2: label 1.5 among whole numbers"),
        ('{"path": "2.jpg", "label": true}', r"m.jsonl, line 2: label True"),
        ('{"path": "2.jpg"}', r"m.jsonl, line 2: no label, but line 1 has one"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    with pytest.raises(UsageError, match=message):
        listed(tmp_path / "m.jsonl", '{"path": "1.jpg", "label": 0}\n' + line)


def test_a_cut_utf_16_file(tmp_path):
    with pytest.raises(UsageError, match=r"m.csv: .*; save it as UTF-8"):
        listed(tmp_path / "m.csv", "\ufeffpath,label\n1.jpg,a\n".encode("utf-16-le")[:-1])


def test_a_spreadsheet_file_under_the_wrong_name(tmp_path):
    with pytest.raises(UsageError, match=r"m.csv"):
        listed(tmp_path / "m.csv", b"PK\x03\x04" + bytes(range(256)) * 20)
