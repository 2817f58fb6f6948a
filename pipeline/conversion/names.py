"""What a run is called: its stores, its splits, its part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.store.remote import check_local

NAME_BYTES, PATH_BYTES = 255, 4095
"""The longest name and path that file systems take, in bytes."""
LONGEST_ENDING = ".errors.jsonl.tmp-0123456789ab"
"""The longest that is appended to the name of DST: the list of errors, while it is written."""
LONGEST_BELOW = 400
"""Bytes that paths in the work folder are longer than DST at most: a split's name and a temp file of a chunk."""
RESERVED = ("lock", "commit.lock", "runs", "copy", "classes.json", "zarr.json")


@dataclass(frozen=True)
class Part:
    """Part I of N of a conversion's chunks, I from 1: chunks whose number is I - 1 modulo N."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From "I/N"."""
        try:
            index, count = (int(word) for word in text.split("/"))
        except ValueError:
            raise UsageError(f"--part {text}: must be I/N, such as 1/4") from None
        if not 1 <= index <= count:
            raise UsageError(f"--part {text}: I must be from 1 to N")
        return cls(index, count)

    def has(self, chunk: int) -> bool:
        return chunk % self.count == self.index - 1


def store_paths(dst: str | os.PathLike[str], sizes: Sequence[int]) -> list[Path]:
    """One store per size: `{size}` in DST is replaced.

    Raises:
        UsageError: several sizes and no `{size}` in DST, or no folder of that name can be made.
    """
    text = os.fspath(dst)
    if len(sizes) > 1 and "{size}" not in text:
        raise UsageError(f"{text}: with several sizes DST must hold {{size}}, such as data/imagenet-{{size}}.zarr")
    check_local(text, "DST", "convert to a local folder, then `python -m pipeline copy` that to the URL")
    paths = [Path(os.path.abspath(text.replace("{size}", str(size)))) for size in sizes]
    if not text.strip() or text.endswith(".work") or not paths[0].name:
        raise UsageError(f"DST {text!r}: not a usable name for a store")
    for path in paths:
        _check_length(path)
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{path}: a link that leads nowhere; choose another DST")
        nearest = next(parent for parent in path.parents if parent.exists())
        if not nearest.is_dir():
            raise UsageError(f"{path}: {nearest} is not a folder; choose another DST")
    return paths


def _check_length(path: Path) -> None:
    """Raise UsageError where the names beside DST, or the paths in its work folder, would be too long to make."""
    longest = max(len(os.fsencode(name)) for name in (*path.parent.parts, f"{path.name}{LONGEST_ENDING}"))
    whole = len(os.fsencode(path)) + LONGEST_BELOW
    for what, length, most in (("a name in it", longest, NAME_BYTES), ("the path", whole, PATH_BYTES)):
        if length > most:
            raise UsageError(f"{path}: {what} is {length - most} bytes too long; choose a shorter DST")


def check_split_name(name: str) -> None:
    """Raise UsageError unless a split may have that name: it becomes a folder in the store and in the work folder."""
    unusable = not name or name.startswith((".", "__", "part-")) or not set(name).isdisjoint("/\\\0")
    if unusable or name in RESERVED or len(os.fsencode(name)) > NAME_BYTES:
        raise UsageError(f"{name!r} can't be a split's name; use one such as train, val or test")
