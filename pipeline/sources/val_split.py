"""`--val-fraction` and `--val-per-class`: a val split drawn from train, the same for every kind of source.

Whether a sample is drawn follows from the seed and its key alone, so adding files moves no other. With a number per
class a new file may take the place of one other of its class.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources.base import Source, SourceSet
from pipeline.sources.subset import Subset
from pipeline.text import counted


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
    order = np.lexsort((draws, labels))
    rank = np.empty(len(labels), np.int64)  # of each sample's draw within its class
    rank[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    is_val = (labels >= 0) & ((draws < wanted.fraction) | (rank < wanted.per_class))
    if is_val.all() or not is_val.any():
        how_many = f"{'all' if is_val.all() else 'none'} of {counted(len(labels), 'image')}"
        raise UsageError(f"--val-fraction {wanted.fraction:g}: draws {how_many}; give another, or --val-per-class N")
    parts = {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
    splits: dict[str, Source] = {name: Subset(train, part, labels[part]) for name, part in parts.items()}
    empty = int(np.count_nonzero((counts > 0) & (np.bincount(labels[is_val], minlength=len(counts)) == 0)))
    notes = [f"val: has no image of {counted(empty, 'class', 'classes')}; --val-per-class 1 puts one of each there"]
    others = {name: source for name, source in found.splits.items() if name != "train"}
    return replace(found, splits={**splits, **others}, notes=found.notes + (notes if empty else []))


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
