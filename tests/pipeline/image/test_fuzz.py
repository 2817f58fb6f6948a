"""Damaged images of every kind: each is decoded or a bad sample, in bounded time and memory, and nothing crashes.

    python tests/pipeline/image/test_fuzz.py KIND [SEED]

Each kind has a process of its own, so that a decoder that crashes fails one test.
"""

from __future__ import annotations

import importlib
import io
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.store.geometry import Geometry

MUTATIONS = 1000
MAX_SECONDS = 5.0  # of one input, in the process's own time
MAX_BYTES = 1 << 30  # of the process's addresses beyond what it has at the start
KINDS = {
    "jpeg": ("JPEG", "RGB", {}),
    "jpeg-grey": ("JPEG", "L", {}),
    "jpeg-progressive": ("JPEG", "RGB", {"progressive": True}),
    "jpeg-cmyk": ("JPEG", "CMYK", {}),
    "png": ("PNG", "RGB", {}),
    "png-palette": ("PNG", "P", {}),
    "png-alpha": ("PNG", "RGBA", {}),
    "png-16": ("PNG", "I;16", {}),
    "webp": ("WEBP", "RGB", {}),
    "webp-lossless": ("WEBP", "RGBA", {"lossless": True}),
    "gif": ("GIF", "P", {}),
    "bmp": ("BMP", "RGB", {}),
    "bmp-palette": ("BMP", "P", {}),
    "tiff": ("TIFF", "RGB", {}),
    "tiff-lzw": ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    "tiff-jpeg": ("TIFF", "RGB", {"compression": "jpeg"}),
    "tiff-16": ("TIFF", "I;16", {"compression": "tiff_adobe_deflate"}),
    "tiff-float": ("TIFF", "F", {}),
    "avif": ("AVIF", "RGB", {"speed": 10}),
    "jpeg-2000": ("JPEG2000", "RGB", {}),
    "jpeg-2000-16": ("JPEG2000", "I;16", {}),
    "ppm": ("PPM", "RGB", {}),
    "ico": ("ICO", "RGBA", {}),
    "qoi": ("QOI", "RGB", {}),
    "heic": ("HEIF", "RGB", {}),
    "jpeg-xl": ("JXL", "RGB", {}),
}
CODECS = {
    "jpeg-12": ("jpeg8", {"bitspersample": 12}),
    "jpeg-lossless-16": ("jpeg8", {"bitspersample": 16, "lossless": True}),
    "jpeg-2000-rgb-12": ("jpeg2k", {"bitspersample": 12}),
}
PLUGINS = {
    "heic": "pillow_heif",
    "jpeg-xl": "pillow_jxl",
    **dict.fromkeys(CODECS, "imagecodecs"),
    "tiff-planar": "tifffile",
}


def intact(kind: str) -> bytes:
    """A small image of that kind, with some detail."""
    y, x = np.mgrid[:40, :48]
    picture = np.dstack([x * 5 + y % 7, y * 6, (x * y) % 256]).astype(np.uint8)
    if kind in CODECS:
        codec, options = CODECS[kind]
        levels = picture.astype(np.uint16) << (options["bitspersample"] - 8)
        return bytes(getattr(importlib.import_module("imagecodecs"), f"{codec}_encode")(levels, **options))
    buffer = io.BytesIO()
    if kind == "tiff-planar":
        levels = np.ascontiguousarray(np.moveaxis(picture.astype(np.uint16) * 257, 2, 0))
        importlib.import_module("tifffile").imwrite(buffer, levels, photometric="rgb", planarconfig="separate")
        return buffer.getvalue()
    if kind == "heic":
        importlib.import_module("pillow_heif").register_heif_opener()
    elif kind == "jpeg-xl":
        importlib.import_module("pillow_jxl")
    extension, mode, options = KINDS[kind]
    image = Image.fromarray(picture)
    if mode == "I;16":
        image = Image.fromarray(picture[..., 0].astype(np.uint16) * 257)
    elif mode == "P":
        image = image.quantize(32)
    else:
        image = image.convert("RGB").convert(mode)
    image.save(buffer, extension, **options)
    return buffer.getvalue()


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """The data with some bytes changed, cut out, doubled or cut off; mostly near the start, where the headers are."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        end = len(changed) if rng.random() < 0.4 else min(len(changed), 200)
        at = int(rng.integers(0, end))
        what = rng.integers(0, 6)
        if what < 2:
            changed[at] ^= 1 << int(rng.integers(0, 8))
        elif what == 2:
            changed[at] = int(rng.choice([0, 1, 127, 128, 255]))
        elif what == 3:
            size = int(rng.choice([2, 4]))
            changed[at : at + size] = int(rng.choice([0, 1, 2**15, 2**16 - 1])).to_bytes(
                size, str(rng.choice(["big", "little"]))
            )
        elif what == 4:
            length = int(rng.integers(1, 40))
            changed[at : at + length] = changed[at : at + length] * int(rng.choice([0, 2, 20]))
        else:
            del changed[max(at, 8) :]
        if not changed:
            break
    return bytes(changed)


def fuzz(kind: str, seed: int = 0) -> dict[str, int]:
    """How often each outcome came. Raises AssertionError where an input takes too long, MemoryError and the like."""
    data, rng = intact(kind), np.random.default_rng(seed)
    geometry, options = Geometry(16), DecodeOptions(max_pixels=1_000_000)
    outcomes: dict[str, int] = {}
    decode_into(data, [geometry], [np.empty((16, 16, 3), np.uint8)], options)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(MUTATIONS):
        damaged, start = mutated(data, rng), time.process_time()
        out = np.full((16, 16, 3), 77, np.uint8)
        try:
            decode_into(damaged, [geometry], [out], options)
            outcome = "good"
        except BadSample as bad:
            outcome = bad.reason
            assert (out == 77).all(), number
        assert outcome != "out-of-memory", number
        assert time.process_time() - start < MAX_SECONDS, number
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *CODECS, "tiff-planar"])
def test_damaged_images(kind: str) -> None:
    if kind in PLUGINS:
        pytest.importorskip(PLUGINS[kind])
    done = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert done.stderr == "" or kind == "avif"  # dav1d writes there
    outcomes = dict(line.split() for line in done.stdout.splitlines())
    assert sum(map(int, outcomes.values())) == MUTATIONS
    assert int(outcomes.get("good", 0)) < MUTATIONS


if __name__ == "__main__":
    for name, count in sorted(fuzz(sys.argv[1], *map(int, sys.argv[2:])).items()):
        sys.stdout.write(f"{name} {count}\n")
