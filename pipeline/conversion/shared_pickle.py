"""Handing a source to the workers by file: pickled once, its arrays mapped by every worker instead of loaded.

    int64 length of the head · head: the pickle and the arrays' lengths · each array's bytes, aligned

Arrays leave the pickle as protocol-5 buffers. cloudpickle also takes classes defined in a script or a notebook.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import numpy as np

ALIGN = 64


def save(value: Any, file: BinaryIO) -> None:
    """Write the value.

    Raises:
        Exception: whatever a part of it that can't be pickled raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    head = pickle.dumps((body, [view.nbytes for view in views]))
    file.write(np.int64(len(head)).tobytes() + head)
    position = 8 + len(head)
    for view, start in zip(views, _starts(position, [view.nbytes for view in views]), strict=True):
        file.write(bytes(start - position))
        file.write(view)
        position = start + view.nbytes


def load(path: Path | str) -> Any:
    """Read it back; its arrays are read-only views of one memory map of the file."""
    whole = memoryview(np.memmap(path, np.uint8, "r")).toreadonly()
    length = int(np.frombuffer(whole[:8], np.int64)[0])
    body, sizes = pickle.loads(whole[8 : 8 + length])
    starts = _starts(8 + length, sizes)
    return pickle.loads(body, buffers=[whole[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def _starts(position: int, sizes: list[int]) -> Iterator[int]:
    """Where each buffer begins: one after the other, aligned."""
    for size in sizes:
        position += -position % ALIGN
        yield position
        position += size
