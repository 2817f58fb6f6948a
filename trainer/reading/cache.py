"""`--data URL --cache DIR`: one process of each machine brings the store over, in the order in which the run needs it.

DIR/NAME.zarr        the store; until it is complete its root group is called `zarr.json.partial`
DIR/NAME.zarr.lock   flock of who brings; when it ends, another run that shares DIR goes on
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.errors import Error, StoreError, UsageError
from pipeline.store.atomic import fsync_dir, remove_temps, write_bytes
from pipeline.store.format import PARTIAL_ROOT, chunk_index, chunk_name
from pipeline.store.locks import flock
from pipeline.store.reader import Store
from pipeline.store.remote import RemotePath
from pipeline.store.split import Split
from pipeline.store.transfer import failures, in_threads
from pipeline.text import one_line
from trainer.reading.arriving import ArrivingSplit, ArrivingStore
from trainer.reading.small_files import ROOTS, compare, read_small, write_small

THREADS = 4
"""Chunks that are brought at once."""
POLL_SECONDS = 0.05
TRIES, RETRY_SECONDS = 4, 1.0
"""A chunk is asked for so often, with a pause that doubles each time."""

Wanted = Sequence[tuple[Split, np.ndarray]]
"""Splits, and of each the slots in the order in which they are needed."""


def needed_chunks(slots: np.ndarray, chunk_images: int) -> np.ndarray:
    """int64 (n,): the chunks that hold the slots, int64, each once, in the order in which they are first needed."""
    chunks, first = np.unique(slots // chunk_images, return_index=True)
    return chunks[np.argsort(first)]


class Cache:
    """A run's stores at URLs, in a folder of this machine.

    Args:
        folder: DIR.
        leader: this process brings what is missing; one on each machine does. The others wait for it.
        say: takes a line for people.

    Raises:
        UsageError: `folder` can't be made.
    """

    def __init__(self, folder: str, leader: bool, say: Callable[[str], None]) -> None:
        self.folder, self.leader, self._say = Path(folder).absolute(), leader, say
        self._stores: dict[str, Store] = {}
        self._error: Error | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--cache {folder}: {error.strerror}; choose a folder on this machine's disk") from error

    def open(self, url: str) -> Store:
        """The store at the URL, whose metadata and small arrays are here; its chunks may be still to come.

        Raises:
            UsageError: another store has this name in DIR, or this one can't be cached.
            StoreError: it is damaged, and the URL can't mend it.
            Error: the bucket can't be read, or DIR can't hold the store.
        """
        if url not in self._stores:
            path = self.folder / RemotePath(url).name
            with self._failures():
                self._stores[url] = self._open(url, path)
        return self._stores[url]

    @property
    def is_complete(self) -> bool:
        """All stores that were opened were here from the start."""
        return not any(isinstance(store, ArrivingStore) for store in self._stores.values())

    def _open(self, url: str, path: Path) -> Store:
        while True:
            with contextlib.suppress(StoreError):  # damaged, or another run has just completed it
                if store := self._present(url, path):
                    return store
            with self._lock(path) if self.leader else contextlib.nullcontext(False) as held:
                if held:
                    return self._begin(url, path)
            time.sleep(POLL_SECONDS)

    def _present(self, url: str, path: Path) -> Store | None:
        """The store in DIR, if there is one.

        Raises:
            UsageError: it isn't the URL's.
            StoreError: files are missing or damaged.
        """
        root = next((root for root in ROOTS if (path / root).exists()), None)
        if root is None:
            return None
        note = compare(url, path, root) if self.leader else ""
        store = Store(path) if root == "zarr.json" else ArrivingStore(path, url, self._bring)
        for name in store.attrs.get("splits", store.splits):
            if (path / name).exists():  # not of a bucket that holds some splits only
                store[name]  # raises where files are missing or have another size
        if self.leader and isinstance(store, ArrivingStore):
            self._check_room(store)
        if note:
            self._say(note)
        return store

    def _begin(self, url: str, path: Path) -> Store:
        """Under the lock: the store in DIR; first all but chunks of images is brought, where it isn't there in full."""
        damage = None
        try:
            if store := self._present(url, path):  # another run may have brought it
                return store
        except StoreError:
            damage = f"{path}: files are missing or damaged"
        try:
            small, file_bytes = read_small(Store(url))
        except (OSError, StoreError) as error:
            if damage is None:
                raise
            why = f"{damage}, and {url} can't be read ({one_line(error)})"
            raise StoreError(f"{why}; run it again with the same --cache when it can") from error
        if damage:
            self._say(f"note: {damage}; they are brought again")
        write_small(path, small, file_bytes)
        store = self._present(url, path)
        assert store is not None
        return store

    def _check_room(self, store: ArrivingStore) -> None:
        need = sum(len(store[name].missing()) * store[name].file_bytes for name in store.splits)
        free = shutil.disk_usage(store.path).free
        if need > free:
            raise Error(f"--cache {self.folder}: {need:,} bytes are to come and {free:,} are free; make room there")
        self._say(f"{store.url}: {need / 1e9:.1f} GB are to come to {store.path}, beside training")

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[bool]:
        """Yields whether this process alone may write there."""
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            yield flock(fd)
        finally:
            os.close(fd)

    def _failures(self) -> contextlib.AbstractContextManager[None]:
        return failures(self.folder, f"{self.folder} keeps what is there: run it again")

    # Chunks

    def start(self, wanted: Wanted) -> None:
        """Begin to bring chunks, in a thread: those that hold the slots in this order, then all others."""
        if self.leader and not self.is_complete:
            self._thread = threading.Thread(target=self._run, args=(wanted,), name="cache", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop after the chunks that are being brought."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _bring(self, split: ArrivingSplit, chunk: int) -> None:
        """See `trainer.reading.arriving.Bring`."""
        if self._error is not None:
            raise self._error
        if self.leader and self._thread is None:  # before the first step
            with self._failures(), self._lock(split.store_path) as held:
                if held:
                    self._fetch((split, chunk))
                    return
        time.sleep(POLL_SECONDS)

    def _run(self, wanted: Wanted) -> None:
        try:
            with self._failures():
                stores = {store.path: store for store in self._stores.values() if isinstance(store, ArrivingStore)}
                for path in dict.fromkeys([*(split.store_path for split, _ in wanted), *stores]):
                    if path in stores:
                        self._bring_store(stores[path], [pair for pair in wanted if pair[0].store_path == path])
        except Error as error:
            self._error = error
        except BaseException as error:
            self._error = Error(f"--cache {self.folder}: {type(error).__name__}: {error}")

    def _bring_store(self, store: ArrivingStore, wanted: Wanted) -> None:
        while not self._stopped.is_set() and not (store.path / "zarr.json").exists():
            with self._lock(store.path) as held:
                if held:
                    for name in store.splits:
                        remove_temps(store[name].path / "images")
                    for _ in in_threads(self._fetch, list(_in_order(store, wanted)), THREADS):
                        if self._stopped.is_set():
                            return
                    if not any(store[name].missing() for name in store.splits):
                        os.replace(store.path / PARTIAL_ROOT, store.path / "zarr.json")
                        fsync_dir(store.path)
                        self._say(f"{store.path}: complete; later runs may give it as --data")
                    return
            self._stopped.wait(POLL_SECONDS)  # another run brings it

    def _fetch(self, item: tuple[ArrivingSplit, int]) -> None:
        """Bring a split's chunk: its file gets its name when its digest was right and all of it is on the disk."""
        split, chunk = item
        origin = split.origin / "images" / chunk_name(chunk)
        data = self._read(origin)
        index = chunk_index(split.chunk_images, split.image_bytes) if split.version > 1 else b""
        digest = hashlib.sha256(memoryview(data)[: split.chunk_bytes]).digest()
        if digest != split.digests[chunk].tobytes() or data[split.chunk_bytes :] != index:
            raise StoreError(
                f"{origin}: missing or damaged, or the store was replaced since {split.store_path} was begun; verify "
                "it, or choose another --cache"
            )
        write_bytes(split.chunk_path(chunk), data)

    def _read(self, origin: RemotePath) -> bytes:
        for attempt in range(TRIES):
            try:
                return origin.read_bytes()
            except FileNotFoundError:
                return b""
            except OSError:
                if attempt == TRIES - 1 or self._stopped.wait(RETRY_SECONDS * 2**attempt):
                    raise
        raise AssertionError


def _in_order(store: ArrivingStore, wanted: Wanted) -> Iterator[tuple[ArrivingSplit, int]]:
    """Missing chunks of a store, each once: those that are wanted in their order, then the others."""
    splits = {name: store[name] for name in store.splits}
    missing = {name: dict.fromkeys(split.missing()) for name, split in splits.items()}
    ordered = [(split.name, needed_chunks(slots, split.chunk_images).tolist()) for split, slots in wanted]
    ordered += [(name, list(chunks)) for name, chunks in missing.items()]
    for name, chunks in ordered:
        for chunk in chunks:
            if chunk in missing[name]:
                del missing[name][chunk]
                yield splits[name], chunk
