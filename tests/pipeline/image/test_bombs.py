"""Small files that ask for much time or memory: refused before they are decoded."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image import decode
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.store.geometry import Geometry


def reason(data: bytes, options: DecodeOptions = decode.DEFAULTS) -> str:
    """Why a sample is bad; `good` where it isn't."""
    try:
        decode_into(data, [Geometry(8)], [np.empty((8, 8, 3), np.uint8)], options)
    except BadSample as bad:
        return bad.reason
    return "good"


def progressive(side: int, more_scans: int, mode: str = "L") -> bytes:
    """A flat progressive JPEG whose last scan is repeated."""
    buffer = io.BytesIO()
    Image.new(mode, (side, side), 128 if mode == "L" else (9, 9, 9, 9)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    end = data.rindex(b"\xff\xd9")
    return data[:end] + data[data.rindex(b"\xff\xda") : end] * more_scans + data[end:]


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_progressive_jpegs_with_many_scans(mode: str) -> None:
    assert reason(progressive(64, 0, mode)) == "good"
    assert reason(progressive(64, 60, mode)) == "good"
    assert reason(progressive(64, 300, mode)) == "too-complex"
    assert reason(progressive(6000, 40, mode)) == "too-complex"  # 2^30 pixels are 29 scans of that size
    assert reason(progressive(6000, 300, mode), DecodeOptions(max_pixels=1000)) == "too-large"


def png_head(width: int, height: int, bits: int, color: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def webp(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "WEBP", lossless=True)
    data = bytearray(buffer.getvalue())
    at = data.index(b"VP8L") + 9  # 14 bits of width - 1, 14 of height - 1
    flags = struct.unpack_from("<I", data, at)[0] >> 28 << 28
    struct.pack_into("<I", data, at, (width - 1) | (height - 1) << 14 | flags)
    return bytes(data)


def jpeg_2000(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG2000", no_jp2=True)
    data = bytearray(buffer.getvalue())
    struct.pack_into(">2I", data, 8, width, height)
    struct.pack_into(">2I", data, 24, width, height)  # one tile
    return bytes(data)


BOMBS = {
    "RGBA PNG": png_head(12000, 14000, 8, 6),
    "16-bit PNG": png_head(11000, 11000, 16, 0),
    "WebP": webp(13000, 13000),
    "JPEG 2000": jpeg_2000(13000, 13000),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_memory_is_limited_below_max_pixels(kind: str, tmp_path: Path) -> None:
    """In a process of its own, whose peak is looked at."""
    (tmp_path / "bomb").write_bytes(BOMBS[kind])
    code = """
import resource, sys
import numpy as np
from pipeline.errors import BadSample
from pipeline.image.decode import DecodeOptions, decode_into
from pipeline.store.geometry import Geometry
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_into(open("bomb", "rb").read(), [Geometry(8)], [np.empty((8, 8, 3), np.uint8)], DecodeOptions())
except BadSample as bad:
    print(bad.reason, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    why, megabytes = done.stdout.split()
    assert why == "too-large", done.stderr
    assert int(megabytes) < 100


def test_small_images_are_never_too_large_for_memory() -> None:
    assert DecodeOptions(max_pixels=100).max_bytes >= 10**9
    buffer = io.BytesIO()
    Image.new("RGBA", (10, 10), (1, 2, 3, 4)).save(buffer, "PNG")
    assert reason(buffer.getvalue(), DecodeOptions(max_pixels=100)) == "good"


def test_more_pixels_allow_more_memory() -> None:
    assert reason(png_head(15000, 16000, 8, 0), DecodeOptions(max_pixels=240_000_000)) == "truncated"


@pytest.mark.quick
@pytest.mark.parametrize("where", ["resize_into", "open_rgb", "array_to_rgb"])
def test_too_little_memory_is_a_bad_sample(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decode, where, fail)
    buffer = io.BytesIO()
    Image.new("RGB", (10, 10)).save(buffer, "PNG")
    data = np.zeros((4, 4), np.uint8) if where == "array_to_rgb" else buffer.getvalue()
    assert reason(data) == "out-of-memory"  # type: ignore[arg-type]


def test_a_long_thin_picture_takes_no_more_memory_than_its_pixels() -> None:
    code = """
import resource
import numpy as np
from pipeline.image.decode import decode_into
from pipeline.store.geometry import Geometry
pixels, out = np.zeros((4_000_000, 1), np.uint8), np.empty((64, 64, 3), np.uint8)
pixels[2_000_000:] = 200
resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
decode_into(pixels, [Geometry(64, fit="stretch")], [out])
print(out[0, 0, 0], out[63, 63, 2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "200"], done.stderr
