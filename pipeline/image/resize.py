"""The resizer in use, and whether this installation of PIL is sound: `python -m pipeline.image.resize` exits 0 or 1.

pillow-simd resizes many times as fast as Pillow, but both own the folder `PIL`, torchvision needs the distribution
called `pillow`, and laying pillow-simd over it loses what its core was built without (JPEG 2000 and compressed TIFF,
unless those headers are installed). So `PIL` stays Pillow's own, complete and untouched, and only pillow-simd's resize
is installed, compiled from its source as a small library of its own: the distribution `pillow-simd-resize`, made by
`pipeline/compiled/install.py`. Pillow decodes, that library resizes. Where it can't be built, Pillow resizes, too:
slower, and pixels differ by 1 or 2 of 255.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, features

from pipeline.compiled.packages import SIMD_MODULE, cpu_flags, file_problems, installed_simd, pil_owners, source_digest

Box = tuple[float, float, float, float]
FILTERS = {
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
REPAIR = "run `python -m pipeline.compiled.install`"


@functools.cache
def _simd() -> tuple[ctypes.CDLL | None, str]:
    """The library of pillow-simd's resize, or None and why it isn't used."""
    version = installed_simd()
    if version is None:
        return None, "pillow-simd isn't installed"
    if version.source != source_digest():
        return None, f"pillow-simd's resize was built from another release's source; {REPAIR}"
    if version.cpu_flag not in cpu_flags():
        return None, f"pillow-simd was built for {version.instructions}, which this processor lacks; {REPAIR}"
    spec = importlib.util.find_spec(SIMD_MODULE)
    try:
        if spec is None or spec.origin is None:
            raise OSError(f"no module {SIMD_MODULE}")
        library = ctypes.CDLL(str(Path(spec.origin).with_name("resize.so")))
        number, pointer = ctypes.c_int, ctypes.c_void_p
        box = [ctypes.c_float] * 4
        library.simd_resize.argtypes = [
            pointer,
            number,
            number,
            *box,
            *[number] * 4,
            pointer,
            ctypes.c_ssize_t,
            pointer,
        ]
        library.simd_resize_scratch.argtypes = [number, number, number]
        library.simd_resize_scratch.restype = ctypes.c_size_t
        library.simd_resize_instructions.restype = ctypes.c_char_p
        library.simd_channel_sums.argtypes = [pointer, ctypes.c_size_t, number, pointer]
        library.simd_channel_sums.restype = None
    except (OSError, AttributeError) as error:
        return None, f"pillow-simd's resize can't be loaded ({error}); {REPAIR}"
    return library, ""


def resizer() -> str:
    """What resizes here, such as `pillow-simd 12.1.1.post0 (avx2)` or `pillow 12.1.1`."""
    version = installed_simd()
    if version is None or _simd()[0] is None:
        return f"pillow {PIL.__version__}"
    return f"pillow-simd {version.release} ({version.instructions})"


@functools.cache
def software_versions() -> dict[str, str]:
    """Everything whose version can change a store's bytes: our own, the resizer, decoders and the array writer."""
    from pipeline import __version__

    versions = {"efficient-imagenet": __version__, "resizer": resizer()}
    for name in ("pillow", "simplejpeg", "numpy", "zarr"):
        versions[name] = importlib.metadata.version(name)
    for feature in ("libjpeg_turbo", "zlib", "webp", "avif", "jpg_2000", "libtiff"):
        versions[feature.replace("jpg_2000", "openjpeg")] = str(features.version(feature))
    return versions


class _Scratch(threading.local):
    memory = np.empty(0, np.uint8)


_scratch = _Scratch()


def resize_into(pixels: np.ndarray, box: Box, size: tuple[int, int], filter_name: str, out: np.ndarray) -> None:
    """Resize part of an image in one antialiased pass.

    Args:
        pixels: uint8 (h, w, 3), C-contiguous RGB. Read in place.
        box: left, top, right, bottom of the part, fractional pixels inside the image.
        size: (width, height) to make of it.
        filter_name: one of `FILTERS`.
        out: uint8 (height, width, 3), or (height, width, 1) for the ITU-R 601-2 luma; rows may lie apart.
    """
    library = _simd()[0]
    if library is None:
        resize_with_pillow(pixels, box, size, filter_name, out)
    else:
        _resize_with_simd(library, pixels, box, size, filter_name, out)


def resize_with_pillow(pixels: np.ndarray, box: Box, size: tuple[int, int], filter_name: str, out: np.ndarray) -> None:
    """`resize_into` where pillow-simd can't be had."""
    image = Image.frombuffer("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGB", 0, 1)
    image = image.resize(size, FILTERS[filter_name], box)
    out[...] = np.asarray(image if out.shape[2] == 3 else image.convert("L")).reshape(out.shape)


def _resize_with_simd(
    library: ctypes.CDLL, pixels: np.ndarray, box: Box, size: tuple[int, int], filter_name: str, out: np.ndarray
) -> None:
    height, width = pixels.shape[:2]
    left, top, right, bottom = box
    channels = out.shape[2]
    # What C can't check. It reads and writes by these.
    assert pixels.dtype == out.dtype == np.uint8
    assert pixels.shape == (height, width, 3)
    assert pixels.flags.c_contiguous
    assert out.shape == (size[1], size[0], channels)
    assert channels in (1, 3)
    assert out.strides[1:] == (channels, 1)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    num_bytes = library.simd_resize_scratch(width, height, size[0])
    if len(_scratch.memory) < num_bytes:
        _scratch.memory = np.empty(num_bytes, np.uint8)
    code = library.simd_resize(
        *(pixels.ctypes.data, width, height, left, top, right, bottom, FILTERS[filter_name]),
        *(size[0], size[1], channels, out.ctypes.data, out.strides[0], _scratch.memory.ctypes.data),
    )
    if code:
        raise MemoryError("no memory for the coefficients of a resize")


def channel_sums(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact sums and sums of squares per channel of uint8 (n, H, W, C) images, C 1 or 3, C-contiguous: int64 (C,)."""
    library = _simd()[0]
    if library is None:
        return channel_sums_numpy(images)
    channels = images.shape[-1]
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    assert channels in (1, 3)
    out = np.empty((2, channels), np.int64)
    library.simd_channel_sums(images.ctypes.data, images.size // channels, channels, out.ctypes.data)
    return out[0], out[1]


def channel_sums_numpy(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`channel_sums` where the compiled library can't be had.

    Column sums go through float32 matrix products over at most 256 rows: every partial sum of squares is an integer
    below 255^2 * 256 < 2^24, so nothing is rounded.
    """
    num, height, width, channels = images.shape
    sums = np.zeros(width * channels, np.int64)
    squares = np.zeros(width * channels, np.int64)
    ones = np.ones(min(height, 256), np.float32)
    scratch = np.empty((len(ones), width * channels), np.float32)
    for rows in images.reshape(num, height, width * channels):
        for start in range(0, height, 256):
            part = rows[start : start + 256]
            block, weights = scratch[: len(part)], ones[: len(part)]
            np.copyto(block, part)
            sums += (weights @ block).astype(np.int64)
            np.multiply(block, block, out=block)
            squares += (weights @ block).astype(np.int64)
    # (W*C,) -> (W, C) -> (C,)
    return sums.reshape(width, channels).sum(0), squares.reshape(width, channels).sum(0)


# Checks


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
    pixels, out = _photo(), np.empty((256, 256, 3), np.uint8)

    def seconds(resize: Callable[..., None]) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            resize(pixels, (64.0, 0.0, 448.0, 384.0), (256, 256), "bicubic", out)
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(resize_with_pillow) / seconds(resize_into)


def _round_trip(extension: str, **options: object) -> Callable[[], str | None]:
    def run() -> str | None:
        image, buffer = Image.fromarray(_photo()[:64, :64]), io.BytesIO()
        try:
            image.save(buffer, extension, **options)
            again = np.asarray(Image.open(buffer).convert("RGB"))
        except (OSError, KeyError) as error:
            return f"{extension}: {error}"
        difference = float(np.abs(again.astype(int) - np.asarray(image)).mean())
        return f"{extension}: comes back altered by {difference:.1f} of 255" if difference > 8 else None

    return run


_ROUND_TRIPS = {
    "JPEG": _round_trip("JPEG", quality=95),
    "PNG": _round_trip("PNG"),
    "WebP": _round_trip("WEBP", lossless=True),
    "AVIF": _round_trip("AVIF", quality=95),
    "JPEG 2000": _round_trip("JPEG2000"),
    "compressed TIFF": _round_trip("TIFF", compression="tiff_lzw"),
}


def missing_formats() -> list[str]:
    """Formats that this PIL was built without; such images become bad samples."""
    Image.init()
    return [name for name, run in _ROUND_TRIPS.items() if run() is not None]


def simd_problems() -> list[str]:
    """What is wrong with pillow-simd's resize; [] where it is sound, or not installed."""
    version = installed_simd()
    if version is None:
        return []
    library, why = _simd()
    if library is None:
        return [why]
    problems = []
    compiled = library.simd_resize_instructions().decode()
    if compiled != version.instructions:
        problems.append(f"pillow-simd's resize is for {compiled}, not {version.instructions}; {REPAIR}")
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
    Image.init()
    problems += [line for name in ("JPEG", "PNG") if (line := _ROUND_TRIPS[name]()) is not None]
    return problems + simd_problems()


def report() -> tuple[list[str], bool]:
    """Lines for the person who installs, and whether all is well."""
    problems = check_coherent()
    lines = [f"error: {problem}" for problem in problems]
    library, why = _simd()
    if library is None:
        lines.append(
            f"resizer: {resizer()}, without SIMD: {why}. Everything works; conversion takes two to three times as long"
        )
    else:
        lines.append(f"resizer: {resizer()}, {speedup():.1f} times as fast as pillow {PIL.__version__} here")
    lost = missing_formats()
    if lost:
        lines.append(f"formats: this Pillow can't read {', '.join(lost)}; images in them will be bad samples")
    return lines, not problems


def main() -> int:
    lines, sound = report()
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
