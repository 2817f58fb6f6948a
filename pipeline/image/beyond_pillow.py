"""Images that Pillow can't read or reads wrongly: what kind they are, and the optional packages that read them."""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image.options import WHITE_16BIT, DecodeOptions, check_pixels
from pipeline.image.pixel_modes import BITS_PER_SAMPLE, MIN_IS_WHITE, PHOTOMETRIC, SAMPLE_FORMAT
from pipeline.text import one_line

EXTRAS = {"pillow_heif": "heif", "pillow_jxl": "jxl", "imagecodecs": "imagecodecs", "tifffile": "imagecodecs"}
"""Optional package -> our extra that installs it."""
PLUGINS = {"HEIC": ("pillow_heif", "HEIF"), "JPEG XL": ("pillow_jxl", "JXL")}
"""Kind -> the package that teaches Pillow to read it, and Pillow's name of the format."""
SIGNATURES = (
    (0, b"\xff\x0a", "JPEG XL"), (0, b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"), (0, b"II\xbc", "JPEG XR"),
    (0, b"8BPS", "Photoshop (PSD)"), (0, b"gimp xcf", "GIMP (XCF)"), (0, b"icns", "ICNS"), (0, b"\x01\xda", "SGI"),
    (0, b"v/1\x01", "OpenEXR"), (0, b"#?RADIANCE", "Radiance HDR"), (0, b"DDS ", "DDS"), (0, b"SIMPLE  =", "FITS"),
    (128, b"DICM", "DICOM"), (0, b"BPG\xfb", "BPG"), (0, b"FLIF", "FLIF"), (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"), (0, b"\xc5\xd0\xd3\xc6", "PostScript"), (0, b"<svg", "SVG"),
)  # fmt: skip
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")
CONVERT = "convert it to PNG or JPEG first"
# Second bytes of JPEG's frame markers: sequential, progressive, lossless; the same with arithmetic coding; JPEG-LS.
PILLOW_JPEG, PROGRESSIVE_JPEG, JPEG_LS = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA), (0xC2, 0xCA), 0xF7

# TIFF tags, and values of theirs
COMPRESSION, FILL_ORDER, ORIENTATION, SAMPLES, PLANES, EXTRA_SAMPLES = 259, 266, 274, 277, 284, 338
UNSPECIFIED, MIN_IS_BLACK, RGB = 0, 1, 2
SEPARATE_PLANES = LOW_BIT_FIRST = SIGNED = 2

Levels = tuple[np.ndarray, int | None]
"""uint or float (H, W) or (H, W, channels), and the level that is white where the file says it."""


class JpegFrame(NamedTuple):
    """A JPEG's frame header: its marker's second byte, bits per sample, size in pixels, channels."""

    marker: int
    bits: int
    height: int
    width: int
    channels: int


def jpeg_frame(data: bytes) -> JpegFrame | None:
    """The frame header of a JPEG; None where it can't be found. (ITU-T T.81, B.2.2; T.87 for JPEG-LS.)"""
    at = 2
    while at + 10 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker == 0xFF:
            at = data.find(b"\xff", at + 1)
            if at < 0:
                return None
        elif (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == JPEG_LS:
            return JpegFrame(marker, *struct.unpack_from(">BHHB", data, at + 4))
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:  # these have no length
            at += 2
        elif marker in (0xD9, 0xDA):  # the image has begun, or ended, without a frame header
            return None
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def unread_kind(data: bytes) -> str | None:
    """The name of a kind of image that Pillow alone doesn't read; None where the content is none that we know."""
    if data[4:8] == b"ftyp" and any(
        brand in data[8 : min(64, int.from_bytes(data[:4], "big"))] for brand in HEIC_BRANDS
    ):
        return "HEIC"
    for at, signature, kind in SIGNATURES:
        if data.startswith(signature, at):
            return kind
    return "SVG" if data[:5] == b"<?xml" and b"<svg" in data[:1024] else None


def package(name: str, kind: str) -> ModuleType:
    """An optional package; BadSample that names the kind of image and our extra where it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BadSample("unsupported", f"{kind}; pip install 'efficient-imagenet[{EXTRAS[name]}]' to read it") from None


def plugin_formats(data: bytes) -> tuple[str, ...]:
    """Formats that an installed plugin lets Pillow read, where the content is one of those; else ()."""
    kind = unread_kind(data)
    if kind is None:
        return ()
    if kind not in PLUGINS:
        raise BadSample("unsupported", f"{kind}; {CONVERT}")
    name, extension = PLUGINS[kind]
    package(name, kind)
    if extension not in Image.OPEN:
        importlib.import_module("pillow_heif").register_heif_opener()
    return (extension,)


def read_levels(data: bytes, options: DecodeOptions) -> Levels | None:
    """The levels of a JPEG, JPEG 2000 or PNG that Pillow reads wrongly or not at all; None for those that it reads."""
    if data[:2] == b"\xff\xd8":
        frame = jpeg_frame(data)
        if frame is None or (frame.bits == 8 and frame.marker in PILLOW_JPEG):
            return None
        if frame.marker not in PILLOW_JPEG:
            raise BadSample(
                "unsupported", f"{'JPEG-LS' if frame.marker == JPEG_LS else 'hierarchical JPEG'}; {CONVERT}"
            )
        bits, size, decoder = frame.bits, (frame.height, frame.width), "jpeg8_decode"
        kind = f"JPEG of {bits} bits a channel"
    elif data[:4] == b"\xff\x4f\xff\x51" or data[4:8] == b"jP  ":
        start = data.find(b"\xff\x4f\xff\x51")
        if start < 0 or len(data) < start + 43:
            return None
        # ITU-T T.800, A.5.1: the image's right, bottom, left and top; then of each channel its bits, less one
        right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
        channels = int.from_bytes(data[start + 40 : start + 42], "big")
        bits = max(byte & 0x7F for byte in data[start + 42 : start + 42 + 3 * channels : 3]) + 1
        if bits <= 8 or (channels == 1 and (bits == 16 or (10 <= bits < 16 and options.scale_16bit == WHITE_16BIT))):
            return None
        size, decoder = (bottom - top, right - left), "jpeg2k_decode"
        kind = f"JPEG 2000 of {bits} bits a channel"
    elif data[:8] == b"\x89PNG\r\n\x1a\n" and data[24:25] == b"\x10" and data[25:26] in b"\2\4\6":
        if options.scale_16bit == WHITE_16BIT:
            return None
        width, height = struct.unpack_from(">2I", data, 16)
        bits, size, decoder = 16, (height, width), "png_decode"
        kind = "colour PNG of 16 bits and --scale-16bit"
    else:
        return None
    check_pixels(*size, options)
    codecs = package("imagecodecs", kind)
    with corrupt_if_it_fails():
        levels = getattr(codecs, decoder)(data)
    if levels.dtype.kind != "u" or levels.shape not in (size, (*size, 3)):
        raise BadSample("unsupported", f"{kind}, {levels.dtype} {levels.shape}; {CONVERT}")
    return levels, 2**bits - 1


def tiff_needs_levels(image: Image.Image, options: DecodeOptions) -> bool:
    """Whether an opened TIFF is laid out in a way that Pillow 12.1 reads wrongly (by comparison with tifffile)."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    bits, samples, compressed = tags.get(BITS_PER_SAMPLE, (1,))[0], tags.get(SAMPLES, 1), tags.get(COMPRESSION, 1) != 1
    separate_planes = samples > 1 and tags.get(PLANES) == SEPARATE_PLANES
    no_alpha, reversed_bits = UNSPECIFIED in tags.get(EXTRA_SAMPLES, ()), tags.get(FILL_ORDER) == LOW_BIT_FIRST
    return (
        (separate_planes and (samples == 2 or no_alpha or (not compressed and (bits == 16 or reversed_bits))))
        or (bits == 8 and tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED)
        or (compressed and image.mode in ("I", "F") and tags.prefix == b"MM")
        or (image.mode == "F" and tags.get(PHOTOMETRIC) == MIN_IS_WHITE)
        or (bits == 16 and samples > 1 and options.scale_16bit != WHITE_16BIT)
    )


def read_tiff(data: bytes, options: DecodeOptions, why: str) -> Levels:
    """The levels of a TIFF's first picture, grey or RGB of any depth; `why` says what Pillow can't read."""
    kind = f"TIFF ({why})"
    tifffile = package("tifffile", kind)
    package("imagecodecs", kind)  # which tifffile decompresses with
    with corrupt_if_it_fails():
        page = tifffile.TiffFile(io.BytesIO(data)).pages[0]
        check_pixels(page.imagelength, page.imagewidth, options)
        photometric, bits, unsigned = int(page.photometric), page.bitspersample, page.sampleformat == 1
        maximum = 2**bits - 1 if unsigned and bits <= 16 else None
        samples = 3 if photometric == RGB else 1
        if (
            photometric not in (MIN_IS_BLACK, RGB, *([MIN_IS_WHITE] if maximum else []))
            or page.samplesperpixel != samples
            or page.imagedepth != 1
            or page.tags.valueof(ORIENTATION, 1) != 1
        ):
            raise BadSample("unsupported", f"{kind}; {CONVERT}")
        levels = page.asarray()
        if samples == 3 and page.planarconfig == SEPARATE_PLANES:
            levels = np.moveaxis(levels, 0, 2)  # (3, H, W) -> (H, W, 3)
        if levels.shape != (page.imagelength, page.imagewidth, *([3] if samples == 3 else [])):
            raise BadSample("corrupt", f"{kind}: {levels.shape}")
        return (maximum - levels if photometric == MIN_IS_WHITE else levels), maximum


@contextlib.contextmanager
def corrupt_if_it_fails() -> Iterator[None]:
    """What an optional decoder raises becomes a BadSample."""
    try:
        yield
    except (BadSample, MemoryError):
        raise
    except Exception as error:  # each codec has errors of its own
        raise BadSample("corrupt", one_line(error)) from None
