"""The read side of the store: plain JSON, numpy and memory maps, nothing else.

A store is an ordinary Zarr v3 hierarchy; this room is only a faster way to the same bytes. Reading imports neither
zarr, joblib nor PIL, so that a data-loading process stays small. `docs/format.md` is the specification.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import StoreError, StoreNotFoundError, UsageError
from pipeline.store.attributes import check_group_metadata, check_root_attributes
from pipeline.store.format import COPY, FORMAT_NAME, PARTIAL_ROOT, READABLE_VERSIONS, split_order
from pipeline.store.metadata import damaged, read_metadata
from pipeline.store.remote import groups_below, is_remote, place
from pipeline.store.split import Split


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a store for reading.

    Args:
        path: the folder that `convert` wrote, such as `data/imagenet-256.zarr`; or a URL that fsspec knows, such as
            `s3://bucket/imagenet-256.zarr`, which is read by ranges and can't be memory-mapped.

    Raises:
        StoreNotFoundError: nothing, or something else than a store, is there.
        StoreError: a store of another version, or damaged metadata.
    """
    return Store(path)


def _is_ours(metadata: dict[str, Any]) -> bool:
    attributes = metadata.get("attributes")
    return isinstance(attributes, dict) and attributes.get("format") == FORMAT_NAME


class Store:
    """A finished store: a mapping from split names to `Split`, opened lazily.

    Attributes:
        path: the store's folder, absolute, so that it stays valid when the process changes its folder; of a
            store at a URL a `RemotePath`.
        attrs: the root group's attributes (format, geometry, classes), as a dict.
        version: of the store's format.
        class_ids: one id per class, in label order (for ImageNet the WordNet ids).
        class_names: human-readable names in the same order; the ids where the source has no names.
        image_shape: (H, W, C) of every image.
        splits: names of the complete splits, `train` first, then `val`, then the rest sorted.
    """

    root_name = "zarr.json"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = place(path)
        file = self.path / self.root_name
        try:
            metadata = read_metadata(file)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(self._why_not()) from None
        if not _is_ours(metadata):
            raise StoreNotFoundError(f"{self.path}: {self._what_else()}")
        version = metadata["attributes"].get("format_version")
        if version not in READABLE_VERSIONS:
            raise StoreError(
                f"{self.path}: format version {version!r}, this software reads "
                f"{' and '.join(map(str, READABLE_VERSIONS))}; use the matching release or convert again"
            )
        try:
            self.attrs: dict[str, Any] = check_group_metadata(metadata)
            self.image_shape: tuple[int, int, int] = check_root_attributes(self.attrs).image_shape
        except ValueError as error:
            damaged(file, error)
        self.version: int = self.attrs["format_version"]
        self.class_ids: list[str] = self.attrs["class_ids"]
        self.class_names: list[str] = self.attrs["class_names"]

    def _what_else(self) -> str:
        for above in (self.path.parent, self.path.parent.parent):
            with contextlib.suppress(StoreError, UsageError, OSError):
                if _is_ours(read_metadata(above / self.root_name)):
                    return f"a part of the store {above}; give that"
        return "Zarr, but not one that `convert` wrote; check the path"

    def _why_not(self) -> str:
        if is_remote(self.path):
            return f"{self.path}: no store there; check the URL"
        name = self.path.name  # none of "/"
        work = self.path.with_name(name + ".work") if name else Path(f"{self.path.resolve()}.work")
        if (work / COPY).exists():
            return f"{self.path}: its copy isn't finished ({work} exists); run the same copy command again"
        if work.exists():
            return f"{self.path}: its conversion isn't finished ({work} exists); rerun the same convert command"
        if (self.path / PARTIAL_ROOT).exists():
            return f"{self.path}: a --cache that isn't complete; train with the same --data and --cache to complete it"
        if self.path.exists():
            return (
                f"{self.path}: not a store (no zarr.json in it); check the path, or make a store from its images with "
                f"`python -m pipeline convert {self.path} DST`"
            )
        return f"{self.path}: no store there; check the path, or make one with `python -m pipeline convert SRC DST`"

    @property
    def geometry(self) -> dict[str, Any]:
        """How images were made: `size`, `fit`, `filter`, `channels`, `exif_transpose`."""
        return dict(self.attrs["geometry"])

    @property
    def splits(self) -> list[str]:
        return split_order(groups_below(self.path))

    def __contains__(self, split: object) -> bool:
        return split in self.splits

    def __iter__(self) -> Iterator[str]:
        """Names of the complete splits."""
        return iter(self.splits)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Store, (str(self.path),))

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            have = ", ".join(self.splits) or "none"
            raise StoreNotFoundError(f"{self.path}: no split {split!r} (complete splits: {have}); convert it first")
        return self._open(split)

    def _open(self, split: str) -> Split:
        return Split(self, split)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, splits={self.splits})"
