"""What a store holds, from metadata only, and what software would convert."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from pipeline import __version__
from pipeline.commands.warm import pages_text
from pipeline.image.resize import resizer, software_versions
from pipeline.store.format import MIN_CHUNKS, chunk_name
from pipeline.store.page_cache import cached_shares
from pipeline.store.reader import Store
from pipeline.store.remote import is_remote
from pipeline.text import counted, printable


def software_info() -> dict[str, Any]:
    """Versions of this installation: {"version", "resizer", "software"}."""
    return {"version": __version__, "resizer": resizer(), "software": software_versions()}


def store_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Geometry, classes and, per split, samples, files, bytes, statistics, bad samples and provenance.

    Raises:
        StoreNotFoundError: no store is there.
        StoreError: the store is damaged.
    """
    store = Store(path)
    splits = {}
    for name in store.splits:
        split = store[name]
        sizes = split.chunk_sizes()
        attrs = split.attrs
        cached, huge = (cached_shares(split) if split.is_raw and not is_remote(split.path) else None) or (None, None)
        splits[name] = {
            "num_samples": split.num_samples,
            "num_valid": split.num_valid,
            "image_shape": list(split.image_shape),
            "chunk_images": split.chunk_images,
            "chunk_files": split.num_chunks,
            "bytes": sum(sizes[chunk_name(chunk)] for chunk in range(split.num_chunks)),
            "codecs": split.codecs,
            "in_memory": cached,
            "in_2mb_pages": huge,
            "mean": split.mean,
            "std": split.std,
            "bad_samples": dict(Counter(bad["reason"] for bad in attrs["bad_samples"])),
            "order": attrs["order"],
            "recipe": attrs["recipe"],
            "source_modes": attrs.get("source_modes", {}),
            "decoder_warnings": attrs.get("decoder_warnings", 0),
            "resizer": attrs.get("resizer", "unknown"),
            "software": attrs.get("software", {}),
            "sample_fingerprint": split.fingerprint,
        }
    return {
        "store": str(store.path),
        "format": store.attrs["format"],
        "format_version": store.attrs["format_version"],
        "geometry": store.geometry,
        "num_classes": len(store.class_ids),
        "splits": splits,
    }


def software_text(info: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in info["software"].items())
    return f"efficient-imagenet {info['version']}\nresizer: {info['resizer']}\nsoftware: {versions}"


def store_text(info: dict[str, Any]) -> str:
    """The information for people."""
    geometry = info["geometry"]
    lines = [
        (
            f"{info['store']}: format {info['format_version']}, {geometry['size']} px, {geometry['fit']}, "
            f"{geometry['filter']}, {geometry['channels']}; {counted(info['num_classes'], 'class', 'classes')}"
        )
    ]
    for name, split in info["splits"].items():
        bad = split["num_samples"] - split["num_valid"]
        codecs = "raw" if split["codecs"] == ["bytes"] else "+".join(split["codecs"])
        mean = " ".join(f"{value:.4f}" for value in split["mean"])
        std = " ".join(f"{value:.4f}" for value in split["std"])
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in split["bad_samples"].items())
        order = "as in the source"
        if split["order"]["shuffled"]:
            by = f" by {split['order']['blocks']}" if "blocks" in split["order"] else ""
            order = f"shuffled{by}, seed {split['order']['seed']}"
        small = ""
        if split["chunk_images"] == -(-split["num_samples"] // MIN_CHUNKS):
            small = f" (small, so that {MIN_CHUNKS} jobs can share a conversion)"
        lines += [
            f"{name}: {counted(split['num_samples'], 'sample')}"
            + (f", of them {bad:,} bad ({reasons})" if bad else ""),
            (
                f"  files  {split['chunk_files']:,} of {counted(split['chunk_images'], 'image')}{small}; "
                f"{split['bytes']:,} bytes; {codecs}{pages_text(split)}"
            ),
            f"  order  {order}",
            f"  mean, std {mean}; {std}",
            f"  resizer  {split['resizer']}",
        ]
    return "\n".join(map(printable, lines))
