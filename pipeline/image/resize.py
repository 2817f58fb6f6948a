"""One antialiased resize of part of an image, by pillow-simd where it can be had and by Pillow elsewhere.

pillow-simd resizes many times as fast as Pillow. But both own the folder `PIL`, and torchvision needs the distribution
called `pillow`. pillow-simd laid over Pillow lacks what its core was built without: JPEG 2000 and compressed TIFF,
unless those headers are installed. So `PIL` stays Pillow's own, complete and untouched. Only pillow-simd's resize is
installed beside it, as a library of its own (`pipeline/compiled/install.py`). Pillow decodes, that library resizes.
Where it can't be built Pillow resizes, too: slower, and pixels differ by 1 or 2 of 255.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import math

import numpy as np
import PIL
from PIL import Image, features

from pipeline.compiled.library import RESIZE, installed, load

MOST_CACHED = 1 << 10
"""Weights of longer axes are not kept: they take much memory, and little time beside the decoding."""
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


class _Axis(ctypes.Structure):
    """What `simd_weights` makes of one axis, and whether anything changes along it."""

    _fields_ = (
        ("bounds", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "first", "length", "precision", "changes")),
    )


@functools.lru_cache(512)  # photographs come in few sizes
def _axis(in_size: int, start: float, end: float, out_size: int, filter_name: str) -> _Axis:
    """The filter's weights that make `out_size` pixels of the source's from `start` to `end`."""
    # Weights of a pixel: a filter spans up to 3 to a side.
    most = 2 * math.ceil(3 * max(1, (end - start) / out_size)) + 3
    bounds, used = np.empty(2 * out_size, np.int32), np.empty(3, np.int32)
    weights = np.empty(most * out_size + 16, np.int16)  # 16 more, because C reads several at once
    count = load(RESIZE)[0].simd_weights(  # type: ignore[union-attr] # its only caller has the library
        *(in_size, start, end, out_size, Image.Resampling[filter_name.upper()]),
        *(bounds.ctypes.data, weights.ctypes.data, most * out_size, used.ctypes.data),
    )
    assert count >= 0, f"no kernel for {filter_name}"
    if not count:
        raise MemoryError("no memory for the weights of a resize")
    changes = out_size != in_size or start != 0 or end != out_size
    axis = _Axis(bounds.ctypes.data, weights.ctypes.data, count, *used.tolist(), changes)
    axis.arrays = bounds, weights  # kept as long as C is given their addresses
    return axis


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
        MemoryError: no memory for weights and rows.
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
    left, top, right, bottom = (ctypes.c_float(edge).value for edge in box)  # as PIL rounds a box
    target = (channels, out.ctypes.data, out.strides[0])
    is_cut = (left, top) == (int(left), int(top)) and (right - left, bottom - top) == size
    if is_cut and left + size[0] <= width and top + size[1] <= height:  # not so where rounding moved a far edge
        start = pixels.ctypes.data + (int(top) * width + int(left)) * 3
        code = library.simd_cut(start, width * 3, *size, *target)
    else:
        make_axis = _axis if max(width, height) <= MOST_CACHED else _axis.__wrapped__
        x = make_axis(width, left, right, size[0], filter_name)
        y = make_axis(height, top, bottom, size[1], filter_name)
        code = library.simd_resize(pixels.ctypes.data, width * 3, ctypes.byref(x), ctypes.byref(y), *size, *target)
    if code:
        raise MemoryError("no memory for the rows of a resize")


def resize_with_pillow(pixels: np.ndarray, box: Box, size: tuple[int, int], filter_name: str, out: np.ndarray) -> None:
    """`resize_into` where pillow-simd can't be had."""
    image = Image.frombuffer("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGB", 0, 1)
    image = image.resize(size, Image.Resampling[filter_name.upper()], box)
    out[...] = np.asarray(image if out.shape[2] == 3 else image.convert("L")).reshape(out.shape)
