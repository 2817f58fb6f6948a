"""Real archives, against the standard library's reader."""

import tarfile

import pytest

from pipeline.errors import UsageError
from pipeline.sources import UNLABELLED, open_source


def test_imagenet_sample(real_data):
    path = real_data / "imagenet_sample_700.tar"
    found = open_source(path)
    source = found.splits["train"]
    with tarfile.open(path) as archive:
        contents = {m.name.encode(): archive.extractfile(m).read() for m in archive if m.isfile()}
    assert len(source) == len(found.class_ids) == 700
    assert found.class_ids == sorted({name.split(b"/")[0].decode() for name in contents})
    assert {source.key(i): source.read(i) for i in range(700)} == contents
    assert [found.class_ids[label] for label in source.labels] == [source.key(i)[:9].decode() for i in range(700)]


def test_odd_images_are_all_accounted_for(real_data):
    path = real_data / "odd_images.tar"
    found = open_source(path)
    with tarfile.open(path) as archive:
        names = sorted(name.encode() for name in archive.getnames())
    source = found.splits["train"]
    assert [source.key(i) for i in range(len(source))] == names
    assert found.ignored == {}
    assert set(source.labels.tolist()) == {UNLABELLED}


def test_compressed_archive_says_how_to_decompress(real_data):
    with pytest.raises(UsageError, match=r"cifar10.tar.gz: compressed with gzip.*run `gunzip -k .*cifar10.tar.gz`"):
        open_source(real_data / "cifar10.tar.gz")
