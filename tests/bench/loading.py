"""Loading speed beside other loaders: same images, same output (uint8 batches of 256 x 224 x 224 x 3), same run.

    python -m tests.bench.loading [--images 20480] [--dir FOLDER] [--peers NAME ...] [--json]

Makes photograph-like 256 px images (4 GB, and as much again for one peer at a time) and measures each loader in steady
state, warm, in random order with random crops: whole epochs for `--seconds`, after a first epoch that isn't counted.
Ours and the bare copy of the same bytes are measured before every peer; the table holds their medians. What
first touches and the cache's pages cost is `tests.bench.pages`. Peers that
aren't installed are skipped with a line. They pin old versions of what this project uses, so give them an environment
of their own that looks into this one, and install without dependencies:

    python -m venv --without-pip /tmp/peers
    python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \\
        > /tmp/peers/lib/python3.11/site-packages/shared.pth
    apt-get install libopencv-dev libturbojpeg0-dev pkg-config
    pip install --no-deps --target /tmp/peers/lib/python3.11/site-packages webdataset braceexpand litdata \\
        lightning-utilities torchdata boto3 botocore s3transfer jmespath
    pip install --no-deps --no-build-isolation --target /tmp/peers/lib/python3.11/site-packages ffcv fastargs \\
        terminaltables pytorch-pfn-extras assertpy imgcat opencv-python-headless
    /tmp/peers/bin/python -m tests.bench.loading

(FFCV needs numba, too.) What it gave on 2 EPYC and on 2 Xeon cores is the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.bench.peers import BATCH, CROP, PEERS, Images
from tests.bench.synthetic import random_store
from trainer.bench.machine import describe
from trainer.bench.passes import bare_copy
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader

OURS = "Efficient ImageNet, 1 thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=20_480)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured per loader")
    parser.add_argument("--dir", type=Path, help="folder for the images; a temporary one by default")
    parser.add_argument(
        "--peers", nargs="*", default=list(PEERS), choices=list(PEERS), metavar="NAME", help="all by default"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="loading-", dir=args.dir))
    try:
        result = compare(folder, args.images, args.seconds, args.peers)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=2) if args.json else table(result))  # noqa: T201


def compare(folder: Path, num_images: int, seconds: float, peers: list[str]) -> dict[str, Any]:
    """Measure ours and the peers; see the module's text."""
    store = random_store(folder / "s.zarr", num_images, smooth=True)
    data = RankPartitionedDataset(store, crop=CROP)
    images = Images(data.split)
    labels = data.split.labels.astype(np.int64)
    own: dict[str, Callable[[], float]] = {
        "bare copy, 1 thread": lambda: bare_copy(data, BATCH, 1, seconds / 2),
        "bare copy, 2 threads": lambda: bare_copy(data, BATCH, 2, seconds / 2),
        OURS: steady(lambda: loaders[1], seconds / 2),
        "Efficient ImageNet, 2 threads": steady(lambda: loaders[2], seconds / 2),
        "Efficient ImageNet, DataLoader(data), 2 workers": steady(lambda: next_epoch(plain), seconds / 2),
        "Efficient ImageNet, data.dataloader(), 2 workers": steady(lambda: next_epoch(made), seconds / 2),
    }
    plain = DataLoader(data, BATCH, num_workers=2, drop_last=True, persistent_workers=True)
    made = data.dataloader(BATCH, 2, drop_last=True)
    loaders = {threads: Loader(data, BATCH, threads=threads) for threads in (1, 2)}
    rates: dict[str, list[float]] = {name: [] for name in own}
    skipped = {}
    for measured, name in enumerate([*peers, ""]):
        for mine, measure in own.items():
            rates[mine].append(measure())
        for loader in loaders.values():
            loader.close()
        if not name:
            break
        prepare, workers = PEERS[name]
        before = peers[measured - 1] if measured else None
        if before is None or PEERS[before][0] is not prepare:
            shutil.rmtree(folder / "peer", ignore_errors=True)
            (folder / "peer").mkdir()
        try:
            epoch = prepare(images, labels, folder / "peer", workers)
            rates[name] = [steady(epoch, seconds)()]
        except ImportError as error:
            skipped[name] = f"not installed ({error.name or error})"
    medians = {name: statistics.median(measured) for name, measured in rates.items()}
    return {
        "command": f"python -m tests.bench.loading --images {num_images} --seconds {seconds:g}",
        "machine": describe(),
        "images_per_second": medians,
        "ours_over": {name: medians[OURS] / rate for name, rate in medians.items()},
        "skipped": skipped,
    }


def next_epoch(loader: DataLoader) -> DataLoader:
    """The loader, at a new order and new crops."""
    loader.dataset.set_epoch(loader.dataset.epoch + 1)
    return loader


def steady(epoch: Callable[[], Iterable[Any]], seconds: float) -> Callable[[], float]:
    """A function that measures images/s over whole epochs, after one that isn't counted."""

    def measure() -> float:
        for batch in epoch():
            pixels = batch[0]
            assert pixels.dtype == torch.uint8
            assert pixels.numel() == BATCH * CROP * CROP * 3
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            for _ in epoch():
                count += BATCH
        return count / elapsed

    return measure


def table(result: dict[str, Any]) -> str:
    """For people."""
    machine = result["machine"]
    lines = [f"{result['command']}: {machine['processor']}, {machine['cores']} cores", ""]
    lines.append(f"{'':52} {'images/s':>9} {'ours, 1 thread, is':>19}")
    for name, rate in result["images_per_second"].items():
        lines.append(f"{name:52} {rate:9,.0f} {result['ours_over'][name]:18.2f}x")
    return "\n".join([*lines, *(f"{name}: skipped, {why}" for name, why in result["skipped"].items())])


if __name__ == "__main__":
    main()
