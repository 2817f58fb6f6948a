"""Reads a store into the page cache before training does, in sequence and in large pieces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pipeline.errors import UsageError
from pipeline.progress import Progress, say
from pipeline.store.page_cache import cached_shares, read_chunks, usable_bytes
from pipeline.store.reader import open_store
from pipeline.store.remote import is_remote


def warm(
    store: str | os.PathLike[str],
    *,
    split: Sequence[str] | None = None,
    size_limit: float | None = None,
    quiet: bool = False,
) -> dict[str, dict[str, Any]]:
    """Read splits into memory, one after the other, as many chunk files as fit.

    Args:
        store: the store's folder.
        split: names of the splits; all by default.
        size_limit: at most so many GB (10^9 bytes); what the available memory holds by default.
        quiet: show no progress.

    Returns:
        By split: `chunk_files`, `chunk_files_read`, and of all its bytes the shares `in_memory` and `in_2mb_pages`,
        None where the system can't tell.

    Raises:
        UsageError: a split that is compressed, or a limit that isn't above 0.
        StoreError: no such store or split, or a damaged one.
    """
    if size_limit is not None and not size_limit > 0:
        raise UsageError(f"--size-limit {size_limit:g}: must be above 0")
    opened = open_store(store)
    parts = [opened[name] for name in dict.fromkeys(split or opened.splits)]
    for part in parts:
        if is_remote(part.path):
            raise UsageError(f"{part.path}: at a URL, so it isn't read by memory maps; `copy` it first")
        if not part.is_raw:
            raise UsageError(f"{part.path}: compressed, so it isn't read by memory maps; warm a raw copy")
    limits = usable_bytes(), None if size_limit is None else size_limit * 1e9
    left = min((limit for limit in limits if limit is not None), default=float("inf"))
    result = {}
    for part in parts:
        chunks = int(min(part.num_chunks, left // part.chunk_bytes))
        left -= chunks * part.chunk_bytes
        images = min(chunks * part.chunk_images, part.num_samples)
        with Progress(part.name, images, part.image_bytes, quiet=quiet) as progress:
            read_chunks(part, chunks, progress.advance)
        say(progress.summary(), quiet=quiet)
        cached, huge = cached_shares(part) or (None, None)
        result[part.name] = {
            "chunk_files": part.num_chunks,
            "chunk_files_read": chunks,
            "in_memory": cached,
            "in_2mb_pages": huge,
        }
    return result


def warm_text(result: dict[str, dict[str, Any]]) -> str:
    """The result for people."""
    lines = []
    for name, part in result.items():
        read, files = part["chunk_files_read"], part["chunk_files"]
        rest = "" if read == files else "; the rest doesn't fit into memory, or --size-limit"
        lines.append(f"{name}: {read:,} of {files:,} chunk files read{rest}{pages_text(part)}")
    return "\n".join(lines)


def pages_text(part: dict[str, Any]) -> str:
    """`; 100 % in memory, 98 % in 2 MB pages`, or nothing."""
    if part["in_memory"] is None:
        return ""
    return f"; {part['in_memory']:.0%} in memory, {part['in_2mb_pages']:.0%} in 2 MB pages"
