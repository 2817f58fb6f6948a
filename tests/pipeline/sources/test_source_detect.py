"""Which kind of source a path is, and what is said where that isn't clear."""

import pytest
from layouts import write_files, write_tar

from pipeline.errors import UsageError
from pipeline.sources import SOURCE_KINDS, open_source
from pipeline.sources.detect import detect_kind


def test_by_content_not_by_name(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"PAR1" + bytes(20))
    assert detect_kind(tmp_path / "x.bin") == "parquet"
    write_tar(tmp_path / "y.bin", "a/1.jpg")
    assert detect_kind(tmp_path / "y.bin") == "tar"
    assert detect_kind(str(tmp_path / "y.bin")) == "tar"
    assert detect_kind([(b"x", 0)]) == "sequence"
    assert detect_kind("torchvision:MNIST") == "torchvision"


def test_two_kinds_in_one_folder_need_a_word(tmp_path):
    write_files(tmp_path, "README.md", "assets/logo.png", "data/train-0.parquet")
    with pytest.raises(UsageError, match=r"holds folder \(.*logo.png\) and parquet data \(.*train-0.parq"):
        open_source(tmp_path)
    assert open_source(tmp_path, "folder").class_ids == ["assets", "data"]


def test_hidden_files_decide_nothing(tmp_path):
    write_files(tmp_path, "cat/1.jpg", ".cache/x.parquet", "._x.tar", "__MACOSX/x.tar")
    assert detect_kind(tmp_path) == "folder"


def test_the_look_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.sources.detect.MAX_FOLDERS", 5)
    write_files(tmp_path, *(f"c{i}/1.jpg" for i in range(9)), "c8/x.tar")
    assert detect_kind(tmp_path) == "folder"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.zip", b"PK\x03\x04rest", r"a zip archive, .*run `unzip"),
        ("x.jpg", b"\xff\xd8\xff", r"a single image; give the folder that holds it"),
        ("x.tar.gz", b"\x1f\x8b" + bytes(30), r"compressed with gzip.*run `gunzip -k"),
        ("x.tar.zst", b"\x28\xb5\x2f\xfd" + bytes(30), r"compressed with zstd.*run `unzstd"),
        ("notes.txt", b"hello", r"no known kind of source"),
        ("x", b"", r"no known kind of source"),
        ("x.tar", b"", r"x.tar: truncated"),
        ("zarr.json", b"{}", r"a Zarr store already"),
    ],
)
def test_what_is_no_source_says_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_source(tmp_path if name == "zarr.json" else tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_unknown_kind(tmp_path):
    with pytest.raises(UsageError, match=f"--source zip: must be one of {', '.join(SOURCE_KINDS)}"):
        open_source(tmp_path, "zip")


def test_neither_file_nor_folder(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        detect_kind(tmp_path / "dangling")
