"""The reader of tar headers, against the standard library's and damaged archives."""

import io
import os
import random
import shutil
import subprocess
import tarfile

import pytest
from layouts import tar_bytes

from pipeline.errors import UsageError
from pipeline.sources import tar_headers
from pipeline.sources.tar_headers import Member, members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def read(path, **bounds) -> list[Member]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return list(members(fd, "x.tar", **bounds))
    finally:
        os.close(fd)


@pytest.mark.parametrize("format", FORMATS)
def test_agrees_with_the_standard_library(tmp_path, format):
    rng = random.Random(format)
    names = ["a.jpg", "n01440764/x 1.JPEG", "d/" * 20 + "long.jpg", "é/ü.png"]
    names += ["deep/" + "y" * 80 + "/" + "z" * 90] if format == "ustar" else ["w" * 300 + ".jpg", "v/" * 90 + "x"]
    files = [(name, rng.randbytes(rng.choice([0, 1, 511, 512, 513, 5000]))) for name in names]
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(files, FORMATS[format]))
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        wanted = [(member.name.encode(), member.offset_data, member.size) for member in archive]
    found = read(path)
    assert [(member.name, member.offset, member.size) for member in found] == wanted
    assert [content[member.offset : member.offset + member.size] for member in found] == [data for _, data in files]


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_names_that_are_not_utf8(tmp_path, format):
    name = b"caf\xe9/" + b"\xff" * 120 + b".jpg"
    data = tar_bytes({os.fsdecode(name): b"1", "next.jpg": b"2"}, FORMATS[format])
    (tmp_path / "x.tar").write_bytes(data)
    assert [member.name for member in read(tmp_path / "x.tar")] == [name, b"next.jpg"]


def test_dots_and_slashes_are_taken_out(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_bytes({"./a//b.jpg": b"1", "/c.jpg": b"2"}))
    assert [member.name for member in read(tmp_path / "x.tar")] == [b"a/b.jpg", b"c.jpg"]


def test_kinds_of_members(tmp_path):
    kinds = [
        ("folder", tarfile.DIRTYPE, ""),
        ("hard", tarfile.LNKTYPE, "a/file"),
        ("soft", tarfile.SYMTYPE, "../file"),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("old", tarfile.AREGTYPE, ""),
        ("oldfolder/", tarfile.AREGTYPE, ""),
    ]
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as archive:
        for name, kind, target in kinds:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    found = [(member.name, member.kind, member.target) for member in read(tmp_path / "x.tar")]
    assert found == [
        (b"folder", "folder", b""),
        (b"hard", "link", b"a/file"),
        (b"soft", "symlink", b"../file"),
        (b"pipe", "other", b""),
        (b"old", "file", b""),
        (b"oldfolder", "folder", b""),
    ]


def test_sizes_in_base_256_and_in_pax(tmp_path):
    huge = 9 * 1024**3  # does not fit into eleven octal digits
    for format in ("gnu", "pax"):
        info = tarfile.TarInfo("big.jpg")
        info.size = huge
        header = info.tobuf(FORMATS[format])
        path = tmp_path / f"{format}.tar"
        with open(path, "wb") as file:
            file.write(header)
            file.seek(len(header) + huge)
            file.write(bytes(1024))
        assert read(path) == [Member(b"big.jpg", "file", len(header), huge, b"")]


def test_archive_inside_an_archive(tmp_path):
    inner = tar_bytes({"1.jpg": b"one", "2.jpg": b"two"})
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_bytes({"first": b"x" * 700, "inner.tar": inner}))
    outer = read(path)[1]
    found = read(path, start=outer.offset, end=outer.offset + outer.size)
    content = path.read_bytes()
    assert [content[member.offset : member.offset + member.size] for member in found] == [b"one", b"two"]


def test_every_cut_is_noticed(tmp_path):
    data = tar_bytes({"a.jpg": b"x" * 600, "b" * 150: b"y" * 10}, tarfile.GNU_FORMAT)
    end = tarfile.open(fileobj=io.BytesIO(data)).getmembers()[-1].offset_data + 512  # noqa: SIM115
    for length in [0, 1, 511, 512, 700, 1023, 1024, 1536, 2048, 2560, 3072, end - 1, end, end + 100, end + 511]:
        (tmp_path / "x.tar").write_bytes(data[:length])
        with pytest.raises(UsageError, match=r"x.tar: truncated"):
            read(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(data[: end + 512])
    assert len(read(tmp_path / "x.tar")) == 2


def test_damage_is_not_taken_for_the_end(tmp_path):
    data = bytearray(tar_bytes({"a.jpg": b"x" * 600, "b.jpg": b"y", "c.jpg": b"z"}))
    for position, message in ((1536 + 3, "damaged, at byte 1,536"), (1536 + 150, "damaged, at byte 1,536")):
        broken = bytearray(data)
        broken[position] ^= 0x41
        (tmp_path / "x.tar").write_bytes(broken)
        with pytest.raises(UsageError, match=message):
            read(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(b"<html>" + bytes(2000))
    with pytest.raises(UsageError, match="not a tar archive"):
        read(tmp_path / "x.tar")


def test_archives_end_to_end_are_noticed(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_bytes({"a.jpg": b"1"}) + tar_bytes({"b.jpg": b"2"}))
    with pytest.raises(UsageError, match="data follows the end mark"):
        read(tmp_path / "x.tar")


def test_broken_extended_header(tmp_path):
    data = bytearray(tar_bytes({"é" * 60: b"1"}, tarfile.PAX_FORMAT))
    data[512:515] = b"xyz"
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(UsageError, match="damaged extended header"):
        read(tmp_path / "x.tar")


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar command")
@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_sparse_members_are_refused(tmp_path, format):
    with open(tmp_path / "holes.jpg", "wb") as file:
        file.seek(10_000_000)
        file.write(b"x")
    command = ["tar", "-C", tmp_path, f"--format={format}", "--sparse", "-cf", tmp_path / "x.tar", "holes.jpg"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this tar has no sparse files")
    with pytest.raises(UsageError, match="stored sparse"):
        read(tmp_path / "x.tar")


def test_reading_by_position_without_pread(tmp_path, monkeypatch):
    (tmp_path / "x.tar").write_bytes(tar_bytes({"a.jpg": b"1", "b.jpg": b"2"}))
    wanted = read(tmp_path / "x.tar")
    monkeypatch.setattr(tar_headers, "_pread", tar_headers._seek_and_read)
    assert read(tmp_path / "x.tar") == wanted
