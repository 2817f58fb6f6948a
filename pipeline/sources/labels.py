"""From labels as a source states them to class indices.

Text labels are class ids: a sample's label is the index of its id in the sorted ids of the split `train` (of all
splits, where there is no `train`), and an id that `train` doesn't have is an error. Integer labels are taken as they
are, so that nobody's class 7 becomes class 5 because two classes have no sample; -1 means unlabelled.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources.base import Source, SourceOptions, SourceSet
from pipeline.store.format import UNLABELLED, split_order
from pipeline.text import counted, printable

MAX_CLASSES = 1_000_000
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MISSING = frozenset(("nan", "na", "n/a", "none", "null", "?", "inf", "-inf"))
_DIGITS = 18  # more don't fit into an int64


class LabelColumn:
    """The labels of one split while it is read: one code per sample, one token per class."""

    def __init__(self) -> None:
        self._codes = array("i")
        self._code_of: dict[str | int, int] = {}
        self._integers: list[int] | None = None

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, token: str | int | None, count: int = 1) -> None:
        """Append `count` samples labelled `token`; None and -1 mean unlabelled."""
        unlabelled = token is None or token == -1
        code = UNLABELLED if unlabelled else self._code_of.setdefault(token, len(self._code_of))  # type: ignore[arg-type]
        self._codes.extend([code] * count) if count != 1 else self._codes.append(code)

    def add_text(self, text: str) -> None:
        """Append a sample whose label is written in a text file, perhaps with spaces around it; -1 is unlabelled."""
        text = text.strip()
        self.add(None if text in ("-1", "-1.0") else text)

    @property
    def tokens(self) -> list[str | int]:
        """The distinct labels, in order of appearance; a sample's code is the index here."""
        return list(self._code_of if self._integers is None else self._integers)

    @property
    def codes(self) -> np.ndarray:
        """int32 (N,)."""
        return np.frombuffer(self._codes, np.int32) if len(self._codes) else np.empty(0, np.int32)

    def read_integers(self) -> None:
        """Turn the text tokens, `7` or `7.0`, into integers."""
        self._integers = [int(float(token)) if "." in str(token) else int(token) for token in self._code_of]


class Part(Protocol):
    """One split as its opener has read it: labels as they are stated."""

    column: LabelColumn

    def where(self, i: int) -> str:
        """The place of sample i for an error, such as its file."""
        ...

    def source(self, labels: np.ndarray) -> Source:
        """The split's samples with their class indices, int32 (N,)."""
        ...


def _first(part: Part, token: str | int) -> str:
    """The place of the first sample that carries the label."""
    return part.where(int(np.flatnonzero(part.column.codes == part.column.tokens.index(token))[0]))


def assemble(
    kind: str,
    parts: Mapping[str, Part],
    options: SourceOptions,
    *,
    class_ids: Iterable[str] | None = None,
    num_classes: int | None = None,
    read_integers: bool = False,
    **facts: Any,
) -> SourceSet:
    """The source set of some splits; their labels become class indices.

    Args:
        kind: of source.
        parts: split name -> what its opener has read.
        options: tells which of the splits are wanted; the others only have a say in the class map.
        class_ids: all ids, where the source declares them (class folders, a synset list), in any order.
        num_classes: the number of integer labels, where the source declares it.
        read_integers: labels are read from text: where all are plain integers (`7` or `7.0`, not `07`), they are class
            numbers.
        facts: further fields of `SourceSet`.
    """
    parts = {split: parts[split] for split in split_order(parts)}
    if read_integers:
        _read_integers(parts)
    kinds = {type(token): (part, token) for part in parts.values() for token in part.column.tokens}
    if len(kinds) > 1:
        first, second = (_first(*pair) for pair in kinds.values())
        raise UsageError(f"{first}; {second}: labels are integers here and text there; write all in one way")
    if int in kinds or (not kinds and num_classes):
        ids, labels = _integers(parts, num_classes)
    else:
        ids, labels = _text(parts, class_ids)
    sources = {split: part.source(labels[split]) for split, part in parts.items() if options.wants(split)}
    return SourceSet(kind, ids, sources, **facts)


def _read_integers(parts: Mapping[str, Part]) -> None:
    """Take text labels for numbers where all but missing ones are; a fraction or a gap among numbers is an error."""
    tokens = {str(token) for part in parts.values() for token in part.column.tokens}
    numbers = {token for token in tokens if _INTEGER.fullmatch(token) or _DECIMAL.fullmatch(token)}
    if not numbers or not all(token.lower() in _MISSING for token in tokens - numbers):
        return
    wrong = {token for token in numbers if len(token) > _DIGITS or ("." in token and not float(token).is_integer())}
    for part in parts.values():
        for token in part.column.tokens:
            if token in wrong or token not in numbers:
                raise UsageError(
                    f"{_first(part, token)}: label {printable(str(token), 40)} among whole numbers; "
                    "write a class number, or -1 for none"
                )
        part.column.read_integers()


def _alike(name: str) -> str:
    """What names that look the same have in common: they differ by Unicode normal form or by spaces around them."""
    return unicodedata.normalize("NFC", name).strip()


def refuse_alike(classes: Sequence[str], place: Callable[[str], str]) -> None:
    """Raise UsageError where two classes of one split look the same, or one isn't UTF-8; `place` tells where one is."""
    seen: dict[str, int] = {}
    for i, name in enumerate(classes):
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise UsageError(f"{place(name)}: class {name!r} isn't UTF-8; save the labels as UTF-8")
        first = seen.setdefault(_alike(name), i)
        if first != i:
            raise UsageError(
                f"{place(name)}: classes {name!a} and {classes[first]!a} read the same (they differ by Unicode "
                "normal form, by spaces, or by bytes that aren't UTF-8); rename one"
            )


def _defining(parts: Mapping[str, Part]) -> list[LabelColumn]:
    """The columns that define the classes: that of `train`, or all where it has no labels."""
    train = parts["train"].column if "train" in parts else None
    return [train] if train is not None and train.tokens else [part.column for part in parts.values()]


def _apply(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes to labels through a table, int32 (classes,); unlabelled samples stay so."""
    return np.append(table, np.int32(UNLABELLED))[np.where(codes == UNLABELLED, len(table), codes)]


def _text(parts: Mapping[str, Part], class_ids: Iterable[str] | None) -> tuple[list[str], dict[str, np.ndarray]]:
    declared = "train" if class_ids is None else "the class list"
    if class_ids is None:
        class_ids = [str(token) for column in _defining(parts) for token in column.tokens]
    by_look = {_alike(name): name for name in sorted(set(class_ids), reverse=True)}  # other splits may spell it else
    ids = sorted(by_look.values())
    index = {_alike(name): label for label, name in enumerate(ids)}
    labels = {}
    for split, part in parts.items():
        refuse_alike([str(token) for token in part.column.tokens], partial(_first, part))
        unknown = [token for token in part.column.tokens if _alike(str(token)) not in index]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UsageError(
                f"{_first(part, unknown[0])}: class {unknown[0]!r}{more} isn't in {declared} "
                f"({counted(len(ids), 'class', 'classes')}: {some([repr(name) for name in ids])}); correct it, or "
                "leave out the split"
            )
        table = np.array([index[_alike(str(token))] for token in part.column.tokens], np.int32)
        labels[split] = _apply(table, part.column.codes)
    return ids, labels


def _integers(parts: Mapping[str, Part], num_classes: int | None) -> tuple[list[str], dict[str, np.ndarray]]:
    if num_classes is None:
        highest = max([0, *(int(token) for column in _defining(parts) for token in column.tokens)])
        if highest >= MAX_CLASSES:
            part = next(part for part in parts.values() if highest in part.column.tokens)
            raise UsageError(
                f"{_first(part, highest)}: label {highest:,}: integer labels are class numbers and "
                f"kept as they are, at most {MAX_CLASSES:,}; if they are ids, put a letter before them"
            )
        num_classes = highest + 1
    labels = {}
    for split, part in parts.items():
        for token in part.column.tokens:
            if not 0 <= int(token) < num_classes:
                raise UsageError(
                    f"{_first(part, token)}: label {token} is out of range; labels go from 0 to "
                    f"{num_classes - 1:,}, and -1 means none"
                )
        labels[split] = _apply(np.array(part.column.tokens, np.int32), part.column.codes)
    return [str(i) for i in range(num_classes)], labels


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names: `a, b, c and 4 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
