"""What the pages of a store's cache cost: 4 kB ones, and the 2 MB ones that `python -m pipeline warm` makes.

    python -m tests.bench.pages [--images 11000] [--dir FOLDER] [--json]

CPU time of one thread per random crop of 224 out of 256 px: at the first touch of fresh maps, touched before, and
through eight maps of every file, which is eight times as much address space for the processor's table (TLB). First
with a cache that random reads have filled, then after `warm`. The store has 2.2 GB by default.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.store.maps import ChunkMaps
from pipeline.store.page_cache import cached_shares, read_chunks
from pipeline.store.reader import Split, open_store
from tests.bench.synthetic import random_store
from trainer.bench.machine import describe, evict
from trainer.reading.batch_pool import aligned_empty
from trainer.reading.copy_crops import copy_crops

BATCH, CROP, MAPS = 256, 224, 8
READ_BYTES = 65_536


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=11_000)
    parser.add_argument("--dir", type=Path, help="folder for the store; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pages-", dir=args.dir))
    try:
        result = measure(random_store(folder / "s.zarr", args.images))
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=2) if args.json else table(result))  # noqa: T201


def measure(store: Path) -> dict[str, Any]:
    """Rows before and after `warm`; the store's files must be cached by nobody else's maps."""
    split = open_store(store)["train"]
    paths = [split.chunk_path(chunk) for chunk in range(split.num_chunks)]
    rows = {}
    for name in ("filled by random reads", "after warm"):
        evict(paths)
        if name == "after warm":
            read_chunks(split, split.num_chunks, lambda images: None)
        else:
            read_at_random(paths)
        rows[name] = {"in_2mb_pages": (cached_shares(split) or (0.0, 0.0))[1], **passes(split, paths)}
    return {"command": "python -m tests.bench.pages", "machine": describe(), "rows": rows}


def read_at_random(paths: list[Path]) -> None:
    """Fill the cache as random order on a cold store does."""
    order = np.random.default_rng(0)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for start in order.permutation(range(0, os.fstat(fd).st_size, READ_BYTES)).tolist():
            os.pread(fd, READ_BYTES, start)
        os.close(fd)


def passes(split: Split, paths: list[Path]) -> dict[str, float]:
    """Microseconds of CPU time per crop, and minor faults per crop at the first touch."""
    one = ChunkMaps(paths, split.chunk_bytes)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = crops_microseconds(split, one, 1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    again = crops_microseconds(split, one, 2)
    many = ChunkMaps(paths * MAPS, split.chunk_bytes)
    crops_microseconds(split, many, 3)  # touches nearly all of them
    for chunk in range(len(many)):
        many.chunk(chunk)[::4096].sum()
    return {
        "first_touch_us": first,
        "touched_us": again,
        "eight_maps_us": crops_microseconds(split, many, 4),
        "first_touch_faults": faults / (split.num_samples // BATCH * BATCH),
    }


def crops_microseconds(split: Split, maps: ChunkMaps, seed: int) -> float:
    """CPU time per crop over as many random crops as the split has images."""
    rng = np.random.default_rng(seed)
    count, size = split.num_samples // BATCH * BATCH, split.image_shape[0]
    copies = len(maps) // split.num_chunks
    slots = rng.permutation(split.num_samples)[:count]
    chunk = slots // split.chunk_images + rng.integers(0, copies, count) * split.num_chunks
    place = rng.integers(0, size - CROP + 1, (2, count))
    positions = chunk * split.chunk_bytes + slots % split.chunk_images * split.image_bytes
    positions += (place[0] * size + place[1]) * 3
    outs = [aligned_empty(BATCH * CROP * CROP * 3).reshape(BATCH, CROP, CROP, 3) for _ in range(3)]
    for out in outs:
        out[:] = 0
    start = time.process_time()
    for k in range(count // BATCH):
        copy_crops(maps, positions[k * BATCH : (k + 1) * BATCH], outs[k % 3], size * 3)
    return (time.process_time() - start) / count * 1e6


def table(result: dict[str, Any]) -> str:
    """For people."""
    machine = result["machine"]
    lines = [f"{result['command']}: {machine['processor']}, {machine['cores']} cores", ""]
    lines.append(
        f"{'us of CPU per crop':24} {'first touch':>11} {'touched':>8} {'8 maps':>8} {'faults':>7} {'2 MB pages':>11}"
    )
    for name, row in result["rows"].items():
        lines.append(
            f"{name:24} {row['first_touch_us']:11.1f} {row['touched_us']:8.1f} {row['eight_maps_us']:8.1f} "
            f"{row['first_touch_faults']:7.2f} {row['in_2mb_pages']:11.0%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
