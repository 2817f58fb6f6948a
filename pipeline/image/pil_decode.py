"""Encoded bytes to an RGB image through PIL, with every kind of failure told apart."""

from __future__ import annotations

import io
import struct

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
from pipeline.image.decode_warnings import DecodeWarnings, captured_warnings
from pipeline.image.pixel_modes import to_rgb
from pipeline.text import one_line

# Formats that the content may be in. Each starts with a signature, so that text can't pass for an image, and none
# runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "QOI")
EXIF_ORIENTATION = 0x0112


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Raise BadSample where an image is larger than allowed."""
    if height * width > max_pixels:
        raise BadSample("too-large", f"{width} x {height} pixels; --max-pixels is {max_pixels:,}")


def open_rgb(
    data: bytes, *, max_pixels: int, background: tuple[int, int, int], exif_transpose: bool
) -> tuple[Image.Image, str, int]:
    """The first frame of an encoded image.

    Args:
        data: the file's bytes; they decide the format.
        max_pixels: larger images are refused before they are decoded.
        background: what shows through where the image is transparent.
        exif_transpose: turn the image upright.

    Returns:
        An image of mode RGB; PIL's name of the source's mode; and how often the decoder complained.

    Raises:
        BadSample: the image can't be converted.
    """
    with captured_warnings(max_pixels) as noted:
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_pixels(image.height, image.width, max_pixels)
            image.load()
            check_pixels(image.height, image.width, max_pixels)  # of an icon it is known only now
            mode = image.mode
            if exif_transpose:
                _turn_upright(image, noted)
            image = to_rgb(image, background)
        except (BadSample, MemoryError):
            raise
        except UnidentifiedImageError:
            raise _why_unidentified(data) from None
        except Exception as error:  # PIL's decoders raise all kinds of errors on damaged files
            raise _bad_sample(error, data) from None
    return image, mode, noted.count


def jpeg_orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8; 1 where there is none, or none that can be read."""
    with captured_warnings(1 << 62):
        try:
            orientation = Image.open(io.BytesIO(data), formats=("JPEG",)).getexif().get(EXIF_ORIENTATION, 1)
        except Exception:  # whatever a damaged EXIF block makes PIL raise
            return 1
    return orientation if orientation in range(1, 9) else 1


def _turn_upright(image: Image.Image, noted: DecodeWarnings) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # EXIF that can't be parsed says nothing about the orientation
        noted.count += 1


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
                if "not a" not in str(error) or _ends_early(data):
                    return _bad_sample(error, data)
    return BadSample("not-an-image")


def _bad_sample(error: Exception, data: bytes) -> BadSample:
    """The outcome that an error of PIL means."""
    text = one_line(error)
    lower = text.lower()
    if isinstance(error, Image.DecompressionBombError):
        return BadSample("too-large", text.partition(" exceeds")[0])
    if "not available" in lower or "support not installed" in lower:
        return BadSample("unsupported", text)
    early = any(sign in lower for sign in ("truncated", "unexpected end", "requires a buffer")) or _ends_early(data)
    if early or isinstance(error, EOFError | struct.error | IndexError):
        return BadSample("truncated", text)
    return BadSample("corrupt", text)


def _ends_early(data: bytes) -> bool:
    """Whether a file that PIL can't decode lacks its end, for formats where that is easy to see."""
    if data[:2] == b"\xff\xd8":
        return b"\xff\xda" not in data  # JPEG without a scan
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return b"IDAT" not in data
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    if data[:3] == b"GIF":
        return data[-1:] != b";"
    if data[:4] == b"\xff\x4f\xff\x51" or data[4:12] == b"jP  \r\n\x87\n":
        return data[-2:] != b"\xff\xd9"  # JPEG 2000's end of codestream
    return False
