"""What a conversion will write, split by split, and what identifies it: its keys, labels, geometry and recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.conversion.workdir import SplitWork
from pipeline.errors import Error, StoreError
from pipeline.sources.base import Source
from pipeline.sources.byte_strings import ByteStrings
from pipeline.store.atomic import atomic_file, write_json
from pipeline.store.format import BAD_LABEL, FORMAT_VERSION, MIN_CHUNKS, chunk_file_bytes
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Split, Store

MIX_SAMPLES = 1024  # mixed among each other where a source is read in blocks: a few hundred MB of large images


def chunk_length(image_bytes: int, num_samples: int, chunk_mb: float) -> int:
    """Slots per chunk, K: about `chunk_mb` megabytes (10^6), and enough chunks for `MIN_CHUNKS` workers on small sets.

    `image_bytes` are those of one image in the largest of the sizes.
    """
    return max(1, min(int(chunk_mb * 10**6) // image_bytes, -(-num_samples // MIN_CHUNKS)))


def slot_order(num_samples: int, *, shuffled: bool, seed: int, blocks: np.ndarray | None = None) -> np.ndarray:
    """int64 (N,): slot -> index in the source; a seeded permutation, or the source's own order.

    `blocks`, int64 (B+1,), are the first sample of each block that the source reads as a whole, and N. Blocks are then
    permuted, and their samples mixed within windows of at least `MIX_SAMPLES`, so that a chunk touches few blocks.
    """
    if not shuffled:
        return np.arange(num_samples, dtype=np.int64)
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    if blocks is None:
        return rng.permutation(num_samples).astype(np.int64)
    permuted = rng.permutation(len(blocks) - 1)
    order = np.concatenate([np.arange(blocks[block], blocks[block + 1], dtype=np.int64) for block in permuted])
    start = 0
    for stop in np.cumsum(np.diff(blocks)[permuted]).tolist():
        if stop - start >= MIX_SAMPLES or stop == num_samples:
            rng.shuffle(order[start:stop])
            start = stop
    return order


@dataclass(frozen=True)
class SplitPlan:
    """One split of a conversion, for all sizes.

    Attributes:
        split: its name.
        source: where its samples come from.
        order: int64 (N,), slot -> index in the source.
        labels: int32 (N,), by slot; -2 for unlabelled.
        keys: uint8 (total,), key_offsets: int64 (N+1,), by slot.
        chunk_images: K.
        recipe: stored choices that decide bytes, apart from the geometry.
        software: versions that can change bytes.
        blocks: what was shuffled as a whole, such as `row groups`; empty where each sample was for itself.
    """

    split: str
    source: Source
    order: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    key_offsets: np.ndarray
    chunk_images: int
    recipe: dict[str, Any]
    software: dict[str, str]
    blocks: str = ""

    @property
    def num_samples(self) -> int:
        return len(self.order)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_samples // self.chunk_images)

    def slots(self, chunk: int) -> np.ndarray:
        """Indices in the source of a chunk's samples, int64."""
        return self.order[chunk * self.chunk_images : (chunk + 1) * self.chunk_images]

    def chunk_bytes(self, geometry: Geometry) -> int:
        """Bytes of a chunk file."""
        return chunk_file_bytes(self.chunk_images, geometry.image_bytes)

    def identity(self, geometry: Geometry, class_ids: Sequence[str]) -> dict[str, Any]:
        """What must be equal for a rerun to go on with the finished chunks."""
        return {
            "format_version": FORMAT_VERSION,
            "geometry": geometry.to_json(),
            "recipe": self.recipe,
            "num_samples": self.num_samples,
            "classes": _digest("\0".join(class_ids).encode("utf-8", "surrogateescape")),
            "keys": _digest(self.keys, self.key_offsets),
            "labels": _digest(self.labels),
            "software": self.software,
            **({"blocks": self.blocks} if self.blocks else {}),
        }

    def save(self, work: SplitWork, geometry: Geometry, class_ids: Sequence[str], run_name: str) -> None:
        """Write plan.json and samples.npz, or check that those of an earlier run say the same."""
        identity = self.identity(geometry, class_ids)
        try:
            earlier = json.loads(work.plan.read_bytes())
        except FileNotFoundError:
            earlier = None
        except ValueError:
            raise Error(f"{work.plan}: unreadable; rerun with --overwrite to start again") from None
        if earlier is not None:
            difference = _what_differs(earlier, identity)
            if difference:
                raise Error(
                    f"{work.path}: an unfinished conversion of other files or settings: {difference}; rerun the "
                    "earlier command on the same files (--on-error skip leaves out bad ones), or add --overwrite to "
                    "start again"
                )
        if earlier is None or not work.samples.exists():
            with atomic_file(work.samples, temp_id=run_name) as file:
                np.savez(file, order=self.order, labels=self.labels, keys=self.keys, key_offsets=self.key_offsets)
            write_json(work.plan, identity, temp_id=run_name)


def make_plan(
    split: str,
    source: Source,
    geometries: Sequence[Geometry],
    recipe: Mapping[str, Any],
    software: dict[str, str],
    *,
    chunk_mb: float,
    shuffled: bool,
    seed: int,
) -> SplitPlan:
    """Plan a split: order, slots and chunk length."""
    num_samples = len(source)
    blocks = getattr(source, "blocks", None)
    order = slot_order(num_samples, shuffled=shuffled, seed=seed, blocks=blocks)
    chunk_images = chunk_length(max(geometry.image_bytes for geometry in geometries), num_samples, chunk_mb)
    keys = ByteStrings(*source.keys()).take(order)
    return SplitPlan(
        split=split,
        source=source,
        order=order,
        labels=np.asarray(source.labels)[order].astype(np.int32),
        keys=keys.blob,
        key_offsets=keys.offsets,
        chunk_images=chunk_images,
        recipe={**recipe, "chunk_images": chunk_images, "shuffled": shuffled, "seed": seed if shuffled else None},
        software=software,
        blocks="" if blocks is None or not shuffled else "row groups" if recipe["source"] == "parquet" else "blocks",
    )


def check_finished(split: Split, plan: SplitPlan, geometry: Geometry) -> None:
    """Check that a committed split is what this plan would write."""
    good = np.asarray(split.labels) != BAD_LABEL
    same_length = split.num_samples == plan.num_samples
    stored = {
        "geometry": geometry.to_json() if split.image_shape == geometry.image_shape else {"size": split.image_shape[0]},
        "recipe": split.attrs["recipe"],
        "num_samples": split.num_samples,
        "keys": split.attrs["sha256"]["keys"],
        "labels": _digest(split.labels[good]),
    }
    wanted = {
        "geometry": geometry.to_json(),
        "recipe": plan.recipe,
        "num_samples": plan.num_samples,
        "keys": _digest(plan.keys),
        "labels": _digest(plan.labels[good]) if same_length else "",
    }
    difference = _what_differs(stored, wanted)
    if difference:
        raise Error(f"{split.path}: finished with other settings: {difference}; use another DST, or --overwrite")


def check_same_software(store: Store, splits: Iterable[str], software: Mapping[str, str]) -> None:
    """Check that a store has today's format, and splits of it came from this decoder and resizer.

    Splits whose metadata can't be read are passed over.
    """
    if store.version != FORMAT_VERSION:
        raise Error(
            f"{store.path}: has format {store.version}, new splits have {FORMAT_VERSION}; convert into a copy of it: "
            f"python -m pipeline copy {store.path} NEW.zarr"
        )
    for name in splits:
        try:
            stored = Split(store, name, check=False).attrs.get("software", {})
        except StoreError:
            continue
        if difference := first_difference(stored, software, words="{name} {old}, not {new}"):
            raise Error(f"{store.path}: {name} was made with {difference}; install that version, or use another DST")


_EXPLAINED = {
    "num_samples": "the source had {old:,} samples, has {new:,} now",
    "keys": "the source has other files now",
    "labels": "the source's files have other labels now",
    "classes": "the source has other classes now",
}


def _what_differs(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first difference; that of the chunk size last, as it may follow from another number of samples."""

    def chunk_size_last(identity: Mapping[str, Any]) -> dict[str, Any]:
        recipe = dict(identity.get("recipe", {}))
        chunk_images = recipe.pop("chunk_images", None)
        return {**identity, "recipe": recipe, "recipe.chunk_images": chunk_images}

    return first_difference(chunk_size_last(earlier), chunk_size_last(now))


def first_difference(
    earlier: Mapping[str, Any],
    now: Mapping[str, Any],
    prefix: str = "",
    *,
    words: str = "{name} was {old}, is {new} now",
) -> str:
    """The first difference between two nested mappings, by the order of `earlier`'s names, in `words`; or nothing."""
    for name in [*earlier, *(name for name in now if name not in earlier)]:
        old, new = earlier.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return first_difference(old, new, f"{prefix}{name}.", words=words)
        if not prefix and name in _EXPLAINED:
            return _EXPLAINED[name].format(old=old, new=new)
        return words.format(name=f"{prefix}{name}", old=old, new=new)
    return ""


def _digest(*arrays: np.ndarray | bytes) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array)
    return digest.hexdigest()
