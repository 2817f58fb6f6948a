"""Plain tar archives, read in place, give what their unpacked folders give."""

import os
import pickle
import tarfile

import joblib
import numpy as np
import pytest
from layouts import samples, tar_bytes, write_files, write_tar

from pipeline.errors import BadSample, Error, UsageError
from pipeline.sources import UNLABELLED, archive, open_source


def test_equals_the_unpacked_folder(tmp_path):
    folder = write_files(
        tmp_path / "folder",
        "train/dog/1.jpg",
        "train/cat/b/1.jpg",
        "train/cat/b.jpg",
        "train/cat/a.jpg",
        "train/cat-x/1.png",
        "train/cat/.DS_Store",
        "train/__MACOSX/1.jpg",
        "train/top.jpg",
        "val/dog/1.jpg",
        "notes/readme.txt",
    )
    with tarfile.open(tmp_path / "pets.tar", "w") as tar:
        for name in sorted(os.listdir(folder), reverse=True):
            tar.add(folder / name, name)
    unpacked, packed = open_source(folder), open_source(tmp_path / "pets.tar")
    assert packed.kind == "tar"
    assert packed.class_ids == unpacked.class_ids == ["cat", "cat-x", "dog"]
    for split in ("train", "val"):
        assert samples(packed.splits[split]) == samples(unpacked.splits[split])
    assert packed.ignored == {
        "dot-file": 1,
        "hidden or system folder": 1,
        "file that is no image": 1,
        "image outside the class folders": 1,
    }


@pytest.mark.parametrize(
    ("members", "splits", "classes"),
    [
        (["cat/1.jpg", "dog/1.jpg"], {"train": [b"cat/1.jpg", b"dog/1.jpg"]}, ["cat", "dog"]),
        (["./cat/1.jpg"], {"train": [b"cat/1.jpg"]}, ["cat"]),
        (["pets/cat/1.jpg", "pets/dog/1.jpg"], {"train": [b"cat/1.jpg", b"dog/1.jpg"]}, ["cat", "dog"]),
        (["pets/train/cat/1.jpg", "pets/val/cat/2.jpg"], {"train": [b"cat/1.jpg"], "val": [b"cat/2.jpg"]}, ["cat"]),
        (["validation/cat/1.jpg"], {"val": [b"cat/1.jpg"]}, ["cat"]),
        (["x/val/cat/a/1.jpg"], {"val": [b"cat/a/1.jpg"]}, ["cat"]),
        (["val/1.jpg"], {"val": [b"1.jpg"]}, []),
        (["2.jpg", "1.jpg"], {"train": [b"1.jpg", b"2.jpg"]}, []),
        (["bus/1.jpg", "train/1.jpg"], {"train": [b"bus/1.jpg", b"train/1.jpg"]}, ["bus", "train"]),
    ],
)
def test_layouts(tmp_path, members, splits, classes):
    found = open_source(write_tar(tmp_path / "x.tar", *members))
    assert found.class_ids == classes
    assert {split: [key for key, _, _ in samples(source)] for split, source in found.splits.items()} == splits


def test_a_wrapping_folder_is_mentioned(tmp_path):
    found = open_source(write_tar(tmp_path / "x.tar", "a/pets/cat/1.jpg", "a/pets/dog/1.jpg"))
    assert len(found.notes) == 1
    assert "everything in it lies in a/pets/" in found.notes[0]


def test_splits_and_classes_side_by_side_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"x.tar: holds both split folders \(train/\) and others \(bus/\)"):
        open_source(write_tar(tmp_path / "x.tar", "bus/1.jpg", "train/steam/1.jpg"))


def test_flat_archive_is_unlabelled(tmp_path):
    source = open_source(write_tar(tmp_path / "x.tar", "1.jpg", "2.jpg")).splits["train"]
    assert source.labels.tolist() == [UNLABELLED, UNLABELLED]


def test_split_told_by_the_archives_name(tmp_path):
    write_tar(tmp_path / "pets-train.tar", "cat/1.jpg", "dog/1.jpg")
    write_tar(tmp_path / "pets-val.tar", "dog/2.jpg")
    found = open_source(tmp_path)
    assert found.kind == "tar"
    assert samples(found.splits["val"]) == [(b"dog/2.jpg", 1, b"dog/2.jpg")]
    only = open_source(tmp_path, splits=["val"])
    assert list(only.splits) == ["val"]
    assert only.class_ids == ["cat", "dog"]
    assert only.splits["val"].labels.tolist() == [1]
    assert list(open_source(tmp_path / "pets-val.tar").splits) == ["val"]
    with pytest.raises(UsageError, match=r"no split 'test' \(there are: train, val\)"):
        open_source(tmp_path, splits=["test"])


def test_several_archives_make_one_split(tmp_path):
    write_tar(tmp_path / "b.tar", "cat/1.jpg")
    write_tar(tmp_path / "a.tar", "dog/1.jpg", "cat/2.jpg")
    keys = [key for key, _, _ in samples(open_source(tmp_path).splits["train"])]
    assert keys == [b"cat/1.jpg", b"cat/2.jpg", b"dog/1.jpg"]
    write_tar(tmp_path / "c.tar", "cat/1.jpg")
    with pytest.raises(UsageError, match=r"cat/1.jpg is in .*b.tar and in .*c.tar"):
        open_source(tmp_path)


def test_duplicate_names_are_refused(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_bytes([("a/1.jpg", b"old"), ("a/2.jpg", b"x"), ("./a/1.jpg", b"new")]))
    with pytest.raises(UsageError, match=r"a/1.jpg is twice in .*x.tar"):
        open_source(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(tar_bytes([("a/1.jpg", b"x"), ("readme", b"old"), ("readme", b"new")]))
    assert len(open_source(tmp_path / "x.tar").splits["train"]) == 1


def test_unknown_class_names_archive_and_member(tmp_path):
    with pytest.raises(UsageError, match=r"x.tar: emu/1.jpg: class 'emu' isn't in train \(1 class: 'cat'\)"):
        open_source(write_tar(tmp_path / "x.tar", "train/cat/1.jpg", "val/emu/1.jpg"))


def test_links_inside_the_archive(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:

        def add(name, kind=tarfile.REGTYPE, target=""):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)

        tar.addfile(*_file("a/1.jpg", b"one"))
        tar.addfile(*_file("pool/77", b"seventy-seven"))
        add("b/hard.jpg", tarfile.LNKTYPE, "./a/1.jpg")
        add("b/soft.jpg", tarfile.SYMTYPE, "../a/1.jpg")
        add("b/pool.jpg", tarfile.SYMTYPE, "../pool/77")
        add("b/chain.jpg", tarfile.SYMTYPE, "soft.jpg")
        add("b/loop.jpg", tarfile.SYMTYPE, "loop.jpg")
        add("b/outside.jpg", tarfile.SYMTYPE, "/etc/passwd")
        add("b/pipe.jpg", tarfile.FIFOTYPE)
        add("b/empty.jpg")
    source = open_source(tmp_path / "x.tar").splits["train"]
    outcome = {}
    for i in range(len(source)):
        try:
            outcome[source.key(i).decode()] = source.read(i)
        except BadSample as error:
            outcome[source.key(i).decode()] = error.reason
    assert outcome == {
        "a/1.jpg": b"one",
        "b/hard.jpg": b"one",
        "b/soft.jpg": b"one",
        "b/pool.jpg": b"seventy-seven",
        "b/chain.jpg": b"one",
        "b/loop.jpg": "missing",
        "b/outside.jpg": "missing",
        "b/pipe.jpg": "missing",
        "b/empty.jpg": "empty",
    }
    assert source.labels.tolist() == [0] + [1] * 8


def _file(name, content):
    import io

    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, io.BytesIO(content)


def test_truncated_archive_is_named(tmp_path):
    path = write_tar(tmp_path / "x.tar", "a/1.jpg", "a/2.jpg")
    path.write_bytes(path.read_bytes()[:1300])
    with pytest.raises(UsageError, match=r"x.tar: truncated"):
        open_source(path)


@pytest.mark.parametrize(("magic", "name"), [(b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz")])
def test_compressed_archive_is_explained(tmp_path, magic, name):
    (tmp_path / "x.tar.zzz").write_bytes(magic + bytes(600))
    with pytest.raises(UsageError, match=f"compressed with {name}.*run `"):
        open_source(tmp_path / "x.tar.zzz")


def test_an_archive_that_shrinks_or_goes_stops_the_job(tmp_path):
    path = write_tar(tmp_path / "x.tar", "a/1.jpg", "a/2.jpg")
    source = open_source(path).splits["train"]
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(Error, match=r"x.tar: shorter than when it was indexed"):
        source.read(1)
    again = pickle.loads(pickle.dumps(source))
    path.unlink()
    with pytest.raises(Error, match=r"x.tar: No such file or directory"):
        again.read(0)
    assert again.change_stamps(np.array([0, 1])).tolist() == [[-1, -1], [-1, -1]]


def test_error_of_the_disk_is_a_bad_sample(tmp_path, monkeypatch):
    source = open_source(write_tar(tmp_path / "x.tar", "a/1.jpg")).splits["train"]

    def failing(fd, size, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(archive, "pread", failing)
    with pytest.raises(BadSample) as caught:
        source.read(0)
    assert caught.value.reason == "unreadable"


def test_stamps(tmp_path):
    path = write_tar(tmp_path / "x.tar", "a/1.jpg", "a/22.jpg")
    source = open_source(path).splits["train"]
    os.utime(path, ns=(5, 7))
    assert source.change_stamps(np.array([1, 0])).tolist() == [[8, 7], [7, 7]]


def test_a_worker_maps_the_index_and_opens_archives_itself(tmp_path):
    source = open_source(write_tar(tmp_path / "x.tar", "a/1.jpg", "b/2.jpg")).splits["train"]
    source.read(0)
    joblib.dump(source, tmp_path / "index")
    again = joblib.load(tmp_path / "index", mmap_mode="r")
    assert isinstance(again.offset, np.memmap)
    assert samples(again) == samples(source)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # other tests have left threads
def test_a_forked_child_reads_through_inherited_descriptors(tmp_path):
    source = open_source(write_tar(tmp_path / "x.tar", *(f"a/{i:03d}.jpg" for i in range(50)))).splits["train"]
    source.read(0)
    child = os.fork()
    if child == 0:
        good = all(source.read(i) == b"a/%03d.jpg" % i for i in range(50))
        os._exit(0 if good else 1)
    assert all(source.read(i) == b"a/%03d.jpg" % i for i in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_few_descriptors_for_many_archives(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_OPEN_ARCHIVES", 3)
    for i in range(10):
        write_tar(tmp_path / f"{i}.tar", f"c/{i}.jpg")
    source = open_source(tmp_path).splits["train"]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    assert [content for _, _, content in samples(source)] == [f"c/{i}.jpg".encode() for i in range(10)]
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before + 3
        del source
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("members", "count", "example", "classes", "wanted"),
    [
        # the stray image hides that stuff/ wraps everything else
        (["1.jpg", "stuff/cat/1.jpg", "stuff/dog/1.jpg"], "2 of 2 images lie", "stuff/cat/1.jpg", "stuff", "stuff"),
        (["pets/a/cat/1.jpg", "pets/b/dog/1.jpg"], "2 of 2 images lie", "pets/a/cat/1.jpg", "a, b", "pets/a"),
        (["train/cat/1.jpg", "train/cat/old/1.jpg"], "1 of 2 images lies", "train/cat/old/1.jpg", "cat", "train/cat"),
    ],
)
def test_images_deeper_than_the_class_folders_are_pointed_out(tmp_path, members, count, example, classes, wanted):
    tar = write_tar(tmp_path / "x.tar", *members)
    (warning,) = open_source(tar).warnings
    assert warning == (
        f"{count} deeper than the class folders, such as {example}; taken for the class: {classes}; "
        f"if the folders below are the classes, unpack it and give the folder {wanted} as SRC"
    )


def test_images_where_they_should_be_raise_no_warning(tmp_path):
    for members in (["stuff/cat/1.jpg", "stuff/dog/1.jpg"], ["1.jpg"], ["train/cat/1.jpg", "val/cat/1.jpg"]):
        assert open_source(write_tar(tmp_path / "x.tar", *members)).warnings == []


@pytest.mark.parametrize(
    ("images", "folders", "classes"),
    [
        (["photos/tree/a/1.jpg", "photos/tree/c/1.jpg"], ["photos/tree", "photos/tree/b"], ["a", "b", "c"]),
        (["train/a/1.jpg", "train/c/1.jpg", "val/c/1.jpg"], ["train/b", "val/d", "misc/e"], ["a", "b", "c"]),
        (["val/a/1.jpg", "test/c/1.jpg"], ["val/b"], ["a", "b", "c"]),
        (["a/1.jpg", "a/x.txt", "c/1.jpg", "b/readme.txt"], ["c/deep/er", ".git/hooks"], ["a", "b", "c"]),
        (["1.jpg", "2.jpg"], ["b"], []),
    ],
)
def test_a_class_folder_without_images_keeps_its_place(tmp_path, images, folders, classes):
    with tarfile.open(tmp_path / "pets.tar", "w") as tar:
        for name in folders:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
    (tmp_path / "files.tar").write_bytes(tar_bytes([(name, name.encode()) for name in images]))
    with tarfile.open(tmp_path / "pets.tar", "a") as tar, tarfile.open(tmp_path / "files.tar") as files:
        for info in files:
            tar.addfile(info, files.extractfile(info))
    with tarfile.open(tmp_path / "pets.tar") as tar:
        tar.extractall(tmp_path / "folder", filter="data")
    packed = open_source(tmp_path / "pets.tar")
    assert packed.class_ids == classes
    wrapper = "photos/tree" if images[0].startswith("photos") else ""
    unpacked = open_source(tmp_path / "folder" / wrapper)
    assert unpacked.class_ids == classes
    for split, source in unpacked.splits.items():
        assert samples(packed.splits[split]) == samples(source)
