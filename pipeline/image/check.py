"""Whether PIL and the resizer are sound here: `python -m pipeline.image.check` exits 0 or 1."""

from __future__ import annotations

import importlib.metadata
import io
import sys
import timeit
from typing import Any

import numpy as np
import PIL
from PIL import Image

from pipeline.compiled.library import REPAIR, RESIZE, installed, load
from pipeline.compiled.pillow import file_problems, pil_owners
from pipeline.image.resize import resize_into, resize_with_pillow, resizer
from pipeline.image.statistics import channel_sums, channel_sums_numpy
from pipeline.store.geometry import FILTERS

ROUND_TRIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "JPEG": ("JPEG", {"quality": 95}),
    "PNG": ("PNG", {}),
    "WebP": ("WEBP", {"lossless": True}),
    "AVIF": ("AVIF", {"quality": 95}),
    "JPEG 2000": ("JPEG2000", {}),
    "compressed TIFF": ("TIFF", {"compression": "tiff_lzw"}),
}
"""For each format PIL's name of it and the options to save a picture with."""


def _photo() -> np.ndarray:
    """uint8 (384, 512, 3): a smooth pattern with edges, the same on every machine."""
    y, x = np.mgrid[0:384, 0:512]
    waves = [
        128 + 90 * np.sin(x / (9 + 4 * i)) * np.cos(y / (13 - 3 * i)) + 30 * ((x // 37 + y // 29) % 2)
        for i in (0, 1, 2)
    ]
    return np.ascontiguousarray(np.dstack(waves).clip(0, 255).astype(np.uint8))


def speedup() -> float:
    """How many times as fast as Pillow the resizer in use makes 256 x 256 pixels out of a 512 x 384 photograph."""
    work = (_photo(), (64.0, 0.0, 448.0, 384.0), (256, 256), "bicubic", np.empty((256, 256, 3), np.uint8))
    pillow, used = (
        min(timeit.repeat(lambda: resize(*work), number=1, repeat=9))  # noqa: B023 - called at once
        for resize in (resize_with_pillow, resize_into)
    )
    return pillow / used


def format_problem(name: str) -> str | None:
    """What happens to a picture that is saved and opened in a format of `ROUND_TRIPS`; None where it comes back."""
    extension, options = ROUND_TRIPS[name]
    image, buffer = Image.fromarray(_photo()[:64, :64]), io.BytesIO()
    Image.init()
    try:
        image.save(buffer, extension, **options)
        again = np.asarray(Image.open(buffer).convert("RGB"))
    except (OSError, KeyError) as error:
        return f"{name}: {error}"
    difference = float(np.abs(again.astype(int) - np.asarray(image)).mean())
    return f"{name}: comes back altered by {difference:.1f} of 255" if difference > 8 else None


def resize_problems() -> list[str]:
    """What is wrong with pillow-simd's resize; [] where it is sound, or not installed."""
    build = installed(RESIZE)
    if build is None:
        return []
    library, why = load(RESIZE)
    if library is None:
        return [why]
    problems = []
    compiled = library.simd_resize_instructions().decode()
    if compiled != build.instructions:
        problems.append(f"pillow-simd's resize is for {compiled}, not {build.instructions}; {REPAIR}")
    pixels, ours, stock = _photo(), np.empty((96, 96, 3), np.uint8), np.empty((96, 96, 3), np.uint8)
    box = (30.5, 0.25, 414.0, 383.5)
    for name in FILTERS:
        resize_into(pixels, box, (96, 96), name, ours)
        resize_with_pillow(pixels, box, (96, 96), name, stock)
        difference = int(np.abs(ours.astype(int) - stock).max())
        if difference > 3:
            problems.append(f"pillow-simd's {name} filter differs from Pillow's by {difference} of 255; {REPAIR}")
    if not np.array_equal(channel_sums(pixels[None]), channel_sums_numpy(pixels[None])):
        problems.append(f"the compiled sums differ from numpy's; {REPAIR}")
    return problems


def check_coherent() -> list[str]:
    """What is wrong with this installation of PIL and of the resizer, one line each; [] when all is well.

    Checks that one distribution owns the folder PIL, that each file there is of that release, that Python files and
    the compiled core agree, that JPEG and PNG come back, and that the resizer works.
    """
    problems = []
    owners = pil_owners()
    if len(owners) > 1:
        problems.append(f"{' and '.join(owners)} share the folder PIL; {REPAIR}")
    elif owners and (wrong := file_problems(importlib.metadata.distribution(owners[0]))):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        problems.append(f"{wrong[0]}{more}; {REPAIR}")
    if PIL.__version__ != Image.core.PILLOW_VERSION:
        problems.append(f"PIL is {PIL.__version__}, its core {Image.core.PILLOW_VERSION}; {REPAIR}")
    problems += [problem for name in ("JPEG", "PNG") if (problem := format_problem(name))]
    return problems + resize_problems()


def main() -> int:
    problems = check_coherent()
    lines = [f"error: {problem}" for problem in problems]
    library, why = load(RESIZE)
    if library is not None:
        lines.append(f"resizer: {resizer()}, {speedup():.1f} times as fast as pillow {PIL.__version__} here")
    else:
        slow = "Everything works; conversion takes two to three times as long"
        lines.append(f"resizer: {resizer()}, without SIMD: {why}. {slow}")
    missing = [name for name in ROUND_TRIPS if format_problem(name)]
    if missing:
        lines.append(f"formats: this Pillow can't read {', '.join(missing)}; images in them will be bad samples")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
