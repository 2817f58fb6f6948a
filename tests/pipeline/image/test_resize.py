"""Which resizer is in use, that it resizes as PIL does, and that a mixed-up PIL is noticed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.compiled.packages import SimdVersion, file_problems, installed_simd, source_digest
from pipeline.image import resize as resizer


@pytest.fixture
def reload() -> Iterator[None]:
    """Forget which resizer was loaded, before and after."""
    caches = (resizer._simd, resizer.software_versions)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


BOXES = [(0.0, 0.0, 50.0, 40.0), (3.25, 1.5, 44.0, 39.75), (5.0, 5.0, 6.0, 6.0), (0.0, 0.5, 16.0, 30.0)]


@pytest.mark.quick
@pytest.mark.parametrize("filter_name", resizer.FILTERS)
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("size", [(16, 12), (50, 12), (16, 40), (50, 40), (90, 70), (1, 1)])
def test_resizes_as_pil_does(filter_name: str, box: resizer.Box, size: tuple[int, int]) -> None:
    pixels = noise(40, 50)
    image = Image.fromarray(pixels).resize(size, resizer.FILTERS[filter_name], box)
    for mode, channels in (("RGB", 3), ("L", 1)):
        expected = np.asarray(image.convert(mode)).reshape(size[1], size[0], channels).astype(int)
        stock, used = np.empty(expected.shape, np.uint8), np.empty(expected.shape, np.uint8)
        resizer.resize_with_pillow(pixels, box, size, filter_name, stock)
        np.testing.assert_array_equal(stock, expected)
        resizer.resize_into(pixels, box, size, filter_name, used)
        assert np.abs(used - expected).max() <= 2


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    out_height=st.integers(1, 70),
    out_width=st.integers(1, 70),
    cut=st.tuples(*[st.floats(0, 0.49)] * 4),
    whole=st.booleans(),
    filter_name=st.sampled_from(sorted(resizer.FILTERS)),
)
@settings(max_examples=400, deadline=None)
def test_any_resize_is_near_pils_and_stays_in_its_place(
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    cut: tuple[float, float, float, float],
    whole: bool,
    filter_name: str,
) -> None:
    pixels = noise(height, width)
    left, top, right, bottom = (0.0, 0.0, 0.0, 0.0) if whole else cut
    box = (width * left, height * top, width * (1 - right), height * (1 - bottom))
    expected = np.empty((out_height, out_width, 3), np.uint8)
    resizer.resize_with_pillow(pixels, box, (out_width, out_height), filter_name, expected)
    block = np.full((out_height + 2, out_width + 8, 3), 99, np.uint8)
    resizer.resize_into(pixels, box, (out_width, out_height), filter_name, block[1:-1, 4:-4])
    assert np.abs(block[1:-1, 4:-4].astype(int) - expected).max() <= 3
    block[1:-1, 4:-4] = 99
    assert (block == 99).all()


@pytest.mark.quick
def test_a_cut_copies() -> None:
    pixels, out = noise(30, 40), np.empty((12, 20, 3), np.uint8)
    resizer.resize_into(pixels, (3.0, 5.0, 23.0, 17.0), (20, 12), "lanczos", out)
    np.testing.assert_array_equal(out, pixels[5:17, 3:23])


@pytest.mark.quick
def test_one_channel_is_the_luma() -> None:
    pixels = np.empty((4, 4, 3), np.uint8)
    pixels[:] = (200, 100, 50)
    out = np.empty((2, 2, 1), np.uint8)
    resizer.resize_into(pixels, (0.0, 0.0, 4.0, 4.0), (2, 2), "box", out)
    assert (out == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)).all()


@pytest.mark.quick
@pytest.mark.skipif(resizer.resizer().startswith("pillow "), reason="pillow-simd can't be had here")
@pytest.mark.parametrize(
    ("pixels", "box", "out"),
    [
        (noise(9, 9)[:, ::2], (0.0, 0.0, 5.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 10.0, 9.0), np.empty((4, 4, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.empty((4, 5, 3), np.uint8)),
        (noise(9, 9), (0.0, 0.0, 9.0, 9.0), np.empty((4, 8, 3), np.uint8)[:, ::2]),
        (noise(9, 9), (5.0, 0.0, 5.0, 9.0), np.empty((4, 4, 3), np.uint8)),
    ],
)
def test_what_c_could_not_survive_never_reaches_it(pixels: np.ndarray, box: resizer.Box, out: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        resizer.resize_into(pixels, box, (4, 4), "bicubic", out)


@pytest.mark.usefixtures("reload")
def test_without_pillow_simd_pillow_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizer, "installed_simd", lambda: None)
    assert resizer.resizer() == f"pillow {PIL.__version__}"
    assert resizer.software_versions()["resizer"] == f"pillow {PIL.__version__}"
    assert resizer.simd_problems() == []
    pixels, out = noise(40, 50), np.empty((12, 16, 3), np.uint8)
    resizer.resize_into(pixels, (0.0, 0.0, 50.0, 40.0), (16, 12), "bicubic", out)
    expected = Image.fromarray(pixels).resize((16, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(out, np.asarray(expected))
    lines, sound = resizer.report()
    assert sound
    assert "without SIMD: pillow-simd isn't installed" in lines[0]


@pytest.mark.quick
@pytest.mark.usefixtures("reload")
@pytest.mark.parametrize(
    ("version", "flags", "problem"),
    [
        (
            SimdVersion("12.1.1.post0", "avx2", source_digest()),
            {"sse4_2"},
            "built for avx2, which this processor lacks",
        ),
        (SimdVersion("12.1.1.post0", "sse4", "c0000000"), {"sse4_2"}, "built from another release's source"),
        (SimdVersion("12.1.1.post0", "sse4", source_digest()), {"sse4_2"}, "can't be loaded"),
    ],
)
def test_an_unfit_library_is_a_problem_and_not_used(
    monkeypatch: pytest.MonkeyPatch, version: SimdVersion, flags: set[str], problem: str
) -> None:
    monkeypatch.setattr(resizer, "installed_simd", lambda: version)
    monkeypatch.setattr(resizer, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(resizer, "SIMD_MODULE", "no_such_module")
    assert resizer.resizer() == f"pillow {PIL.__version__}"
    assert problem in resizer.simd_problems()[0]


@pytest.mark.quick
def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    version = SimdVersion("12.1.1.post0", "avx2", "c1a2b3c4")
    assert str(version) == "12.1.1.post0+avx2.c1a2b3c4"
    assert version.cpu_flag == "avx2"
    monkeypatch.setattr("importlib.metadata.version", lambda name: str(version))
    assert installed_simd() == version


@pytest.mark.quick
def test_software_versions_can_be_stored() -> None:
    versions = resizer.software_versions()
    assert json.loads(json.dumps(versions)) == versions
    assert versions["pillow"] == PIL.__version__
    assert {"resizer", "simplejpeg", "numpy", "zarr", "efficient-imagenet", "libjpeg_turbo"} <= versions.keys()


def test_this_installation_is_coherent() -> None:
    assert resizer.check_coherent() == []
    assert resizer.missing_formats() == []
    done = subprocess.run([sys.executable, "-m", "pipeline.image.resize"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert resizer.resizer() in done.stdout


def test_two_owners_of_the_folder_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pillow-12.1.1", "pillow_simd-12.1.1.post0"):
        info = tmp_path / f"{name}.dist-info"
        info.mkdir()
        distribution, _, version = name.partition("-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert resizer.pil_owners() == ["pillow", "pillow-simd"]
    assert "pillow and pillow-simd share the folder PIL" in resizer.check_coherent()[0]


@pytest.mark.quick
def test_altered_missing_and_foreign_files_are_problems(tmp_path: Path) -> None:
    folder, info = tmp_path / "PIL", tmp_path / "pillow-1.0.dist-info"
    folder.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 1.0\n")
    record = []
    for name in ("Image.py", "_core.so", "gone.py"):
        data = name.encode()
        (folder / name).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"PIL/{name},sha256={digest},{len(data)}\n")
    (info / "RECORD").write_text("".join(record))
    distribution = importlib.metadata.PathDistribution(info)
    assert file_problems(distribution) == []

    (folder / "_core.so").write_bytes(b"of another release")
    (folder / "gone.py").unlink()
    (folder / "_extra.so").write_bytes(b"left behind")
    problems = file_problems(distribution)
    assert len(problems) == 3
    assert "_core.so: not the file that pillow 1.0 installed" in problems[0]
    assert "gone.py: missing" in problems[1]
    assert "_extra.so: left by another release" in problems[2]


def test_a_broken_resizer_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resizer, "check_coherent", lambda: ["PIL is in pieces"])
    assert resizer.main() == 1
    assert "error: PIL is in pieces" in capsys.readouterr().out


def test_a_format_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(resizer._ROUND_TRIPS, "JPEG 2000", lambda: "JPEG2000: encoder not available")
    assert resizer.main() == 0
    assert "can't read JPEG 2000" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize("sums", [resizer.channel_sums, resizer.channel_sums_numpy])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 3, 5, 3), (3, 7, 9, 1), (2, 64, 33, 3), (0, 4, 4, 3)])
def test_channel_sums(sums: Callable[..., tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    columns = images.reshape(-1, shape[-1]).astype(np.int64)
    got = sums(images)
    assert all(part.dtype == np.int64 for part in got)
    np.testing.assert_array_equal(got, [columns.sum(0), (columns**2).sum(0)])


@pytest.mark.parametrize("sums", [resizer.channel_sums, resizer.channel_sums_numpy])
@pytest.mark.parametrize("channels", [1, 3])
def test_channel_sums_beyond_what_float32_and_32_bits_hold(
    sums: Callable[..., tuple[np.ndarray, np.ndarray]], channels: int
) -> None:
    images = np.full((2, 600, 401, channels), 255, np.uint8)
    pixels = 2 * 600 * 401
    np.testing.assert_array_equal(sums(images), [[pixels * 255] * channels, [pixels * 255**2] * channels])
