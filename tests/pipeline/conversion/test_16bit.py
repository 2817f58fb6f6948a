"""Levels of 12 bits in files of 16: a warning, and the flag that says which level is white."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import convert, open_store
from pipeline.conversion.options import ConvertOptions
from pipeline.errors import UsageError


def folder(path: Path, highest: int) -> Path:
    for number in range(3):
        levels = np.linspace(0, highest >> number, 16 * 16, dtype=np.uint16).reshape(16, 16)
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(levels).save(path / f"{number}.png")
    return path.parent


@pytest.mark.parametrize(
    ("highest", "scale", "warned", "white"),
    [
        (4095, 65535, True, 16),
        (4095, "4095", False, 255),
        (4095, "max", False, 255),
        (65535, 65535, False, 255),
        (6700, 65535, False, 26),
    ],
)
def test_dark_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], highest: int, scale: int | str, warned: bool, white: int
) -> None:
    convert(folder(tmp_path / "in" / "cat", highest), tmp_path / "a.zarr", size=16, scale_16bit=scale, n_jobs=1)
    split = open_store(tmp_path / "a.zarr")["train"]
    assert max(split.image(slot).max() for slot in range(3)) == white
    said = capsys.readouterr().err
    assert ("--scale-16bit" in said) == warned
    recipe = split.attrs["recipe"]
    assert recipe.get("scale_16bit") == (None if scale == 65535 else "max" if scale == "max" else int(scale))


def test_8_bit_images_are_never_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "cat").mkdir(parents=True)
    Image.new("L", (16, 16), 3).save(tmp_path / "in" / "cat" / "dark.png")
    convert(tmp_path / "in", tmp_path / "a.zarr", size=16, n_jobs=1)
    assert "16 bits" not in capsys.readouterr().err


def test_another_scale_is_another_conversion(tmp_path: Path) -> None:
    source = folder(tmp_path / "in" / "cat", 4095)
    convert(source, tmp_path / "a.zarr", size=16, n_jobs=1)
    with pytest.raises(Exception, match="scale_16bit"):
        convert(source, tmp_path / "a.zarr", size=16, n_jobs=1, scale_16bit="max")


@pytest.mark.quick
@pytest.mark.parametrize("value", ["0", "65536", "most", "", 0, 1.5, -1])
def test_wrong_scales(value: object) -> None:
    with pytest.raises(UsageError, match="--scale-16bit"):
        ConvertOptions(scale_16bit=value)


@pytest.mark.quick
@pytest.mark.parametrize(("value", "scale"), [("max", "max"), ("4095", 4095), (np.int64(255), 255)])
def test_right_scales(value: object, scale: object) -> None:
    assert ConvertOptions(scale_16bit=value).decode.scale_16bit == scale
