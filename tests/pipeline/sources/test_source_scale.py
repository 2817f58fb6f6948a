"""An index of 1.3 million samples stays below 500 MB, and a worker gets it by path, not by value.

Each index is built in a process of its own, whose peak is read from the kernel (VmHWM).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLASSES, PER_CLASS = 1000, 1300
LIMIT_BYTES = 500e6

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

MEASURE = """
import json, os, sys, types, joblib, pathlib
from pipeline.sources import open_source
from pipeline.sources.archive_index import KeptIndex

{before}
found = open_source({src!r}, index=KeptIndex(pathlib.Path({index!r})))  # as a conversion, which keeps it
source = found.splits["train"]
joblib.dump(source, {index!r})
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps(dict(
    num=len(source), classes=len(found.class_ids), peak=peak,
    first=source.key(0).decode(), last=source.key(len(source) - 1).decode(),
    labels=[int(source.labels[i]) for i in (0, len(source) - 1)],
)))
"""

WORKER = """
import sys, joblib
source = joblib.load({index!r}, mmap_mode="r")
source.key(len(source) // 2)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["RssAnon"].split()[0]) * 1024)
"""

# A listing without a file system beneath it: names come in an order of the listing's own, as some file systems do.
LISTING = """
class Entry:
    def __init__(self, name, folder):
        self.name, self.folder = name, folder
    def is_dir(self, follow_symlinks=True):
        return self.folder

class Listing:
    def __init__(self, path):
        depth = os.fsencode(path).count(b"/n")
        if depth:
            wnid = os.path.basename(os.fsencode(path))
            self.entries = (Entry(b"%s_%d.JPEG" % (wnid, i * 7919 % {per_class}), False) for i in range({per_class}))
        elif os.path.basename(os.fsencode(path)) == b"train":
            self.entries = (Entry(b"n%08d" % (i * 7919 % {classes}), True) for i in range({classes}))
        else:
            self.entries = iter([Entry(b"train", True)])
    def __enter__(self):
        return self.entries
    def __exit__(self, *_):
        pass

os.scandir = Listing
real_stat = os.stat
os.stat = lambda path, **kw: (
    types.SimpleNamespace(st_dev=0, st_ino=hash(path)) if b"/train/" in os.fsencode(path) else real_stat(path, **kw)
)
"""


def header(name: bytes, size: int) -> bytes:
    """A ustar header, much faster than tarfile's."""
    start = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % size + b"%011o\0" % 0
    end = b"0" + bytes(100) + b"ustar\0" + b"00" + bytes(247)
    return start + b"%06o\0 " % (sum(start) + sum(end) + 8 * 32) + end


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(tmp_path, src, *, before=""):
    index = str(tmp_path / "index")
    found = run(MEASURE.format(src=str(src), index=index, before=before))
    assert found["num"] == CLASSES * PER_CLASS
    assert found["peak"] < LIMIT_BYTES, f"{found['peak'] / 1e6:.0f} MB"
    private = run(WORKER.format(index=index))
    assert private < 100e6, f"a worker holds {private / 1e6:.0f} MB of its own"
    return found


@pytest.mark.slow
def test_folder(tmp_path):
    (tmp_path / "train").mkdir()
    before = LISTING.format(classes=CLASSES, per_class=PER_CLASS)
    found = check(tmp_path, tmp_path, before=before)
    assert (found["first"], found["last"]) == ("n00000000/n00000000_0.JPEG", "n00000999/n00000999_999.JPEG")
    assert found["labels"] == [0, 999]


@pytest.mark.slow
def test_nested_train_archive(tmp_path):
    path = tmp_path / "ILSVRC2012_img_train.tar"
    with open(path, "wb") as file:
        for label in range(CLASSES):
            inner = b"".join(header(b"n%08d_%d.JPEG" % (label, i), 0) for i in range(PER_CLASS)) + bytes(1024)
            file.write(header(b"n%08d.tar" % label, len(inner)) + inner)
        file.write(bytes(1024))
    found = check(tmp_path, path)
    assert (found["first"], found["last"]) == ("n00000000/n00000000_0.JPEG", "n00000999/n00000999_999.JPEG")
    assert found["labels"] == [0, 999]


@pytest.mark.slow
def test_plain_archive(tmp_path):
    with open(tmp_path / "x.tar", "wb") as file:
        for i in range(PER_CLASS):
            file.writelines(header(b"train/n%08d/n%08d_%d.JPEG" % (label, label, i), 0) for label in range(CLASSES))
        file.write(bytes(1024))
    found = check(tmp_path, tmp_path / "x.tar")
    assert (found["first"], found["last"]) == ("n00000000/n00000000_0.JPEG", "n00000999/n00000999_999.JPEG")
    assert found["labels"] == [0, 999]


@pytest.mark.slow
def test_webdataset(tmp_path):
    with open(tmp_path / "x.tar", "wb") as file:
        for i in range(CLASSES * PER_CLASS):
            label = (b"%03d" % (i % CLASSES)).ljust(512, b"\0")
            file.write(header(b"%08d.jpg" % i, 0) + header(b"%08d.cls" % i, 3) + label)
        file.write(bytes(1024))
    check(tmp_path, tmp_path / "x.tar")


@pytest.mark.slow
def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for shard in range(10):
        numbers = range(shard * 130_000, (shard + 1) * 130_000)
        images = [{"bytes": b"x", "path": f"n{i % 1000:08d}_{i}.JPEG"} for i in numbers]
        table = pa.table({"image": images, "label": [i % 1000 for i in numbers]})
        pq.write_table(table, tmp_path / f"train-{shard:05d}-of-00010.parquet", row_group_size=1000)
    found = check(tmp_path, tmp_path)
    assert (found["first"], found["last"]) == ("n00000000_0.JPEG", "n00000999_1299999.JPEG")
    assert found["labels"] == [0, 999]


@pytest.mark.slow
def test_manifest(tmp_path):
    with open(tmp_path / "m.csv", "w") as file:
        file.write("path,label\n")
        file.writelines(f"n{i % CLASSES:08d}/{i}.JPEG,n{i % CLASSES:08d}\n" for i in range(CLASSES * PER_CLASS))
    found = check(tmp_path, tmp_path / "m.csv")
    assert found["labels"] == [0, 999]
