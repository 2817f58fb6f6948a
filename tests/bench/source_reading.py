"""Reading the same images from class folders, the nested train tar and parquet: images/s, and ratios to the folder.

    python -m tests.bench.source_reading [--images N] [--classes N] [--rounds N]

Random bytes of ImageNet's mean size stand for images (sources don't decode). Each is read in the order in which a
conversion would read it, round by round in turn, from a warm page cache; the median round counts. Prints one JSON
object.

On 2 EPYC cores (`--rounds 21`), images/s: class folders 59,533, nested train tar 72,330 (0.81 of the folders' time),
parquet 12,657 (4.7 times).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from pipeline.conversion.plan import slot_order
from pipeline.sources import Source, open_source

MEAN_BYTES = 110_000


def write_all(root: Path, num_images: int, num_classes: int) -> dict[str, Path]:
    """The same images as a folder and as an archive of class archives (and as parquet, where pyarrow is installed)."""
    rng = np.random.default_rng(0)
    folder, archive = root / "folder", root / "ILSVRC2012_img_train.tar"
    rows = []
    with tarfile.open(archive, "w") as outer:
        for label in range(num_classes):
            wnid, buffer = f"n{label:08d}", io.BytesIO()
            (folder / wnid).mkdir(parents=True)
            with tarfile.open(fileobj=buffer, mode="w") as inner:
                for i in range(num_images // num_classes):
                    content = rng.bytes(int(rng.integers(MEAN_BYTES // 2, MEAN_BYTES * 3 // 2)))
                    path = folder / wnid / f"{wnid}_{i}.JPEG"
                    path.write_bytes(content)
                    inner.add(path, path.name)
                    rows.append({"image": {"bytes": content, "path": f"{wnid}/{path.name}"}, "label": label})
            info = tarfile.TarInfo(f"{wnid}.tar")
            info.size = buffer.tell()
            buffer.seek(0)
            outer.addfile(info, buffer)
    written = {"folder": folder, "imagenet": archive}
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return written
    pq.write_table(pa.Table.from_pylist(rows), root / "train-0.parquet", row_group_size=100)
    return written | {"parquet": root / "train-0.parquet"}


def images_per_second(source: Source, order: np.ndarray) -> float:
    start = time.perf_counter()
    for i in order.tolist():
        source.read(i)
    return len(order) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        paths = write_all(Path(root), options.images, options.classes)
        sources = {name: open_source(path).splits["train"] for name, path in paths.items()}
        rates: dict[str, list[float]] = {kind: [] for kind in sources}
        for _ in range(options.rounds):
            for kind, source in sources.items():
                blocks = getattr(source, "blocks", None)
                rates[kind].append(
                    images_per_second(source, slot_order(len(source), shuffled=True, seed=0, blocks=blocks))
                )
    result = {
        kind: {
            "images_per_second": round(statistics.median(values)),
            "cost_vs_folder": round(statistics.median(f / v for f, v in zip(rates["folder"], values, strict=True)), 3),
        }
        for kind, values in rates.items()
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    json.dump({"machine": machine, "images": options.images, "mean_bytes": MEAN_BYTES, **result}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
