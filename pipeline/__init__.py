"""Offline conversion of image datasets into fixed-size uint8 Zarr chunks, and the store's read side.

from pipeline import convert, open_store
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.conversion.api import convert
    from pipeline.store.reader import open_store

__all__ = ["convert", "open_store"]
__version__ = "0.1.0"

_EXPORTS = {"convert": "pipeline.conversion.api", "open_store": "pipeline.store.reader"}


def __getattr__(name: str) -> Any:
    # Lazy, so that a data-loading process that opens a store imports neither joblib nor PIL.
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
