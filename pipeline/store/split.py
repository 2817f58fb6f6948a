"""One split of a store: its metadata, its files, its arrays and its images as memory maps."""

from __future__ import annotations

import math
import operator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import StoreError
from pipeline.store.attributes import check_group_metadata, check_split_attributes
from pipeline.store.format import (
    BAD_LABEL,
    SMALL_ARRAYS,
    UNLABELLED,
    SplitArrays,
    check_images_metadata,
    check_small_metadata,
    chunk_file_bytes,
    chunk_name,
    single_chunk_name,
)
from pipeline.store.maps import ChunkMaps
from pipeline.store.metadata import RESTORE, damaged, read_metadata, regular_size
from pipeline.store.remote import file_sizes, is_remote, read_part, zarr_store
from pipeline.text import counted

if TYPE_CHECKING:
    from pipeline.store.reader import Store

LISTED_CHUNKS = 20
"""At most so many missing or damaged chunk files are named one by one."""


class Split:
    """One complete split: N slots, of which `num_valid` hold a served sample.

    Opening checks all metadata, and by their sizes that every file is there in full. A file that is cut short later,
    while it is mapped, ends the process that reads there with SIGBUS.
    Pickles as the store's path and its name; arrays and maps are opened again, lazily, by whoever unpickles it.

    Args:
        store: the open store.
        name: of the split.
        check: False leaves the files and labels unchecked, for those who look for damage themselves.

    Attributes:
        num_samples: slots, N; the length of every array.
        num_valid: served samples; slots minus bad ones.
        num_classes: classes of the store.
        image_shape: (H, W, C) of every image, uint8.
        chunk_images: slots per chunk, K; the last chunk is padded with zeros to K.
        codecs: names of the Zarr codecs of each image; `["bytes"]` in a store that can be mapped.
        version: of the store's format.
        attrs: the split's attributes (recipe, mean, std, bad samples, fingerprint, software, ...).

    Raises:
        StoreError: missing or short files (the first are named), or damaged metadata.
    """

    def __init__(self, store: Store, name: str, *, check: bool = True) -> None:
        self.store_path = store.path
        self.name = name
        self.path = self.store_path / name
        self.num_classes = len(store.class_ids)
        file = self.path / "images" / "zarr.json"
        try:
            found = check_images_metadata(read_metadata(file), store.image_shape, store.version)
            file = self.path / "zarr.json"
            self.attrs: dict[str, Any] = check_group_metadata(read_metadata(file))
            check_split_attributes(self.attrs, found[0], store.image_shape[2], store.version)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"{file}: missing; {RESTORE}") from None
        except ValueError as error:
            damaged(file, error)
        self.num_samples, self.chunk_images, self.codecs = found
        self.num_valid, self.num_chunks = int(self.attrs["num_valid"]), -(-self.num_samples // self.chunk_images)
        self.image_shape, self.version = store.image_shape, store.version
        self.mean: list[float] = self.attrs["mean"]
        self.std: list[float] = self.attrs["std"]
        self.fingerprint: str = self.attrs["sample_fingerprint"]
        self._store, self._check = store, check
        if check:
            self.check_files()

    def __reduce__(self) -> tuple[Any, ...]:
        return (operator.getitem, (self._store, self.name))

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        return f"Split({str(self.path)!r}, num_samples={self.num_samples}, num_valid={self.num_valid})"

    # Files

    @property
    def image_bytes(self) -> int:
        return math.prod(self.image_shape)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the images of one uncompressed chunk, padding included."""
        return self.chunk_images * self.image_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of a chunk file that isn't compressed: the chunk, and since version 2 of the format its index."""
        return chunk_file_bytes(self.chunk_images, self.image_bytes, self.version)

    def chunk_path(self, chunk: int) -> Path:
        """File of chunk number `chunk` (0-based)."""
        return self.path / "images" / chunk_name(chunk)

    @property
    def is_raw(self) -> bool:
        """True where chunk files begin with the bare bytes of the images, so that they can be mapped."""
        return self.codecs == ["bytes"]

    def chunk_sizes(self) -> dict[str, int]:
        """Name -> bytes of the regular files among the images' files."""
        return file_sizes(self.path / "images")

    def good_chunks(self) -> np.ndarray:
        """int64 (n,): numbers of the chunks whose files are there in full, as far as their sizes tell."""
        sizes = self.chunk_sizes()
        found = np.array([sizes.get(chunk_name(chunk), 0) for chunk in range(self.num_chunks)], np.int64)
        return np.flatnonzero(found == self.file_bytes if self.is_raw else found > 0)

    def problems(self) -> list[str]:
        """Missing, short and overlong files of the split, one line each. Cheap: file sizes only, no content."""
        problems: list[str] = []
        try:
            sizes = self.chunk_sizes()
        except OSError as error:
            return [f"{self.path / 'images'}: unreadable ({error.strerror})"]
        for chunk in range(self.num_chunks):
            if len(problems) == LISTED_CHUNKS:
                problems.append(f"{self.path / 'images'}: more chunk files are missing or damaged, not listed here")
                break
            size = sizes.get(chunk_name(chunk))
            if size is None:
                problems.append(f"{self.chunk_path(chunk)}: missing chunk")
            elif self.is_raw and size != self.file_bytes:
                kind = "short" if size < self.file_bytes else "overlong"
                problems.append(f"{self.chunk_path(chunk)}: {kind} chunk, {size:,} of {self.file_bytes:,} bytes")
            elif size == 0:
                problems.append(f"{self.chunk_path(chunk)}: empty chunk")
        for name in SMALL_ARRAYS:
            try:
                self._find_small(name)
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

    def _find_small(self, name: str) -> tuple[Path, tuple[int, ...]]:
        """The file and the shape of a small array, after its metadata and its file's size were checked."""
        folder = self.path / name
        try:
            metadata = read_metadata(folder / "zarr.json")
            shape = check_small_metadata(metadata, name, self.num_samples, self.num_chunks)
            file = folder / single_chunk_name(len(shape))
            wanted = math.prod(shape) * np.dtype(SMALL_ARRAYS[name]).itemsize
            size = regular_size(file) if wanted else 0  # of an empty array there is no file
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError(f"{error.filename}: missing") from None
        except ValueError as error:
            raise StoreError(f"{folder}/zarr.json: damaged ({error})") from None
        if size != wanted:
            raise StoreError(f"{file}: {size:,} of {wanted:,} bytes")
        return file, shape

    def small_array(self, name: str) -> np.ndarray:
        """A small array, read-only and read anew from its single chunk; name is one of `SMALL_ARRAYS`."""
        file, shape = self._find_small(name)
        dtype = np.dtype(SMALL_ARRAYS[name]).newbyteorder("<")
        # Read, not mapped: a map keeps a descriptor, and the largest of these arrays is tens of megabytes.
        wanted = math.prod(shape) * dtype.itemsize
        array = read_part(file, 0, wanted).view(dtype).reshape(shape) if wanted else np.empty(shape, dtype)
        array.flags.writeable = False
        return array

    def arrays(self) -> SplitArrays:
        """All small arrays, read anew."""
        return SplitArrays(**{name: self.small_array(name) for name in SMALL_ARRAYS})

    @cached_property
    def labels(self) -> np.ndarray:
        """int32 (N,): class index; `BAD_LABEL` (-1) for a bad slot, `UNLABELLED` (-2) for an unlabelled sample.

        Raises:
            StoreError: a label that is none of these, or as many bad ones as the attributes don't say.
        """
        labels = self.small_array("labels")
        if self._check and (problem := self.label_problem(labels)):
            raise StoreError(f"{problem}; {RESTORE}")
        return labels

    def label_problem(self, labels: np.ndarray) -> str:
        """What is wrong with labels, int32 (N,), in one line: one that is no class, or not `num_valid` good slots."""
        outside = np.flatnonzero((labels >= self.num_classes) | (labels < UNLABELLED))
        if len(outside):
            slot, classes = outside[0], counted(self.num_classes, "class", "classes")
            return f"{self.path / 'labels'}: slot {slot} has label {labels[slot]}, outside the {classes}"
        if np.count_nonzero(labels != BAD_LABEL) != self.num_valid:
            return f"{self.path / 'zarr.json'}: num_valid doesn't fit the labels"
        return ""

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

    def _slot(self, i: int) -> int:
        slot = operator.index(i)  # of a numpy integer too, whose own arithmetic would wrap
        if not 0 <= slot < self.num_samples:
            raise IndexError(f"slot {slot} is outside 0..{self.num_samples - 1} of {self.path}")
        return slot

    def key(self, i: int) -> bytes:
        """Where slot i's sample came from: for a folder, the path below the split's folder."""
        slot, (blob, offsets) = self._slot(i), self._key_arrays
        return blob[offsets[slot] : offsets[slot + 1]].tobytes()

    # Images

    @cached_property
    def maps(self) -> ChunkMaps:
        """Read-only memory maps of all chunks, made at the first use in each process.

        Raises:
            StoreError: the store is compressed, or at a URL.
        """
        if is_remote(self.path):
            raise StoreError(f"{self.path}: at a URL, which can't be memory-mapped; `copy` it, or train with --cache")
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

        Of a store at a URL the image alone is read.

        Raises:
            IndexError: i is not a slot.
            StoreError: the store is compressed.
        """
        if is_remote(self.path):
            return self.read_image(i)
        chunk, position = divmod(self._slot(i), self.chunk_images)
        start = position * self.image_bytes
        return self.maps.chunk(chunk)[start : start + self.image_bytes].reshape(self.image_shape)

    def read_image(self, i: int) -> np.ndarray:
        """uint8 (H, W, C): slot i's image from its file, without a map; through zarr where it is compressed."""
        slot = self._slot(i)
        if not self.is_raw:
            import zarr

            array: Any = zarr.open_array(zarr_store(self.path / "images"), mode="r")
            return np.asarray(array[slot])
        chunk, position = divmod(slot, self.chunk_images)
        return read_part(self.chunk_path(chunk), position * self.image_bytes, self.image_bytes).reshape(
            self.image_shape
        )
