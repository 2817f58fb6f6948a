"""Every depth, layout and byte order of the formats that can hold several: right, or a bad sample `unsupported`.

Files are written here byte by byte from known levels, so that what they must become follows from the levels. Where
imagecodecs and tifffile read the same format, they must find these levels in the file.
"""

from __future__ import annotations

import io
import itertools
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image.options import DecodeOptions
from pipeline.image.pil_decode import open_rgb

HEIGHT, WIDTH = 11, 13


@pytest.fixture(autouse=True)
def rng() -> None:
    """The same levels whatever tests ran before."""
    global RNG
    RNG = np.random.default_rng(0)


@pytest.fixture(params=["extras", "no extras"])
def extras(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the optional decoders are there."""
    if request.param == "extras":
        pytest.importorskip("imagecodecs")
        pytest.importorskip("tifffile")
        return True
    for name in ("imagecodecs", "tifffile"):
        monkeypatch.setitem(sys.modules, name, None)
    return False


def decoded(data: bytes) -> np.ndarray | str:
    """RGB as int (H, W, 3), or why the sample is bad."""
    try:
        return np.asarray(open_rgb(data, DecodeOptions(), exif_transpose=False)[0]).astype(int)
    except BadSample as bad:
        return bad.reason


def levels(bits: int, kind: str = "u", channels: int = 1) -> np.ndarray:
    """Random levels (H, W, channels) that use the whole range, as the smallest dtype that holds them."""
    shape = (HEIGHT, WIDTH, channels)
    if kind == "f":
        values = RNG.random(shape).astype(f"f{bits // 8}")
        values[0, 0], values[0, 1] = 0, 1
        return values
    low, high = (0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values = RNG.integers(low, high, shape, endpoint=True, dtype=np.int64)
    values[0, 0], values[0, 1] = low, high
    return values.astype(f"{kind}{max(1, 1 << (bits - 1).bit_length() >> 3)}")


def eight_bits(values: np.ndarray, bits: int, kind: str) -> np.ndarray:
    """The levels from 0.0 to 255.0, by the rules of docs/decoding.md: these use their whole range."""
    low = 0.0 if kind != "i" else float(values.min())
    high = {"u": 2.0**bits - 1, "f": 1.0, "i": float(values.max())}[kind]
    return (values.astype(float) - low) / (high - low) * 255


def blend(color: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return color * alpha / 255 + 255 * (1 - alpha / 255)


def packed_rows(values: np.ndarray, bits: int, order: str) -> bytes:
    """Rows of levels (h, n), each padded to whole bytes. Levels that aren't bytes begin with their highest bit."""
    if bits % 8 == 0:
        return values.astype(values.dtype.newbyteorder(order)).tobytes()
    binary = ((values[..., None].astype(int) >> np.arange(bits)[::-1]) & 1).astype(np.uint8)
    return np.packbits(binary.reshape(len(values), -1), axis=1).tobytes()


# TIFF

PHOTOMETRIC = {"white is 0": 0, "grey": 1, "rgb": 2, "palette": 3, "cmyk": 5}
REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def tiff(
    values: np.ndarray, bits: int, kind: str, photometric: str, *, order: str, planes: int, compression: int,
    fill_order: int, extra: int | None, palette: np.ndarray | None = None,
) -> bytes:  # fmt: skip
    height, width, channels = values.shape
    rows = 4
    strips = []
    for plane in [values] if planes == 1 else np.split(values, channels, axis=2):
        for top in range(0, height, rows):
            part = plane[top : top + rows]
            data = packed_rows(part.reshape(len(part), -1), bits, order)
            data = zlib.compress(data) if compression == 8 else data
            strips.append(data.translate(REVERSED) if fill_order == 2 else data)
    tags: dict[int, list[int]] = {
        256: [width], 257: [height], 258: [bits] * channels, 259: [compression], 262: [PHOTOMETRIC[photometric]],
        266: [fill_order], 273: [0] * len(strips), 277: [channels], 278: [rows],
        279: [len(strip) for strip in strips], 284: [planes], 339: [{"u": 1, "i": 2, "f": 3}[kind]] * channels,
    }  # fmt: skip
    if extra is not None:
        tags[338] = [extra]
    if palette is not None:
        tags[320] = palette.ravel().tolist()

    def head() -> bytes:
        start, table, blobs = 8 + 2 + 12 * len(tags) + 4, b"", b""
        for tag in sorted(tags):
            code, letter = (4, "I") if tag == 273 else (3, "H")
            data = struct.pack(f"{order}{len(tags[tag])}{letter}", *tags[tag])
            if len(data) > 4:
                at, blobs = struct.pack(f"{order}I", start + len(blobs)), blobs + data + bytes(len(data) % 2)
                data = at
            table += struct.pack(f"{order}HHI", tag, code, len(tags[tag])) + data.ljust(4, b"\0")
        magic = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
        return magic + table + bytes(4) + blobs

    tags[273] = [*itertools.accumulate([len(head()), *tags[279][:-1]])]
    return head() + b"".join(strips)


def tiff_layouts() -> Iterator[tuple[str, int, str, int, int | None]]:
    """Photometric, bits, kind, channels and what an extra channel is (2: alpha, 0: nothing known)."""
    kinds = [(bits, "u") for bits in (1, 2, 4, 8, 12, 16, 32)] + [(bits, "i") for bits in (8, 16, 32)]
    for bits, kind in [*kinds, (16, "f"), (32, "f"), (64, "f")]:
        for photometric, channels, extra in (
            ("grey", 1, None), ("white is 0", 1, None), ("palette", 1, None), ("grey", 2, 2), ("palette", 2, 2),
            ("rgb", 3, None), ("rgb", 4, 2), ("rgb", 4, 0), ("cmyk", 4, None), ("cmyk", 5, 0),
        ):  # fmt: skip
            if photometric != "palette" or (kind == "u" and bits <= 8):
                yield photometric, bits, kind, channels, extra


@pytest.mark.parametrize("layout", [*tiff_layouts()], ids=lambda layout: "-".join(map(str, layout)))
def test_tiff(layout: tuple[str, int, str, int, int | None], extras: bool) -> None:
    photometric, bits, kind, channels, extra = layout
    values = levels(bits, kind, channels)
    scaled = eight_bits(values, bits, kind)
    palette = None
    if photometric == "palette":
        palette = RNG.integers(0, 256, (3, 2**bits)) * 257
        color = (palette.T // 257)[values[..., 0]].astype(float)
    elif photometric == "cmyk":
        color = (255 - scaled[..., :3]) * (255 - scaled[..., 3:4]) / 255
    elif photometric == "rgb":
        color = scaled[..., :3]
    else:
        color = np.repeat(255 - scaled[..., :1] if photometric == "white is 0" else scaled[..., :1], 3, axis=2)
    expected = blend(color, scaled[..., -1:]) if extra == 2 else color
    outcomes: Counter[str] = Counter()
    for order, planes, compression, fill_order in itertools.product("<>", (1, 2), (1, 8), (1, 2)):
        if (planes == 2 and channels == 1) or (fill_order == 2 and bits > 8):
            continue
        data = tiff(
            values, bits, kind, photometric, order=order, planes=planes, compression=compression,
            fill_order=fill_order, extra=extra, palette=palette,
        )  # fmt: skip
        if extras and not (compression == 8 and fill_order == 2):  # which tifffile doesn't read
            import tifffile

            read = tifffile.imread(io.BytesIO(data))
            read = np.moveaxis(read, 0, -1) if planes == 2 else read.reshape(values.shape)
            np.testing.assert_array_equal(read, values)
        got = decoded(data)
        where = (order, planes, compression, fill_order)
        if isinstance(got, str):
            assert got == "unsupported" or (got == "corrupt" and fill_order == 2), where
        else:
            assert np.abs(got - expected).max() < (2.6 if photometric == "cmyk" or extra == 2 else 1.1), where
        outcomes[got if isinstance(got, str) else "right"] += 1
    simple = photometric in ("grey", "rgb") or (photometric == "white is 0" and kind == "u" and bits <= 16)
    if extras and simple and extra is None and bits >= 8 and (bits, kind) != (32, "u"):
        assert outcomes["right"] == outcomes.total()
    if photometric in ("grey", "palette") and channels == 1 and kind == "u" and bits <= 16:
        assert outcomes["right"] >= 2


@pytest.mark.parametrize("bits", [31, 32])
def test_unsigned_tiff_of_32_bits(bits: int) -> None:
    values = levels(bits)
    data = tiff(values.astype("u4"), 32, "u", "grey", order="<", planes=1, compression=1, fill_order=1, extra=None)
    got = decoded(data)
    if bits == 32:
        assert isinstance(got, str)
        assert got == "unsupported"
    else:
        assert not isinstance(got, str)
        assert np.abs(got[..., :1] - eight_bits(values, bits, "u")).max() <= 0.6


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_float_levels_that_are_no_numbers(value: float) -> None:
    values = levels(32, "f")
    values[5, 5] = value
    data = tiff(values, 32, "f", "grey", order="<", planes=1, compression=1, fill_order=1, extra=None)
    assert decoded(data) == "unsupported"


# PNG

PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png(values: np.ndarray, bits: int, color: int, interlaced: bool, chunks: list[tuple[bytes, bytes]]) -> bytes:
    raw = b""
    for x, y, right, down in ADAM7 if interlaced else ((0, 0, 1, 1),):
        part = values[y::down, x::right]
        rows = packed_rows(part.reshape(len(part), -1), bits, ">")
        length = len(rows) // len(part) if len(part) else 0
        raw += b"".join(b"\0" + rows[i * length : (i + 1) * length] for i in range(len(part)) if length)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, color, 0, 0, interlaced)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


@pytest.mark.parametrize("transparent", [False, True])
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("color", "bits"), [(color, bits) for color, depths in PNG_DEPTHS.items() for bits in depths])
def test_png(color: int, bits: int, interlaced: bool, transparent: bool) -> None:
    values = levels(bits, channels=PNG_CHANNELS[color])
    scaled = eight_bits(values, bits, "u")
    chunks = []
    alpha = scaled[..., -1:] if color in (4, 6) else np.full((HEIGHT, WIDTH, 1), 255.0)
    expected = np.repeat(scaled[..., :1], 3, axis=2) if color in (0, 3, 4) else scaled[..., :3]
    if color == 3:
        palette = RNG.integers(0, 256, (2**bits, 3), np.uint8)
        chunks.append((b"PLTE", palette.tobytes()))
        expected = palette[values[..., 0]].astype(float)
        if transparent:
            alphas = RNG.integers(0, 256, 2**bits, np.uint8)
            chunks.append((b"tRNS", alphas.tobytes()))
            alpha = alphas[values].astype(float)
    elif transparent and color in (0, 2):
        chosen = values[3, 4]
        chunks.append((b"tRNS", struct.pack(f">{len(chosen)}H", *chosen.tolist())))
        alpha = np.where((values == chosen).all(2, keepdims=True), 0.0, 255.0)
    data = png(values, bits, color, interlaced, chunks)
    got = decoded(data)
    assert not isinstance(got, str), got
    assert np.abs(got - blend(expected, alpha)).max() < (2.1 if color in (4, 6) or transparent else 1.1)


# Netpbm


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("maximum", [1, 100, 255, 1000, 4095, 65535])
@pytest.mark.parametrize("kind", ["bitmap", "grey", "rgb"])
def test_netpbm(kind: str, maximum: int, plain: bool) -> None:
    maximum = 1 if kind == "bitmap" else maximum
    values = RNG.integers(0, maximum, (HEIGHT, WIDTH, 3 if kind == "rgb" else 1), endpoint=True, dtype=np.uint16)
    number = {"bitmap": 1, "grey": 2, "rgb": 3}[kind] + (0 if plain else 3)
    head = f"P{number}\n{WIDTH} {HEIGHT}\n" + ("" if kind == "bitmap" else f"{maximum}\n")
    if plain:
        body = " ".join(map(str, values.ravel().tolist())).encode()
    elif kind == "bitmap":
        body = np.packbits(values[..., 0].astype(np.uint8), axis=1).tobytes()
    else:
        body = values.astype("u1" if maximum < 256 else ">u2").tobytes()
    expected = np.broadcast_to(values * (255 / maximum), (HEIGHT, WIDTH, 3))
    got = decoded(head.encode() + body)
    assert not isinstance(got, str), got
    assert np.abs(got - (255 - expected if kind == "bitmap" else expected)).max() < 1.1


@pytest.mark.parametrize("scale", ["-1.0", "1.0"])
def test_portable_float_map(scale: str) -> None:
    values = levels(32, "f")
    body = values[::-1].astype("<f4" if scale[0] == "-" else ">f4").tobytes()  # from the lowest row up
    got = decoded(f"Pf\n{WIDTH} {HEIGHT}\n{scale}\n".encode() + body)
    assert not isinstance(got, str), got
    assert np.abs(got - values * 255).max() < 1.1


# BMP


@pytest.mark.parametrize("from_top", [False, True])
@pytest.mark.parametrize("masks", [(16, 5, 5, 5), (16, 5, 6, 5), (24, 8, 8, 8), (32, 8, 8, 8), (1,), (4,), (8,)])
def test_bmp(masks: tuple[int, ...], from_top: bool) -> None:
    bits, *depths = masks
    if depths:
        values = np.stack([RNG.integers(0, 2**depth, (HEIGHT, WIDTH)) for depth in depths], axis=2)
        shifts = (depths[1] + depths[2], depths[2], 0)
        words = sum(values[..., i].astype(np.int64) << shifts[i] for i in range(3))
        rows = [row.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes() for row in words]
        expected = values * (255 / (2.0 ** np.array(depths) - 1))
        fields = struct.pack("<3I", *((2**depth - 1) << shift for depth, shift in zip(depths, shifts, strict=True)))
        table = fields if bits in (16, 32) else b""
    else:
        palette = RNG.integers(0, 256, (2**bits, 4), np.uint8)
        palette[:, 3] = 0
        values = RNG.integers(0, 2**bits, (HEIGHT, WIDTH))
        packed = packed_rows(values.astype(np.uint8), bits, "<")
        rows = [packed[i * len(packed) // HEIGHT : (i + 1) * len(packed) // HEIGHT] for i in range(HEIGHT)]
        expected, table = palette[values][..., 2::-1].astype(float), palette.tobytes()
    rows = [row + bytes(-len(row) % 4) for row in rows]
    body = b"".join(rows if from_top else rows[::-1])
    start = 14 + 40 + len(table)
    compression = 3 if depths and bits in (16, 32) else 0
    head = struct.pack(
        "<2sIIIIiiHHIIiiII", b"BM", start + len(body), 0, start, 40, WIDTH, -HEIGHT if from_top else HEIGHT, 1, bits,
        compression, len(body), 0, 0, 0, 0,
    )  # fmt: skip
    got = decoded(head + table + body)
    assert not isinstance(got, str), got
    assert np.abs(got - expected).max() < 5  # of 5 bits, Pillow rounds otherwise


# JPEG 2000, and the formats that Pillow itself has to write


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bits", [8, 9, 10, 12, 15, 16])
def test_jpeg_2000(monkeypatch: pytest.MonkeyPatch, bits: int, channels: int) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    values = levels(bits, channels=channels)
    values[:, 5:] = values.max()  # white, which wraps to black in Pillow's shift
    for container in ("jp2", "j2k"):
        data = imagecodecs.jpeg2k_encode(
            values.squeeze(), level=0, reversible=True, bitspersample=bits, codecformat=container
        )
        got = decoded(data)
        assert not isinstance(got, str), got
        assert np.abs(got - eight_bits(values, bits, "u")).max() < 1.1
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "imagecodecs", None)
            without = decoded(data)
        if isinstance(without, str):
            assert without == "unsupported"
            assert bits > 8
        else:
            assert np.abs(without - got).max() <= 1


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("PNG", "png", {}),
        ("WEBP", "webp", {"lossless": True}),
        ("WEBP", "webp", {"quality": 60}),
        ("GIF", "gif", {}),
        ("QOI", "qoi", {}),
        ("AVIF", "avif", {"quality": 100}),
        ("JPEG2000", "jpeg2k", {}),
        ("JXL", "jpegxl", {"lossless": True}),
        ("JPEG", "jpeg8", {"quality": 95, "subsampling": 0}),
        ("JPEG", "jpeg8", {"quality": 80, "progressive": True}),
    ],
)
def test_other_decoders_find_the_same(kind: str, codec: str, options: dict[str, Any]) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    if kind == "JXL":
        pytest.importorskip("pillow_jxl")
    y, x = np.mgrid[:40, :56]
    smooth = np.dstack([x * 4, y * 6, (x + y) * 2]).astype(np.uint8)
    buffer = io.BytesIO()
    picture = Image.fromarray(smooth).quantize(64) if kind == "GIF" else Image.fromarray(smooth)
    picture.save(buffer, kind, **options)
    got = decoded(buffer.getvalue())
    assert not isinstance(got, str), got
    wanted = getattr(imagecodecs, f"{codec}_decode")(buffer.getvalue())
    assert np.abs(got - np.squeeze(wanted)[..., :3].astype(int)).max() <= 1
