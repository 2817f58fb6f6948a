"""The read side of the store (format version 1): plain JSON, numpy and memory maps, nothing else.

A store is an ordinary Zarr v3 hierarchy; this module is only a faster way to the same bytes. It imports neither
zarr, joblib nor PIL, so that a data-loading process stays small. `docs/format.md` is the specification.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import StoreError, StoreNotFoundError
from pipeline.store.maps import ChunkMaps

FORMAT_NAME = "efficient-imagenet"
FORMAT_VERSION = 1
BAD_LABEL = -1
UNLABELLED = -2
SMALL_ARRAYS = ("labels", "keys", "key_offsets", "source_size", "digests")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: unreadable metadata ({error}); restore it, or convert with --overwrite") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: not a Zarr v3 metadata object; restore it, or convert with --overwrite")
    return value


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store for reading.

    Args:
        path: the folder that `convert` wrote, such as `data/imagenet-256.zarr`.

    Raises:
        StoreNotFoundError: nothing, or something else than a store, is there.
        StoreError: a store of another version, or damaged metadata.
    """
    return Store(path)


class Store:
    """A finished store: a mapping from split names to `Split`, opened lazily.

    Attributes:
        path: the store's folder.
        attrs: the root group's attributes (format, geometry, classes), as a dict.
        class_ids: one id per class, in label order (for ImageNet the WordNet ids).
        class_names: human-readable names in the same order; the ids where the source has no names.
        splits: names of the complete splits, `train` first, then `val`, then the rest sorted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            metadata = _read_json(self.path / "zarr.json")
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(self._why_not()) from None
        self.attrs: dict[str, Any] = metadata.get("attributes", {})
        if self.attrs.get("format") != FORMAT_NAME:
            raise StoreNotFoundError(
                f"{self.path}: a Zarr hierarchy, but not one that `python -m pipeline convert` wrote; check the path"
            )
        if self.attrs.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{self.path}: format version {self.attrs.get('format_version')}, this software reads "
                f"{FORMAT_VERSION}; use the matching release or convert again"
            )
        self.class_ids: list[str] = list(self.attrs["class_ids"])
        self.class_names: list[str] = list(self.attrs["class_names"])

    def _why_not(self) -> str:
        name = self.path.name  # none of "." and "/"
        work = self.path.with_name(name + ".work") if name else Path(f"{self.path.resolve()}.work")
        if work.exists():
            return f"{self.path}: its conversion isn't finished ({work} exists); rerun the same convert command"
        if self.path.exists():
            return f"{self.path}: not a store (no zarr.json in it); check the path"
        return f"{self.path}: no store there; check the path, or make one with `python -m pipeline convert SRC DST`"

    @property
    def geometry(self) -> dict[str, Any]:
        """How images were made: `size`, `fit`, `filter`, `channels`, `exif_transpose`."""
        return dict(self.attrs["geometry"])

    @property
    def splits(self) -> list[str]:
        found = [entry.name for entry in os.scandir(self.path) if os.path.isfile(os.path.join(entry.path, "zarr.json"))]
        return sorted(found, key=lambda name: ({"train": 0, "val": 1}.get(name, 2), name))

    def __contains__(self, split: object) -> bool:
        return split in self.splits

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            have = ", ".join(self.splits) or "none"
            raise StoreNotFoundError(f"{self.path}: no split {split!r} (complete splits: {have}); convert it first")
        return Split(self.path, split)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, splits={self.splits})"


class Split:
    """One complete split: N slots, of which `num_valid` hold a served sample.

    Opening checks that every chunk file is there and has its full size, so that a map can't raise SIGBUS later.
    Pickles as two strings; arrays and maps are opened again, lazily, by whoever unpickles it.

    Attributes:
        num_samples: slots, N; the length of every array.
        num_valid: served samples; slots minus bad ones.
        image_shape: (H, W, C) of every image, uint8.
        chunk_images: slots per chunk, K; the last chunk is padded with zeros to K.
        codecs: names of the images' Zarr codecs; `["bytes"]` in a store that can be mapped.
        attrs: the split's attributes (recipe, mean, std, bad samples, fingerprint, software, ...).

    Raises:
        StoreError: missing or short chunk files (the first are named), or damaged metadata.
    """

    def __init__(self, store: str | os.PathLike[str], name: str, *, check: bool = True) -> None:
        self.store_path = Path(store)
        self.name = name
        self.path = self.store_path / name
        try:
            self.attrs: dict[str, Any] = _read_json(self.path / "zarr.json").get("attributes", {})
            images = _read_json(self.path / "images" / "zarr.json")
        except FileNotFoundError as error:
            raise StoreError(f"{error.filename}: missing; restore it, or convert with --overwrite") from None
        try:
            shape, chunk = images["shape"], images["chunk_grid"]["configuration"]["chunk_shape"]
            self.num_samples = int(shape[0])
            self.num_valid = int(self.attrs["num_valid"])
            self.image_shape: tuple[int, int, int] = (int(shape[1]), int(shape[2]), int(shape[3]))
            self.chunk_images = int(chunk[0])
            self.codecs: list[str] = [codec["name"] for codec in images["codecs"]]
            self.mean: list[float] = list(self.attrs["mean"])
            self.std: list[float] = list(self.attrs["std"])
            self.fingerprint: str = self.attrs["sample_fingerprint"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.path}: incomplete metadata ({error!r}); restore it, or convert with --overwrite"
            ) from None
        if check:
            self.check_files()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Split, (str(self.store_path), self.name))

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        return f"Split({str(self.path)!r}, num_samples={self.num_samples}, num_valid={self.num_valid})"

    # Geometry of the files

    @property
    def image_bytes(self) -> int:
        height, width, channels = self.image_shape
        return height * width * channels

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one uncompressed chunk, padding included."""
        return self.chunk_images * self.image_bytes

    @property
    def num_chunks(self) -> int:
        return -(-self.num_samples // self.chunk_images)

    def chunk_path(self, chunk: int) -> Path:
        """File of chunk number `chunk` (0-based)."""
        return self.path / "images" / f"c.{chunk}.0.0.0"

    @property
    def is_raw(self) -> bool:
        """True where chunk files are the bare bytes, so that they can be mapped."""
        return self.codecs == ["bytes"]

    def problems(self) -> list[str]:
        """Missing, short and overlong files of the split, one line each. Cheap: file sizes only, no content."""
        problems = []
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.path / "images")}
        for chunk in range(self.num_chunks):
            size = sizes.get(f"c.{chunk}.0.0.0")
            if size is None:
                problems.append(f"{self.chunk_path(chunk)}: missing chunk")
            elif self.is_raw and size != self.chunk_bytes:
                kind = "short" if size < self.chunk_bytes else "overlong"
                problems.append(f"{self.chunk_path(chunk)}: {kind} chunk, {size:,} of {self.chunk_bytes:,} bytes")
            elif size == 0:
                problems.append(f"{self.chunk_path(chunk)}: empty chunk")
        for name in SMALL_ARRAYS:
            try:
                self.small_array(name)
            except StoreError as error:
                problems.append(str(error))
        return problems

    def check_files(self) -> None:
        """Raise StoreError naming the first missing or short files, if there are any."""
        problems = self.problems()
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise StoreError("; ".join(problems[:3]) + more + "; restore the files or convert again with --overwrite")

    # Arrays

    def small_array(self, name: str) -> np.ndarray:
        """A small array as a read-only memory map of its single chunk; name is one of `SMALL_ARRAYS`."""
        folder = self.path / name
        try:
            metadata = _read_json(folder / "zarr.json")
            shape = tuple(int(n) for n in metadata["shape"])
            dtype = np.dtype(metadata["data_type"]).newbyteorder("<")
            file = folder / ".".join(["c", *("0" for _ in shape)])
            size = file.stat().st_size
        except FileNotFoundError as error:
            raise StoreError(f"{error.filename}: missing") from None
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{folder}/zarr.json: damaged ({error!r})") from None
        wanted = int(np.prod(shape)) * dtype.itemsize
        if size != wanted:
            raise StoreError(f"{file}: {size:,} of {wanted:,} bytes")
        if wanted == 0:
            return np.empty(shape, dtype)
        # Read, not mapped: a map keeps a descriptor, and the largest of these arrays is tens of megabytes.
        array = np.fromfile(file, dtype).reshape(shape)
        array.flags.writeable = False
        return array

    @cached_property
    def labels(self) -> np.ndarray:
        """int32 (N,): class index; `BAD_LABEL` (-1) for a bad slot, `UNLABELLED` (-2) for an unlabelled sample."""
        return self.small_array("labels")

    @cached_property
    def valid_slots(self) -> np.ndarray:
        """int64 (num_valid,): slots that hold a served sample, ascending."""
        return np.flatnonzero(self.labels != BAD_LABEL)

    @cached_property
    def source_size(self) -> np.ndarray:
        """int32 (N, 2): height and width of each image before resizing, 0 for a bad slot."""
        return self.small_array("source_size")

    @cached_property
    def digests(self) -> np.ndarray:
        """uint8 (chunks, 32): SHA-256 of each whole uncompressed chunk, padding included."""
        return self.small_array("digests")

    @cached_property
    def _key_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.small_array("keys"), self.small_array("key_offsets")

    def key(self, i: int) -> bytes:
        """Where slot i's sample came from: for a folder, the path below the split's folder."""
        blob, offsets = self._key_arrays
        if not 0 <= i < self.num_samples:
            raise IndexError(f"slot {i} is outside 0..{self.num_samples - 1} of {self.path}")
        return blob[offsets[i] : offsets[i + 1]].tobytes()

    # Images

    @cached_property
    def maps(self) -> ChunkMaps:
        """Read-only memory maps of all chunks, made at the first use in each process.

        Raises:
            StoreError: the store is compressed.
        """
        if not self.is_raw:
            codecs = "+".join(name for name in self.codecs if name != "bytes")
            raise StoreError(
                f"{self.path}: compressed ({codecs}), which can't be memory-mapped; make a raw copy first: "
                f"python -m pipeline copy {self.store_path} NEW.zarr --codec none"
            )
        paths = [self.chunk_path(chunk) for chunk in range(self.num_chunks)]
        return ChunkMaps(paths, self.chunk_bytes)

    def image(self, i: int) -> np.ndarray:
        """uint8 (H, W, C): a read-only view of slot i's image in the memory map; copy it before writing.

        Raises:
            IndexError: i is not a slot.
            StoreError: the store is compressed.
        """
        if not 0 <= i < self.num_samples:
            raise IndexError(f"slot {i} is outside 0..{self.num_samples - 1} of {self.path}")
        start = (i % self.chunk_images) * self.image_bytes
        flat = self.maps.chunk(i // self.chunk_images)[start : start + self.image_bytes]
        return flat.reshape(self.image_shape)
