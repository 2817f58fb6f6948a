"""All of a cached store but its chunks of images: compared with the URL's store, and brought from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import Error, StoreError, UsageError
from pipeline.store.atomic import write_bytes
from pipeline.store.format import PARTIAL_ROOT, SMALL_ARRAYS, single_chunk_name
from pipeline.store.integrity import altered_arrays
from pipeline.store.metadata import read_metadata
from pipeline.store.reader import Store
from pipeline.store.remote import RemotePath, file_sizes
from pipeline.store.split import Split
from pipeline.text import one_line

ROOTS = ("zarr.json", PARTIAL_ROOT)
"""What the root group is called, of a complete store and of one whose chunks are still to come."""


def compare(url: str, path: Path, root: str) -> str:
    """Compare the metadata in DIR with that of the URL's store; returns a note where that can't be read.

    Raises:
        UsageError: it isn't that store.
        StoreError: files are missing or damaged.
        Error: the URL can't be read, and chunks are still to come.
    """
    try:
        splits = Store(url).splits
        names = {root: "zarr.json", **{f"{split}/zarr.json": f"{split}/zarr.json" for split in splits}}
        there = {here: (RemotePath(url) / name).read_bytes() for here, name in names.items()}
    except (OSError, StoreError) as error:
        why = f"{url} can't be read ({one_line(error)})"
        if root == PARTIAL_ROOT:
            raise Error(f"{why}, and {path} isn't complete; run it again when it can") from error
        return f"note: {why}; training from {path} as it is"
    damaged = None
    for here, data in there.items():
        try:
            read_metadata(path / here)
        except (FileNotFoundError, NotADirectoryError, StoreError):
            damaged = here
            continue
        if (path / here).read_bytes() != data:
            raise UsageError(
                f"{path}: holds another store than {url}, or that one was replaced since ({here} differs); "
                "choose another --cache, or delete it"
            )
    if damaged:
        raise StoreError(f"{path / damaged}: missing or damaged")
    return ""


def read_small(store: Store) -> tuple[dict[str, bytes], dict[str, int]]:
    """Everything but chunks of images.

    Returns:
        Files by their names below DIR/NAME.zarr, the root group last; and of each split the bytes of a chunk's file.

    Raises:
        UsageError: a store that can't be mapped.
        StoreError: small arrays are altered.
    """
    files: dict[str, bytes] = {}
    file_bytes: dict[str, int] = {}
    for name in store.splits:
        split = Split(store, name, check=False)
        if not split.is_raw:
            raise UsageError(
                f"{split.path}: compressed ({'+'.join(split.codecs)}), which can't be memory-mapped; --cache needs a "
                "store that was copied with --codec none"
            )
        arrays = split.arrays()
        if altered := altered_arrays(split, arrays):
            raise StoreError(f"{altered[0]}; take that split from a good copy of the store")
        for file in ["zarr.json", *(f"{part}/zarr.json" for part in ("images", *SMALL_ARRAYS))]:
            files[f"{name}/{file}"] = (split.path / file).read_bytes()
        for array_name, array in arrays.named().items():
            if array.size:
                files[f"{name}/{array_name}/{single_chunk_name(array.ndim)}"] = array.tobytes()
        file_bytes[name] = split.file_bytes
    return {**files, PARTIAL_ROOT: (store.path / "zarr.json").read_bytes()}, file_bytes


def write_small(path: Path, files: Mapping[str, bytes], file_bytes: Mapping[str, int]) -> None:
    """Write what `read_small` returns to DIR/NAME.zarr, and remove chunks that are damaged there."""
    for root in ROOTS:
        (path / root).unlink(missing_ok=True)
    for name, size in file_bytes.items():
        digests = f"{name}/digests/{single_chunk_name(2)}"
        known = (path / digests).exists() and (path / digests).read_bytes() == files.get(digests)
        folder = path / name / "images"
        for file, found in (file_sizes(folder) if folder.exists() else {}).items():
            if file.startswith("c.") and not (known and found == size):  # damaged, or perhaps another store's
                (folder / file).unlink()
    for file, data in files.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path / file, data)
