"""Receipts: a chunk with one is finished. They hold what was learnt about the chunk, and are put together at commit."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pipeline.conversion.workdir import SplitWork
from pipeline.store.atomic import write_json


@dataclass(frozen=True)
class Receipt:
    """What is known of one finished chunk of n samples.

    Attributes:
        sha256: of the chunk file, in hexadecimal.
        sums, squares: per channel, over the good images' pixel values.
        bad: bad samples, each with `slot`, `reason` and `detail`.
        modes: good images per pixel mode of their files; warnings: of the decoder, their number.
        source_size: int32 (n, 2), height and width before resizing; 0 for a bad sample.
        stamps: int64 (n, 2), the source's change stamps before the images were read.
        peak_16bit: highest of the 8-bit levels that levels of 16 bits became; -1 without such images.
    """

    sha256: str
    sums: list[int]
    squares: list[int]
    bad: list[dict[str, Any]]
    modes: dict[str, int]
    warnings: int
    source_size: np.ndarray
    stamps: np.ndarray
    peak_16bit: int


def write_receipt(work: SplitWork, chunk: int, receipt: Receipt, run_name: str, check: Callable[[], None]) -> None:
    """Write the receipt of a chunk whose file is in place; `check` as in `atomic_file`."""
    status = os.stat(work.chunk(chunk))
    arrays = {"source_size": receipt.source_size.tolist(), "stamps": receipt.stamps.tolist()}
    value = {"file": [status.st_size, status.st_mtime_ns], **vars(receipt), **arrays}
    write_json(work.receipt(chunk), value, indent=None, temp_id=run_name, check=check)


def read_receipt(work: SplitWork, chunk: int) -> Receipt | None:
    """A chunk's receipt; None when the chunk isn't finished, or its file has changed since."""
    try:
        saved = json.loads(work.receipt(chunk).read_bytes())
        status = os.stat(work.chunk(chunk))
        if saved["file"] != [status.st_size, status.st_mtime_ns]:
            return None
        values = {field.name: saved[field.name] for field in fields(Receipt)}
        for name, dtype in (("source_size", np.int32), ("stamps", np.int64)):
            values[name] = np.array(values[name], dtype).reshape(-1, 2)
        return Receipt(**values)
    except (OSError, ValueError, KeyError):
        return None


class Receipts:
    """All receipts of a split, read once. The totals are of the whole split where no chunk is missing.

    Attributes:
        found: chunk -> its receipt, for the finished chunks in ascending order.
        missing: the other chunks.
    """

    def __init__(self, work: SplitWork, num_chunks: int) -> None:
        receipts = {chunk: read_receipt(work, chunk) for chunk in range(num_chunks)}
        self.found = {chunk: receipt for chunk, receipt in receipts.items() if receipt is not None}
        self.missing = [chunk for chunk, receipt in receipts.items() if receipt is None]

    @property
    def bad(self) -> list[dict[str, Any]]:
        """All bad samples, by slot."""
        return [bad for receipt in self.found.values() for bad in receipt.bad]

    @property
    def digests(self) -> np.ndarray:
        """uint8 (chunks, 32)."""
        joined = "".join(receipt.sha256 for receipt in self.found.values())
        return np.frombuffer(bytes.fromhex(joined), np.uint8).reshape(-1, 32)

    @property
    def source_size(self) -> np.ndarray:
        """int32 (N, 2)."""
        return np.concatenate([receipt.source_size for receipt in self.found.values()])

    @property
    def sums(self) -> list[int]:
        """Per channel."""
        return [sum(channel) for channel in zip(*(receipt.sums for receipt in self.found.values()), strict=True)]

    @property
    def squares(self) -> list[int]:
        """Per channel."""
        return [sum(channel) for channel in zip(*(receipt.squares for receipt in self.found.values()), strict=True)]

    @property
    def modes(self) -> dict[str, int]:
        """Good images per pixel mode, by name."""
        total: Counter[str] = Counter()
        for receipt in self.found.values():
            total.update(receipt.modes)
        return dict(sorted(total.items()))

    @property
    def warnings(self) -> int:
        return sum(receipt.warnings for receipt in self.found.values())

    @property
    def peak_16bit(self) -> int:
        return max((receipt.peak_16bit for receipt in self.found.values()), default=-1)
