"""What is done alike with every kind of source: `--classes`, `--class-order`, `--limit-per-class`, and a val split.

`--val-fraction` and `--val-per-class` draw val from train. Whether a sample is drawn follows from the seed and its key
alone, so adding files moves no other. With a number per class a new file may take the place of one other of its class.
"""

from __future__ import annotations

import hashlib
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
from pipeline.text import counted


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

    def read_ahead(self, i: int) -> None:
        ask = getattr(self.source, "read_ahead", None)
        if ask is not None:
            ask(int(self.indices[i]))

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
        keep = np.flatnonzero(_ranks(labels, np.argsort(labels, kind="stable")) < limit)
        splits[name] = source if len(keep) == len(labels) else Subset(source, keep, labels[keep])
    return replace(found, splits=splits)


@dataclass(frozen=True)
class ValSplit:
    """What the val split takes of train.

    Args:
        fraction: share of each class that is drawn, 0 to 1.
        per_class: at least so many samples of each class.
        seed: of the draw.
    """

    fraction: float = 0.0
    per_class: int = 0
    seed: int = 0


def draw_val(found: SourceSet, wanted: ValSplit) -> SourceSet:
    """The set with `train` divided into `train` and `val`. Unlabelled samples stay in train.

    Raises:
        UsageError: no train split, a val split already, no labels, or a class or split that would become empty.
    """
    if "train" not in found.splits or "val" in found.splits:
        what = "has a val split already" if "val" in found.splits else "has no train split to draw from"
        raise UsageError(f"{found.origin}: {what}; leave out --val-fraction and --val-per-class, or give --split train")
    train = found.splits["train"]
    labels = np.asarray(train.labels)
    counts = np.bincount(labels[labels >= 0], minlength=len(found.class_ids))
    if not counts.any():
        raise UsageError(f"{found.origin}: no image has a label to draw val by; leave out --val-fraction")
    small = np.flatnonzero((counts > 0) & (counts <= wanted.per_class))
    if len(small):
        class_id, images = found.class_ids[small[0]], counted(int(counts[small[0]]), "image")
        raise UsageError(f"--val-per-class {wanted.per_class}: class {class_id!r} has only {images}; give less")
    draws = _draws(train, wanted.seed)
    ranks = _ranks(labels, np.lexsort((draws, labels)))
    is_val = (labels >= 0) & ((draws < wanted.fraction) | (ranks < wanted.per_class))
    if is_val.all() or not is_val.any():
        how_many = f"{'all' if is_val.all() else 'none'} of {counted(len(labels), 'image')}"
        raise UsageError(f"--val-fraction {wanted.fraction:g}: draws {how_many}; give another, or --val-per-class N")
    parts = {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
    splits: dict[str, Source] = {name: Subset(train, part, labels[part]) for name, part in parts.items()}
    empty = int(np.count_nonzero((counts > 0) & (np.bincount(labels[is_val], minlength=len(counts)) == 0)))
    without = counted(empty, "class", "classes")
    notes = [f"val: has no image of {without}; --val-per-class 1 --overwrite puts one of each there"]
    others = {name: source for name, source in found.splits.items() if name != "train"}
    return replace(found, splits={**splits, **others}, notes=found.notes + (notes if empty else []))


def _ranks(labels: np.ndarray, order: np.ndarray) -> np.ndarray:
    """int64 (N,): how many samples of its class come before each in an order that is sorted by class."""
    ranks = np.empty(len(labels), np.int64)
    ranks[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    return ranks


def _draws(source: Source, seed: int) -> np.ndarray:
    """float64 (N,), 0 to 1: of each sample the first 53 bits of the SHA-256 of the seed, a NUL byte and its key."""
    keys, offsets = source.keys()
    blob, ends = keys.tobytes(), offsets.tolist()
    start = hashlib.sha256(b"%d\0" % seed)
    draws = np.empty(len(source), np.uint64)
    for i in range(len(source)):
        digest = start.copy()
        digest.update(blob[ends[i] : ends[i + 1]])
        draws[i] = int.from_bytes(digest.digest()[:8], "big")
    return (draws >> np.uint64(11)) / 2.0**53


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
