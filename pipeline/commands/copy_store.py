"""`copy`: the same store with other codecs, on a disk or in an object store, proved chunk by chunk on the way."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast

import joblib
import numpy as np
import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore

from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, StoreError, StoreNotFoundError, UsageError
from pipeline.progress import Progress, say
from pipeline.store.attributes import check_root_attributes, with_digest
from pipeline.store.format import (
    CODECS,
    FORMAT_NAME,
    READABLE_VERSIONS,
    SMALL_ARRAYS,
    SplitArrays,
    chunk_index,
    chunk_name,
    split_order,
)
from pipeline.store.reader import Split, Store
from pipeline.store.writer import known_codecs, publish, root_attributes, write_split
from pipeline.text import one_line

ZSTD_LEVEL = 5


def codec_arguments(codec: str) -> dict[str, Any]:
    """`filters` and `compressors` of zarr's `create_array` for images uint8 (N, H, W, C).

    `max` stores the channels as planes and differences between neighbours: photographs shrink most then.

    Raises:
        UsageError: an unknown codec, or one whose library isn't installed.
    """
    from zarr.codecs import BloscCodec, TransposeCodec, ZstdCodec

    zstd = ZstdCodec(level=ZSTD_LEVEL)
    if codec == "none":
        return {"filters": None, "compressors": None}
    if codec == "zstd":
        return {"filters": None, "compressors": [zstd]}
    if codec == "blosc":
        return {
            "filters": None,
            "compressors": [BloscCodec(cname="zstd", clevel=ZSTD_LEVEL, shuffle="bitshuffle", typesize=1)],
        }
    if codec == "max":
        try:
            from zarr.codecs.numcodecs import Delta
        except ImportError:
            raise UsageError("--codec max needs numcodecs: pip install numcodecs") from None
        # (N, H, W, C) -> (N, C, H, W)
        return {"filters": [TransposeCodec(order=(0, 3, 1, 2)), Delta(dtype="u1", astype="u1")], "compressors": [zstd]}
    raise UsageError(f"--codec {codec}: must be one of {', '.join(CODECS)}")


def _open(place: str, *, read_only: bool) -> ZarrStore:
    if "://" not in place:
        return LocalStore(place, read_only=read_only)
    try:
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(place, read_only=read_only)
    except ImportError as error:
        scheme = place.split("://")[0]
        raise UsageError(
            f"{place}: {scheme}:// needs a package that isn't installed ({error}); "
            "pip install 'efficient-imagenet[remote]' (s3), or fsspec's package for that scheme"
        ) from None
    except ValueError as error:
        raise UsageError(f"{place}: no store can be opened at such a URL ({error})") from None


@contextlib.contextmanager
def _readable(place: str) -> Iterator[None]:
    """What the network or the disk says, as one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise Error(
                f"{error.filename or place}: {error.strerror}; the copy isn't finished, run it again"
            ) from error
        raise Error(f"{place}: {error}; the copy isn't finished, run it again") from error


def copy_store(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    codec: str = "none",
    n_jobs: int = -1,
    quiet: bool = False,
) -> None:
    """Copy a store, re-encoded with standard Zarr v3 codecs.

    Every chunk's uncompressed bytes are checked against its digest when read, and again after they were written.

    Args:
        src: a store's folder, or a URL that fsspec opens (`s3://bucket/x.zarr`).
        dst: a folder that doesn't exist yet, or such a URL.
        codec: `none` (raw, for training), `zstd`, `blosc` (zstd with bitshuffle) or `max`.
        n_jobs: threads; -1 for one per core.

    Raises:
        UsageError: DST exists or lies in SRC, an unknown codec, no threads, or a URL whose package is missing.
        StoreError: SRC is damaged.
        Error: reading or writing failed.
    """
    with known_codecs():
        _copy_store(os.fspath(src), os.fspath(dst), codec, n_jobs, quiet)


def _copy_store(source: str, target: str, codec: str, n_jobs: int, quiet: bool) -> None:
    codec_arguments(codec)  # raises before anything is written
    if n_jobs == 0:
        raise UsageError("--n-jobs can't be 0; give a number of threads, or -1 for one per core")
    if _is_inside(target, source):
        raise UsageError(f"{target}: lies in the store that is copied; choose a DST outside {source}")
    group = _open_group(source)
    if "://" in target:
        store = _open(target, read_only=False)
        with _readable(target):
            if _exists(store):
                raise UsageError(f"{target}: a store is there already; choose another DST or delete it first")
            _copy(group, source, store, codec, n_jobs, quiet)
            sizes = f"{_image_bytes(group):,} bytes of images became {_image_bytes(zarr.open_group(store, mode='r')):,}"
        say(f"{target}: copied with codec {codec}; {sizes}", quiet=quiet)
        return
    final = Path(os.path.abspath(target))
    if final.exists():
        raise UsageError(f"{final}: exists already; choose another DST or delete it first")
    final.parent.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(final)
    with _readable(target), workspace.run(None):
        staged = workspace.path / "copy"
        shutil.rmtree(staged, ignore_errors=True)
        try:
            _copy(group, source, _open(str(staged), read_only=False), codec, n_jobs, quiet)
            publish(staged, final)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        sizes = f"{_image_bytes(group):,} bytes of images became {_image_bytes(zarr.open_group(final, mode='r')):,}"
    say(f"{final}: copied with codec {codec}; {sizes}", quiet=quiet)


def _image_bytes(group: zarr.Group) -> int:
    """Bytes of all chunk files, as they are stored."""
    return sum(cast(zarr.Array, split["images"]).nbytes_stored() for _, split in group.groups())


def _is_inside(target: str, source: str) -> bool:
    """True where `target` is a place below `source`."""
    if ("://" in target) != ("://" in source):
        return False
    if "://" in target:
        return target.startswith(source.rstrip("/") + "/")
    return Path(os.path.realpath(source)) in Path(os.path.realpath(target)).parents


def _exists(store: ZarrStore) -> bool:
    try:
        zarr.open_group(store, mode="r")
    except FileNotFoundError:
        return False
    return True


def _open_group(source: str) -> zarr.Group:
    """The root group, whose attributes are sound.

    Raises:
        StoreNotFoundError: no store is there.
        StoreError: its metadata are damaged, or a split is missing.
    """
    if "://" not in source:
        store = Store(source)
        for name in store.splits:
            Split(store, name, check=False)
    with _readable(source):
        try:
            group = zarr.open_group(_open(source, read_only=True), mode="r", zarr_format=3, use_consolidated=False)
        except FileNotFoundError:
            raise StoreNotFoundError(f"{source}: no store there; check the path") from None
        present = {name for name, _ in group.groups()}
    attributes: dict[str, Any] = dict(group.attrs)
    if attributes.get("format") != FORMAT_NAME or attributes.get("format_version") not in READABLE_VERSIONS:
        raise StoreError(f"{source}: not a store of a format that is known here; check the path")
    try:
        check_root_attributes(attributes)
    except ValueError as error:
        raise StoreError(f"{source}/zarr.json: {error}; take it from a good copy of the store") from None
    if gone := split_order(set(attributes.get("splits", ())) - present):
        raise StoreError(f"{source}: {' and '.join(gone)} missing, which the root lists; restore or convert that first")
    return group


def _copy(group: zarr.Group, source: str, store: ZarrStore, codec: str, n_jobs: int, quiet: bool) -> None:
    names = []
    for name, split in sorted(group.groups()):
        names.append(name)
        _copy_split(split, f"{source}/{name}", store, name, codec, n_jobs, quiet)
    # Last, so that nobody takes half a copy for a store: until here the root group has no attributes.
    attrs: Any = group.attrs
    attributes = root_attributes(attrs["geometry"], attrs["class_ids"], attrs["class_names"], names)
    zarr.open_group(store, mode="r+").update_attributes(attributes)


def _copy_split(
    split: zarr.Group, source: str, store: ZarrStore, name: str, codec: str, n_jobs: int, quiet: bool
) -> None:
    arrays = SplitArrays(**{array: np.asarray(split[array][...]) for array in SMALL_ARRAYS})  # type: ignore[index]
    images: Any = split["images"]
    image_shape, chunk_images = images.shape[1:], (images.shards or images.chunks)[0]
    attributes = with_digest(dict(split.attrs))
    made = write_split(store, name, image_shape, chunk_images, arrays, attributes, **codec_arguments(codec))
    num_samples = images.shape[0]

    def copy_chunk(chunk: int) -> int:
        try:
            data = _read_chunk(images, chunk)
        except OSError:  # of the disk or the network
            raise
        except (RuntimeError, ValueError) as error:  # of a codec
            raise StoreError(
                f"{source}/images/{chunk_name(chunk)}: can't be decoded ({one_line(error)}); take that file "
                "from a good copy of the store, then copy again"
            ) from error
        for place in (source, "the copy"):
            if place != source:
                _write_chunk(made, chunk, data)
                data = _read_chunk(made, chunk)
            if hashlib.sha256(data).digest() != arrays.digests[chunk].tobytes():
                raise StoreError(
                    f"{place}: chunk {chunk_name(chunk)} is missing or altered; run `verify`, then copy again"
                )
        return min(chunk_images, num_samples - chunk * chunk_images)

    with joblib.parallel_config(backend="threading"):
        workers = max(1, min(joblib.effective_n_jobs(n_jobs), len(arrays.digests)))
    # Leaving the pool waits for what runs, so that after an error nothing writes any more.
    with (
        Progress(f"copy {name}", num_samples, math.prod(image_shape), quiet=quiet) as progress,
        ThreadPoolExecutor(workers, "copy") as pool,
    ):
        try:
            for done in as_completed([pool.submit(copy_chunk, chunk) for chunk in range(len(arrays.digests))]):
                progress.advance(done.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _is_raw(images: zarr.Array[Any]) -> bool:
    return not images.compressors and not images.filters


def _read_chunk(images: zarr.Array[Any], chunk: int) -> np.ndarray:
    """uint8 (K * H * W * C,): a whole uncompressed chunk, its padding included."""
    chunk_images = (images.shards or images.chunks)[0]
    each = math.prod(images.shape[1:])
    whole = np.zeros((chunk_images, *images.shape[1:]), np.uint8)
    if _is_raw(images):  # all at once: zarr would take a shard apart into its images
        path = f"{images.store_path.path}/{chunk_name(chunk)}"
        found = sync(images.store_path.store.get(path, default_buffer_prototype()))
        return np.empty(0, np.uint8) if found is None else found.as_numpy_array()[: chunk_images * each]
    first = chunk * chunk_images
    part = np.asarray(images[first : first + chunk_images])
    whole[: len(part)] = part
    return whole.reshape(-1)


def _write_chunk(images: zarr.Array[Any], chunk: int, data: np.ndarray) -> None:
    """Write a whole chunk, uint8 (K * H * W * C,); raw ones as `convert` writes them, with their padding."""
    assert images.shards is not None
    shape = (images.shards[0], *images.shape[1:])
    if _is_raw(images):
        index = chunk_index(shape[0], math.prod(shape[1:]))
        path = f"{images.store_path.path}/{chunk_name(chunk)}"
        sync(images.store_path.store.set(path, cpu.Buffer.from_bytes(data.tobytes() + index)))
        return
    first = chunk * shape[0]
    last = min(first + shape[0], images.shape[0])
    images[first:last] = data.reshape(shape)[: last - first]
