"""One sample from encoded bytes (or an array) to one or more resized squares, written where they belong.

JPEG, nearly everything there is, takes the fast path: simplejpeg (libjpeg-turbo) decodes into a buffer that is kept,
four bytes a pixel, which is how the resizer wants them; one resize cuts and shrinks it; the result goes to the chunk.
The pixels are those that PIL decodes. Whatever simplejpeg can't do or isn't sure of goes to PIL, as do other formats.
"""

from __future__ import annotations

import contextlib
import io
import logging
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import (  # noqa: F401 - each plugin registers its format
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    ImageOps,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    QoiImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from pipeline.errors import BadSample
from pipeline.fit import place
from pipeline.geometry import Geometry
from pipeline.modes import array_to_image, to_rgb, to_rgbx
from pipeline.resizer import resize_into

# Formats that the content may be in. Each starts with a signature, so that text can't pass for an image, and none
# runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "QOI")
# Half-scale JPEG decoding where each stored pixel covers at least this many source pixels in both directions: the
# mean absolute difference to the full decode is 0.4 of 255 on average and below 1 for any of 700 photographs.
HALF_SCALE = 6.0
KEPT_BYTES = 1 << 26  # a decode buffer up to this size is kept for the next image
EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode.

    Args:
        max_pixels: larger images are refused before they are decoded.
        background: what shows through transparent pixels, (R, G, B).
    """

    max_pixels: int = 178_956_970
    background: tuple[int, int, int] = (255, 255, 255)


@dataclass(frozen=True)
class Decoded:
    """What one sample was.

    Attributes:
        height, width: of the source in pixels, after the EXIF transpose where that is asked for.
        mode: PIL's name of the source's pixel mode.
        warnings: how often the decoder complained about a sample that it could decode all the same.
    """

    height: int
    width: int
    mode: str
    warnings: int


class _Kept(threading.local):
    buffer = np.empty(0, np.uint8)


_kept = _Kept()
_pil_lock = threading.Lock()


def _buffer(num_bytes: int) -> np.ndarray:
    """uint8 (num_bytes,), overwritten by the thread's next call: fresh pages cost a tenth of the decoding."""
    if num_bytes > KEPT_BYTES:
        return np.empty(num_bytes, np.uint8)
    if num_bytes > len(_kept.buffer):
        _kept.buffer = np.empty(num_bytes, np.uint8)
    return _kept.buffer[:num_bytes]


def decode_into(
    data: bytes | np.ndarray,
    geometries: Sequence[Geometry],
    outs: Sequence[np.ndarray],
    options: DecodeOptions = DecodeOptions(),
) -> Decoded:
    """Decode once, resize once per geometry.

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
    exif_transpose = geometries[0].exif_transpose
    if not isinstance(data, np.ndarray) and len(data) == 0:
        raise BadSample("empty")
    fast = None if isinstance(data, np.ndarray) else _decode_jpeg(data, geometries, options)
    if fast is not None:
        pixels, decoded = fast
    elif isinstance(data, np.ndarray):
        pixels, decoded = _from_array(data, options)
    else:
        pixels, decoded = _decode_pil(data, options, exif_transpose=exif_transpose)
    halved = pixels.shape[0] != decoded.height or pixels.shape[1] != decoded.width
    for geometry, out in zip(geometries, outs, strict=True):
        placement = place(decoded.height, decoded.width, geometry)
        box = placement.box
        if halved:
            box = (box[0] / 2, box[1] / 2, box[2] / 2, box[3] / 2)
        width, height = placement.size
        left, top = placement.offset
        target = out
        if (width, height) != (geometry.size, geometry.size):
            out[...] = 0
            target = out[top : top + height, left : left + width]
        resize_into(pixels, box, placement.size, geometry.filter, target)
    return decoded


# JPEG


def _decode_jpeg(
    data: bytes, geometries: Sequence[Geometry], options: DecodeOptions
) -> tuple[np.ndarray, Decoded] | None:
    """RGBX pixels of a JPEG, at half scale where that is good enough; None when PIL should try."""
    if data[:2] != b"\xff\xd8":
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _check_pixels(height, width, options)
    if colors not in ("YCbCr", "Gray", "RGB"):
        return None
    orientation = _orientation(data, options) if geometries[0].exif_transpose else 1
    factor = 1
    # A flip would move the half pixel by which an odd side is rounded up to the other end.
    if geometries[0].filter != "box" and orientation == 1:
        scale = min(place(height, width, geometry).scale for geometry in geometries)
        factor = 2 if scale >= HALF_SCALE else 1
    h, w = -(-height // factor), -(-width // factor)
    try:
        # strict: data that ends early or is damaged must not pass as an image
        pixels = simplejpeg.decode_jpeg(
            data, "RGBX", min_height=h, min_width=w, min_factor=factor, buffer=_buffer(h * w * 4), strict=True
        )
    except ValueError:
        return None
    if orientation != 1:
        pixels = _transpose(pixels, orientation)
        height, width = pixels.shape[:2]
    return pixels, Decoded(height, width, "L" if colors == "Gray" else "RGB", 0)


def _transpose(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels (h, w, 4) turned upright, by the meaning of EXIF orientations 2 to 8 (as `ImageOps.exif_transpose`)."""
    words = pixels.view(np.uint32)[:, :, 0]  # (h, w)
    if orientation in (5, 6, 7, 8):
        words = words.T
    if orientation in (2, 3, 6, 7):
        words = words[:, ::-1]
    if orientation in (3, 4, 7, 8):
        words = words[::-1]
    return np.ascontiguousarray(words)[:, :, None].view(np.uint8)


def _check_pixels(height: int, width: int, options: DecodeOptions) -> None:
    if height * width > options.max_pixels:
        raise BadSample("too-large", f"{width} x {height} pixels; --max-pixels is {options.max_pixels:,}")


# PIL


class _Counter(logging.Handler):
    """Counts the records that PIL logs, instead of showing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@contextlib.contextmanager
def _quiet_pil(options: DecodeOptions) -> Iterator[list[int]]:
    """PIL with our limits, its warnings and log records counted into the list that is given: [count].

    These settings are global to the process, hence the lock: one PIL decode at a time. Processes, not threads, are
    what conversion runs on.
    """
    count, handler, logger = [0], _Counter(), logging.getLogger("PIL")
    with _pil_lock, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        settings = Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK, logger.propagate
        Image.MAX_IMAGE_PIXELS = options.max_pixels / 2  # type: ignore[assignment] # PIL refuses twice as many
        PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY  # big colour profiles are no reason to fail
        logger.propagate = False
        logger.addHandler(handler)
        try:
            yield count
        finally:
            logger.removeHandler(handler)
            Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK, logger.propagate = settings
            count[0] += len(caught) + handler.count


def _decode_pil(data: bytes, options: DecodeOptions, *, exif_transpose: bool) -> tuple[np.ndarray, Decoded]:
    """RGBX pixels of anything that PIL reads."""
    with _quiet_pil(options) as count:
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_pixels(image.height, image.width, options)
            image.load()
            _check_pixels(image.height, image.width, options)  # of an icon it is known only now
            mode = image.mode
            if exif_transpose:
                image = _upright(image, count)
            pixels = _pixels(to_rgb(image, options.background))
        except (BadSample, MemoryError):
            raise
        except UnidentifiedImageError:
            raise _why_unidentified(data) from None
        except Exception as error:  # PIL's decoders raise all kinds of errors on damaged files
            raise _bad_sample(error) from None
        if data[:2] == b"\xff\xd8" and image.format in ("JPEG", "MPO") and mode != "CMYK":
            count[0] += 1  # simplejpeg found something amiss, but all pixels are there
    return pixels, Decoded(image.height, image.width, mode, count[0])


def _pixels(rgb: Image.Image) -> np.ndarray:
    return to_rgbx(rgb, _buffer(rgb.width * rgb.height * 4).reshape(rgb.height, rgb.width, 4))


def _from_array(array: np.ndarray, options: DecodeOptions) -> tuple[np.ndarray, Decoded]:
    """RGBX pixels of an array."""
    if array.ndim in (2, 3):
        _check_pixels(array.shape[0], array.shape[1], options)
    try:
        image = array_to_image(array)
    except ValueError as error:
        raise BadSample("bad-shape", str(error)) from None
    pixels = _pixels(to_rgb(image, options.background))
    return pixels, Decoded(image.height, image.width, image.mode, 0)


def _upright(image: Image.Image, count: list[int]) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF that can't be parsed says nothing about the orientation
        count[0] += 1
        return image


def _orientation(data: bytes, options: DecodeOptions) -> int:
    """EXIF orientation of a JPEG, 1 to 8; 1 where there is none, or none that can be read."""
    with _quiet_pil(options):
        try:
            orientation = Image.open(io.BytesIO(data), formats=("JPEG",)).getexif().get(EXIF_ORIENTATION, 1)
        except Exception:
            return 1
    return orientation if orientation in range(1, 9) else 1


def _why_unidentified(data: bytes) -> BadSample:
    """PIL's `open` hides why a file that starts like an image can't be opened; ask its plugins once more."""
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        accepted = accept(data[:16]) if accept else False
        if isinstance(accepted, str):  # the format is known, but PIL was built without it
            return BadSample("unsupported", accepted)
        if accepted:
            try:
                factory(io.BytesIO(data), "")
            except Exception as error:
                sample = _bad_sample(error)
                if "not a" not in sample.detail:
                    return sample
    return BadSample("not-an-image")


def _bad_sample(error: Exception) -> BadSample:
    """The outcome that an error of PIL means."""
    text = " ".join(str(error).split()) or type(error).__name__
    lower = text.lower()
    if isinstance(error, Image.DecompressionBombError):
        return BadSample("too-large", text)
    if "not available" in lower or "support not installed" in lower:
        return BadSample("unsupported", text)
    if isinstance(error, EOFError | struct.error | IndexError) or "truncated" in lower or "unexpected end" in lower:
        return BadSample("truncated", text)
    return BadSample("corrupt", text)
