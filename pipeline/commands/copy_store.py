"""`copy`: the same store with other codecs, on a disk or in an object store, proved chunk by chunk on the way.

An interrupted copy is taken up by the same command. On a disk it waits in DST's work folder; at a URL it has no root
group yet, so that nobody takes it for a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from zarr.storage import MemoryStore

from pipeline.commands.chunk_codec import ChunkCodec, codec_arguments
from pipeline.conversion.preflight import Need, check_space
from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, StoreError, UsageError
from pipeline.progress import Progress, say
from pipeline.store.atomic import remove_temps, write_bytes
from pipeline.store.attributes import with_digest
from pipeline.store.format import COPY, SplitArrays, chunk_file_bytes, chunk_name, images_in_chunk, split_order
from pipeline.store.integrity import altered_arrays
from pipeline.store.reader import Split, Store
from pipeline.store.remote import RemotePath, file_sizes, is_remote, place
from pipeline.store.transfer import failures, in_threads
from pipeline.store.writer import known_codecs, publish, root_attributes, write_group, write_split
from pipeline.text import counted, one_line

ROOT = "zarr.json"
AGAIN = "the copy isn't finished, run it again"
MEMORY_BYTES = 4_000_000_000
"""With --n-jobs -1 there are so many threads at most that their chunks fit; each holds about four."""


@dataclass
class Tally:
    """What a copy did.

    Attributes:
        chunks, kept: chunks that are there and proved, and how many of them were there before.
        bytes_read, bytes_stored: of the images' files in SRC and DST.
    """

    chunks: int = 0
    kept: int = 0
    bytes_read: int = 0
    bytes_stored: int = 0


def copy_store(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    codec: str = "none",
    n_jobs: int = -1,
    quiet: bool = False,
) -> None:
    """Copy a store, re-encoded with standard Zarr v3 codecs, or go on with an interrupted copy.

    Every chunk's uncompressed bytes are checked against its digest when read, and its file is read again after it was
    written. Chunks of an interrupted copy that have the right digest are kept.

    Args:
        src: a store's folder, or a URL that fsspec opens (`s3://bucket/x.zarr`).
        dst: a folder that doesn't exist yet, or such a URL.
        codec: `none` (raw, for training), `zstd`, `blosc` (zstd with bitshuffle) or `max`.
        n_jobs: threads; -1 for one per core, fewer where their chunks would need more than 4 GB.

    Raises:
        UsageError: DST exists or lies in SRC, an unknown codec, no threads, or a URL whose package is missing.
        StoreError: SRC is damaged.
        Error: reading or writing failed.
    """
    with known_codecs():
        _copy_store(place(src), place(dst), codec, n_jobs, quiet)


def _copy_store(source: Path, target: Path, codec: str, n_jobs: int, quiet: bool) -> None:
    codec_arguments(codec)  # raises before anything is written
    if n_jobs == 0:
        raise UsageError("--n-jobs can't be 0; give a number of threads, or -1 for one per core")
    if _is_inside(target, source):
        raise UsageError(f"{target}: lies in the store that is copied; choose a DST outside {source}")
    with contextlib.suppress(OSError):  # such as of a bucket that shows no more than DST
        if (target.parent / ROOT).exists():
            raise UsageError(f"{target}: lies in a store, which it would damage; choose a DST outside {target.parent}")
    tally = Tally()
    with failures(source, AGAIN):
        store = Store(source)
        splits = _open_splits(store)
        files = _small_files(store, splits, codec)
    if isinstance(target, RemotePath):
        with failures(target, AGAIN):
            present = target.all_sizes()
            if ROOT in present:
                raise UsageError(f"{target}: a store is there already; choose another DST or delete it first")
            _refuse_strangers(target, present, files, splits)
            _copy(splits, target, files, present, n_jobs, quiet, tally)
            (target / ROOT).write_bytes(files[ROOT])
    else:
        if os.path.lexists(target):
            raise UsageError(f"{target}: exists already; choose another DST or delete it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        workspace = Workspace(target)
        with failures(target, AGAIN), workspace.run(None, copying=True):
            staged = workspace.path / COPY
            present = _files_below(staged)
            _refuse_strangers(staged, present, files, splits)
            if codec == "none":  # else nobody knows how much it will be
                size = sum(one.num_chunks * chunk_file_bytes(one.chunk_images, one.image_bytes) for one, _ in splits)
                check_space([Need(staged, size - sum(present.values()), 0)])
            _copy(splits, staged, files, present, n_jobs, quiet, tally)
            write_bytes(staged / ROOT, files[ROOT])
            publish(staged, target)
    kept = f" ({tally.kept:,} of them were there already)" if tally.kept else ""
    say(
        f"{target}: copied with codec {codec}; {tally.bytes_read:,} bytes of images became {tally.bytes_stored:,}; "
        f"verified by SHA-256: {counted(tally.chunks, 'chunk')} as written{kept}, and all small arrays as read",
        quiet=quiet,
    )


def _is_inside(target: Path, source: Path) -> bool:
    """True where `target` is a place below `source`."""
    if is_remote(target) or is_remote(source):
        return str(target).startswith(f"{source}/")
    return Path(os.path.realpath(source)) in Path(os.path.realpath(target)).parents


def _open_splits(store: Store) -> list[tuple[Split, SplitArrays]]:
    """All splits with their small arrays, which are unaltered.

    Raises:
        StoreError: damage, or a split that the root lists is missing.
    """
    names = store.splits
    if gone := split_order(set(store.attrs.get("splits", ())) - set(names)):
        missing = " and ".join(gone)
        raise StoreError(f"{store.path}: {missing} missing, which the root lists; restore or convert that first")
    opened = []
    for split in (Split(store, name, check=False) for name in names):
        arrays = split.arrays()
        if altered := altered_arrays(split, arrays):
            raise StoreError(f"{altered[0]}; take that split from a good copy of the store")
        opened.append((split, arrays))
    return opened


def _small_files(store: Store, splits: Sequence[tuple[Split, SplitArrays]], codec: str) -> dict[str, bytes]:
    """Name -> bytes of all files of the copy but the chunks of images."""
    written: dict[str, Any] = {}
    memory = MemoryStore(written)
    attributes = root_attributes(
        store.geometry, store.class_ids, store.class_names, [split.name for split, _ in splits]
    )
    write_group(memory, "", attributes)
    for split, arrays in splits:
        attributes = with_digest(dict(split.attrs))
        shape, chunk_images = split.image_shape, split.chunk_images
        write_split(memory, split.name, shape, chunk_images, arrays, attributes, **codec_arguments(codec))
    return {name: buffer.to_bytes() for name, buffer in written.items()}


def _files_below(folder: Path) -> dict[str, int]:
    """Name, relative to the folder -> bytes, of all files below; temp files of a killed copy are deleted."""
    sizes = {}
    for root, _, _ in os.walk(folder):
        remove_temps(root)
        for name, size in file_sizes(Path(root)).items():
            sizes[os.path.relpath(os.path.join(root, name), folder)] = size
    return sizes


def _refuse_strangers(
    folder: Path, present: Mapping[str, int], files: Mapping[str, bytes], splits: Sequence[tuple[Split, SplitArrays]]
) -> None:
    """Raise UsageError for a file of an unfinished copy that isn't this copy's; one that is cut short may be."""
    chunks = {f"{split.name}/images/{chunk_name(chunk)}" for split, _ in splits for chunk in range(split.num_chunks)}
    for name in present:
        if name not in chunks and not (name in files and files[name].startswith((folder / name).read_bytes())):
            raise UsageError(f"{folder}/{name}: no part of this copy; choose another DST, or delete {folder}")


def _put(path: Path, data: bytes) -> None:
    if not is_remote(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
    else:
        path.write_bytes(data)


def _copy(
    splits: Sequence[tuple[Split, SplitArrays]],
    target: Path,
    files: Mapping[str, bytes],
    present: Mapping[str, int],
    n_jobs: int,
    quiet: bool,
    tally: Tally,
) -> None:
    """Bring everything to `target` but the root group, which comes last: only then it is a store."""
    for name, data in files.items():
        if name != ROOT and present.get(name) != len(data):
            _put(target / name, data)
    for split, arrays in splits:
        name = f"{split.name}/images"
        there = {chunk for chunk in range(split.num_chunks) if f"{name}/{chunk_name(chunk)}" in present}
        sizes = split.chunk_sizes()
        tally.bytes_read += sum(sizes.get(chunk_name(chunk), 0) for chunk in range(split.num_chunks))
        _copy_images(split, arrays, target / name, ChunkCodec(files[f"{name}/zarr.json"]), there, n_jobs, quiet, tally)


def _copy_images(
    split: Split,
    arrays: SplitArrays,
    target: Path,
    codec: ChunkCodec,
    there: Container[int],
    n_jobs: int,
    quiet: bool,
    tally: Tally,
) -> None:
    origin = ChunkCodec((split.path / "images" / "zarr.json").read_bytes())

    def is_right(chunk: int, pixels: np.ndarray) -> bool:
        return hashlib.sha256(pixels).digest() == arrays.digests[chunk].tobytes()

    def is_kept(chunk: int, data: bytes) -> bool:
        try:
            return codec.is_whole(data) and is_right(chunk, codec.decode(chunk, data))
        except (RuntimeError, ValueError):  # cut short
            return False

    def copy_chunk(chunk: int) -> tuple[int, int, bool]:
        """Images, bytes stored, and whether they were there."""
        file = target / chunk_name(chunk)
        num_images = images_in_chunk(chunk, split.chunk_images, split.num_samples)
        if chunk in there:
            data = file.read_bytes()
            if is_kept(chunk, data):
                return num_images, len(data), True
        path = split.chunk_path(chunk)
        try:
            if not is_remote(path) and not path.is_file():
                raise FileNotFoundError  # a FIFO would never end
            stored = path.read_bytes()
            pixels = origin.decode(chunk, stored)
        except FileNotFoundError:
            pixels, stored = np.empty(0, np.uint8), b""
        except (RuntimeError, ValueError) as error:  # of a codec
            raise StoreError(
                f"{path}: can't be decoded ({one_line(error)}); take that file from a good copy of the store, "
                "then copy again"
            ) from error
        if not is_right(chunk, pixels):
            where = f"{split.path}: chunk {chunk_name(chunk)}"
            raise StoreError(f"{where} is missing or altered; run `verify`, then copy again")
        same = origin.is_raw and codec.is_raw and codec.is_whole(stored)
        data = stored if same else codec.encode(chunk, pixels)
        _put(file, data)
        written = file.read_bytes()
        if not (written == data if codec.is_raw else is_kept(chunk, written)):
            raise Error(f"{file}: reads back otherwise than it was written; check the disk or network, then copy again")
        return num_images, len(data), False

    with joblib.parallel_config(backend="threading"):
        workers = joblib.effective_n_jobs(n_jobs)
    if n_jobs < 0:
        workers = min(workers, MEMORY_BYTES // (4 * split.chunk_bytes))
    with Progress(f"copy {split.name}", split.num_samples, split.image_bytes, quiet=quiet) as progress:
        for num_images, stored, kept in in_threads(copy_chunk, range(split.num_chunks), workers):
            tally.chunks, tally.kept = tally.chunks + 1, tally.kept + kept
            tally.bytes_stored += stored
            progress.advance(num_images)
