"""Small datasets in the layouts that sources read. File contents need not be images: sources don't decode."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.io import savemat


def write_files(root: Path, *paths: str) -> Path:
    """Files whose content is their own path."""
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(path.encode())
    return root


def samples(source) -> list[tuple[bytes, int, object]]:
    """[(key, label, content)] of a whole source."""
    return [(source.key(i), int(source.labels[i]), source.read(i)) for i in range(len(source))]


def tar_bytes(files: Mapping[str, bytes] | Sequence[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of these files, in this order."""
    buffer = io.BytesIO()
    pairs = files.items() if isinstance(files, Mapping) else files
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, content in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_tar(path: Path, *names: str) -> Path:
    """An archive of files whose content is their own path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes([(name, name.encode()) for name in names]))
    return path


# number, WordNet id, words, number of children; numbers are in another order than ids, as in the real kit
SYNSETS = (
    (1, "n02119789", "kit fox, Vulpes macrotis", 0),
    (2, "n02100735", "English setter", 0),
    (3, "n01440764", "tench, Tinca tinca", 0),
    (4, "n00001740", "entity", 2),
)


def meta_mat(synsets=SYNSETS, prefix: str = "ILSVRC2012") -> bytes:
    """A `meta.mat` as the kit's: a struct array with one row per synset."""
    fields = [f"{prefix}_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
    rows = np.zeros((len(synsets), 1), [(name, object) for name in fields])
    for i, (number, wnid, words, children) in enumerate(synsets):
        rows[i, 0] = (float(number), wnid, words, f"what {words} is", float(children), np.zeros((1, children)), 0.0)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": rows})
    return buffer.getvalue()


def write_devkit(
    path: Path, truth: Sequence[int | str], *, synsets=SYNSETS, prefix: str = "ILSVRC2012", drop: str = ""
) -> Path:
    """A devkit archive; `truth` is its ground truth, `drop` the end of a file name that is left out."""
    top = f"{prefix}_devkit_t12"
    files = {
        f"{top}/readme.txt": b"hello",
        f"{top}/data/meta.mat": meta_mat(synsets, prefix),
        f"{top}/data/{prefix}_validation_ground_truth.txt": "".join(f"{line}\n" for line in truth).encode(),
    }
    files = {name: content for name, content in files.items() if not drop or not name.endswith(drop)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(tar_bytes(files)))
    return path


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def write_imagenet(root: Path) -> Path:
    """The official archives in small: three classes, five training and four validation images, and the devkit."""
    classes = {"n02100735": (7, 2), "n01440764": (10, 3), "n02119789": (1,)}
    train = {
        f"{wnid}.tar": tar_bytes({f"{wnid}_{i}.JPEG": f"{wnid} {i}".encode() for i in numbers})
        for wnid, numbers in classes.items()
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(train))
    val = {val_name(number): f"val {number}".encode() for number in (1, 2, 3, 4)}
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(val))
    write_devkit(root / "ILSVRC2012_devkit_t12.tar.gz", [3, 1, 2, 3])
    return root
