"""The ILSVRC2012 development kit: which class each validation image has, and what the classes are called."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources.files import open_regular, opened
from pipeline.sources.labels import LabelColumn
from pipeline.sources.tar_headers import pread
from pipeline.text import as_text, one_line

NAME = "ILSVRC2012_devkit_t12"
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
MAX_BYTES = 64_000_000  # of the unpacked kit, several times its size
_META_SECONDS, _META_MEMORY = 60, 8 << 30
_WANTED = f"get {NAME}.tar.gz, the ILSVRC2012 development kit for tasks 1 and 2"
_FIELDS = ("ILSVRC2012_ID", "WNID", "words", "num_children")
_VAL_IMAGE = re.compile(rb"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)


@dataclass(frozen=True)
class Devkit:
    """What the kit says.

    Attributes:
        path: where it was read from.
        words: WordNet id -> the class's names, `tench, Tinca tinca`, for each class that has images.
        truth: the WordNet id of validation image 1, 2, ...
    """

    path: Path
    words: dict[str, str]
    truth: list[str]

    def label(self, keys: Iterable[bytes], images: str) -> tuple[LabelColumn, list[str]]:
        """Labels of images named `ILSVRC2012_val_00000001.JPEG` and so on by number, and notes for the person."""
        column = LabelColumn()
        for key in keys:
            match = _VAL_IMAGE.fullmatch(key.rpartition(b"/")[2])
            number = int(match[1]) if match else 0
            if not 1 <= number <= len(self.truth):
                raise UsageError(
                    f"{images}: {as_text(key)} has no ground truth in {self.path} "
                    f"({len(self.truth):,} lines); the images and the devkit must both be of ILSVRC2012"
                )
            column.add(self.truth[number - 1])
        note = f"{images}: {len(column):,} images, {len(self.truth):,} lines of ground truth"
        return column, [] if len(column) == len(self.truth) else [note]


def is_official_val(keys: Iterable[bytes]) -> bool:
    """True where the first image is named as the official validation images are."""
    return any(_VAL_IMAGE.fullmatch(key) for key in islice(keys, 1))


def find_devkit(folder: Path) -> Path | None:
    """The kit in the folder: the archive as it was downloaded, or unpacked. One of another year comes last."""
    try:
        found = sorted(path for path in folder.iterdir() if re.match(r"ILSVRC\d{4}_devkit", path.name))
    except OSError:
        return None
    return min(found, key=lambda path: (not path.name.startswith(NAME), not path.is_file()), default=None)


def read_devkit(path: Path) -> Devkit:
    """Read the kit."""
    files = _read_folder(path) if path.is_dir() else _read_archive(path)
    for name in (META, GROUND_TRUTH):
        if name not in files:
            kit = "of another year or task" if files or not path.name.startswith(NAME) else "incomplete"
            raise UsageError(f"{path}: a devkit that is {kit} (no {name} in it); {_WANTED}")
    by_number, words = _read_meta(files[META], path)
    truth = []
    for line, text in enumerate(files[GROUND_TRUTH].decode("ascii", "replace").split("\n"), 1):
        if not text.strip():
            continue
        wnid = by_number.get(int(text)) if re.fullmatch(r"\s*\d{1,9}\s*", text) else None
        if wnid is None:
            raise UsageError(
                f"{path}: {GROUND_TRUTH}, line {line}: {text.strip()!r} isn't the number of one of the "
                f"{len(by_number):,} classes in {META}; {_WANTED}"
            )
        truth.append(wnid)
    return Devkit(path, words, truth)


def _read_folder(path: Path) -> dict[str, bytes]:
    files = {}
    for name in (META, GROUND_TRUTH):
        if (path / name).exists():
            with opened(str(path / name)) as fd:
                files[name] = pread(fd, MAX_BYTES, 0)
    return files


def _read_archive(path: Path) -> dict[str, bytes]:
    files = {}
    try:
        with open(path, "rb", opener=open_regular) as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            with gzip.open(file) if packed else contextlib.nullcontext(file) as stream:
                content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"{path}: holds more than {MAX_BYTES:,} bytes, which no devkit does; {_WANTED}")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                name = "/".join(member.name.removeprefix("./").split("/")[1:])
                inner = archive.extractfile(member) if name in (META, GROUND_TRUTH) else None
                if inner is not None:
                    files[name] = inner.read()
    except (OSError, tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        raise UsageError(f"{path}: can't be read ({one_line(error)}); {_WANTED}") from None
    return files


def _read_meta(content: bytes, path: Path) -> tuple[dict[int, str], dict[str, str]]:
    """Number -> WordNet id, and WordNet id -> words, of the synsets without children: only they have images."""
    rows = _synsets(content)
    if rows is None:
        raise UsageError(f"{path}: {META} can't be read, it is damaged; {_WANTED}")
    if isinstance(rows, str):
        raise UsageError(f"{path}: the synsets in {META} have no {rows}, so it is of another year; {_WANTED}")
    return {number: wnid for number, wnid, _ in rows}, {wnid: words for _, wnid, words in rows}


def _synsets(content: bytes) -> Any:
    """What `write_synsets` writes, by a process of its own: a damaged file makes scipy crash or take all memory."""
    command = [sys.executable, "-c", "from pipeline.sources import devkit; devkit.write_synsets()"]
    try:
        run = subprocess.run(command, input=content, capture_output=True, timeout=_META_SECONDS, check=False)
        return json.loads(run.stdout) if not run.returncode else None
    except (subprocess.TimeoutExpired, ValueError):
        return None


def write_synsets() -> None:
    """Write the synsets without children of the `meta.mat` on standard input as JSON, or the field that they lack."""
    from scipy.io import loadmat

    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_META_MEMORY, _META_MEMORY))
    content = io.BytesIO(sys.stdin.buffer.read())
    synsets = np.atleast_1d(loadmat(content, squeeze_me=True, variable_names=["synsets"])["synsets"])
    missing = [name for name in _FIELDS if name not in (synsets.dtype.names or ())]
    rows = [
        (int(synset["ILSVRC2012_ID"]), str(synset["WNID"]).strip(), str(synset["words"]).strip())
        for synset in synsets
        if not missing and int(synset["num_children"]) == 0
    ]
    json.dump(missing[0] if missing else rows, sys.stdout)
