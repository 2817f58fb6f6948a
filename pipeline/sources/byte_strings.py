"""Many byte strings (keys, paths) as two numpy arrays: a million of them cost their bytes plus eight each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

_TAKE_BLOCK = 1 << 16  # strings gathered at a time, so that the index arrays stay small


class ByteStrings:
    """An immutable sequence of byte strings.

    Args:
        blob: uint8 (total,), all strings end to end.
        offsets: int64 (N+1,), where each begins; the last is the total.
    """

    def __init__(self, blob: np.ndarray, offsets: np.ndarray) -> None:
        self.blob = blob
        self.offsets = offsets

    @staticmethod
    def pack(values: Iterable[bytes]) -> ByteStrings:
        """The values as arrays, without keeping an object for each."""
        builder = ByteStringsBuilder()
        for value in values:
            builder.append(value)
        return builder.build()

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """uint8 (total,) and int64 (N+1,): the blob and the offsets."""
        return self.blob, self.offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> bytes:
        if not 0 <= i < len(self):
            raise IndexError(f"string {i} of {len(self)}")
        return self.blob[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        blob, offsets = memoryview(np.ascontiguousarray(self.blob)), self.offsets
        for start in range(0, len(self), _TAKE_BLOCK):
            bounds = offsets[start : start + _TAKE_BLOCK + 1].tolist()
            for i in range(len(bounds) - 1):
                yield bytes(blob[bounds[i] : bounds[i + 1]])

    def take(self, indices: np.ndarray) -> ByteStrings:
        """The strings at `indices`, int64 (M,), in that order."""
        starts, lengths = self.offsets[:-1][indices], np.diff(self.offsets)[indices]
        offsets = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        blob = np.empty(int(offsets[-1]), np.uint8)
        for first in range(0, len(indices), _TAKE_BLOCK):
            block = slice(first, first + _TAKE_BLOCK)
            begin, end = int(offsets[first]), int(offsets[min(first + _TAKE_BLOCK, len(indices))])
            shift = np.repeat(starts[block] - offsets[:-1][block], lengths[block])
            blob[begin:end] = self.blob[shift + np.arange(begin, end)]
        return ByteStrings(blob, offsets)


class ByteStringsBuilder:
    """Collects byte strings one by one without keeping an object for each."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, value: bytes) -> None:
        self._blob += value
        self._offsets.append(len(self._blob))

    def build(self) -> ByteStrings:
        """The strings collected; the builder can't be appended to afterwards."""
        return ByteStrings(np.frombuffer(self._blob, np.uint8), np.frombuffer(self._offsets, np.int64))


def path_order(paths: ByteStrings) -> np.ndarray:
    """int64 (N,): the order of `paths` sorted by their components, compared as bytes.

    It is the order of a walk that lists each folder sorted, so that an archive and its extracted copy agree.
    """
    keys = [path.replace(b"/", b"\0") for path in paths]
    if all(keys[i] <= keys[i + 1] for i in range(len(keys) - 1)):
        return np.arange(len(keys), dtype=np.int64)
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def first_duplicate(strings: ByteStrings) -> tuple[int, int] | None:
    """Positions of the first string that occurs twice, or None."""
    hashes = np.fromiter((hash(value) for value in strings), np.int64, len(strings))
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    seen: dict[bytes, int] = {}
    for i in np.unique(np.concatenate([order[same], order[same + 1]])).tolist():
        first = seen.setdefault(strings[i], i)
        if first != i:
            return first, i
    return None
