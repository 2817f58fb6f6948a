"""The public API under one name: `from efficient_imagenet import convert, open_store, RankPartitionedDataset, Loader`.

`pipeline` and `trainer` are names that other packages have, too. Where another one is found first, importing this
module says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline import convert, open_store
    from trainer.dataset import RankPartitionedDataset
    from trainer.loader import Loader

__all__ = ["Loader", "RankPartitionedDataset", "convert", "open_store"]

_WHERE = {
    "convert": "pipeline",
    "open_store": "pipeline",
    "RankPartitionedDataset": "trainer.dataset",
    "Loader": "trainer.loader",
}


def _check_names() -> None:
    """Raise ImportError where `pipeline` or `trainer` is another package than the one beside this module."""
    for name, part in (("pipeline", "store"), ("trainer", "reading")):
        spec = importlib.util.find_spec(name)
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        if not any((folder / part / "__init__.py").exists() for folder in folders):
            found = (spec and spec.origin) or "nowhere"
            raise ImportError(
                f"efficient-imagenet needs its own package {name!r}, but Python finds {found}; rename or move that, "
                "or install efficient-imagenet into an environment of its own"
            )


_check_names()


def __getattr__(name: str) -> Any:
    # Lazy, so that converting needs no torch, and loading neither joblib nor PIL.
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
