"""One antialiased resize of part of an image, by pillow-simd where it can be had and by Pillow elsewhere.

pillow-simd resizes many times as fast as Pillow. But both own the folder `PIL`, and torchvision needs the distribution
called `pillow`. pillow-simd laid over Pillow lacks what its core was built without: JPEG 2000 and compressed TIFF,
unless those headers are installed. So `PIL` stays Pillow's own, complete and untouched. Only pillow-simd's resize is
installed beside it, as a library of its own (`pipeline/compiled/install.py`). Pillow decodes, that library resizes.
Where it can't be built Pillow resizes, too: slower, and pixels differ by 1 or 2 of 255.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import threading

import numpy as np
import PIL
from PIL import Image, features

from pipeline.compiled.library import RESIZE, installed, load

Box = tuple[float, float, float, float]


def resizer() -> str:
    """What resizes here, such as `pillow-simd 12.1.1.post0 (avx2)` or `pillow 12.1.1`."""
    build = installed(RESIZE)
    if build is None or load(RESIZE)[0] is None:
        return f"pillow {PIL.__version__}"
    return f"pillow-simd {build.release} ({build.instructions})"


@functools.cache
def software_versions() -> dict[str, str]:
    """Everything whose version can change a store's bytes: our own, the resizer, decoders and the array writer."""
    from pipeline import __version__

    versions = {"efficient-imagenet": __version__, "resizer": resizer()}
    for name in ("pillow", "simplejpeg", "numpy", "zarr"):
        versions[name] = importlib.metadata.version(name)
    for name in ("imagecodecs", "tifffile", "pillow-heif", "pillow-jxl-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # these are extras
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
        filter_name: one of `pipeline.store.geometry.FILTERS`.
        out: uint8 (height, width, 3), or (height, width, 1) for the ITU-R 601-2 luma; rows may lie apart.

    Raises:
        ValueError: an array or a box that isn't so.
        MemoryError: no memory for the coefficients.
    """
    library = load(RESIZE)[0]
    if library is None:
        resize_with_pillow(pixels, box, size, filter_name, out)
        return
    height, width = pixels.shape[:2]
    left, top, right, bottom = box
    channels = out.shape[-1]
    # C reads and writes by these and can't check them.
    if not (
        pixels.dtype == out.dtype == np.uint8
        and pixels.shape == (height, width, 3)
        and pixels.flags.c_contiguous
        and out.shape == (size[1], size[0], channels)
        and channels in (1, 3)
        and out.strides[1:] == (channels, 1)
        and out.flags.writeable
        and 0 <= left < right <= width
        and 0 <= top < bottom <= height
    ):
        shapes = f"{pixels.dtype} {pixels.shape} to {out.dtype} {out.shape}, {size}"
        raise ValueError(f"can't resize {shapes}, box {box}: see resize_into for what the arrays must be")
    num_bytes = library.simd_resize_scratch(width, height, size[0])
    if len(_scratch.memory) < num_bytes:
        _scratch.memory = np.empty(num_bytes, np.uint8)
    code = library.simd_resize(
        *(pixels.ctypes.data, width, height, left, top, right, bottom, Image.Resampling[filter_name.upper()]),
        *(size[0], size[1], channels, out.ctypes.data, out.strides[0], _scratch.memory.ctypes.data),
    )
    if code:
        raise MemoryError("no memory for the coefficients of a resize")


def resize_with_pillow(pixels: np.ndarray, box: Box, size: tuple[int, int], filter_name: str, out: np.ndarray) -> None:
    """`resize_into` where pillow-simd can't be had."""
    image = Image.frombuffer("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGB", 0, 1)
    image = image.resize(size, Image.Resampling[filter_name.upper()], box)
    out[...] = np.asarray(image if out.shape[2] == 3 else image.convert("L")).reshape(out.shape)
