"""Which resizer is in use, that it resizes as PIL does, and that a mixed-up PIL is noticed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from pipeline import resizer
from pipeline.packages import file_problems


@pytest.fixture
def reload_core() -> Iterator[None]:
    """Forget which core was loaded, before and after."""
    caches = (resizer._load_core, resizer.software_versions)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def rgbx(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)


@pytest.mark.quick
@pytest.mark.parametrize("filter_name", resizer.FILTERS)
@pytest.mark.parametrize("box", [(0.0, 0.0, 50.0, 40.0), (3.25, 1.5, 44.0, 39.75), (5.0, 5.0, 6.0, 6.0)])
def test_resizes_as_pil_does(filter_name: str, box: tuple[float, float, float, float]) -> None:
    pixels = rgbx(40, 50)
    image = Image.fromarray(pixels[:, :, :3])
    expected = np.asarray(image.resize((16, 12), resizer.FILTERS[filter_name], box)).astype(int)
    stock, used = np.empty((12, 16, 3), np.uint8), np.empty((12, 16, 3), np.uint8)
    resizer.resize_into(pixels, box, (16, 12), filter_name, stock, core=Image.core)
    np.testing.assert_array_equal(stock, expected)
    resizer.resize_into(pixels, box, (16, 12), filter_name, used)
    assert np.abs(used - expected).max() <= 2


@pytest.mark.quick
def test_one_channel_is_the_luma() -> None:
    pixels = np.empty((4, 4, 4), np.uint8)
    pixels[:] = (200, 100, 50, 9)
    out = np.empty((2, 2, 1), np.uint8)
    resizer.resize_into(pixels, (0.0, 0.0, 4.0, 4.0), (2, 2), "box", out)
    assert (out == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)).all()


@pytest.mark.quick
def test_out_may_be_part_of_a_larger_array() -> None:
    out = np.zeros((8, 10, 3), np.uint8)
    resizer.resize_into(rgbx(9, 9), (0.0, 0.0, 9.0, 9.0), (4, 3), "bilinear", out[2:5, 3:7])
    assert out[2:5, 3:7].all(axis=2).any()
    out[2:5, 3:7] = 0
    assert not out.any()


@pytest.mark.usefixtures("reload_core")
def test_without_pillow_simd_pillow_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizer, "installed_core", lambda: None)
    assert resizer.resizer() == f"pillow {PIL.__version__}"
    assert resizer.software_versions()["resizer"] == f"pillow {PIL.__version__}"
    assert resizer.core_problems() == []
    pixels, out = rgbx(40, 50), np.empty((12, 16, 3), np.uint8)
    resizer.resize_into(pixels, (0.0, 0.0, 50.0, 40.0), (16, 12), "bicubic", out)
    expected = Image.fromarray(pixels[:, :, :3]).resize((16, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(out, np.asarray(expected))
    lines, sound = resizer.report()
    assert sound
    assert "without SIMD: pillow-simd isn't installed" in lines[0]


@pytest.mark.usefixtures("reload_core")
def test_a_core_for_another_processor_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizer, "installed_core", lambda: "12.1.1.post0+avx2")
    monkeypatch.setattr(resizer, "cpu_flags", lambda: frozenset({"sse4_1"}))
    assert resizer.resizer() == f"pillow {PIL.__version__}"
    assert "built for avx2, which this processor lacks" in resizer.core_problems()[0]


@pytest.mark.usefixtures("reload_core")
def test_a_core_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizer, "installed_core", lambda: "12.1.1.post0+sse4")
    monkeypatch.setattr(resizer, "cpu_flags", lambda: frozenset({"sse4_1"}))
    monkeypatch.setattr(resizer, "CORE_MODULE", "no_such_module")
    assert resizer.resizer() == f"pillow {PIL.__version__}"
    assert "can't be loaded" in resizer.core_problems()[0]


@pytest.mark.usefixtures("reload_core")
def test_names() -> None:
    assert resizer.instruction_set("12.1.1.post0+avx2") == "avx2"
    assert resizer.instruction_set("12.1.1.post0+sse4") == "sse4.1"
    version = resizer.installed_core()
    if version is None:
        assert resizer.resizer() == f"pillow {PIL.__version__}"
    else:
        assert resizer.resizer().startswith(f"pillow-simd {version.partition('+')[0]} (")


@pytest.mark.quick
def test_software_versions_can_be_stored() -> None:
    versions = resizer.software_versions()
    assert json.loads(json.dumps(versions)) == versions
    assert versions["pillow"] == PIL.__version__
    assert {"resizer", "simplejpeg", "numpy", "zarr", "efficient-imagenet", "libjpeg_turbo"} <= versions.keys()


def test_this_installation_is_coherent() -> None:
    assert resizer.check_coherent() == []
    assert resizer.missing_formats() == []
    done = subprocess.run([sys.executable, "-m", "pipeline.resizer"], capture_output=True, text=True)
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
