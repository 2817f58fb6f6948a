"""A store whose chunks are still being brought to this machine: readers wait for the chunks that aren't there yet.

It lies where the whole store will lie. Until all of it is there its root group has another name, so that nobody else
takes it for a store; and a chunk file has its name only when it is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.errors import UsageError
from pipeline.store.format import PARTIAL_ROOT, chunk_name
from pipeline.store.maps import LIBC, ChunkMaps
from pipeline.store.reader import Store
from pipeline.store.remote import RemotePath
from pipeline.store.split import Split

Bring = Callable[["ArrivingSplit", int], None]
"""Called again and again while a chunk is missing: waits a moment, or brings it; raises where it will never come."""


class ArrivingMaps(ChunkMaps):
    """Maps of chunk files, each made when it is first needed and there.

    Args:
        bring: called with a chunk's number while its file is missing.
    """

    def __init__(self, paths: Sequence[Path], chunk_bytes: int, bring: Callable[[int], None]) -> None:
        if LIBC is None:
            raise UsageError("--cache: this system has no memory maps as it needs them; copy the store first")
        self._bring = bring
        self._paths = paths
        self._mapped = np.zeros(len(paths), bool)
        self._lock = threading.Lock()
        super().__init__(paths, chunk_bytes)

    def _map_all(self, paths: Sequence[object]) -> None:
        """None of them yet."""

    def arrive(self, positions: np.ndarray, stopped: Callable[[], bool]) -> None:
        for chunk in np.unique(positions // self.chunk_bytes).tolist():
            self._wait(chunk, stopped)

    def chunk(self, chunk: int) -> np.ndarray:
        self._wait(chunk, lambda: False)
        return super().chunk(chunk)

    def _wait(self, chunk: int, stopped: Callable[[], bool]) -> None:
        while not self._mapped[chunk]:
            if self._paths[chunk].exists():
                with self._lock:
                    if not self._mapped[chunk]:
                        self._map(self._paths[chunk], int(self.addresses[chunk]))
                        self._mapped[chunk] = True
            elif stopped():
                raise UsageError("the loader was closed while it waited for a chunk")
            else:
                self._bring(chunk)


class ArrivingStore(Store):
    """A store at `url`, of which all but chunks of images lies in `path`.

    Args:
        bring: see `Bring`.
    """

    root_name = PARTIAL_ROOT

    def __init__(self, path: Path, url: str, bring: Bring) -> None:
        super().__init__(path)
        self.url, self.bring = url, bring

    def __getitem__(self, split: str) -> ArrivingSplit:
        found = super().__getitem__(split)
        assert isinstance(found, ArrivingSplit)
        return found

    def _open(self, split: str) -> ArrivingSplit:
        return ArrivingSplit(self, split)


class ArrivingSplit(Split):
    """A split of an `ArrivingStore`. Chunk files that are missing are to come."""

    def __init__(self, store: ArrivingStore, name: str) -> None:
        self.origin = RemotePath(store.url) / name
        self.store = store
        super().__init__(store, name)

    def chunk_sizes(self) -> dict[str, int]:
        whole = dict.fromkeys((chunk_name(chunk) for chunk in range(self.num_chunks)), self.file_bytes)
        return {**whole, **super().chunk_sizes()}

    def missing(self) -> list[int]:
        """Numbers of the chunks that aren't here yet, ascending."""
        here = super().chunk_sizes()
        return [chunk for chunk in range(self.num_chunks) if chunk_name(chunk) not in here]

    @cached_property
    def maps(self) -> ChunkMaps:
        paths = [self.chunk_path(chunk) for chunk in range(self.num_chunks)]
        return ArrivingMaps(paths, self.chunk_bytes, lambda chunk: self.store.bring(self, chunk))
