"""Stores at URLs: a path in a bucket, with those methods of `pathlib.Path` that readers of stores use.

fsspec is imported when the first URL is opened. What the network says is raised as an `OSError` with the URL as its
file, like what a disk says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import numpy as np

from pipeline.errors import Error, UsageError
from pipeline.text import one_line

LOCAL = "file://"
NAMELESS = re.compile(r"(s3a?|gc?s|https?):(?=/|$)(?!//[^/])|[a-z][a-z0-9+.-]*:///*$")
"""Addresses without the bucket or host that they need; they would be taken for folders here."""


def place(path: str | os.PathLike[str] | RemotePath) -> Path:
    """Where a store lies: an absolute path, or for a URL a `RemotePath`, which readers use alike.

    Raises:
        UsageError: a URL without a bucket, host or path.
    """
    text = str(path)
    if NAMELESS.match(text):
        if text.startswith(LOCAL):
            raise UsageError(f"{text}: a URL without a path; write file:///PATH")
        raise UsageError(f"{text}: a URL without a bucket or host; write {text.partition(':')[0]}://NAME/x.zarr")
    if "://" in text and not text.startswith(LOCAL):
        return cast(Path, RemotePath(text))
    return Path(unquote(text.removeprefix(LOCAL)) if text.startswith(LOCAL) else text).absolute()


class RemotePath:
    """A file or folder at a URL that fsspec knows, such as `s3://bucket/x.zarr`; listings are always fresh.

    Raises, with all methods:
        FileNotFoundError: nothing is there.
        OSError: the network or the server says so.
        UsageError: a scheme that isn't known, or whose package isn't installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """fsspec's file system and the path in it; other errors than a missing file become an OSError."""
        try:
            from fsspec.core import url_to_fs

            system, path = url_to_fs(self.url)
        except ImportError as error:
            scheme = self.url.partition("://")[0]
            raise UsageError(
                f"{self.url}: {scheme}:// needs a package that isn't installed ({one_line(error)}); "
                "pip install 'efficient-imagenet[remote]' (s3), or fsspec's package for that scheme"
            ) from None
        except ValueError as error:
            raise UsageError(f"{self.url}: no store can be opened at such a URL ({one_line(error)})") from None
        try:
            yield system, path
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, "not found", self.url) from None
        except Error:  # ours, such as of a signal
            raise
        except Exception as error:  # each package raises kinds of its own
            raise OSError(errno.EIO, one_line(error), self.url) from error

    def stat(self) -> Any:
        """With `st_size` and `st_mode`, as `os.stat` has them."""
        with self._opened() as (system, path):
            system.invalidate_cache()
            found = system.info(path)
        kind = stat.S_IFREG if found["type"] == "file" else stat.S_IFDIR
        return SimpleNamespace(st_size=found["size"] or 0, st_mode=kind)

    def exists(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def _list(self) -> list[dict[str, Any]]:
        with self._opened() as (system, path):
            system.invalidate_cache()
            return [entry for entry in system.ls(path, detail=True) if entry["name"].strip("/") != path.strip("/")]

    def iterdir(self) -> Iterator[RemotePath]:
        return (self / entry["name"].rstrip("/").rpartition("/")[2] for entry in self._list())

    def folders(self) -> list[str]:
        """Names of the folders right below."""
        return [e["name"].rstrip("/").rpartition("/")[2] for e in self._list() if e["type"] == "directory"]

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the files right below."""
        files = [entry for entry in self._list() if entry["type"] == "file"]
        with self._opened() as (system, _):
            return {entry["name"].rpartition("/")[2]: _size(system, entry) for entry in files}

    def all_sizes(self) -> dict[str, int]:
        """Name, relative to this folder -> bytes of all files below; none where there is no such folder."""
        with self._opened() as (system, path):
            system.invalidate_cache()
            found = system.find(path, detail=True)
            start = path.strip("/") + "/"
            return {
                name.lstrip("/").removeprefix(start): _size(system, entry)
                for name, entry in found.items()
                if name.lstrip("/").startswith(start)
            }

    def read_bytes(self) -> bytes:
        with self._opened() as (system, path):
            return cast(bytes, system.cat_file(path))

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start` on, or as many as there are."""
        with self._opened() as (system, path):
            data = cast(bytes, system.cat_file(path, start=start, end=start + length))
        return data if len(data) <= length else data[start : start + length]  # a server that knows no ranges

    def write_bytes(self, data: bytes) -> None:
        """Put the file there in one piece, and make the folders that it needs where there are such."""
        with self._opened() as (system, path):
            try:
                system.pipe_file(path, data)
            except FileNotFoundError:
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
                system.pipe_file(path, data)


def _size(system: Any, entry: dict[str, Any]) -> int:
    """Bytes of a listed file; a plain web server's listing doesn't have them, so it is asked for each."""
    size = entry["size"] if entry["size"] is not None else system.info(entry["name"])["size"]
    if size is None:
        raise OSError(errno.EIO, "the server doesn't say how large this file is", entry["name"])
    return int(size)


def is_remote(path: Path | RemotePath) -> bool:
    return isinstance(path, RemotePath)


def check_local(path: str | os.PathLike[str], name: str, instead: str = "give a path on this machine's disk") -> None:
    """Raise UsageError where a path that must be on a disk is a URL.

    Args:
        name: the flag's or argument's.
        instead: what to do.
    """
    if "://" in str(path) or NAMELESS.match(str(path)):
        raise UsageError(f"{name} {path}: a URL; {instead}")


def file_sizes(folder: Path | RemotePath) -> dict[str, int]:
    """Name -> bytes of the regular files right below a folder."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    sizes: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # such as of a link that leads nowhere
                found = entry.stat()
                if stat.S_ISREG(found.st_mode):
                    sizes[entry.name] = found.st_size
    return sizes


def groups_below(folder: Path | RemotePath) -> list[str]:
    """Names of the folders right below that hold a `zarr.json`."""
    if isinstance(folder, RemotePath):
        return [name for name in folder.folders() if (folder / name / "zarr.json").exists()]
    return [entry.name for entry in os.scandir(folder) if os.path.isfile(os.path.join(entry.path, "zarr.json"))]


def read_part(file: Path | RemotePath, start: int, length: int) -> np.ndarray:
    """uint8 (length,), or shorter where the file ends before: a part of a file, without a map."""
    if isinstance(file, RemotePath):
        return np.frombuffer(file.read_range(start, length), np.uint8)
    with open(file, "rb") as opened:
        opened.seek(start)
        return np.fromfile(opened, np.uint8, length)


def zarr_store(folder: Path | RemotePath) -> Any:
    """What zarr opens to read a folder."""
    if not isinstance(folder, RemotePath):
        return str(folder)
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(folder.url, read_only=True)
