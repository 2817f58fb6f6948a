"""What the name of a file or folder says: an image candidate, something to pass over, or a split.

The extension only decides what is looked at; the content decides the format. An extension is listed when a person
would expect the file to be accounted for, even where decoding it may turn out to be impossible.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from pipeline.sources import ignored
from pipeline.text import as_text

# fmt: off
IMAGE_EXTENSIONS = frozenset((
    b"jpg", b"jpeg", b"jpe", b"jfif", b"png", b"apng", b"webp", b"gif", b"bmp", b"dib", b"tif", b"tiff", b"avif",
    b"heic", b"heif", b"jxl", b"jp2", b"j2k", b"jpx", b"jpf", b"jpc", b"ppm", b"pgm", b"pbm", b"pnm", b"mpo", b"ico",
    b"tga", b"qoi",
))
# fmt: on
SYSTEM_FOLDERS = frozenset((b"__macosx", b"@eadir", b"$recycle.bin", b"system volume information", b"lost+found"))

# fmt: off
_SPLITS = {
    b"train": "train", b"training": "train",
    b"val": "val", b"valid": "val", b"validation": "val", b"dev": "val",
    b"test": "test", b"testing": "test",
}
# fmt: on
# Files that may hold labels: tables, and annotations whose name says so or of which there are as many as images.
_TABLES = frozenset((b"csv", b"tsv", b"jsonl", b"ndjson", b"parquet", b"mat", b"xls", b"xlsx", b"cls", b"h5", b"lst"))
_ANNOTATIONS = frozenset((b"json", b"txt", b"xml", b"npy", b"npz", b"pkl", b"yaml", b"yml"))
_LABEL_WORDS = re.compile(rb"label|class|anno|target|meta|truth|gt|categor|synset|train|val|test|list|index|species")
_ABOUT = (b".", b"readme", b"licen", b"requirements", b"sha", b"md5", b"checksum")
_WORDS = re.compile(rb"[a-z]+")


def is_image(name: bytes) -> bool:
    """True where the extension, in any case, is that of an image."""
    stem, dot, extension = name.rpartition(b".")
    return bool(dot and stem) and extension.lower() in IMAGE_EXTENSIONS


def is_system_folder(name: bytes) -> bool:
    return name.startswith(b".") or name.lower() in SYSTEM_FOLDERS


def why_ignored(path: bytes) -> str | None:
    """Why the file at this relative path is passed over, or None where it is an image candidate."""
    *folders, name = path.split(b"/")
    if any(is_system_folder(folder) for folder in folders):
        return ignored.SYSTEM_FOLDER
    if name.startswith(b"."):
        return ignored.DOT_FILE
    return None if is_image(name) else ignored.NOT_AN_IMAGE


def split_of_folder(name: bytes) -> str | None:
    """The split that a folder of this name holds: `train`, `val`, `test`, or None. Case doesn't matter."""
    return _SPLITS.get(name.lower())


def splits_among(folders: Iterable[bytes]) -> dict[bytes, str]:
    """Folder -> split, for those that are named as splits.

    Where none is, those that differ by a split's name alone: `training_set` and `test_set`, `x_train` and `x_val`.
    """
    folders = list(folders)
    exact = {folder: split for folder in folders if (split := split_of_folder(folder))}
    alike: dict[bytes, dict[bytes, str]] = {}
    for folder in folders:
        name = folder.lower()
        for word in _WORDS.finditer(name):
            if split := _SPLITS.get(word[0]):
                alike.setdefault(name[: word.start()] + b"*" + name[word.end() :], {})[folder] = split
                break
    several = [found for found in alike.values() if "train" in found.values() and len(set(found.values())) > 1]
    return exact or max(several, key=len, default={})


def label_like(paths: Iterable[bytes]) -> list[str]:
    """Those of the files in a folder or archive that may hold labels: some names, and kinds of which there are many."""
    images, found, many = 0, list[str](), Counter[bytes]()
    for path in paths:
        stem, _, extension = path.rpartition(b"/")[2].lower().rpartition(b".")
        if extension in IMAGE_EXTENSIONS:
            images += 1
        elif not stem or stem.startswith(_ABOUT):
            continue
        elif extension in _TABLES or (extension in _ANNOTATIONS and _LABEL_WORDS.search(stem)):
            if len(found) < 100:
                found.append(as_text(path))
        elif extension in _ANNOTATIONS:
            many[extension] += 1
    return sorted(found) + [f"{n:,} .{kind.decode()} files" for kind, n in many.items() if n > 1 and 2 * n >= images]


def split_of_file(path: bytes) -> str | None:
    """The split that a data file (parquet, tar) belongs to, or None: its name's first split word, else its folder's."""
    for part in reversed(path.lower().split(b"/")):
        found = [_SPLITS[word] for word in _WORDS.findall(part) if word in _SPLITS]
        if found:
            return found[0]
    return None
