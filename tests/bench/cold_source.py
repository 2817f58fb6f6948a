"""Converting from a disk whose files aren't cached, with and without asking the system to read ahead.

    python -m tests.bench.cold_source [--images TAR_OR_FOLDER] [--count 700] [--copies 8] [--repeats 5] [--jobs 2]

The same images as files of a folder and as members of one tar, each copy with bytes of its own on the disk. Before each
run the page cache is emptied of them. Medians and ratios are printed, in images/s.

On 2 EPYC cores (`--images imagenet_sample_700.tar --copies 3 --repeats 3`): a folder 335 and 284 (1.18 times with
asking), a tar 388 and 355 (1.09).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import convert
from pipeline.sources import open_source
from tests.bench.decode import load_images
from trainer.bench.machine import evict


class Silent:
    """A source that is never asked to read ahead."""

    def __init__(self, source: Any) -> None:
        self.source, self.labels = source, source.labels
        for name in ("keys", "key", "read", "change_stamps"):
            setattr(self, name, getattr(source, name))

    def __len__(self) -> int:
        return len(self.source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=None, help="a tar or folder of JPEGs")
    parser.add_argument("--count", type=int, default=700)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    images = load_images(args.images, args.count)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        root, folder = Path(name), Path(name) / "images"
        for number, data in enumerate(images * args.copies):
            path = folder / f"class{number % 20:02d}" / f"{number:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        with tarfile.open(root / "images.tar", "w") as tar:
            tar.add(folder, "images")
        rates: dict[str, list[float]] = {}
        for _ in range(args.repeats):
            for src in (folder, root / "images.tar"):
                found = open_source(src)
                silent = {split: Silent(source) for split, source in found.splits.items()}
                for way, source_set in (("asked ahead", found), ("not asked", replace(found, splits=silent))):
                    evict([*folder.glob("*/*")] if src == folder else [src])
                    start = time.perf_counter()
                    convert(source_set, root / "store.zarr", size=256, n_jobs=args.jobs, quiet=True)
                    rate = len(images) * args.copies / (time.perf_counter() - start)
                    rates.setdefault(f"{src.name}, {way}", []).append(rate)
                    sys.stderr.write(f"{src.name}, {way}: {rate:,.0f} images/s\n")
                    shutil.rmtree(root / "store.zarr")
    median = {way: statistics.median(values) for way, values in rates.items()}
    for way, rate in median.items():
        sys.stdout.write(f"{way:28s} {rate:8,.0f} images/s\n")
    for src in ("images", "images.tar"):
        sys.stdout.write(f"{src}: {median[f'{src}, asked ahead'] / median[f'{src}, not asked']:.2f} times\n")
    sys.stdout.write(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
