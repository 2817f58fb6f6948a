"""A PIL that is mixed up and a resizer that doesn't work are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.compiled.library import RESIZE, Library, load
from pipeline.image import check, resize


def test_this_installation_is_coherent() -> None:
    assert check.check_coherent() == []
    assert [name for name in check.ROUND_TRIPS if check.format_problem(name)] == []
    done = subprocess.run([sys.executable, "-m", "pipeline.image.check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert resize.resizer() in done.stdout


def test_two_owners_of_the_folder_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pillow-12.1.1", "pillow_simd-12.1.1.post0"):
        info = tmp_path / f"{name}.dist-info"
        info.mkdir()
        distribution, _, version = name.partition("-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert check.pil_owners() == ["pillow", "pillow-simd"]
    assert "pillow and pillow-simd share the folder PIL" in check.check_coherent()[0]


@pytest.mark.quick
def test_a_resizer_that_resizes_wrongly_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    if load(RESIZE)[0] is None:
        pytest.skip("pillow-simd can't be had here")

    def inverted(pixels: np.ndarray, *arguments: object) -> None:
        resize.resize_into(255 - pixels, *arguments)

    monkeypatch.setattr(check, "resize_into", inverted)
    assert len(check.resize_problems()) == 4


@pytest.mark.quick
def test_a_broken_pil_fails_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "check_coherent", lambda: ["PIL is in pieces"])
    assert check.main() == 1
    assert "error: PIL is in pieces" in capsys.readouterr().out


def test_a_format_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(check.ROUND_TRIPS, "JPEG 2000", ("no such format", {}))
    assert check.main() == 0
    assert "can't read JPEG 2000" in capsys.readouterr().out


@pytest.mark.quick
def test_without_the_library_all_is_well_and_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Library("resize", "no-such-distribution", RESIZE.sources, RESIZE.functions)
    for module in (check, resize):
        monkeypatch.setattr(module, "RESIZE", missing)
    assert check.resize_problems() == []
    assert check.main() == 0
    assert "without SIMD: no-such-distribution isn't installed" in capsys.readouterr().out
