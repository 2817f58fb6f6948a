"""What was passed over, in words."""

import pytest
from layouts import write_files, write_tar

from pipeline import convert
from pipeline.sources import open_source
from pipeline.sources.ignored import Ignored, describe


@pytest.mark.quick
def test_few_files_are_all_named():
    ignored = Ignored(b"/data")
    ignored.add("file that is no image", b"/data/notes/readme.txt")
    assert describe(ignored) == "1 file that is no image (notes/readme.txt)"
    ignored.add("dot-file", b"/data/.DS_Store")
    ignored.add("dot-file", b"/data/a/.DS_Store")
    assert describe(ignored) == "2 dot-files (.DS_Store, a/.DS_Store), 1 file that is no image (notes/readme.txt)"
    assert ignored == {"file that is no image": 1, "dot-file": 2}


@pytest.mark.quick
def test_many_files_by_extension_with_the_first():
    ignored = Ignored()
    for i in range(10):
        ignored.add("file that is no image", b"%d.TXT" % i)
    for name in (b"a.json", b"b.json", b"Makefile", b"c.md", b"x.no-extension", b"caf\xe9.p\xff"):
        ignored.add("file that is no image", name)
    assert describe(ignored) == (
        "16 files that are no images (10 .txt, 2 .json, 2 without extension, 2 of other kinds; e.g. 0.TXT, 1.TXT)"
    )


@pytest.mark.quick
def test_numbered_extensions_dont_fill_the_memory():
    ignored = Ignored()
    for i in range(1000):
        ignored.add("file that is no image", b"x.%05d" % i)
    assert len(ignored.extensions["file that is no image"]) == 101
    assert ignored["file that is no image"] == sum(ignored.extensions["file that is no image"].values()) == 1000


@pytest.mark.quick
def test_a_name_stays_on_its_line():
    ignored = Ignored()
    ignored.add("dot-file", b".a\nb")
    assert describe(ignored) == "1 dot-file (.a b)"


@pytest.mark.quick
def test_counts_of_ones_own_source():
    assert (
        describe({"broken row": 3, "file that is no image": 1, "dot-file": 0})
        == "3 broken row, 1 file that is no image"
    )


def test_names_dont_depend_on_the_listing_and_reach_the_person(tmp_path, capsys):
    write_files(tmp_path / "a", "cat/1.jpg", "cat/z.txt", "cat/a.txt", "dog/1.jpg", "dog/b.md", "top.jpg")
    convert(tmp_path / "a", tmp_path / "x.zarr", size=8, dry_run=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == (
        "ignored: 3 files that are no images (2 .txt, 1 .md; e.g. cat/a.txt, cat/z.txt), "
        "1 image outside the class folders (top.jpg)"
    )
    convert(tmp_path / "a", tmp_path / "x.zarr", size=8, dry_run=True, quiet=True)
    assert capsys.readouterr().err == ""


def test_names_inside_archives(tmp_path):
    found = open_source(write_tar(tmp_path / "x.tar", "cat/1.jpg", "notes/readme.txt", "__MACOSX/1.jpg", "2.jpg"))
    assert describe(found.ignored) == (
        "1 file that is no image (notes/readme.txt), 1 hidden or system folder (__MACOSX/1.jpg), "
        "1 image outside the class folders (2.jpg)"
    )


def test_a_source_that_may_be_too_high_is_warned_of_before_the_conversion(tmp_path, capsys):
    write_files(tmp_path / "photos", "stuff/cat/1.jpg")
    convert(tmp_path / "photos", tmp_path / "x.zarr", size=8, dry_run=True)
    assert (
        capsys.readouterr()
        .err.splitlines()[1]
        .startswith("warning: 1 of 1 image lies deeper than the class folders, such as ")
    )
