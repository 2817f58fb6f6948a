"""Every source ends in bounded time and memory: in samples, or in one line that says where."""

import errno
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from layouts import tar_bytes, write_files, write_imagenet, write_tar

from pipeline.errors import BadSample, UsageError
from pipeline.sources import archive, files, open_source, parquet, webdataset

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def refused(src, match, kind=None):
    with pytest.raises(UsageError, match=match) as caught:
        open_source(src, kind)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


# --- what is no regular file


@pytest.mark.parametrize(
    ("kind", "name"), [("tar", "x.tar"), ("webdataset", "x.tar"), ("parquet", "x.parquet"), ("manifest", "x.csv")]
)
@pytest.mark.parametrize("what", ["fifo", "device", "folder of one"])
def test_a_fifo_or_a_device_is_refused_at_once(tmp_path, kind, name, what):
    src = tmp_path / name
    if what == "device":
        src.symlink_to("/dev/zero")
    else:
        os.mkfifo(src)
    if what == "folder of one":
        if kind == "manifest":
            pytest.skip("a manifest is a file")
        src = tmp_path
    refused(src, f"{name}: not a regular file", kind)


@pytest.mark.parametrize("name", ["ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"])
def test_a_fifo_in_the_place_of_an_official_archive(tmp_path, name):
    root = write_imagenet(tmp_path)
    (root / name).unlink()
    os.mkfifo(root / name)
    refused(root, "regular file")


def test_a_fifo_in_an_unpacked_devkit(tmp_path):
    root = write_imagenet(tmp_path)
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz") as packed:
        packed.extractall(root, filter="data")
    (root / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    (meta := root / "ILSVRC2012_devkit_t12/data/meta.mat").unlink()
    os.mkfifo(meta)
    refused(root, "meta.mat: not a regular file")


def test_an_archive_that_became_a_fifo(tmp_path):
    source = open_source(write_tar(tmp_path / "x.tar", "a/1.jpg")).splits["train"]
    os.unlink(tmp_path / "x.tar")
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(Exception, match="not a regular file; put the archive back"):
        source.read(0)


# --- tar headers


def sized(size_field, kind=b"0"):
    """A tar header with these bytes as its size."""
    info = tarfile.TarInfo("a/1.jpg")
    info.type = kind
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = size_field.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize(
    "size", [b"-1", b"-0000001000", b"77777777777", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"\x81" + b"\0" * 11, b"8"]
)
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"K", b"g"])
def test_negative_and_absurd_sizes_in_tar_headers(tmp_path, size, kind):
    (tmp_path / "x.tar").write_bytes(sized(size, kind) + bytes(2048))
    refused(tmp_path / "x.tar", r"x.tar: (damaged header at byte 0|truncated)")


@pytest.mark.parametrize("size", ["-512", "-1", "9" * 30, "9" * 5000, "x"])
def test_negative_and_absurd_sizes_in_pax_headers(tmp_path, size):
    record = f" size={size}\n".encode()
    record = next(b"%d%s" % (n, record) for n in range(9, 6000) if len(b"%d%s" % (n, record)) == n)
    info = tarfile.TarInfo("pax")
    info.type, info.size = b"x", len(record)
    head = info.tobuf(tarfile.GNU_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0")
    (tmp_path / "x.tar").write_bytes(head + sized(b"0") + bytes(2048))
    refused(tmp_path / "x.tar", r"x.tar: (damaged|truncated)")


def test_extended_headers_are_read_up_to_a_limit(tmp_path):
    with open(tmp_path / "x.tar", "wb") as file:  # 4 GB, sparse
        file.write(sized(b"%011o" % (4 << 30), b"L"))
        file.truncate((4 << 30) + 2048)
    refused(tmp_path / "x.tar", "damaged header")


def test_members_are_read_up_to_a_limit(tmp_path, monkeypatch):
    data = tar_bytes({"a/1.jpg": b"x" * 100, "a/2.jpg": b"y" * 20})
    (tmp_path / "x.tar").write_bytes(data)
    source = open_source(tmp_path / "x.tar").splits["train"]
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 50)
    with pytest.raises(BadSample) as caught:
        source.read(0)
    assert caught.value.reason == "unsupported"
    assert source.read(1) == b"y" * 20


def test_label_files_are_read_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(webdataset, "MAX_LABEL_BYTES", 10)
    (tmp_path / "x.tar").write_bytes(tar_bytes({"a.jpg": b"x", "a.cls": b"1" * 11}))
    refused(tmp_path / "x.tar", "x.tar: a.cls: 11 bytes are too many")


# --- parquet


def write_group(path, images, rows):
    table = pa.table({"image": pa.array([{"bytes": data, "path": None} for data in images], IMAGE), "label": rows})
    pq.write_table(table, path, row_group_size=len(rows))
    return path


def test_a_row_group_is_read_in_pieces_that_arrow_can_join(tmp_path):
    images = [b"%d" % i for i in range(100)]
    source = open_source(write_group(tmp_path / "x.parquet", images, list(range(100)))).splits["train"]
    assert [source.read(i) for i in range(100)] == images
    assert source._groups[0].num_chunks > 1


def test_a_row_group_is_read_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 10_000)
    path = write_group(tmp_path / "x.parquet", [b"x" * 1000] * 64, [0] * 64)
    source = open_source(path).splits["train"]
    with pytest.raises(Exception, match=r"x.parquet.*row group 0 holds more than 10,000 bytes"):
        source.read(0)


@pytest.mark.slow
def test_a_row_group_above_2_gib(tmp_path):
    """33 images of 64 MiB, stored once by the dictionary."""
    data = random.Random(0).randbytes(1 << 16) * 1024
    kind = pa.struct([("bytes", pa.large_binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array([{"bytes": data, "path": None}] * 33, kind), "label": [0] * 33})
    pq.write_table(
        table,
        tmp_path / "x.parquet",
        row_group_size=33,
        store_schema=False,
        write_statistics=False,
        dictionary_pagesize_limit=1 << 28,
    )
    del table
    source = open_source(tmp_path / "x.parquet").splits["train"]
    assert source.read(32) == data


# --- folders


def test_1200_nested_folders(tmp_path, monkeypatch):
    (tmp_path / "deep/c").mkdir(parents=True)
    (tmp_path / "deep/b").mkdir()
    (tmp_path / "deep/b/1.jpg").write_bytes(b"x")
    with monkeypatch.context() as context:
        context.chdir(tmp_path / "deep/c")
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        with open("1.jpg", "wb") as file:
            file.write(b"y")
    try:
        found = open_source(tmp_path / "deep")
        assert found.splits["train"].key(1) == b"c/" + b"d/" * 1200 + b"1.jpg"
        assert found.splits["train"].read(1) == b"y"
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "deep"], check=True)  # shutil recurses


def test_a_mesh_of_links_ends(tmp_path):
    folders = [tmp_path / f"mesh/c{i}" for i in range(12)]
    for folder in folders:
        write_files(folder, "1.jpg")
    for folder in folders:
        for other in folders:
            if other != folder:
                (folder / other.name).symlink_to(other)
    start = time.monotonic()
    refused(tmp_path / "mesh", "ways lead here through links")
    assert time.monotonic() - start < 60


def test_links_to_one_folder_from_several_classes(tmp_path):
    write_files(tmp_path, "shared/1.jpg")
    for i in range(200):
        (tmp_path / f"src/c{i}").mkdir(parents=True)
        (tmp_path / f"src/c{i}/link").symlink_to(tmp_path / "shared")
    assert len(open_source(tmp_path / "src").splits["train"]) == 200


def test_archives_below_1200_nested_folders(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        (tmp_path / "deep").mkdir()
        context.chdir(tmp_path / "deep")
        write_tar(tmp_path / "deep/a.tar", "x/1.jpg")
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
    try:
        assert len(open_source(tmp_path / "deep").splits["train"]) == 1
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "deep"], check=True)


# --- one bad row


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_nul_in_a_path_is_one_bad_sample(tmp_path, suffix):
    write_files(tmp_path, "1.jpg")
    text = "path,label\n1.jpg,a\nx\0y.jpg,a\n"
    if suffix == ".jsonl":
        text = "".join(json.dumps({"path": path, "label": "a"}) + "\n" for path in ("1.jpg", "x\0y.jpg"))
    (tmp_path / f"m{suffix}").write_text(text)
    source = open_source(tmp_path / f"m{suffix}").splits["train"]
    assert source.read(0) == b"1.jpg"
    with pytest.raises(BadSample) as caught:
        source.read(1)
    assert caught.value.reason == "missing"
    assert source.change_stamps(np.array([1])).tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    "row",
    [
        '{"path": "\\ud800.jpg", "label": "a"}',
        '{"path": "2.jpg", "label": "\\ud800"}',
        '{"path": "2.jpg", "label": ' + "9" * 5000 + "}",
        '{"path": "2.jpg", "label": "' + "9" * 5000 + '"}',
        "[" * 100_000,
        '{"path": ' + "[" * 100_000,
        '{"path": ["2.jpg"], "label": "a"}',
        '{"path": "2.jpg", "label": {"a": 1}}',
        '{"path": "2.jpg", "label": 1e400}',
        '{"path": "2.jpg", "label": NaN}',
    ],
)
def test_one_bad_row_of_json_is_named_with_its_line(tmp_path, row):
    (tmp_path / "m.jsonl").write_text('{"path": "1.jpg", "label": "1"}\n' + row + "\n")
    refused(tmp_path / "m.jsonl", "m.jsonl, line 2: ")


def test_one_bad_row_of_a_table_is_named_with_its_line(tmp_path):
    (tmp_path / "m.csv").write_text("path,label\n1.jpg,1\n2.jpg," + "9" * 200_000 + "\n")
    refused(tmp_path / "m.csv", "m.csv, line 3: ")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_line_without_end_is_refused(tmp_path, suffix):
    with open(tmp_path / f"m{suffix}", "wb") as file:
        file.write(b"path,label\n1.jpg,1\n")
        file.truncate(1 << 40)
    refused(tmp_path / f"m{suffix}", "a line has more than|not a JSON object")


def test_paths_in_parquet_that_no_file_can_have(tmp_path):
    images = [{"bytes": None, "path": "x\0y"}, {"bytes": b"good", "path": "b"}]
    table = pa.table({"image": pa.array(images, IMAGE), "label": [0, 1]})
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet").splits["train"]
    with pytest.raises(BadSample):
        source.read(0)
    assert source.read(1) == b"good"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENODATA, errno.ETIMEDOUT, errno.EBADMSG, 9999])
def test_any_fault_of_a_files_disk_is_a_bad_sample(tmp_path, monkeypatch, number):
    write_files(tmp_path, "a/1.jpg")
    source = open_source(tmp_path).splits["train"]

    def failing(*_):
        raise OSError(number, "odd")

    monkeypatch.setattr(files.os, "open", failing)
    with pytest.raises(BadSample) as caught:
        source.read(0)
    assert caught.value.reason == "unreadable"


# --- the devkit


def devkit_with(root, meta):
    """A devkit whose `meta.mat` is this."""
    top = "ILSVRC2012_devkit_t12/data"
    content = {f"{top}/meta.mat": meta, f"{top}/ILSVRC2012_validation_ground_truth.txt": b"1\n" * 4}
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar_bytes(content)))
    return root


def test_a_meta_mat_that_kills_its_reader_is_one_line(tmp_path, monkeypatch):
    """Whatever scipy does on a damaged file, even a segfault, it does elsewhere."""
    root = write_imagenet(tmp_path)
    fake = tmp_path / "fake/scipy"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    crash = f"import os\ndef loadmat(*a, **k):\n    os.kill(os.getpid(), {int(signal.SIGSEGV)})\n"
    (fake / "io.py").write_text(crash)
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    refused(root, "meta.mat can't be read")


@pytest.mark.parametrize("damage", ["cut", "zeros", "noise", "empty"])
def test_a_damaged_meta_mat_is_one_line(tmp_path, damage):
    root = write_imagenet(tmp_path)
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz") as kit:
        good = kit.extractfile("ILSVRC2012_devkit_t12/data/meta.mat").read()
    noise = random.Random(1).randbytes(len(good) - 200)
    bad = {"cut": good[: len(good) // 2], "zeros": good[:200] + bytes(500), "noise": good[:200] + noise, "empty": b""}
    refused(devkit_with(root, bad[damage]), "meta.mat")


def test_a_devkit_that_unpacks_without_end_is_refused(tmp_path):
    root = write_imagenet(tmp_path)
    (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(bytes(70_000_000), 1))
    refused(root, "more than 64,000,000 bytes")


# --- fuzz

CHILD = """
import sys, resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from pipeline.errors import BadSample, Error
from pipeline.sources import open_source
for path in sys.argv[1:]:
    try:
        found = open_source(path, unlabelled=True)
        for source in found.splits.values():
            source.keys()
            for i in range(min(len(source), 20)):
                try:
                    source.read(i)
                except BadSample:
                    pass
        print("read", path)
    except Error as error:
        assert chr(10) not in str(error), error
        print("refused", path)
"""


def seeds():
    """Good archives, as bytes by file name."""
    members = {f"train/{name}/{i}.jpg": b"%d" % i * 300 for name in "ab" for i in range(3)}
    shard = {f"{i:03d}.{kind}": b"%d" % i for i in range(6) for kind in ("jpg", "cls")}
    buffer = io.BytesIO()
    rows = [{"bytes": b"x" * 50, "path": f"{i}.jpg"} for i in range(30)]
    pq.write_table(pa.table({"image": pa.array(rows, IMAGE), "label": list(range(30))}), buffer, row_group_size=10)
    pax = tar_bytes({"é" * 80 + "/1.jpg": b"1", "b/2.jpg": b"2"}, tarfile.PAX_FORMAT)
    table = "path,label,split\n" + "".join(f"{i}.jpg,{i % 3},train\n" for i in range(20))
    lines = "".join(json.dumps({"path": f"{i}.jpg", "label": i % 3}) + "\n" for i in range(20))
    return {
        "a.tar": tar_bytes(members), "b.tar": tar_bytes(shard), "c.tar": pax, "d.parquet": buffer.getvalue(),
        "e.csv": table.encode(), "f.jsonl": lines.encode(), "g.tar": b"PK\x03\x04" + tar_bytes(shard)[4:],
    }  # fmt: skip


def mutated(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 2, 5, 20])):
        place = rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[place : place + rng.choice([1, 7, 512, 3000])]
        elif kind == 3:
            data[place:place] = rng.choice([b"\0", b"\xff" * 12, b"-1", b"9" * 600, b"[" * 2000, data[:512]])
        elif kind == 4:
            data[place : place + 12] = rng.choice(
                [b"-0000000001\0", b"77777777777\0", b"\xff" * 12, b"\x80" + b"\x7f" * 11]
            )
        elif place > 156:  # a tar header whose sum holds, so that what is damaged is believed
            start = place // 512 * 512
            if len(data) >= start + 512:
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
        if not data:
            return b""
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(seeds()))
def test_damaged_archives_end_in_time_and_memory(tmp_path, name):
    """150 damaged copies of each, all read in one process with 3 GiB of address space, each in under a second."""
    rng, count = random.Random(name), 150
    stem, _, suffix = name.partition(".")
    paths = []
    for i in range(count):
        path = tmp_path / f"{stem}{i}.{suffix}"
        path.write_bytes(mutated(seeds()[name], rng))
        paths.append(str(path))
    result = subprocess.run(
        [sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, timeout=count, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.splitlines()) == count
