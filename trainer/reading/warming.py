"""Reading a store into memory beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pipeline.store.page_cache import cached_shares, read_chunk, usable_bytes
from pipeline.store.reader import Split

IN_MEMORY = 0.95
"""A split of which so much is cached already is left alone."""


def warm_up(splits: Sequence[Split], say: Callable[[str], None]) -> Callable[[], None]:
    """Read the splits into the page cache, in sequence and in 2 MB pages, in a thread; only where all of them fit.

    Does nothing where the system can't tell what is cached, nor for files of less than 2 MB.

    Returns:
        a function that ends it, at most one chunk file later.
    """
    splits = list({split.path: split for split in splits}.values())  # stages may share one
    room = usable_bytes()
    total = sum(split.num_chunks * split.chunk_bytes for split in splits)
    cold = [split for split in splits if (cached_shares(split) or (1.0, 1.0))[0] < IN_MEMORY]
    if room is None or total > room or not cold:
        return lambda: None
    stopped = threading.Event()

    def read() -> None:
        for split in cold:
            for chunk in range(split.num_chunks):
                if stopped.is_set():
                    return
                read_chunk(split, chunk)

    say(f"reading {', '.join(str(split.path) for split in cold)} into memory beside training; --warm never: not so")
    threading.Thread(target=read, name="warm-up", daemon=True).start()
    return stopped.set
