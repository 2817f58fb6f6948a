"""Every odd file and every real photograph has an asserted outcome. Needs `--real-data DIR`."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from pipeline.errors import BadSample
from pipeline.image.decode import Decoded, decode_into
from pipeline.store.geometry import FILTERS, FITS, Geometry

RESIZES = {
    "crop": lambda size: {"size": size},
    "stretch": lambda size: {"size": (size, size)},
    "pad": lambda size: {"size": None, "max_size": size},
}

# The source (height, width, mode, complaints) and the mean level of each channel, looked at once; or why it is refused.
ODD: dict[str, tuple[Decoded, tuple[int, int, int]] | str] = {
    "pil_sample_cmyk.jpg": (Decoded(100, 100, "CMYK", 0), (30, 5, 7)),
    "hopper_gray.jpg": (Decoded(128, 128, "L", 0), (85, 85, 85)),
    "hopper_orientation_6.jpg": (Decoded(128, 128, "RGB", 0), (90, 80, 95)),
    "hopper_orientation_3.jpg": (Decoded(128, 128, "RGB", 0), (90, 80, 95)),
    "orientation_rectangle.jpg": (Decoded(1, 2, "RGB", 0), (254, 0, 0)),
    "hopper_bad_exif.jpg": (Decoded(500, 500, "L", 1), (126, 126, 126)),
    "exif_typeerror.jpg": (Decoded(531, 800, "RGB", 0), (160, 159, 142)),
    "invalid-exif.jpg": (Decoded(200, 200, "RGB", 0), (92, 92, 92)),
    "truncated_jpeg.jpg": "truncated",
    "truncated_image.png": "truncated",
    "broken_data_stream.png": "corrupt",
    "hopper_16bit.pgm": (Decoded(128, 128, "I", 0), (84, 84, 84)),
    "16bit.cropped.tif": (Decoded(64, 64, "I;16", 0, 3), (1, 1, 1)),
    "apng_mode_16bit.png": (Decoded(64, 128, "RGBA", 0, 255), (255, 0, 0)),
    "apng_mode_palette_alpha.png": (Decoded(64, 128, "P", 0), (255, 0, 0)),
    "decompression_bomb.gif": "too-large",
    "decompression_bomb.ico": "too-large",
    "frozenpond.mpo": (Decoded(480, 640, "RGB", 0), (114, 110, 106)),
    "icc_profile_big.jpg": (Decoded(250, 425, "RGB", 0), (61, 111, 171)),
    "hopper.webp": (Decoded(128, 128, "RGB", 0), (90, 80, 96)),
    "transparent.webp": (Decoded(150, 200, "RGBA", 0), (196, 185, 187)),
    "pal8rletrns.png": (Decoded(64, 127, "P", 0), (105, 95, 116)),
    "bmp_g_pal8.bmp": (Decoded(64, 127, "P", 0), (115, 115, 116)),
    "bmp_b_badwidth.bmp": "too-large",
    "chi.gif": (Decoded(240, 320, "P", 0), (252, 253, 249)),
    "dispose_bgnd.gif": (Decoded(100, 100, "P", 0), (72, 169, 247)),
    "1_trns.png": (Decoded(64, 64, "1", 0), (124, 124, 124)),
    "7x13.png": (Decoded(13, 7, "RGB", 0), (142, 142, 142)),
    "junk_jpeg_header.jpg": (Decoded(768, 1024, "RGB", 1), (124, 123, 123)),
    "avif_hopper.avif": (Decoded(128, 128, "RGB", 0), (90, 80, 96)),
    "photoshop-200dpi-broken.jpg": (Decoded(200, 200, "RGB", 1), (92, 92, 92)),
}


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


@pytest.fixture(scope="module")
def odd(real_data: Path) -> dict[str, bytes]:
    return dict(members(real_data / "odd_images.tar"))


@pytest.fixture(scope="module")
def photos(real_data: Path) -> dict[str, bytes]:
    return dict(members(real_data / "imagenet_sample_700.tar"))


def convert(data: bytes, geometry: Geometry) -> tuple[np.ndarray, Decoded]:
    out = np.zeros(geometry.image_shape, np.uint8)
    return out, decode_into(data, [geometry], [out])


def test_every_odd_file_is_listed(odd: dict[str, bytes]) -> None:
    assert odd.keys() == ODD.keys()


@pytest.mark.parametrize("name", ODD)
def test_odd_file(odd: dict[str, bytes], name: str, capfd: pytest.CaptureFixture[str]) -> None:
    expected = ODD[name]
    if isinstance(expected, str):
        with pytest.raises(BadSample) as caught:
            convert(odd[name], Geometry(64))
        assert caught.value.reason == expected
    else:
        out, info = convert(odd[name], Geometry(64))
        assert info == expected[0]
        assert out.mean((0, 1)) == pytest.approx(expected[1], abs=2)
    assert capfd.readouterr() == ("", "")


def test_orientation_of_odd_files(odd: dict[str, bytes]) -> None:
    hopper, _ = convert(odd["hopper.webp"], Geometry(64))
    for name in ("hopper_orientation_6.jpg", "hopper_orientation_3.jpg"):
        as_stored, _ = convert(odd[name], Geometry(64))
        upright, _ = convert(odd[name], Geometry(64, exif_transpose=True))
        assert np.abs(upright.astype(int) - hopper).mean() < 8
        assert np.abs(as_stored.astype(int) - hopper).mean() > 30
    _, info = convert(odd["orientation_rectangle.jpg"], Geometry(64, exif_transpose=True))
    assert (info.height, info.width) == (2, 1)
    for name in ("hopper_bad_exif.jpg", "exif_typeerror.jpg", "invalid-exif.jpg"):
        convert(odd[name], Geometry(64, exif_transpose=True))


def test_every_real_photograph_converts(photos: dict[str, bytes]) -> None:
    assert len(photos) == 700
    complaints = sum(convert(data, Geometry(64))[1].warnings for data in photos.values())
    assert complaints == 0


def test_45_missing_bytes_are_noticed_in_every_photograph(photos: dict[str, bytes]) -> None:
    for name, data in photos.items():
        with pytest.raises(BadSample) as caught:
            convert(data[:-45], Geometry(64))
        assert caught.value.reason == "truncated", name


def test_decoded_pixels_are_those_of_pil(photos: dict[str, bytes]) -> None:
    for name in sorted(photos)[::7]:
        pixels = simplejpeg.decode_jpeg(photos[name], "RGB")
        expected = np.asarray(Image.open(io.BytesIO(photos[name])).convert("RGB"))
        np.testing.assert_array_equal(pixels, expected, err_msg=name)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("filter_name", FILTERS)
def test_photographs_match_torchvision(photos: dict[str, bytes], fit: str, filter_name: str) -> None:
    geometry = Geometry(256, fit, filter_name)
    resize = v2.Resize(**RESIZES[fit](256), interpolation=InterpolationMode(filter_name), antialias=True)
    transform = v2.Compose([resize, v2.CenterCrop(256)])
    differences = []
    for name in sorted(photos)[::14]:
        image = Image.open(io.BytesIO(photos[name])).convert("RGB")
        if min(image.size) >= 6 * 256:
            continue  # decoded at half scale
        out, _ = convert(photos[name], geometry)
        differences.append(np.abs(out.astype(int) - np.asarray(transform(image))).mean())
    assert len(differences) >= 48
    assert np.mean(differences) < 0.02
    assert max(differences) < (0.35 if filter_name == "box" else 0.02)


@pytest.mark.parametrize("filter_name", [name for name in FILTERS if name != "box"])
def test_half_scale_decoding_stays_within_one_level(photos: dict[str, bytes], filter_name: str) -> None:
    differences = []
    for name in sorted(photos)[::7]:
        image = Image.open(io.BytesIO(photos[name])).convert("RGB")
        size = min(image.size) // 6
        transform = v2.Compose([v2.Resize(size, InterpolationMode(filter_name), antialias=True), v2.CenterCrop(size)])
        out, _ = convert(photos[name], Geometry(size, filter=filter_name))
        differences.append(np.abs(out.astype(int) - np.asarray(transform(image))).mean())
    assert np.mean(differences) < 0.5
    assert max(differences) < 1
