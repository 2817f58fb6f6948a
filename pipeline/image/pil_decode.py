"""Encoded bytes to an RGB image through PIL, with every kind of failure told apart."""

from __future__ import annotations

import importlib
import io
import struct

from PIL import Image, ImageOps, UnidentifiedImageError

from pipeline.errors import BadSample
from pipeline.image.beyond_pillow import Levels, plugin_formats, read_levels, read_tiff, tiff_needs_levels
from pipeline.image.decode_warnings import DecodeWarnings, captured_warnings
from pipeline.image.options import DEEP_PEAK_BYTES, PLAIN_PEAK_BYTES, WHITE_16BIT, Decoded, DecodeOptions, check_pixels
from pipeline.image.pixel_modes import BITS_PER_SAMPLE, levels_to_rgb, tiff_tag, to_rgb
from pipeline.text import one_line

# Formats that the content may be in. Each starts with a signature, so that text can't pass for an image, and none
# runs another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "QOI")
for _name in ("Avif", "Bmp", "Gif", "Ico", "Jpeg2K", "Jpeg", "Mpo", "Png", "Ppm", "Qoi", "Tiff", "WebP"):
    importlib.import_module(f"PIL.{_name}ImagePlugin")  # which registers its format
EXIF_ORIENTATION = 0x0112
# Formats that take more memory than others while they are decoded, in bytes for each pixel.
PEAK_BYTES = {"WEBP": 25, "JPEG2000": 25, "AVIF": 20, "JXL": 21}
TIFF_STARTS = (b"II", b"MM")
TIFF_LIMITS = ("unknown pixel mode", "unknown raw mode", "samples per pixel", "codec configuration")
"""What Pillow says of a TIFF that is laid out in a way that it can't read."""
PLAIN_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr")


def open_rgb(data: bytes, options: DecodeOptions, *, exif_transpose: bool) -> tuple[Image.Image, Decoded]:
    """The first frame of an encoded image, whose content decides the format, in mode RGB; and what it was."""
    with captured_warnings(options.max_pixels) as noted:
        try:
            image, mode, deep = _open(data, options, exif_transpose, noted)
        except (BadSample, MemoryError):
            raise
        except Exception as error:  # PIL's decoders raise all kinds of errors on damaged files
            bad = _why_unidentified(data) if isinstance(error, UnidentifiedImageError) else _bad_sample(error, data)
            if not data.startswith(TIFF_STARTS) or not (bad.reason == "unsupported" or noted.codec_is_missing):
                raise bad from None
            image, mode, deep = _from_levels(read_tiff(data, options, bad.detail), options)
    peak = max(high for _, high in image.getextrema()) if deep else -1  # type: ignore[misc] # RGB has three pairs
    return image, Decoded(image.height, image.width, mode, noted.count, peak)


def _open(
    data: bytes, options: DecodeOptions, exif_transpose: bool, noted: DecodeWarnings
) -> tuple[Image.Image, str, bool]:
    levels = read_levels(data, options)
    if levels is not None:
        return _from_levels(levels, options)
    image: Image.Image = Image.open(io.BytesIO(data), formats=plugin_formats(data) or FORMATS)
    _check_image(image, options)
    if image.format == "TIFF" and tiff_needs_levels(image, options):
        return _from_levels(read_tiff(data, options, "Pillow reads its layout wrongly"), options)
    image.load()
    _check_image(image, options)  # of an icon the size is known only now
    mode, deep = image.mode, _is_16bit(image, data)
    if image.format == "PNG" and mode == "L" and "transparency" in image.info:
        image.info["transparency"] *= {2: 85, 4: 17}.get(data[24], 1)  # which PIL leaves at the file's depth
    if image.format == "JPEG" and mode != "CMYK":
        noted.count += 1  # simplejpeg refused the data, but PIL found all pixels
    if exif_transpose:
        try:
            ImageOps.exif_transpose(image, in_place=True)
        except Exception:  # EXIF that can't be parsed says nothing about the orientation
            noted.count += 1
    return to_rgb(image, options), mode, deep


def _check_image(image: Image.Image, options: DecodeOptions) -> None:
    plain = image.mode in PLAIN_MODES and not image.has_transparency_data
    peak = PEAK_BYTES.get(image.format or "", PLAIN_PEAK_BYTES if plain else DEEP_PEAK_BYTES)
    check_pixels(image.height, image.width, options, peak)


def _is_16bit(image: Image.Image, data: bytes) -> bool:
    """Whether the file gives 16 bits to each level, of which few may be in use."""
    if image.format == "TIFF":
        return bool(tiff_tag(image, BITS_PER_SAMPLE, (1,))[0] == 16)
    return image.mode.startswith("I;16") or (image.format == "PNG" and data[24:25] == b"\x10")


def _from_levels(levels: Levels, options: DecodeOptions) -> tuple[Image.Image, str, bool]:
    array, maximum = levels
    mode = "L" if array.ndim == 2 else "RGB"
    deep = f";{8 * array.itemsize}" if array.itemsize > 1 else ""
    return Image.fromarray(levels_to_rgb(array, maximum, options)), mode + deep, maximum == WHITE_16BIT


def jpeg_orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8; 1 where there is none, or none that can be read."""
    with captured_warnings(1 << 62):
        try:
            orientation = Image.open(io.BytesIO(data), formats=("JPEG",)).getexif().get(EXIF_ORIENTATION, 1)
        except Exception:  # whatever a damaged EXIF block makes PIL raise
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
                if "not a" not in str(error) or _ends_early(data):
                    return _bad_sample(error, data)
    return BadSample("not-an-image")


def _bad_sample(error: Exception, data: bytes) -> BadSample:
    """The outcome that an error of PIL means."""
    text = one_line(error)
    lower = text.lower()
    if isinstance(error, Image.DecompressionBombError):
        return BadSample("too-large", text.partition(" exceeds")[0])
    if data.startswith(TIFF_STARTS) and isinstance(error.__cause__, KeyError):
        return BadSample("unsupported", f"compression {text}")
    if "not available" in lower or "support not installed" in lower or any(sign in lower for sign in TIFF_LIMITS):
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
