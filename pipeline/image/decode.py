"""One sample from encoded bytes (or an array) to one or more resized squares, written where they belong.

Nearly all images are JPEGs and take the fast path: simplejpeg (libjpeg-turbo) decodes into a buffer that is kept, one
resize cuts and shrinks it, and the result goes straight to its place in the chunk. The pixels are those that PIL
decodes. PIL decodes the other formats, and every JPEG that simplejpeg refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import simplejpeg

from pipeline.errors import BadSample
from pipeline.image.beyond_pillow import PROGRESSIVE_JPEG, jpeg_frame
from pipeline.image.options import DEFAULTS, PLAIN_PEAK_BYTES, Decoded, DecodeOptions, check_pixels
from pipeline.image.pil_decode import jpeg_orientation, open_rgb
from pipeline.image.pixel_modes import array_to_rgb, to_array
from pipeline.image.placement import Placement, crop_placement
from pipeline.image.resize import resize_into
from pipeline.store.geometry import Geometry

JPEG_START = b"\xff\xd8"
# Half-scale JPEG decoding where each stored pixel covers at least this many source pixels in both directions: the
# mean absolute difference to the full decode is 0.4 of 255 on average and below 1 in each of 100 photographs.
HALF_SCALE = 6.0
# A progressive JPEG takes as long as its scans times its pixels: 2.6 ns, as measured. Encoders make about ten scans.
USUAL_SCANS, MAX_SCANS, MAX_SCANNED_PIXELS = 20, 100, 1 << 30
PROGRESSIVE_PEAK_BYTES = 9  # a pixel's memory: three bytes, and three coefficients of two
KEPT_BYTES = 1 << 26  # a decode buffer up to this size is kept for the next image


class _Buffers(threading.local):
    decoded = np.empty(0, np.uint8)


_buffers = _Buffers()


def _buffer(height: int, width: int) -> np.ndarray:
    """uint8 (height, width, 3), overwritten by the thread's next call: fresh pages cost a tenth of the decoding."""
    num_bytes = height * width * 3
    if num_bytes > KEPT_BYTES:
        return np.empty((height, width, 3), np.uint8)
    if num_bytes > len(_buffers.decoded):
        _buffers.decoded = np.empty(num_bytes, np.uint8)
    return _buffers.decoded[:num_bytes].reshape(height, width, 3)


def decode_into(
    data: bytes | np.ndarray,
    geometries: Sequence[Geometry],
    outs: Sequence[np.ndarray],
    options: DecodeOptions = DEFAULTS,
) -> Decoded:
    """Decode once, resize once per geometry. (A JPEG that some sizes take at half scale is decoded twice.)

    Args:
        data: an encoded image, whose content decides the format; or uint8 or uint16 pixels (H, W), (H, W, 1),
            (H, W, 3) or (H, W, 4).
        geometries: what to make; they may differ in size only.
        outs: one uint8 (S, S, C) array per geometry, which is filled.
        options: limits and background.

    Returns:
        What the sample was.

    Raises:
        BadSample: it can't be converted; `outs` are untouched.
    """
    try:
        if isinstance(data, np.ndarray):
            pixels, decoded = _from_array(data, options)
        elif len(data) == 0:
            raise BadSample("empty")
        else:
            fast = _jpeg_into(data, geometries, outs, options)
            if fast is not None:
                return fast
            image, decoded = open_rgb(data, options, exif_transpose=geometries[0].exif_transpose)
            pixels = to_array(image, _buffer(image.height, image.width))
        for geometry, out in zip(geometries, outs, strict=True):
            _resize_into(pixels, crop_placement(decoded.height, decoded.width, geometry), geometry, out)
    except MemoryError:
        raise BadSample("out-of-memory") from None
    return decoded


def _resize_into(
    pixels: np.ndarray, placement: Placement, geometry: Geometry, out: np.ndarray, factor: int = 1
) -> None:
    """Fill `out` (S, S, C) from RGB pixels that were decoded at 1/factor of the source's size."""
    left, top, right, bottom = placement.box
    width, height = placement.size
    target = out
    if (width, height) != (geometry.size, geometry.size):
        out[...] = 0
        x, y = placement.offset
        target = out[y : y + height, x : x + width]
    box = (left / factor, top / factor, right / factor, bottom / factor)
    resize_into(pixels, box, placement.size, geometry.filter, target)


# JPEG


def _jpeg_into(
    data: bytes, geometries: Sequence[Geometry], outs: Sequence[np.ndarray], options: DecodeOptions
) -> Decoded | None:
    """`decode_into` for JPEGs that simplejpeg decodes without complaint; None for everything else."""
    if data[:2] != JPEG_START:
        return None
    frame = jpeg_frame(data)
    if frame is not None and frame.marker in PROGRESSIVE_JPEG:
        check_pixels(frame.height, frame.width, options, PROGRESSIVE_PEAK_BYTES)
        scans = data.count(b"\xff\xda")
        if scans > max(USUAL_SCANS, min(MAX_SCANS, MAX_SCANNED_PIXELS // max(1, frame.height * frame.width))):
            raise BadSample("too-complex", f"a progressive JPEG of {scans} scans")
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_pixels(height, width, options, 3)
    if colors not in ("YCbCr", "Gray", "RGB"):
        return None
    orientation = jpeg_orientation(data) if geometries[0].exif_transpose else 1
    upright = (width, height) if orientation >= 5 else (height, width)
    placements = [crop_placement(*upright, geometry) for geometry in geometries]
    # Not where the image is turned: that would move the half pixel by which an odd side is rounded up to the other end.
    may_halve = geometries[0].filter != "box" and orientation == 1
    factors = [2 if may_halve and placement.scale >= HALF_SCALE else 1 for placement in placements]
    for factor in sorted(set(factors)):  # nearly always one; a size's pixels don't depend on the other sizes
        h, w = -(-height // factor), -(-width // factor)
        try:
            # strict: data that ends early or is damaged must not pass as an image
            pixels = simplejpeg.decode_jpeg(
                data, "RGB", min_height=h, min_width=w, min_factor=factor, buffer=_buffer(h, w), strict=True
            )
        except ValueError:
            return None
        if orientation != 1:
            pixels = _transpose(pixels, orientation)
        for placement, geometry, out, own in zip(placements, geometries, outs, factors, strict=True):
            if own == factor:
                _resize_into(pixels, placement, geometry, out, factor)
    return Decoded(*upright, "L" if colors == "Gray" else "RGB", 0)


def _transpose(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels (h, w, 3) turned upright, by the meaning of EXIF orientations 2 to 8 (as `ImageOps.exif_transpose`)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


# Everything else


def _from_array(array: np.ndarray, options: DecodeOptions) -> tuple[np.ndarray, Decoded]:
    """RGB pixels of an array."""
    if array.ndim in (2, 3):
        check_pixels(array.shape[0], array.shape[1], options, PLAIN_PEAK_BYTES)
    pixels = array_to_rgb(array, options)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[array.shape[2] if array.ndim == 3 else 1]
    peak = int(pixels.max()) if array.dtype == np.uint16 else -1
    return pixels, Decoded(array.shape[0], array.shape[1], mode, 0, peak)
