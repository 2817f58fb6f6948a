"""The protocol of sources: what a dataset on disk must offer to be converted.

A `SourceSet` is the whole of SRC (classes and splits), a `Source` is one split of it. A source keeps everything that
it knows per sample in numpy arrays, never in lists: a conversion writes it once into the work folder and each worker
maps it, so that an index of 1.3 million samples costs no memory per worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeline.sources.byte_strings import ByteStrings

if TYPE_CHECKING:
    from pipeline.sources.archive_index import KeptIndex


class Source(Protocol):
    """One split: N samples in the source's own, reproducible order (never the file system's listing order).

    A source that must read several samples at once (parquet's row groups) may have one attribute more: `blocks`, int64
    (B+1,), the first sample of each such block, and N. The shuffle of a train split then keeps blocks close together.
    A source that knows where its samples lie on a disk may have a method `read_ahead(i)`, which asks the system to
    begin reading sample i, doesn't wait for it, and never raises.
    """

    labels: np.ndarray
    """int32 (N,): index into the set's class ids, or -2 for an unlabelled sample."""

    def __len__(self) -> int: ...

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys' bytes end to end, uint8 (total,), and int64 (N+1,) offsets into them. Keys are unique."""
        ...

    def key(self, i: int) -> bytes:
        """Sample i's key."""
        ...

    def read(self, i: int) -> bytes | np.ndarray:
        """The encoded image file's bytes, or a decoded uint8/uint16 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).

        Called in worker processes on the unpickled source; opens what it needs lazily.

        Raises:
            BadSample: this sample can't be read.
        """
        ...

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): what changes when a sample's data changes, such as size and mtime in ns.

        Cheap and never raising: a sample that can't be looked at has (-1, -1).
        """
        ...


@dataclass
class SourceSet:
    """All that SRC holds.

    Attributes:
        kind: name of the source's kind, one of those of `--source`.
        class_ids: label order; by default the sorted ids.
        splits: name -> Source, in the source's order. Values may be made lazily (any Mapping).
        class_names: human-readable names in the same order, None where the source has none.
        ignored: what was passed over, by kind, with counts: {"dot-file": 3, "file that is no image": 1}.
        notes: lines that the person should see, such as a class without images.
        origin: SRC as given, for messages only.
        warnings: lines about what may be a mistake of the person's.
        label_hints: split -> what lies beside its unlabelled images and may hold their labels, and how to use it.
    """

    kind: str
    class_ids: list[str]
    splits: Mapping[str, Source]
    class_names: list[str] | None = None
    ignored: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    origin: str = ""
    warnings: list[str] = field(default_factory=list)
    label_hints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceOptions:
    """What is asked of a source, beside where it is; see `open_source`."""

    splits: tuple[str, ...] = ()
    """The wanted splits; empty means all."""
    check_md5: bool = False
    download: bool = False
    label_column: str | None = None
    image_column: str | None = None
    index: KeptIndex | None = None
    """What earlier runs found in archives; None: they are scanned."""

    def wants(self, split: str) -> bool:
        return not self.splits or split in self.splits

    @property
    def only_split(self) -> str:
        """The name of a source's only split: the one that was asked for, else `train`."""
        return self.splits[0] if len(self.splits) == 1 else "train"


@dataclass(eq=False)
class Indexed:
    """N samples with a key and a label each, as arrays: what the sources that index files have in common.

    Args:
        names: the samples' keys, unique.
        labels: int32 (N,), class indices or -2.
    """

    names: ByteStrings
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys' bytes end to end, uint8 (total,), and int64 (N+1,) offsets into them."""
        return self.names.arrays

    def key(self, i: int) -> bytes:
        return self.names[i]
