"""Receipts: a chunk with one is finished. They hold what was learnt about the chunk, and are put together at commit."""

from __future__ import annotations

import json
import os
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


def read_receipts(work: SplitWork, num_chunks: int) -> dict[int, Receipt]:
    """Chunk -> its receipt, for the finished chunks of a split in ascending order."""
    receipts = ((chunk, read_receipt(work, chunk)) for chunk in range(num_chunks))
    return {chunk: receipt for chunk, receipt in receipts if receipt is not None}
