"""How fast a store feeds training here, beside what the machine itself can do: `python -m pipeline bench STORE`.

Every loader figure stands next to its ceiling from the same run: for memory the bare copy of the same bytes, for the
disk random reads of the same crops by 16 threads and one sequential read of the same files. Rates are medians of
interleaved passes, in images/s. Needs the extra `train`; nothing else in the pipeline imports the trainer.
"""

from __future__ import annotations

import os
from typing import Any

from pipeline.errors import UsageError
from pipeline.store.page_cache import cached_shares
from pipeline.store.reader import open_store
from pipeline.text import counted
from trainer.bench.machine import describe
from trainer.bench.passes import Measurement

H100_IMAGES_PER_SECOND = 2_800
"""ResNet-50 training on one H100 SXM, bf16; published figures are 2,616 to 2,800."""
FEWEST_IMAGES = 2_000
"""With fewer, passes are so short that starting them is most of what is measured."""


def bench(store: str | os.PathLike[str], *, split: str = "train", crop: int | None = None) -> dict[str, Any]:
    """Measure a store; takes about a minute.

    Args:
        store: the store's folder.
        split: name of the split; the first one if it isn't there.
        crop: side of the crop in pixels; 7/8 of the image by default (224 of 256).

    Returns:
        A JSON-ready dict: `machine`, `store`, `warm` and `cold` (lists of rows with images per second) and `sentence`.
        `cold` is empty, and `notes` says why, where the page cache can't be emptied. `notes` also says when the store
        is too small for its figures to mean much.

    Raises:
        UsageError: the extra `train` isn't installed, or the store is compressed.
        StoreError: no store, or a damaged one.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"bench needs {error.name}: pip install 'efficient-imagenet[train]'") from None
    opened = open_store(store)
    names = [split] if split in opened else opened.splits
    if not names:
        raise UsageError(f"{opened.path}: no complete split; convert one first")
    part = opened[names[0]]
    size = part.image_shape[0]
    crop = crop or max(1, size * 7 // 8)
    if part.num_valid == 0:
        raise UsageError(f"{part.path}: no samples to measure")
    measurement = Measurement(part)
    warm = measurement.warm([crop, size])
    cold, notes = measurement.cold(crop)
    if part.num_valid < FEWEST_IMAGES:
        images = counted(part.num_valid, "image")
        small = f"{images}: too few for these figures to mean much; measure a store of {FEWEST_IMAGES:,} or more"
        notes = [*notes, small]
    return {
        "command": " ".join(["python", "-m", "pipeline", "bench", str(store)]),
        "machine": describe(),
        "store": {
            "path": str(opened.path),
            "split": part.name,
            "image_shape": list(part.image_shape),
            "images_measured": measurement.count,
            "batch_size": measurement.batch_size,
            "in_2mb_pages": (cached_shares(part) or (None, None))[1],
        },
        "warm": warm,
        "cold": cold,
        "notes": notes,
        "sentence": _sentence(warm, cold, crop),
    }


def _sentence(warm: list[dict[str, Any]], cold: list[dict[str, Any]], crop: int) -> str:
    def gpus(images_per_second: float) -> str:
        return f"{images_per_second:,.0f} images/s, {images_per_second / H100_IMAGES_PER_SECOND:.1f} H100s"

    rate = next(
        row["images_per_second"]
        for row in warm
        if row["what"] == "loader" and (row["crop"], row["threads"], row["order"]) == (crop, 1, "random")
    )
    disk = next((row["images_per_second"] for row in cold if row["what"] == "loader, random"), None)
    return (
        f"Training ResNet-50 at {H100_IMAGES_PER_SECOND:,} images/s on each H100, one core feeds them "
        f"{crop}-pixel crops at {gpus(rate)} from memory"
        + (f", and {gpus(disk)} when every image comes from this disk." if disk else ".")
    )


def bench_text(result: dict[str, Any]) -> str:
    """The result of `bench` as a table for people."""
    machine, store = result["machine"], result["store"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; {store['path']}/{store['split']}",
        f"{store['image_shape']}, {store['images_measured']:,} images, batch {store['batch_size']}"
        + ("" if store["in_2mb_pages"] is None else f"; {store['in_2mb_pages']:.0%} of the split in 2 MB pages"),
        "",
        f"{'in memory':34} {'threads':>7} {'images/s':>10} {'of the bare copy':>17}",
    ]
    for row in result["warm"]:
        what = f"{row['what']}{', ' + row['order'] if 'order' in row else ''}, crop {row['crop']}"
        lines.append(f"{what:34} {row['threads']:7} {row['images_per_second']:10,.0f} {row['of_ceiling']:17.0%}")
    if result["cold"]:
        lines += ["", f"{'from disk':34} {'MB/s':>7} {'images/s':>10} {'of its ceiling':>17}"]
    for row in result["cold"]:
        lines.append(
            f"{row['what']:34} {row['bytes_per_second'] / 1e6:7,.0f} {row['images_per_second']:10,.0f} "
            + (f"{row['of_ceiling']:17.0%}" if "of_ceiling" in row else "")
        )
    return "\n".join([*lines, *result["notes"], "", result["sentence"]])
