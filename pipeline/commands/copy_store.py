"""`copy`: the same store with other codecs, on a disk or in an object store, proved chunk by chunk on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import joblib
import numpy as np
import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.storage import LocalStore

from pipeline.conversion.workdir import Workspace
from pipeline.errors import Error, StoreError, StoreNotFoundError, UsageError
from pipeline.progress import Progress, say
from pipeline.store.format import CODECS, FORMAT_NAME, FORMAT_VERSION, SMALL_ARRAYS, SplitArrays
from pipeline.store.integrity import padded_digest
from pipeline.store.writer import known_codecs, publish, write_split
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
    encoding = codec_arguments(codec)
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
            _copy(group, source, store, encoding, n_jobs, quiet)
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
            _copy(group, source, _open(str(staged), read_only=False), encoding, n_jobs, quiet)
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
    if "://" not in source and not os.path.isdir(source):
        raise StoreNotFoundError(f"{source}: no store there; check the path")
    with _readable(source):
        try:
            group = zarr.open_group(_open(source, read_only=True), mode="r", zarr_format=3, use_consolidated=False)
        except FileNotFoundError:
            raise StoreNotFoundError(f"{source}: no store there; check the path") from None
    if group.attrs.get("format") != FORMAT_NAME or group.attrs.get("format_version") != FORMAT_VERSION:
        raise StoreError(f"{source}: not a store of format version {FORMAT_VERSION}; check the path")
    return group


def _copy(group: zarr.Group, source: str, store: ZarrStore, encoding: dict[str, Any], n_jobs: int, quiet: bool) -> None:
    for name, split in sorted(group.groups()):
        _copy_split(split, f"{source}/{name}", store, name, encoding, n_jobs, quiet)
    # Last, so that nobody takes half a copy for a store: until here the root group has no attributes.
    zarr.open_group(store, mode="r+").update_attributes(dict(group.attrs))


def _copy_split(
    split: zarr.Group, source: str, store: ZarrStore, name: str, encoding: dict[str, Any], n_jobs: int, quiet: bool
) -> None:
    images: Any = split["images"]
    arrays = SplitArrays(**{array: np.asarray(split[array][...]) for array in SMALL_ARRAYS})  # type: ignore[index]
    num_samples, chunk_images = images.shape[0], images.chunks[0]
    image_shape = images.shape[1:]
    made: Any = write_split(store, name, image_shape, chunk_images, arrays, dict(split.attrs), **encoding)

    def copy_chunk(chunk: int) -> int:
        first = chunk * chunk_images
        last = min(first + chunk_images, num_samples)

        def check(part: np.ndarray, place: str) -> np.ndarray:
            if padded_digest(part, chunk_images) != arrays.digests[chunk].tobytes():
                raise StoreError(f"{place}: chunk c.{chunk}.0.0.0 is missing or altered; run `verify`, then copy again")
            return part

        try:
            part = images[first:last]
        except OSError:  # of the disk or the network
            raise
        except (RuntimeError, ValueError) as error:  # of a codec
            raise StoreError(
                f"{source}/images/c.{chunk}.0.0.0: can't be decoded ({one_line(error)}); take that file "
                "from a good copy of the store, then copy again"
            ) from error
        made[first:last] = check(part, source)
        check(made[first:last], "the copy")
        return last - first

    jobs = (joblib.delayed(copy_chunk)(chunk) for chunk in range(len(arrays.digests)))
    with joblib.parallel_config(backend="threading"):
        workers = max(1, min(joblib.effective_n_jobs(n_jobs), len(arrays.digests)))
    threads = joblib.Parallel(n_jobs=workers, prefer="threads", return_as="generator_unordered")
    with Progress(f"copy {name}", num_samples, int(np.prod(image_shape)), quiet=quiet) as progress:
        for num_images in threads(jobs):
            progress.advance(num_images)
