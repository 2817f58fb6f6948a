"""decode_into: every format, oddity and failure, and the distance to torchvision's own resize."""

from __future__ import annotations

import io
import logging
import threading
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import AvifImagePlugin, BmpImagePlugin, Image, ImageOps
from sklearn.datasets import load_sample_images
from torchvision.transforms import InterpolationMode, v2

from pipeline.errors import BadSample
from pipeline.image import decode
from pipeline.image.decode import Decoded, DecodeOptions, decode_into
from pipeline.store.geometry import FILTERS, FITS, Geometry

PHOTOS: list[np.ndarray] = load_sample_images().images  # two photographs, uint8 (427, 640, 3)


def encode(image: np.ndarray | Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


SMALL = Geometry(32)
DEFAULTS = DecodeOptions()


def decoded(
    data: bytes | np.ndarray, geometry: Geometry = SMALL, options: DecodeOptions = DEFAULTS
) -> tuple[np.ndarray, Decoded]:
    out = np.full(geometry.image_shape, 77, np.uint8)
    return out, decode_into(data, [geometry], [out], options)


def reason(data: bytes | np.ndarray, **options: Any) -> str:
    out = np.full((32, 32, 3), 77, np.uint8)
    with pytest.raises(BadSample) as caught:
        decode_into(data, [Geometry(32)], [out], DecodeOptions(**options))
    assert (out == 77).all(), "outs must be untouched"
    return caught.value.reason


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Mean absolute difference in levels of 255."""
    return float(np.abs(a.astype(int) - b).mean())


def torchvision_resize(image: Any, geometry: Geometry) -> Any:
    size = geometry.size
    sides: dict[str, dict[str, Any]] = {
        "crop": {"size": size},
        "stretch": {"size": (size, size)},
        "pad": {"size": None, "max_size": size},
    }
    resize = v2.Resize(**sides[geometry.fit], interpolation=InterpolationMode(geometry.filter), antialias=True)
    return v2.Compose([resize, v2.CenterCrop(size)])(image)


def like_torchvision(image: Image.Image, geometry: Geometry) -> np.ndarray:
    return np.asarray(torchvision_resize(image, geometry))


# Geometry and filters


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("size", [224, 112])
def test_photographs_match_torchvision(fit: str, filter_name: str, size: int) -> None:
    for photo in PHOTOS:
        data = encode(photo, quality=92)
        geometry = Geometry(size, fit, filter_name)
        ours, _ = decoded(data, geometry)
        expected = like_torchvision(Image.open(io.BytesIO(data)), geometry)
        assert difference(ours, expected) < (0.35 if filter_name == "box" else 0.02)


@pytest.mark.parametrize("filter_name", ["bicubic", "bilinear"])
def test_photographs_match_torchvision_on_tensors(filter_name: str) -> None:
    data = encode(PHOTOS[0], quality=92)
    geometry = Geometry(224, filter=filter_name)
    tensor = v2.functional.pil_to_tensor(Image.open(io.BytesIO(data)))
    expected = torchvision_resize(tensor, geometry).permute(1, 2, 0).numpy()
    assert difference(decoded(data, geometry)[0], expected) < 0.02


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(
    ("height", "width"),
    [
        (1, 1),
        (1, 2),
        (13, 7),
        (7, 13),
        (31, 32),
        (32, 32),
        (33, 32),
        (40, 33),
        (47, 90),
        (1000, 1),
        (2, 999),
        (333, 64),
    ],
)
def test_sizes_and_aspects_match_torchvision(fit: str, height: int, width: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    geometry = Geometry(32, fit, "bilinear")
    ours, info = decoded(encode(image, "PNG"), geometry)
    assert (info.height, info.width) == (height, width)
    if fit == "pad" and max(height, width) >= 32 * min(height, width):
        return  # torchvision would make a side of 0 pixels
    expected = like_torchvision(Image.fromarray(image), geometry)
    # Noise is the hardest case: float32 boxes move an edge of the kernel by a fraction of a level.
    assert difference(ours, expected) < 0.1
    assert np.abs(ours.astype(int) - expected).max() <= 3


def test_an_image_of_the_stored_size_is_kept_as_it_is() -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for fit in FITS:
        np.testing.assert_array_equal(decoded(encode(image, "PNG"), Geometry(32, fit))[0], image)


def test_a_long_thin_image_needs_no_memory() -> None:
    data = encode(Image.new("L", (1, 60_000), 50), "PNG")
    out, info = decoded(data, Geometry(256))  # would be 256 x 15,360,000 pixels if it were resized whole
    assert (info.height, info.width) == (60_000, 1)
    assert (out == 50).all()


def test_pad_has_black_borders() -> None:
    out, _ = decoded(encode(Image.new("RGB", (40, 20), (200, 100, 50)), "PNG"), Geometry(32, "pad"))
    assert (out[8:24] == (200, 100, 50)).all()
    assert not out[:8].any()
    assert not out[24:].any()


def test_several_sizes_equal_each_alone_and_every_run() -> None:
    data = encode(PHOTOS[1])
    geometries = [Geometry(size) for size in (64, 96, 128)]
    outs = [np.empty(geometry.image_shape, np.uint8) for geometry in geometries]
    decode_into(data, geometries, outs)
    again = [np.empty_like(out) for out in outs]
    decode_into(data, geometries, again)
    for out, repeated in zip(outs, again, strict=True):
        np.testing.assert_array_equal(out, repeated)
    for geometry, out in zip(geometries, outs, strict=True):  # 64 is decoded at half scale, the others are not
        np.testing.assert_array_equal(out, decoded(data, geometry)[0])


def test_writes_into_views_of_a_larger_block() -> None:
    block = np.zeros((3, 32, 32, 3), np.uint8)
    decode_into(encode(PHOTOS[0]), [Geometry(32)], [block[1]])
    assert block[1].any()
    assert not block[0].any()
    assert not block[2].any()


# JPEG


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2},
        {"progressive": True},
        {"optimize": True, "quality": 30},
        {"restart_marker_blocks": 2},
        {"icc_profile": b"\0" * 500_000},
        {"exif": b"Exif\0\0garbage"},
        {"keep_rgb": True},
    ],
)
def test_jpeg_pixels_are_those_of_pil(options: dict[str, Any]) -> None:
    data = encode(PHOTOS[0], **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert_whole(data, expected)


def assert_whole(data: bytes, expected: np.ndarray) -> None:
    """Decoding alone is right: compare a part that is stored without being resized."""
    height, width = expected.shape[:2]
    left = round((width - height) / 2)
    out, info = decoded(data, Geometry(height))
    np.testing.assert_array_equal(out, expected[:, left : left + height])
    assert info == Decoded(*expected.shape[:2], "RGB", 0)


def test_grey_jpeg_has_three_equal_channels() -> None:
    out, info = decoded(encode(Image.fromarray(PHOTOS[0]).convert("L")), Geometry(96))
    assert info.mode == "L"
    assert (out == out[:, :, :1]).all()
    assert out.std() > 20


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_gray_channels(kind: str) -> None:
    for image in (Image.fromarray(PHOTOS[0]), Image.fromarray(PHOTOS[0]).convert("L")):
        data = encode(image, kind)
        geometry = Geometry(128, channels="gray")
        out, _ = decoded(data, geometry)
        expected = like_torchvision(Image.open(io.BytesIO(data)).convert("L"), geometry)
        assert out.shape == (128, 128, 1)
        assert difference(out[:, :, 0], expected) < 0.6  # luma after the resize, not before it: rounding


@pytest.mark.parametrize("factor", [6, 7.3, 12])
@pytest.mark.parametrize("filter_name", [name for name in FILTERS if name != "box"])
def test_half_scale_decoding_stays_within_one_level(factor: float, filter_name: str) -> None:
    for photo in PHOTOS:
        data = encode(photo[:, :639], quality=92)  # an odd side
        geometry = Geometry(int(427 / factor), filter=filter_name)
        ours, info = decoded(data, geometry)
        assert (info.height, info.width) == (427, 639)
        expected = like_torchvision(Image.open(io.BytesIO(data)), geometry)
        assert 0 < difference(ours, expected) < 1


def test_full_decoding_where_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*args: Any, **kwargs: Any) -> np.ndarray:
        seen.append(kwargs["min_factor"])
        return real(*args, **kwargs)

    real = simplejpeg.decode_jpeg
    monkeypatch.setattr(decode.simplejpeg, "decode_jpeg", spy)
    data = encode(PHOTOS[0])
    for size, filter_name in ((71, "bicubic"), (72, "bicubic"), (71, "box")):
        decoded(data, Geometry(size, filter=filter_name))
    assert seen == [2, 1, 1]


def cmyk_image() -> Image.Image:
    return Image.fromarray(PHOTOS[0]).convert("CMYK")


def test_cmyk_jpeg_is_not_inverted() -> None:
    out, info = decoded(encode(cmyk_image(), quality=95), Geometry(96))
    assert info == Decoded(427, 640, "CMYK", 0)
    assert difference(out, like_torchvision(Image.fromarray(PHOTOS[0]), Geometry(96))) < 3


def test_jpeg_with_junk_between_segments_converts_and_is_counted() -> None:
    data = encode(PHOTOS[0])
    junk = data[:20] + b"\0\0\0\0" + data[20:]
    out, info = decoded(junk)
    np.testing.assert_array_equal(out, decoded_full(data))
    assert info.warnings == 1
    _, info = decoded(data + b"trailing junk, \xff\xd8 even")
    assert info.warnings == 0


def decoded_full(data: bytes) -> np.ndarray:
    """Through PIL, which always decodes at full scale."""
    geometry = Geometry(32)
    out = np.empty(geometry.image_shape, np.uint8)
    image, info = decode.open_rgb(data, DecodeOptions(), exif_transpose=False)
    pixels = np.asarray(image)
    assert info.height
    decode.resize_into(
        pixels, decode.crop_placement(info.height, info.width, geometry).box, (32, 32), geometry.filter, out
    )
    return out


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
@pytest.mark.parametrize("missing", [1, 2, 3, 45, 1000, 20_000])
def test_truncated_jpeg(options: dict[str, Any], missing: int) -> None:
    assert reason(encode(PHOTOS[0], **options)[:-missing]) == "truncated"


# EXIF orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_on_request_only(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(PHOTOS[0][:90, :130], kind, exif=exif.tobytes())
    stored = Image.open(io.BytesIO(data))
    stored.load()
    for transpose in (False, True):
        geometry = Geometry(48, exif_transpose=transpose)
        image = ImageOps.exif_transpose(stored) if transpose else stored
        out, info = decoded(data, geometry)
        assert (info.height, info.width) == (image.height, image.width)
        assert difference(out, like_torchvision(image.convert("RGB"), geometry)) < 0.1


def test_broken_exif_is_no_orientation() -> None:
    good = encode(PHOTOS[0])
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12", b"Exif\0\0II*\0\xff\xff\xff\x7f"):
        for kind in ("JPEG", "PNG"):
            data = encode(PHOTOS[0], kind, exif=exif)
            out, info = decoded(data, Geometry(96, exif_transpose=True))
            assert (info.height, info.width) == (427, 640)
            if kind == "JPEG":
                np.testing.assert_array_equal(out, decoded(good, Geometry(96))[0])


# Formats


@pytest.mark.parametrize(
    ("kind", "options", "bound"),
    [
        ("PNG", {}, 0),
        ("PNG", {"icc_profile": bytes(3_000_000)}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 3),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("TIFF", {"compression": "tiff_adobe_deflate"}, 0),
        ("TIFF", {"compression": "jpeg", "quality": 95}, 4),
        ("PPM", {}, 0),
        ("QOI", {}, 0),
        ("JPEG2000", {}, 0),
        ("JPEG2000", {"no_jp2": True}, 0),
        ("AVIF", {"quality": 95}, 3),
        ("GIF", {}, 12),
        ("JPEG", {"quality": 95}, 3),
    ],
)
def test_format(kind: str, options: dict[str, Any], bound: float) -> None:
    image = PHOTOS[0][:64, :64]
    out, info = decoded(encode(image, kind, **options), Geometry(64))
    assert (info.height, info.width, info.warnings) == (64, 64, 0)
    assert difference(out, image) <= bound


def test_icon() -> None:
    out, info = decoded(encode(Image.fromarray(PHOTOS[0][:64, :64]), "ICO", sizes=[(16, 16), (64, 64)]), Geometry(64))
    assert (info.height, info.width) == (64, 64)
    np.testing.assert_array_equal(out, PHOTOS[0][:64, :64])


def test_first_frame_of_animations() -> None:
    frames = [Image.new("RGB", (32, 32), color) for color in ((255, 0, 0), (0, 255, 0))]
    for kind, options in (
        ("GIF", {"disposal": 2}),
        ("WEBP", {"lossless": True}),
        ("PNG", {}),
        ("TIFF", {}),
        ("MPO", {}),
    ):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        out, info = decoded(data)
        assert difference(out, np.asarray(frames[0])) < 2, kind
        assert info.warnings == 0


def test_16_bit_png_and_pgm() -> None:
    levels = (np.arange(32 * 32, dtype=np.uint16) * 64).reshape(32, 32)
    expected = np.round(levels / 257).astype(np.uint8)
    for kind in ("PNG", "PPM", "TIFF", "JPEG2000"):
        out, _ = decoded(encode(Image.fromarray(levels), kind))
        np.testing.assert_array_equal(out, np.repeat(expected[:, :, None], 3, 2))


def test_alpha_over_the_background() -> None:
    clear = encode(Image.new("RGBA", (8, 8), (9, 9, 9, 0)), "PNG")
    assert (decoded(clear)[0] == 255).all()
    assert (decoded(clear, options=DecodeOptions(background=(0, 10, 20)))[0] == (0, 10, 20)).all()
    assert (decoded(np.zeros((8, 8, 4), np.uint8))[0] == 255).all()


def test_content_decides_whatever_the_name() -> None:
    for kind, mode in (("PNG", "RGB"), ("GIF", "P"), ("BMP", "RGB")):
        assert decoded(encode(PHOTOS[0][:9, :9], kind))[1].mode == mode


# Arrays


def test_arrays_are_resized_as_the_same_png_is() -> None:
    for shape in ((40, 50), (40, 50, 1), (40, 50, 3), (40, 50, 4)):
        array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        flat = array[:, :, 0] if shape[-1] == 1 else array
        out, info = decoded(array)
        np.testing.assert_array_equal(out, decoded(encode(flat, "PNG"))[0])
        assert (info.height, info.width) == (40, 50)


def test_16_bit_arrays() -> None:
    assert (decoded(np.full((4, 4), 25700, np.uint16))[0] == 100).all()
    assert (decoded(np.full((4, 4, 3), 25700, np.uint16))[0] == 100).all()


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4), np.float32), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8), np.zeros((0, 4), np.uint8)],
)
def test_bad_arrays(array: np.ndarray) -> None:
    assert reason(array) == "bad-shape"


# What can't be converted


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "not-an-image"),
        (b"Py and other words that start like a portable pixmap", "not-an-image"),
        (b"P7 is no format of ours", "not-an-image"),
        ("Ein Text, nichts als Text".encode("utf-16"), "not-an-image"),
        (bytes(1000), "not-an-image"),
        (b"\xff\xd8", "not-an-image"),
        (b"\xff\xd8\xff\xe0" + bytes(1000), "truncated"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"GIF89a", "truncated"),
        (b"BM" + b"\xff" * 100, "truncated"),
    ],
)
def test_no_image(data: bytes, expected: str) -> None:
    assert reason(data) == expected


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "JPEG2000", "JPEG", "PPM"])
def test_truncated_anywhere(kind: str) -> None:
    data = encode(PHOTOS[0][:60, :50], kind)
    for length in range(16, len(data) - 45, max(1, len(data) // 100)):
        assert reason(data[:length]) in ("truncated", "corrupt", "not-an-image"), length
    assert reason(data[: len(data) // 2]) == "truncated"


def test_damaged_png_is_corrupt() -> None:
    data = bytearray(encode(PHOTOS[0][:60, :50], "PNG"))
    data[len(data) // 2] ^= 0xFF
    assert reason(bytes(data)) == "corrupt"


def giant_png() -> bytes:
    data = bytearray(encode(PHOTOS[0][:8, :8], "PNG"))
    data[16:24] = (30_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def giant_jpeg() -> bytes:
    data = bytearray(encode(PHOTOS[0][:8, :8]))
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = (30_000).to_bytes(2, "big") * 2
    return bytes(data)


def test_giants_are_refused_before_they_are_decoded() -> None:
    assert reason(giant_png()) == "too-large"
    assert reason(giant_jpeg()) == "too-large"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_max_pixels_is_exact(kind: str) -> None:
    data = encode(PHOTOS[0][:31, :33], kind)
    assert reason(data, max_pixels=31 * 33 - 1) == "too-large"
    decoded(data, options=DecodeOptions(max_pixels=31 * 33))


def test_max_pixels_of_arrays_and_cmyk() -> None:
    assert reason(np.zeros((9, 9), np.uint8), max_pixels=80) == "too-large"
    assert reason(encode(cmyk_image()), max_pixels=80) == "too-large"


def test_max_pixels_above_pils_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    decoded(encode(PHOTOS[0], "PNG"))
    assert Image.MAX_IMAGE_PIXELS == 10


def test_a_codec_that_pil_lacks_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(PHOTOS[0][:8, :8], "AVIF")
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    assert reason(data) == "unsupported"


# Noise


def warning_png() -> bytes:
    """A PNG that PIL warns about: an APNG whose frame count is 0."""
    data = encode(PHOTOS[0][:8, :8], "PNG")
    body = b"acTL" + bytes(8)
    chunk = (8).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return data[:33] + chunk + data[33:]


@pytest.fixture
def loud_tiff() -> bytes:
    """A fax TIFF with a damaged line, which libtiff decodes and reports on the terminal."""
    image = Image.fromarray(PHOTOS[0][:64, :64]).convert("1")
    data = bytearray(encode(image, "TIFF", compression="group4"))
    data[40] ^= 0xFF
    data[60] ^= 0xFF
    return bytes(data)


def test_complaints_are_counted_and_silent(loud_tiff: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoded(warning_png())[1].warnings == 1
        assert decoded(loud_tiff)[1].warnings >= 1
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("PIL").propagate
    assert not logging.getLogger("PIL").handlers


def test_log_records_of_pil_are_counted_and_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(self: Any) -> Any:
        logging.getLogger("PIL.BmpImagePlugin").error("noise")
        return super(BmpImagePlugin.BmpImageFile, self).load()

    monkeypatch.setattr(BmpImagePlugin.BmpImageFile, "load", load, raising=False)
    assert decoded(encode(PHOTOS[0][:8, :8], "BMP"))[1].warnings >= 1
    assert capfd.readouterr() == ("", "")


def test_threads_do_not_disturb_each_other() -> None:
    data = [encode(PHOTOS[0]), encode(PHOTOS[1]), encode(PHOTOS[1], "PNG"), encode(cmyk_image())]
    geometry = Geometry(96)
    expected = [decoded(item, geometry)[0] for item in data]
    wrong: list[int] = []

    def work(start: int) -> None:
        for step in range(12):
            i = (start + step) % len(data)
            if not np.array_equal(decoded(data[i], geometry)[0], expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert Image.MAX_IMAGE_PIXELS == 89478485


def test_a_buffer_is_kept_but_not_a_giant_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "KEPT_BYTES", 1000)
    kept = decode._buffer(10, 10)
    assert np.shares_memory(kept, decode._buffer(5, 5))
    large = decode._buffer(50, 50)
    assert large.shape == (50, 50, 3)
    assert not np.shares_memory(large, decode._buffer(50, 50))
