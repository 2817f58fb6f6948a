"""The same images in every layout convert to the same pixels and labels under the same keys."""

import csv
import tarfile

import numpy as np
import pytest
from folders import make_folder
from layouts import tar_bytes, val_name, write_devkit
from PIL import Image

from pipeline import convert, open_store
from pipeline.commands.verify import verify
from pipeline.sources import Source, SourceSet, open_source

WNIDS = ["n01440764", "n02100735", "n02119789"]  # numbers 3, 2, 1 in the small devkit
NUMBER = {"n01440764": 3, "n02100735": 2, "n02119789": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Class folders; validation images have their official names."""
    root = make_folder(
        tmp_path_factory.mktemp("layouts") / "folder",
        {"train": dict.fromkeys(WNIDS, 3), "val": dict.fromkeys(WNIDS, 2)},
        suffix=".JPEG",
    )
    for i, path in enumerate(sorted((root / "val").rglob("*.JPEG"), key=lambda path: path.read_bytes()), 1):
        path.rename(path.with_name(val_name(i)))
    return root


@pytest.fixture(scope="module")
def expected(folder):
    """split -> key -> (label, pixels): decoded and resized by PIL, in a way that the pipeline doesn't use."""
    found = {}
    for split in ("train", "val"):
        for path in (folder / split).rglob("*.JPEG"):
            with Image.open(path) as image:
                width, height = image.size
                pixels = np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BICUBIC))
            assert width != height
            key = str(path.relative_to(folder / split)).encode()
            found.setdefault(split, {})[key] = WNIDS.index(path.parent.name), pixels
    return found


def archives(folder, root):
    train = {
        f"{wnid}.tar": tar_bytes({path.name: path.read_bytes() for path in (folder / "train" / wnid).iterdir()})
        for wnid in reversed(WNIDS)
    }
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(train))
    val = {path.name: path for path in sorted((folder / "val").rglob("*.JPEG"), key=lambda path: path.name)}
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes({name: path.read_bytes() for name, path in val.items()}))
    truth = [NUMBER[path.parent.name] for path in val.values()]
    write_devkit(root / "ILSVRC2012_devkit_t12.tar.gz", truth)
    return root


def kaggle(folder, root):
    data = root / "ILSVRC/Data/CLS-LOC"
    lines = ["ImageId,PredictionString"]
    for path in folder.rglob("*.JPEG"):
        flat = path.parts[-3] == "val"
        target = data / "val" / path.name if flat else data / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        lines += [f"{path.stem},{path.parent.name} 1 2 3 4"] if flat else []
    (root / "LOC_val_solution.csv").write_text("\n".join(lines))
    return root


def tar(folder, root):
    with tarfile.open(root / "x.tar", "w") as file:
        file.add(folder, "images")
    return root / "x.tar"


def webdataset(folder, root):
    for split in ("train", "val"):
        files = []
        for path in sorted((folder / split).rglob("*.JPEG")):
            key = f"{path.parent.name}/{path.stem}"
            files += [(f"{key}.jpg", path.read_bytes()), (f"{key}.cls", str(WNIDS.index(path.parent.name)).encode())]
        (root / f"{split}-000.tar").write_bytes(tar_bytes(files))
    return root


def parquet(folder, root):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for split in ("train", "val"):
        paths = sorted((folder / split).rglob("*.JPEG"))
        images = [{"bytes": path.read_bytes(), "path": str(path.relative_to(folder / split))} for path in paths]
        labels = [WNIDS.index(path.parent.name) for path in paths]
        pq.write_table(pa.table({"image": images, "label": labels}), root / f"{split}.parquet", row_group_size=2)
    return root


def manifest(folder, root):
    with open(root / "m.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for path in folder.rglob("*.JPEG"):
            writer.writerow([path, path.parent.name, path.parts[-3]])
    return root / "m.csv"


def sequence(folder, root):
    def of(split):
        for path in (folder / split).rglob("*.JPEG"):
            yield path.read_bytes(), path.parent.name, str(path.relative_to(folder / split))

    return {split: list(of(split)) for split in ("train", "val")}


KINDS = [archives, kaggle, tar, webdataset, parquet, manifest, sequence]


@pytest.mark.parametrize("make", KINDS)
def test_same_pixels_labels_and_keys(make, folder, expected, tmp_path):
    (tmp_path / "src").mkdir()
    src = make(folder, tmp_path / "src")
    if not isinstance(src, dict):
        assert open_source(src).kind == {"archives": "imagenet"}.get(make.__name__, make.__name__)
    convert(src, tmp_path / "x.zarr", size=16, fit="stretch", n_jobs=1, quiet=True)
    store = open_store(tmp_path / "x.zarr")
    assert store.splits == ["train", "val"]
    by_name = make in (archives, kaggle, manifest, webdataset)  # keys of another form, with the same file names
    for split, wanted in expected.items():
        found = {}
        for i in range(store[split].num_samples):
            key = store[split].key(i)
            if by_name:
                stem = key.rpartition(b"/")[2].split(b".")[0]
                label = int(store[split].labels[i])
                (key,) = (k for k in wanted if k.endswith(stem + b".JPEG") and wanted[k][0] == label)
            found[key] = int(store[split].labels[i]), store[split].image(i)
        assert found.keys() == wanted.keys()
        for key, (label, pixels) in wanted.items():
            assert found[key][0] == label
            assert np.abs(found[key][1].astype(int) - pixels).max() <= 2, key


class NpzSource:
    def __init__(self, path):
        self.path = path
        self.labels = np.load(path)["labels"].astype(np.int32)

    def __len__(self):
        return len(self.labels)

    def key(self, i):
        return b"%05d" % i

    def keys(self):
        return np.frombuffer(b"".join(map(self.key, range(len(self)))), np.uint8), np.arange(len(self) + 1) * 5

    def read(self, i):
        return np.load(self.path)["images"][i]

    def change_stamps(self, indices):
        return np.zeros((len(indices), 2), np.int64)


def test_a_source_of_ones_own(tmp_path):
    """The README's example of a new source."""

    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=[1, 0, 1, 1, 0, 0])
    source: Source = NpzSource(tmp_path / "x.npz")
    mine = SourceSet("npz", ["cat", "dog"], {"val": source, "train": source}, origin="x.npz")
    convert(mine, tmp_path / "x.zarr", split="val", size=16, n_jobs=1, quiet=True)
    val = open_store(tmp_path / "x.zarr")["val"]
    assert np.array_equal([val.image(i) for i in range(6)], images)
    assert val.labels.tolist() == [1, 0, 1, 1, 0, 0]
    assert mine.notes == []
    assert open_source(mine, limit_per_class=1).splits["val"].labels.tolist() == [1, 0]


@pytest.mark.parametrize("make", KINDS)
def test_every_kind_can_draw_val_from_train(make, folder, tmp_path):
    (tmp_path / "src").mkdir()
    src = make(folder, tmp_path / "src")
    store = tmp_path / "x.zarr"
    convert(src, store, size=16, split="train", val_fraction=0.3, val_per_class=1, n_jobs=1, quiet=True)
    splits = open_store(store)
    assert splits.splits == ["train", "val"]
    whole = open_source(src).splits["train"]
    drawn = [{split.key(i) for i in range(split.num_samples)} for split in (splits["train"], splits["val"])]
    assert drawn[0].isdisjoint(drawn[1])
    assert drawn[0] | drawn[1] == {whole.key(i) for i in range(len(whole))}
    assert set(splits["val"].labels.tolist()) == set(whole.labels.tolist())
    if not isinstance(src, dict):
        assert verify(store, against=src, quiet=True)["ok"]
