"""Which kind of source SRC is, found by looking at it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.files import entries_of, open_regular
from pipeline.sources.hugging_face import is_dataset
from pipeline.sources.imagenet import is_official
from pipeline.sources.kaggle import find_tree
from pipeline.sources.manifest import MANIFEST_SUFFIXES
from pipeline.sources.torchvision_sets import PREFIX
from pipeline.text import as_text

MAX_FOLDERS = 200  # looked into, the first by name of each level
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}


def detect_kind(src: Any) -> str:
    """The kind of source, one of `SOURCE_KINDS`; `tar` for a WebDataset, too, which only the index tells."""
    if not isinstance(src, str | os.PathLike):
        parts = src.values() if isinstance(src, Mapping) else [src]
        return "hugging-face" if parts and all(map(is_dataset, parts)) else "sequence"
    if str(src).startswith(PREFIX):
        return "torchvision"
    path = Path(os.fspath(src))
    if path.is_dir():
        return _detect_folder(path)
    if path.is_file():
        return _detect_file(path)
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path}: neither a file nor a folder; check the path")
    raise UsageError(f"{path}: no such file or folder; check the path")


def _detect_file(path: Path) -> str:
    if path.suffix.lower() in MANIFEST_SUFFIXES:
        return "manifest"
    if is_official(path):
        return "imagenet"
    try:
        with open(path, "rb", opener=open_regular) as file:
            head = file.read(512)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check its permissions") from None
    if head[:4] == b"PAR1":
        return "parquet"
    for magic, (method, command) in _COMPRESSED.items():
        if head.startswith(magic):
            raise UsageError(f"{path}: compressed with {method}, so it can't be read in place; run `{command} {path}`")
    if head[:4] == b"PK\x03\x04":
        raise UsageError(f"{path}: a zip archive, which isn't read in place; run `unzip {path}` and give the folder")
    if head[257:262] == b"ustar" or path.suffix.lower() == ".tar":
        return "tar"
    if names.is_image(os.fsencode(path.name)):
        raise UsageError(f"{path}: a single image; give the folder that holds it")
    raise UsageError(f"{path}: no known kind of source (folder, tar, parquet, CSV, JSON lines); give --source")


def _detect_folder(path: Path) -> str:
    if is_official(path):
        return "imagenet"
    if find_tree(path):
        return "kaggle"
    if (path / "zarr.json").is_file():
        raise UsageError(f"{path}: a Zarr store already; `python -m pipeline copy` copies one")
    seen: dict[str, str] = {}
    for folder, name in _files(os.fsencode(path)):
        extension = name.lower().rpartition(b".")[2]
        if name.startswith(b"."):
            continue
        if names.is_image(name):
            seen.setdefault("folder", as_text(os.path.join(folder, name)))
        elif extension in (b"tar", b"parquet"):
            seen.setdefault(extension.decode(), as_text(os.path.join(folder, name)))
    if len(seen) > 1:
        (kind, example), (other, another) = list(seen.items())[:2]
        raise UsageError(f"{path}: holds {kind} ({example}) and {other} data ({another}); give --source for one")
    return next(iter(seen), "folder")


def _files(root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Folder and name of the files in the first three levels, breadth first; in at most `MAX_FOLDERS` folders."""
    level, left = [root], MAX_FOLDERS
    for _ in range(3):
        below: list[bytes] = []
        for folder in level[:left]:
            # Links to folders aren't entered: what they hold is told by the rest.
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries_of(folder))
            yield from ((folder, name) for name, is_folder in found if not is_folder)
            inner = (name for name, is_folder in found if is_folder and not names.is_system_folder(name))
            below += [os.path.join(folder, name) for name in inner]
        left -= min(left, len(level))
        level = below
