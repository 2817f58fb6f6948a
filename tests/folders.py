"""Small image folders for tests."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def make_image(seed: int, height: int = 40, width: int = 50) -> Image.Image:
    """A smooth random RGB image, different for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def make_folder(path: Path, counts: Mapping[str, Mapping[str, int]], *, suffix: str = ".jpg") -> Path:
    """Write `path/<split>/<class>/<number><suffix>`; counts is split -> class -> number of images."""
    seed = 0
    for split, classes in counts.items():
        for name, count in classes.items():
            (path / split / name).mkdir(parents=True)
            for i in range(count):
                make_image(seed, 40 + seed % 7, 50 + seed % 5).save(path / split / name / f"{i:03d}{suffix}")
                seed += 1
    return path


def tree(path: Path) -> dict[str, bytes]:
    """Every file below path: relative name -> bytes."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def same_tree(one: Path, other: Path) -> bool:
    """Byte-identical folders, as `diff -r` would say."""
    comparison = filecmp.dircmp(one, other, ignore=[], hide=[])
    if comparison.left_only or comparison.right_only or comparison.funny_files:
        return False
    _, different, errors = filecmp.cmpfiles(one, other, comparison.common_files, shallow=False)
    return not different and not errors and all(same_tree(one / sub, other / sub) for sub in comparison.common_dirs)
