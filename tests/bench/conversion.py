"""How fast images become a store, against decoding alone, a torchvision loop and FFCV's writer.

    python -m tests.bench.conversion [--images TAR_OR_FOLDER] [--count 700] [--copies 24] [--repeats 3] [--json FILE]

Without --images two photographs that ship with scikit-learn are used, in ImageNet's sizes. All ways read the same
files, from a warm page cache, in turn, `--repeats` times; medians and ratios are printed. Every figure is images/s.
FFCV is measured where it is installed. A run should take many seconds: workers take half a second to start.

On 2 EPYC cores (`--images imagenet_sample_700.tar --copies 24 --repeats 2`), in images/s: convert 573 with one job
and 1,042 with two (1.82 times as many); FFCV's writer 490 with two workers (ours 2.13 times), torchvision loop 291
(3.58), decode only 888 and, in two processes, 1,650 (0.63). On 2 Xeon cores (Emerald Rapids), the same command: 355,
624 (1.76), 315 (1.98), 214 (2.92), 505 and 990 (0.63); other runs gave 0.66 to 0.72 of decode only, and 1.80 to 1.96
for two jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import joblib
import numpy as np
import simplejpeg

from pipeline import convert
from tests.bench.decode import load_images

SIZE = 256


def write_images(images: list[bytes], folder: Path, copies: int) -> list[str]:
    """The images as files of 20 classes, each under `copies` names (links to one file)."""
    paths = []
    for number, data in enumerate(images):
        target = folder / f"class{number % 20:02d}"
        target.mkdir(parents=True, exist_ok=True)
        first = target / f"{number:05d}-0.jpg"
        first.write_bytes(data)
        paths.append(str(first))
        for copy in range(1, copies):
            os.link(first, target / f"{number:05d}-{copy}.jpg")
            paths.append(str(target / f"{number:05d}-{copy}.jpg"))
    return paths


def decode_only(paths: list[str]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            data = file.read()
        try:
            simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:  # CMYK, or a PNG by another name
            from PIL import Image

            with Image.open(path) as image:
                image.convert("RGB")


def torchvision_loop(paths: list[str]) -> None:
    """What people write first: PIL, Resize, CenterCrop, into one uint8 array."""
    from PIL import Image
    from torchvision.transforms import v2

    transform = v2.Compose([v2.Resize(SIZE, antialias=True), v2.CenterCrop(SIZE)])
    out = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for i, path in enumerate(paths):
        with Image.open(path) as image:
            out[i] = np.asarray(transform(image.convert("RGB")))


def in_processes(work: Callable[[list[str]], None], paths: list[str], n_jobs: int) -> None:
    parts = [paths[i :: n_jobs * 8] for i in range(n_jobs * 8)]
    joblib.Parallel(n_jobs=n_jobs, batch_size=1)(joblib.delayed(work)(part) for part in parts)


def ffcv_writer(folder: Path, out: Path, n_jobs: int) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = v2.Compose([v2.Resize(SIZE), v2.CenterCrop(SIZE)])
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(out), fields, num_workers=n_jobs).from_indexed_dataset(ImageFolder(str(folder), crop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=None, help="a tar or folder of JPEGs")
    parser.add_argument("--count", type=int, default=700)
    parser.add_argument("--copies", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        paths = write_images(load_images(args.images, args.count), folder / "images", args.copies)
        cores = os.cpu_count() or 1

        def store(n_jobs: int) -> None:
            convert(folder / "images", folder / "store.zarr", size=SIZE, n_jobs=n_jobs, quiet=True)
            shutil.rmtree(folder / "store.zarr")

        ways: dict[str, Callable[[], None]] = {
            "decode only, 1 process": lambda: decode_only(paths),
            f"decode only, {cores} processes": lambda: in_processes(decode_only, paths, cores),
            "torchvision loop, 1 process": lambda: torchvision_loop(paths[:: args.copies]),
            "convert, 1 job": lambda: store(1),
            f"convert, {cores} jobs": lambda: store(cores),
        }
        try:
            import ffcv  # noqa: F401

            ways[f"FFCV writer, {cores} workers"] = lambda: ffcv_writer(folder / "images", folder / "x.beton", cores)
        except ImportError:
            sys.stderr.write("FFCV isn't installed: skipped\n")
        rates: dict[str, list[float]] = {way: [] for way in ways}
        decode_only(paths)  # warm the page cache
        for _ in range(args.repeats):
            for way, run in ways.items():
                count = len(paths[:: args.copies]) if "torchvision" in way else len(paths)
                start = time.perf_counter()
                run()
                rates[way].append(count / (time.perf_counter() - start))
                sys.stderr.write(f"{way}: {rates[way][-1]:,.0f} images/s\n")
    median = {way: statistics.median(values) for way, values in rates.items()}
    both = median[f"convert, {cores} jobs"]
    ratios = {
        f"{cores} jobs to 1 job": both / median["convert, 1 job"],
        f"convert to decode only, {cores} processes": both / median[f"decode only, {cores} processes"],
        "convert to torchvision loop": both / median["torchvision loop, 1 process"],
    }
    if f"FFCV writer, {cores} workers" in median:
        ratios["convert to FFCV writer"] = both / median[f"FFCV writer, {cores} workers"]
    lines = [f"{way:40s} {rate:8,.0f} images/s" for way, rate in median.items()]
    lines += [f"{name:40s} {ratio:8.2f}" for name, ratio in ratios.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps({"rates": rates, "median": median, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
