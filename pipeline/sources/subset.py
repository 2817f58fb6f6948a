"""Subsets and label order: `--classes`, `--limit-per-class` and `--class-order`, the same for every kind of source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources.base import Source, SourceSet
from pipeline.sources.byte_strings import ByteStrings
from pipeline.sources.labels import some
from pipeline.store.format import UNLABELLED


@dataclass(eq=False)
class Subset:
    """Some samples of another source, in its order: int64 (N,) ascending indices into it, and int32 (N,) labels."""

    source: Source
    indices: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def blocks(self) -> np.ndarray | None:
        """The source's blocks, as far as they are in the subset."""
        blocks = getattr(self.source, "blocks", None)
        return None if blocks is None else np.unique(np.searchsorted(self.indices, blocks))

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        return ByteStrings(*self.source.keys()).take(self.indices).arrays

    def key(self, i: int) -> bytes:
        return self.source.key(int(self.indices[i]))

    def read(self, i: int) -> bytes | np.ndarray:
        return self.source.read(int(self.indices[i]))

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        return self.source.change_stamps(self.indices[indices])


def order_classes(found: SourceSet, order: str | Path) -> SourceSet:
    """Number the classes as `numeric` (1, 2, 10 instead of 1, 10, 2) or as the lines of a file say.

    With a file a class's label is its line's number, counted from 0 over the lines that hold a class. Classes in it
    that the source lacks keep their place, so that 700 classes of ImageNet can have the labels of all 1,000.
    """
    if str(order) == "numeric":
        bad = [name for name in found.class_ids if not re.fullmatch(r"-?\d+", name)]
        if bad:
            raise UsageError(f"--class-order numeric: class {bad[0]!r} is no integer; give a file of ids in order")
        ids = sorted(found.class_ids, key=int)
    else:
        lines = _lines("--class-order", order)
        ids = _ids(lines, found, "--class-order", order)
        missing = sorted(set(found.class_ids) - set(ids))
        if missing:
            raise UsageError(f"--class-order {order}: lacks {_some(missing)}; add it, or leave it out with --classes")
        twice = [name for name, count in Counter(ids).items() if count > 1]
        if twice:
            raise UsageError(f"--class-order {order}: names {_some(twice)} more than once; leave one line of each")
    return _renumber(found, ids)


def choose_classes(found: SourceSet, classes: str | Path) -> SourceSet:
    """Keep the samples of the classes that a file lists, one id or name per line; unlabelled samples are left out."""
    ids = _ids(_lines("--classes", classes), found, "--classes", classes)
    unknown = sorted(set(ids) - set(found.class_ids))
    if unknown:
        raise UsageError(f"--classes {classes}: {_some(unknown)} not in {found.origin}; correct or remove these lines")
    chosen = set(ids)
    return _renumber(found, [name for name in found.class_ids if name in chosen], keep_unlabelled=False)


def limit_per_class(found: SourceSet, limit: int) -> SourceSet:
    """Keep the first `limit` samples of each class in each split; unlabelled samples count as one more class."""
    if limit < 1:
        raise UsageError(f"--limit-per-class {limit}: must be at least 1")
    splits: dict[str, Source] = {}
    for name, source in found.splits.items():
        labels = np.asarray(source.labels)
        order = np.argsort(labels, kind="stable")
        ordered = labels[order]
        rank = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)  # within its class
        keep = np.sort(order[rank < limit])
        splits[name] = source if len(keep) == len(labels) else Subset(source, keep, labels[keep])
    return replace(found, splits=splits)


def _renumber(found: SourceSet, ids: Sequence[str], *, keep_unlabelled: bool = True) -> SourceSet:
    """The set with these class ids; samples of other classes are left out."""
    index = {name: label for label, name in enumerate(ids)}
    table = np.array([index.get(name, -1) for name in found.class_ids], np.int32)
    names = None
    if found.class_names is not None:
        name_of = dict(zip(found.class_ids, found.class_names, strict=True))
        names = [name_of.get(name, name) for name in ids]
    splits: dict[str, Source] = {}
    for split, source in found.splits.items():
        old = np.asarray(source.labels)
        labelled = old != UNLABELLED
        new = np.where(labelled, np.append(table, np.int32(-1))[np.where(labelled, old, -1)], np.int32(UNLABELLED))
        keep = np.flatnonzero(new >= 0 if not keep_unlabelled else new != -1)
        splits[split] = Subset(source, keep, new[keep].astype(np.int32))
    return replace(found, class_ids=list(ids), class_names=names, splits=splits)


def _lines(flag: str, path: str | Path) -> list[str]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; give a text file with one class id per line") from None
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "backslashreplace")
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _ids(lines: list[str], found: SourceSet, flag: str, path: str | Path) -> list[str]:
    """The class that each line names: by its id, by its class name, or by an id before the first space or comma."""
    if not lines:
        raise UsageError(f"{flag} {path}: no class in it; write one class id per line")
    known = set(found.class_ids)
    names = found.class_names or found.class_ids
    count = Counter(names)
    by_name = {name: i for name, i in zip(names, found.class_ids, strict=True) if count[name] == 1}
    first = [re.split(r"[\s,]", line, maxsplit=1)[0] for line in lines]
    whole_matches = sum(line in known or line in by_name for line in lines)
    if whole_matches < sum(word in known for word in first):  # `n01440764 tench, Tinca tinca`
        return first
    return [line if line in known else by_name.get(line, line) for line in lines]


def _some(names: Sequence[str]) -> str:
    return f"class {some([repr(name) for name in names])}"
