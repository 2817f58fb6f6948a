"""The demo's sample: scikit-learn's digits (1,797 real handwritten digits, in its wheel) as an image folder.

    python data/make_digits.py data/digits

writes `train/<digit>/<number>.png` and `val/<digit>/<number>.png`; every fifth sample, in the dataset's own order,
goes to val. Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

VAL_EVERY = 5


def make_digits(folder: Path) -> int:
    """Write the image folder unless it is complete; returns the number of images."""
    digits = load_digits()
    # 8 x 8 values from 0 to 16 -> uint8
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    done = folder / ".complete"
    if not done.exists():
        for i, (image, label) in enumerate(zip(images, digits.target, strict=True)):
            path = folder / ("val" if i % VAL_EVERY == 0 else "train") / str(label) / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        done.touch()
    return len(images)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make_digits(parser.parse_args().folder)
