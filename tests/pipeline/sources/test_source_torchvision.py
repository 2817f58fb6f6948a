"""torchvision's datasets by name, from files written here in torchvision's own formats."""

import gzip
import pickle
import subprocess
import sys

import joblib
import numpy as np
import pytest

from pipeline.errors import UsageError
from pipeline.sources import open_source
from pipeline.sources.sequence import LazySource, PackedSource

datasets = pytest.importorskip("torchvision.datasets")


def idx(array) -> bytes:
    """The IDX format: two zeros, type code 8 (uint8), number of dimensions, big-endian sizes, data."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_mnist(root, counts=(7, 4)):
    rng = np.random.default_rng(1)
    made = {}
    (root / "MNIST/raw").mkdir(parents=True)
    for split, count in zip(("train", "t10k"), counts, strict=True):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = rng.integers(0, 10, count).astype(np.uint8)
        (root / f"MNIST/raw/{split}-images-idx3-ubyte").write_bytes(idx(images))
        (root / f"MNIST/raw/{split}-labels-idx1-ubyte").write_bytes(idx(labels))
        made[split] = images, labels
    return made


def test_mnist(tmp_path):
    made = write_mnist(tmp_path)
    found = open_source(f"torchvision:MNIST:{tmp_path}")
    assert found.kind == "torchvision"
    assert found.class_ids == [str(i) for i in range(10)]
    assert found.class_names[:2] == ["0 - zero", "1 - one"]
    assert list(found.splits) == ["train", "test"]
    for split, name in (("train", "train"), ("test", "t10k")):
        images, labels = made[name]
        source = found.splits[split]
        assert isinstance(source, PackedSource)
        assert source.labels.tolist() == labels.tolist()
        for i in range(len(source)):
            assert source.key(i) == b"%d" % i
            assert np.array_equal(source.read(i), images[i])


def test_workers_need_no_torch(tmp_path):
    made = write_mnist(tmp_path)
    joblib.dump(open_source(f"torchvision:mnist:{tmp_path}").splits["test"], tmp_path / "index")
    script = """
import joblib, sys
source = joblib.load(sys.argv[1], mmap_mode="r")
assert "torch" not in sys.modules
sys.stdout.buffer.write(source.read(2).tobytes())
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    assert subprocess.run(command, check=True, capture_output=True).stdout == made["t10k"][0][2].tobytes()


@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_mnist_from_gz_files(tmp_path, place):
    made = write_mnist(tmp_path / "written")
    root = tmp_path / "packed"
    (root / place).mkdir(parents=True)
    for path in (tmp_path / "written/MNIST/raw").iterdir():
        (root / place / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    before = sorted(root.rglob("*"))
    found = open_source(f"torchvision:MNIST:{root}")
    assert sorted(root.rglob("*")) == before
    assert found.splits["train"].labels.tolist() == made["train"][1].tolist()
    assert np.array_equal(found.splits["test"].read(1), made["t10k"][0][1])
    cut = root / place / "train-images-idx3-ubyte.gz"
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte.gz: .*; get the file again"):
        open_source(f"torchvision:MNIST:{root}")


def test_only_the_wanted_split(tmp_path):
    write_mnist(tmp_path)
    assert list(open_source(f"torchvision:MNIST:{tmp_path}", splits=["test"]).splits) == ["test"]
    with pytest.raises(UsageError, match=r"no split 'val' \(there are: train, test\)"):
        open_source(f"torchvision:MNIST:{tmp_path}", splits=["val"])


def test_cifar10(tmp_path, monkeypatch):
    """Batches as CIFAR-10's: rows of 3072 bytes, all red, then green, then blue."""
    rng = np.random.default_rng(2)
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: setattr(self, "classes", ["plane", "car", "bird"]))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        rows[name] = rng.integers(0, 256, (2, 3072), np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": rows[name], "labels": [2, 0]}))
    found = open_source(f"torchvision:CIFAR10:{tmp_path}")
    assert found.class_names == ["plane", "car", "bird"]
    train = found.splits["train"]
    assert train.labels.tolist() == [2, 0] * 5
    wanted = rows["data_batch_2"][1]
    assert np.array_equal(
        train.read(3)[5, 7], [wanted[5 * 32 + 7], wanted[1024 + 5 * 32 + 7], wanted[2048 + 5 * 32 + 7]]
    )
    assert train.read(3).shape == (32, 32, 3)


def test_channels_first_arrays(tmp_path, monkeypatch):
    import scipy.io as sio

    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (32, 32, 3, 5), np.uint8)
    monkeypatch.setattr(datasets.SVHN, "_check_integrity", lambda self: True)
    for split in ("train", "test", "extra"):
        sio.savemat(tmp_path / f"{split}_32x32.mat", {"X": images, "y": np.array([[1], [10], [3], [2], [9]])})
    found = open_source(f"torchvision:SVHN:{tmp_path}")
    assert list(found.splits) == ["train", "test"]
    source = found.splits["train"]
    assert source.labels.tolist() == [1, 0, 3, 2, 9]  # SVHN calls the zero 10
    assert isinstance(source, PackedSource)
    assert np.array_equal(source.read(4), images[:, :, :, 4])
    assert list(open_source(f"torchvision:SVHN:{tmp_path}", splits=["extra"]).splits) == ["extra"]


def test_datasets_without_an_array_are_asked_for_each_image(tmp_path):
    found = open_source("torchvision:FakeData", limit_per_class=2)
    source = found.splits["train"].source
    assert isinstance(source, LazySource)
    wanted = datasets.FakeData()
    assert len(found.class_ids) == 10
    assert source.labels[:20].tolist() == [int(wanted[i][1]) for i in range(20)]
    joblib.dump(source, tmp_path / "index")
    assert np.array_equal(joblib.load(tmp_path / "index").read(3), np.asarray(wanted[3][0]))


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ("torchvision:MNST", "torchvision has no dataset 'MNST'; did you mean .*MNIST"),
        ("torchvision:", "torchvision has no dataset ''; such as MNIST or CIFAR10"),
        ("torchvision:ImageFolder:/nowhere", "nowhere"),
        ("torchvision:EMNIST:/nowhere", "needs more than a name and a split for it; convert it from Python"),
        ("torchvision:CocoDetection:/nowhere", "needs more than a name .*annFile.*; convert it from Python"),
        ("torchvision:VisionDataset", "torchvision has no dataset 'VisionDataset'"),
        ("torchvision:VOCDetection:/nowhere", "/nowhere"),
    ],
)
def test_errors_in_one_line(src, message):
    with pytest.raises(UsageError, match=message) as caught:
        open_source(src)
    assert "\n" not in str(caught.value)


def test_targets_that_are_no_class_numbers(monkeypatch):
    real = datasets.FakeData.__getitem__
    monkeypatch.setattr(datasets.FakeData, "__getitem__", lambda self, i: (real(self, i)[0], {"boxes": []}))
    with pytest.raises(UsageError, match="sample 0 has the label"):
        open_source("torchvision:FakeData")


def test_missing_files_are_not_downloaded_unless_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets.MNIST, "download", lambda self: asked.append(self.root))
    with pytest.raises(UsageError, match=r"Dataset not found. You can use --download to download it"):
        open_source(f"torchvision:MNIST:{tmp_path}")
    assert asked == []
    made = write_mnist(tmp_path)
    found = open_source(f"torchvision:MNIST:{tmp_path}", download=True)
    assert len(asked) == 2
    assert found.splits["train"].labels.tolist() == made["train"][1].tolist()


def test_download_where_there_is_none(tmp_path):
    with pytest.raises(UsageError, match="--download: only torchvision's datasets"):
        open_source(tmp_path, "folder", download=True)
    with pytest.raises(UsageError, match="--download: torchvision can't download FakeData"):
        open_source("torchvision:FakeData", download=True)


def test_without_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UsageError, match=r'torchvision is missing; `pip install "efficient-imagenet\[train\]"`'):
        open_source("torchvision:MNIST")


def test_real_mnist(real_data):
    """10,000 digits: against the IDX files, parsed here."""
    root = real_data / "mnist10k"
    found = open_source(f"torchvision:MNIST:{root}")
    for split, name, count in (("train", "train", 8500), ("test", "t10k", 1500)):
        images = gzip.decompress((root / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((root / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        source = found.splits[split]
        assert len(source) == count
        assert source.labels.tolist() == list(labels)
        assert b"".join(source.read(i).tobytes() for i in range(count)) == images
