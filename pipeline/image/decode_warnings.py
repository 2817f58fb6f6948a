"""What PIL and libtiff say about a damaged file is counted, and never reaches the terminal."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import warnings
from collections.abc import Iterator

from PIL import Image, PngImagePlugin

_lock = threading.Lock()
_TiffHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class DecodeWarnings(logging.Handler):
    """What was said.

    Attributes:
        count: how many warnings, log records and libtiff messages came; complete once the context has ended.
        codec_is_missing: libtiff was built without a TIFF's compression.
    """

    count = 0
    codec_is_missing = False

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@functools.cache
def _libtiff() -> ctypes.CDLL | None:
    """The libtiff that PIL has loaded, which writes its errors to the terminal; None where it can't be found."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            path = next((line[line.index("/") :].rstrip("\n") for line in maps if "/libtiff" in line), None)
        library = ctypes.CDLL(path) if path else None
        if library is not None:
            library.TIFFSetErrorHandler.restype = ctypes.c_void_p
            library.TIFFSetErrorHandler.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


@contextlib.contextmanager
def _libtiff_counted(noted: DecodeWarnings) -> Iterator[None]:
    library = _libtiff()
    if library is None:
        yield
        return

    def count(module: int | None, text: int | None, arguments: int | None) -> None:
        noted.count += 1
        noted.codec_is_missing |= text is not None and b"not configured" in ctypes.string_at(text)

    handler = _TiffHandler(count)
    previous = library.TIFFSetErrorHandler(ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        library.TIFFSetErrorHandler(previous)


@contextlib.contextmanager
def captured_warnings(max_pixels: int) -> Iterator[DecodeWarnings]:
    """PIL with our limit of pixels (DecompressionBombError above it) and nothing written to the terminal.

    All of this is global to the process, hence a lock: one PIL decode at a time. Conversion runs on processes.
    """
    noted, loggers = DecodeWarnings(logging.WARNING), [logging.getLogger(name) for name in ("PIL", "tifffile")]
    with _lock, warnings.catch_warnings(record=True) as caught, _libtiff_counted(noted):
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        settings = Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK, [logger.propagate for logger in loggers]
        Image.MAX_IMAGE_PIXELS = max_pixels / 2  # type: ignore[assignment] # PIL refuses more than twice as many
        PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY  # a big colour profile is no reason to fail
        for logger in loggers:
            logger.propagate = False
            logger.addHandler(noted)
        try:
            yield noted
        finally:
            Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK, propagated = settings
            for logger, value in zip(loggers, propagated, strict=True):
                logger.removeHandler(noted)
                logger.propagate = value
            noted.count += len(caught)
