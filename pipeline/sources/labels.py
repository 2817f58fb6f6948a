"""From labels as a source states them to class indices.

Text labels are class ids: a sample's label is the index of its id in the sorted ids of the split `train` (of all
splits, where there is no `train`), and an id that `train` doesn't have is an error. Integer labels are taken as they
are, so that nobody's class 7 becomes class 5 because two classes have no sample; -1 means unlabelled.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from pipeline.errors import UsageError
from pipeline.store.format import UNLABELLED
from pipeline.text import counted

MAX_CLASSES = 1_000_000
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")


class LabelColumn:
    """The labels of one split while it is read: one code per sample, one token per class."""

    def __init__(self) -> None:
        self._codes = array("i")
        self._code_of: dict[str | int, int] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, token: str | int | None, count: int = 1) -> None:
        """Append `count` samples labelled `token`; None and -1 mean unlabelled."""
        unlabelled = token is None or token == -1
        code = UNLABELLED if unlabelled else self._code_of.setdefault(token, len(self._code_of))  # type: ignore[arg-type]
        self._codes.extend([code] * count) if count != 1 else self._codes.append(code)

    @property
    def tokens(self) -> list[str | int]:
        """The distinct labels, in order of appearance; a sample's code is the index here."""
        return list(self._code_of)

    @property
    def codes(self) -> np.ndarray:
        """int32 (N,)."""
        return np.frombuffer(self._codes, np.int32) if len(self._codes) else np.empty(0, np.int32)

    def read_integers(self) -> None:
        """Turn text tokens into integers; call it when `all_integers` holds."""
        self._code_of = {int(token): code for token, code in self._code_of.items()}

    def reorder(self, order: np.ndarray) -> None:
        """Put the samples into this order, int64 (N,)."""
        self._codes = array("i", self.codes[order].tobytes())

    def first(self, token: str | int) -> int:
        """The first sample that carries the token."""
        return int(np.flatnonzero(self.codes == self._code_of[token])[0])


def stated(text: str) -> str | None:
    """A label from a text file: without the spaces around it, None where it says that there is none (-1)."""
    text = text.strip()
    return None if text == "-1" else text


def all_integers(columns: Iterable[LabelColumn]) -> bool:
    """True where every text label of the columns is a plain integer (`7`, not `07`)."""
    tokens = [token for column in columns for token in column.tokens]
    return bool(tokens) and all(isinstance(token, str) and _INTEGER.fullmatch(token) for token in tokens)


class _Where(Protocol):
    def __call__(self, split: str, sample: int) -> str: ...


def resolve(
    columns: Mapping[str, LabelColumn],
    where: _Where,
    *,
    class_ids: Sequence[str] | None = None,
    num_classes: int | None = None,
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Class ids in label order, and each split's labels.

    Args:
        columns: split name -> its labels as stated.
        where: names the place of a sample in an error, such as its file.
        class_ids: all ids, where the source declares them (class folders, a synset list), in any order.
        num_classes: the number of integer labels, where the source declares it.

    Returns:
        The class ids, and int32 (N,) labels for each split.

    Raises:
        UsageError: a label that `train` or the declaration doesn't have, text mixed with integers, integers below -1.
    """
    kinds = {type(token) for column in columns.values() for token in column.tokens}
    if kinds == {int, str}:
        raise UsageError("some labels are integers and some are text; write them all in one way")
    if kinds == {int} or (not kinds and num_classes):
        return _integers(columns, where, num_classes)
    if class_ids is None:
        source = [columns["train"]] if "train" in columns and columns["train"].tokens else list(columns.values())
        class_ids = [str(token) for column in source for token in column.tokens]
        declared = "train"
    else:
        declared = "the class list"
    ids = sorted(set(class_ids))
    index = {name: label for label, name in enumerate(ids)}
    labels = {}
    for split, column in columns.items():
        unknown = [token for token in column.tokens if token not in index]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UsageError(
                f"{where(split, column.first(unknown[0]))}: class {unknown[0]!r}{more} isn't in {declared} "
                f"({counted(len(ids), 'class', 'classes')}); correct it, or leave out the split"
            )
        table = np.array([index[str(token)] for token in column.tokens], np.int32)
        labels[split] = _apply(table, column.codes)
    return ids, labels


def _apply(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes to labels through a table, int32 (classes,); unlabelled samples stay so."""
    return np.append(table, np.int32(UNLABELLED))[np.where(codes == UNLABELLED, len(table), codes)]


def _integers(
    columns: Mapping[str, LabelColumn], where: _Where, num_classes: int | None
) -> tuple[list[str], dict[str, np.ndarray]]:
    for split, column in columns.items():
        lowest = min(map(int, column.tokens), default=0)
        if lowest < 0:
            raise UsageError(
                f"{where(split, column.first(lowest))}: label {lowest}; labels are 0, 1, ..., or -1 for none"
            )
    train = [columns["train"]] if "train" in columns and columns["train"].tokens else list(columns.values())
    if num_classes is None:
        highest = max(int(token) for column in train for token in column.tokens)
        if highest >= MAX_CLASSES:
            raise UsageError(
                f"label {highest:,}: integer labels are class numbers and kept as they are, at most {MAX_CLASSES:,}; "
                "if they are ids, put a letter before them"
            )
        num_classes = highest + 1
    labels = {}
    for split, column in columns.items():
        for token in column.tokens:
            if int(token) >= num_classes:
                raise UsageError(
                    f"{where(split, column.first(token))}: label {token} is out of range; "
                    f"labels go from 0 to {num_classes - 1:,}"
                )
        labels[split] = _apply(np.array(column.tokens, np.int32), column.codes)
    return [str(i) for i in range(num_classes)], labels
