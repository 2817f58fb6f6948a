"""Intact images of kinds that Pillow doesn't read: decoded where the extra is installed, else `unsupported` by name."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import BadSample
from pipeline.image.beyond_pillow import EXTRAS, jpeg_frame
from pipeline.image.decode import Decoded, DecodeOptions, decode_into
from pipeline.store.geometry import Geometry

Y, X = np.mgrid[:48, :48]
PICTURE = np.dstack([X * 5, Y * 5, (X + Y) * 2]).astype(np.uint8)
DEEP = PICTURE.astype(np.uint16) * 257


def decoded(data: bytes, options: DecodeOptions = DecodeOptions()) -> tuple[np.ndarray, Decoded]:  # noqa: B008
    out = np.empty((48, 48, 3), np.uint8)
    return out, decode_into(data, [Geometry(48)], [out], options)


def bad(data: bytes, options: DecodeOptions = DecodeOptions()) -> BadSample:  # noqa: B008
    with pytest.raises(BadSample) as caught:
        decoded(data, options)
    return caught.value


def heic() -> bytes:
    pytest.importorskip("pillow_heif").register_heif_opener()
    return saved("HEIF", quality=100, chroma=444)


def jpeg_xl() -> bytes:
    pytest.importorskip("pillow_jxl")
    return saved("JXL", lossless=True)


def saved(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PICTURE).save(buffer, kind, **options)
    return buffer.getvalue()


def encoded(codec: str, levels: np.ndarray = PICTURE, **options: object) -> bytes:
    data: bytes = getattr(pytest.importorskip("imagecodecs"), f"{codec}_encode")(
        np.ascontiguousarray(levels), **options
    )
    return data


def tiff(levels: np.ndarray = PICTURE, **options: object) -> bytes:
    buffer = io.BytesIO()
    pytest.importorskip("tifffile").imwrite(buffer, levels, **{"photometric": "rgb", **options})
    return buffer.getvalue()


READ: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "HEIC": (heic, "HEIC", "pillow_heif"),
    "JPEG XL": (jpeg_xl, "JPEG XL", "pillow_jxl"),
    "JPEG of 12 bits": (lambda: encoded("jpeg8", DEEP >> 4, bitspersample=12, level=100), "12 bits", "imagecodecs"),
    "lossless JPEG of 16 bits": (
        lambda: encoded("jpeg8", DEEP[..., 0], lossless=True, bitspersample=16), "16 bits", "imagecodecs",
    ),
    "JPEG 2000 of 12 bits": (
        lambda: encoded("jpeg2k", DEEP >> 4, bitspersample=12, level=0, reversible=True), "12 bits", "imagecodecs",
    ),
    "TIFF of floats": (lambda: tiff(PICTURE.astype(np.float32) / 255), "TIFF", "tifffile"),
    "TIFF of grey doubles": (lambda: tiff(X / 47, photometric="minisblack"), "TIFF", "tifffile"),
    "TIFF of JPEG XL": (lambda: tiff(compression="jpegxl", compressionargs={"lossless": True}), "TIFF", "tifffile"),
    "TIFF of WebP": (lambda: tiff(compression="webp", compressionargs={"lossless": True}), "TIFF", "tifffile"),
    "TIFF of LERC": (lambda: tiff(compression="lerc"), "TIFF", "tifffile"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_read_with_an_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, kind, package = READ[name]
    data = make()
    out, source = decoded(data)
    is_grey = np.ptp(out, axis=2).max() == 0
    wanted = (X * 255 / (47 if "doubles" in name else 51))[..., None] if is_grey else PICTURE
    assert np.abs(out.astype(int) - wanted).max() <= (3 if package == "pillow_heif" or "12" in name else 1)
    assert (source.height, source.width) == (48, 48)

    monkeypatch.setitem(sys.modules, package, None)
    refused = bad(data)
    assert refused.reason == "unsupported"
    assert kind in refused.detail
    assert f"efficient-imagenet[{EXTRAS[package]}]" in refused.detail


NOT_READ = {
    "JPEG-LS": b"\xff\xd8\xff\xf7\0\x0b\x08\0\x30\0\x30\x01\x01\x11\0" + bytes(60),
    "hierarchical": b"\xff\xd8\xff\xc5\0\x0b\x08\0\x30\0\x30\x01\x01\x11\0" + bytes(60),
    "JPEG XR": b"II\xbc\x01" + bytes(60),
    "PSD": b"8BPS\0\1" + bytes(60),
    "OpenEXR": b"v/1\x01" + bytes(60),
    "DDS": b"DDS |" + bytes(60),
    "DICOM": bytes(128) + b"DICM" + bytes(60),
    "FITS": b"SIMPLE  =                    T",
    "PDF": b"%PDF-1.7\n",
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "SVG": b'<?xml version="1.0"?>\n<!-- a drawing -->\n<svg xmlns="http://www.w3.org/2000/svg"/>',
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", NOT_READ)
def test_kinds_that_are_never_read_are_named(kind: str) -> None:
    refused = bad(NOT_READ[kind])
    assert refused.reason == "unsupported"
    assert kind in refused.detail


@pytest.mark.parametrize(
    ("levels", "options"),
    [
        (np.zeros((48, 48, 13), np.uint16), {"photometric": "minisblack", "planarconfig": "contig"}),
        (PICTURE, {"photometric": "minisblack", "planarconfig": "contig"}),
        (np.zeros((48, 48, 4), np.uint8), {"photometric": "minisblack", "planarconfig": "contig"}),
        (PICTURE.astype(np.float32), {"extratags": [(274, "H", 1, 6, True)]}),
    ],
)
def test_tiffs_that_are_no_picture_for_us(levels: np.ndarray, options: dict[str, object]) -> None:
    assert bad(tiff(levels, **options)).reason == "unsupported"


@pytest.mark.parametrize("name", READ)
def test_damaged_ones_are_bad_samples_and_silent(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = READ[name][0]()
    for length in range(4, len(data), max(1, len(data) // 40)):
        try:
            decoded(data[:length])
        except BadSample:
            continue
    for at in range(4, len(data), max(1, len(data) // 40)):
        try:
            decoded(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        except BadSample:
            continue
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", READ)
def test_they_obey_the_limit_of_pixels(name: str) -> None:
    assert bad(READ[name][0](), DecodeOptions(max_pixels=48 * 47)).reason == "too-large"


def test_colour_of_16_bits_is_scaled_from_all_its_bits() -> None:
    options = DecodeOptions(scale_16bit=4095)
    levels = DEEP >> 4
    for data in (encoded("png", levels), tiff(levels), tiff(np.moveaxis(levels, 2, 0), planarconfig="separate")):
        out, source = decoded(data, options)
        assert np.abs(out.astype(int) - PICTURE).max() <= 1
        assert source.peak_16bit >= 230
        assert decoded(data)[1].peak_16bit in (14, 15)
        assert bad(data, DecodeOptions(scale_16bit=1000)).reason == "unsupported"


def test_jpeg_2000_of_12_bits_has_its_own_white() -> None:
    data = encoded("jpeg2k", DEEP[..., 0] >> 4, bitspersample=12, level=0, reversible=True)
    for scale in (65535, 4095, "max"):
        assert np.abs(decoded(data, DecodeOptions(scale_16bit=scale))[0] - PICTURE[..., :1].astype(int)).max() <= 1


@pytest.mark.quick
def test_frame_of_a_jpeg_is_found_behind_anything() -> None:
    plain = saved("JPEG")
    assert jpeg_frame(plain) == (0xC0, 8, 48, 48, 3)
    exif = b"\xff\xe1" + (40 + 2).to_bytes(2, "big") + (b"\xff\xc2\0\x11\x08" * 8)  # looks like a frame header
    assert jpeg_frame(plain[:2] + exif + plain[2:]) == (0xC0, 8, 48, 48, 3)
    assert jpeg_frame(plain[:2] + b"\xff\xff\xff" + plain[2:]) == (0xC0, 8, 48, 48, 3)
    assert jpeg_frame(plain[:2] + b"junk" + plain[2:]) == (0xC0, 8, 48, 48, 3)
    assert jpeg_frame(saved("JPEG", progressive=True)) == (0xC2, 8, 48, 48, 3)
    for length in range(len(plain)):
        assert jpeg_frame(plain[:length]) in (None, (0xC0, 8, 48, 48, 3))
    assert jpeg_frame(b"\xff\xd8" + b"\xff\xd9" * 9) is None
