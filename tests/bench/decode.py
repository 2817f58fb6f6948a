"""How much of the JPEG decoder's own speed is left once the image is also cut, resized and stored.

    python -m tests.bench.decode --images imagenet_sample_700.tar [--size 256] [--count 200] [--repeats 7] [--json FILE]

One process, one thread, the same encoded images in memory for all. Rounds alternate between the candidates and ratios
are taken within a round, so that a neighbour's load hits all alike; figures are medians of the rounds. Time is the
thread's CPU time: everything here computes, and nothing waits.

    decode only, simplejpeg    decode_jpeg to RGB, pixels thrown away: the ceiling
    decode only, Pillow        open + load
    decode_into                ours: decode, cut + resize, write into the chunk's buffer
    decode_into, Pillow        the same where pillow-simd can't be built
    torchvision loop           open + convert, v2.Resize(antialias=True) + CenterCrop, to a uint8 tensor

On one of 2 EPYC cores with AVX2 (`--images imagenet_sample_700.tar`), in images/s: decode only 867 (Pillow 739),
decode_into 713, which is 82 % of decode only (with Pillow's resize 335), torchvision loop 258.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.transforms import v2

from pipeline.image import decode
from pipeline.image import resize as resizer
from pipeline.store.geometry import Geometry


def load_images(path: Path | None, count: int) -> list[bytes]:
    """`count` JPEG files out of a tar or a folder; without one, scikit-learn's two photographs in ImageNet's sizes."""
    if path is None:
        from sklearn.datasets import load_sample_images

        images = []
        for number in range(count):
            photo = Image.fromarray(load_sample_images().images[number % 2])
            buffer = io.BytesIO()
            photo.resize([(500, 375), (500, 333), (375, 500)][number % 3]).save(buffer, "JPEG", quality=92)
            images.append(buffer.getvalue())
        return images
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
        return [file.read_bytes() for file in files[:: max(1, len(files) // count)][:count]]
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.isfile()]
        chosen = members[:: max(1, len(members) // count)][:count]
        return [file.read() for member in chosen if (file := tar.extractfile(member)) is not None]


def candidates(size: int) -> dict[str, Callable[[bytes], object]]:
    geometry, out = Geometry(size), np.empty((size, size, 3), np.uint8)
    transform = v2.Compose([v2.Resize(size, v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(size)])

    def pillow(data: bytes) -> object:
        return Image.open(io.BytesIO(data)).load()

    def ours(data: bytes) -> object:
        return decode.decode_into(data, [geometry], [out])

    def ours_with_pillow(data: bytes) -> object:
        used, decode.resize_into = decode.resize_into, resizer.resize_with_pillow
        try:
            return decode.decode_into(data, [geometry], [out])
        finally:
            decode.resize_into = used

    def torchvision(data: bytes) -> object:
        return v2.functional.pil_to_tensor(transform(Image.open(io.BytesIO(data)).convert("RGB")))

    return {
        "decode only, simplejpeg": lambda data: simplejpeg.decode_jpeg(data, "RGB"),
        "decode only, Pillow": pillow,
        "decode_into": ours,
        "decode_into, Pillow": ours_with_pillow,
        "torchvision loop": torchvision,
    }


def measure(images: list[bytes], size: int, repeats: int) -> dict[str, dict[str, float]]:
    """Per candidate: images per second, and its ratio to simplejpeg's decode-only rate (medians of the rounds)."""
    runs = candidates(size)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeats + 1):
        for name, run in runs.items():
            start = time.thread_time()
            for data in images:
                run(data)
            if round_number:  # the first one warms up
                seconds[name].append(time.thread_time() - start)
    ceiling = seconds["decode only, simplejpeg"]
    return {
        name: {
            "images_per_second": len(images) / statistics.median(times),
            "of_decode_only": statistics.median(c / t for c, t in zip(ceiling, times, strict=True)),
        }
        for name, times in seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=None, help="a tar or folder of JPEGs")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = load_images(arguments.images, arguments.count)
    results = measure(images, arguments.size, arguments.repeats)
    about = {"resizer": resizer.resizer(), "images": len(images), "size": arguments.size, "repeats": arguments.repeats}
    sys.stdout.write(f"{about}\n")
    for name, figures in results.items():
        rate, share = figures["images_per_second"], figures["of_decode_only"]
        sys.stdout.write(f"{name:26} {rate:8.0f} img/s  {share:6.1%} of decode only\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"bench": "decode", **about, "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
