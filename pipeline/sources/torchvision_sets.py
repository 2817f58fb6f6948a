"""torchvision's datasets by name: `torchvision:MNIST`, `torchvision:CIFAR10:/path/to/root`.

torchvision and torch are imported here only, when such a source is opened. Datasets that hold all images as one array
(MNIST, CIFAR10, SVHN, ...) are handed to workers as that array, others as the dataset object.
"""

from __future__ import annotations

import difflib
import gzip
import inspect
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pipeline.errors import UsageError
from pipeline.sources import names
from pipeline.sources.base import Source, SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings
from pipeline.sources.labels import assemble
from pipeline.sources.sequence import ARRAY, PackedSource, Part, image_array
from pipeline.text import one_line

PREFIX = "torchvision:"
DEFAULT_ROOT = "data"
_SPLIT_VALUES = ("train", "val", "valid", "test")


def open_torchvision(src: Any, options: SourceOptions) -> SourceSet:
    """The torchvision source: `torchvision:NAME` or `torchvision:NAME:ROOT`; the default root is `data`.

    Integer labels are torchvision's own; the class names too. Only the wanted splits are opened.
    """
    src = os.fspath(src)
    name, _, root = src.removeprefix(PREFIX).partition(":")
    cls = _find(name, src)
    root = root or DEFAULT_ROOT
    parameters = inspect.signature(cls).parameters
    if options.download and "download" not in parameters:
        raise UsageError(f"--download: torchvision can't download {name}; put its files into {root}")
    fixed = {"root": root, "download": options.download}
    fixed = {name: value for name, value in fixed.items() if name in parameters}
    parts = {}
    with _unpacked(cls, root, src) as unpacked:
        if unpacked:
            fixed |= {"root": unpacked, "download": False}
        for split, arguments in _splits(parameters, options).items():
            if options.wants(split):
                dataset = _make(cls, fixed | arguments, src, root, optional="split" in arguments)
                if dataset is not None:
                    parts[split] = _Part(f"{src} {split}", dataset)
    if not parts and not options.splits:
        raise UsageError(f"{src}: torchvision needs more than a name and a split for it; convert it from Python")
    listed = (getattr(part.samples, "classes", None) for part in parts.values())
    classes = next((list(classes) for classes in listed if classes), [])
    made = assemble("torchvision", parts, options, num_classes=len(classes) or None)
    if classes and len(classes) == len(made.class_ids):
        made.class_names = [name if isinstance(name, str) else ", ".join(map(str, name)) for name in classes]
    return made


def _find(name: str, src: str) -> Callable[..., Any]:
    try:
        from torchvision import datasets
    except ImportError:
        raise UsageError(f'{src}: torchvision is missing; `pip install "efficient-imagenet[train]"`') from None
    classes = {known: getattr(datasets, known) for known in datasets.__all__}
    known = {known.lower(): known for known, cls in classes.items() if isinstance(cls, type)}
    known.pop("visiondataset", None)  # the others' base class
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=3)
        hint = f"did you mean {' or '.join(known[match] for match in close)}?" if close else "such as MNIST or CIFAR10"
        raise UsageError(f"{src}: torchvision has no dataset {name!r}; {hint}")
    return classes[known[name.lower()]]


@contextmanager
def _unpacked(cls: Any, root: str, src: str) -> Iterator[str | None]:
    """A temporary root for MNIST and its kin where only their `.gz` files are there, in ROOT or ROOT/NAME/raw.

    torchvision reads them unpacked, which is done in a moment; the images are in memory afterwards.
    """
    resources = getattr(cls, "resources", None)
    pairs = [pair for pair in resources if isinstance(pair, tuple)] if isinstance(resources, list) else []
    packed = [pair[0] for pair in pairs if pair[0].endswith(".gz")]
    raw = Path(root, cls.__name__, "raw")
    places = (raw, Path(root)) if packed else ()
    found = next((place for place in places if all((place / name).is_file() for name in packed)), None)
    if found is None or all((raw / name).with_suffix("").is_file() for name in packed):
        yield None
        return
    with TemporaryDirectory() as temp:
        target = Path(temp, cls.__name__, "raw")
        target.mkdir(parents=True)
        for name in packed:
            try:
                (target / name).with_suffix("").write_bytes(gzip.decompress((found / name).read_bytes()))
            except (OSError, EOFError, zlib.error) as error:
                raise UsageError(f"{src}: {found / name}: {one_line(error)}; get the file again") from None
        yield temp


def _splits(parameters: Any, options: SourceOptions) -> dict[str, dict[str, Any]]:
    """Split name -> the arguments that choose it."""
    if "train" in parameters:
        return {"train": {"train": True}, "test": {"train": False}}
    if "split" in parameters:
        values = [*_SPLIT_VALUES, *(split for split in options.splits if split not in _SPLIT_VALUES)]
        found: dict[str, dict[str, Any]] = {}
        for value in values:
            found.setdefault(names.split_of_folder(value.encode()) or value, {"split": value})
        return found
    return {options.only_split: {}}


def _make(cls: Callable[..., Any], arguments: dict[str, Any], src: str, root: str, optional: bool) -> Any:
    """The dataset, or None where torchvision doesn't know the split."""
    try:
        return cls(**arguments)
    except ValueError as error:
        if optional:
            return None
        raise UsageError(f"{src}: {_line(error)}") from None
    except TypeError as error:
        raise UsageError(f"{src}: needs more than a name ({_line(error)}); convert it from Python") from None
    except (RuntimeError, OSError, ImportError) as error:
        raise UsageError(f"{src}: {_line(error)} Files are expected in {root!r}; give torchvision:NAME:ROOT") from None


def _line(error: Exception) -> str:
    return one_line(error).replace("download=True", "--download").rstrip(".") + "."


class _Part(Part):
    """One split; a dataset that holds all its images as one array is handed to workers as that."""

    def source(self, labels: np.ndarray) -> Source:
        images = _one_array(self.samples)
        if images is None:
            return super().source(labels)
        count, size = len(images), images[0].size
        shape = np.zeros((count, 4), np.int32)
        shape[:, : images.ndim - 1] = images.shape[1:]
        payload = ByteStrings(images.reshape(-1), np.arange(count + 1, dtype=np.int64) * size)
        return PackedSource(self.keys, labels, payload, np.full(count, ARRAY, np.uint8), shape)


def _one_array(dataset: Any) -> np.ndarray | None:
    """uint8 (N, H, W) or (N, H, W, 3): all images, where the dataset holds them so and its items agree with it."""
    data = getattr(dataset, "data", None)
    if data is None or len(data) != len(dataset) or not len(dataset):
        return None
    images = np.asarray(data)
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:  # (N, 3, H, W), as SVHN and STL10
        images = images.transpose(0, 2, 3, 1)
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        return None
    if any(not np.array_equal(image_array(dataset[i][0]), images[i]) for i in {0, len(dataset) - 1}):
        return None
    return np.ascontiguousarray(images)
