"""From Python: any sequence of (image, label) or (image, label, key).

An image is encoded bytes, a path, an array or a PIL image; a label is an integer, a class id, or None. A list or tuple
is packed into arrays, which workers map; any other sequence (an object that loads its items when asked) is handed to
the workers as it is, must pickle, and is gone through once for its labels.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from pipeline.errors import BadSample, UsageError
from pipeline.sources.base import Indexed, Source, SourceOptions, SourceSet
from pipeline.sources.byte_strings import ByteStrings, ByteStringsBuilder, first_duplicate
from pipeline.sources.files import ask_ahead_file, bad_sample, file_stamps, read_file
from pipeline.sources.labels import LabelColumn, assemble
from pipeline.text import as_text, one_line, printable

ENCODED, PATH, ARRAY, BAD = range(4)
_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


@dataclass(eq=False)
class PackedSource(Indexed):
    """Images of all kinds in one array of bytes.

    Args:
        payload: encoded bytes, paths, arrays' bytes, or `reason: detail` of bad samples, one per sample.
        kind: uint8 (N,), which of these.
        shape: int32 (N, 4), height, width, channels (0: none) and index of the dtype; zeros for all but arrays.
    """

    payload: ByteStrings
    kind: np.ndarray
    shape: np.ndarray

    def read(self, i: int) -> bytes | np.ndarray:
        data = self.payload[i]
        if self.kind[i] == PATH:
            return read_file(data)
        if self.kind[i] == ENCODED:
            return _encoded(data, self.key(i))
        if self.kind[i] == BAD:
            reason, _, detail = as_text(data).partition(": ")
            raise BadSample(reason, detail)
        height, width, channels, dtype = self.shape[i].tolist()
        return np.frombuffer(data, _DTYPES[dtype]).reshape((height, width, channels) if channels else (height, width))

    def read_ahead(self, i: int) -> None:
        if self.kind[i] == PATH:
            ask_ahead_file(self.payload[i])

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): a file's size and time; of other samples the size and CRC-32 of their bytes."""
        stamps = np.empty((len(indices), 2), np.int64)
        for row, i in enumerate(indices.tolist()):
            data = self.payload[i]
            stamps[row] = file_stamps([data])[0] if self.kind[i] == PATH else (len(data), zlib.crc32(data))
        return stamps


@dataclass(eq=False)
class LazySource(Indexed):
    """A sequence that is asked for each image when it is read.

    It is pickled by value, so that classes of a script or notebook work in its workers.
    """

    samples: Any

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"samples": cloudpickle.dumps(self.samples)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, samples=cloudpickle.loads(state["samples"]))

    def read(self, i: int) -> bytes | np.ndarray:
        image = item(self.samples, i)[0]
        if isinstance(image, bytes | bytearray | memoryview):
            return _encoded(bytes(image), self.key(i))
        return read_file(os.fsencode(image)) if isinstance(image, str | os.PathLike) else image_array(image)

    def change_stamps(self, indices: np.ndarray) -> np.ndarray:
        """int64 (len(indices), 2): zeros; whether a sequence's images have changed can't be seen cheaply."""
        return np.zeros((len(indices), 2), np.int64)


def item(samples: Any, i: int) -> Any:
    """The sequence's own item; whatever it raises is the sample's fault, unless the machine is at fault.

    Raises:
        BadSample: the sequence raised.
    """
    try:
        return samples[i]
    except OSError as error:
        if error.errno is not None:
            raise bad_sample(error, b"sample %d" % i) from None
        raise BadSample("corrupt", f"sample {i}: {one_line(error)}") from None  # PIL's, of a file that was opened
    except (MemoryError, UsageError):
        raise
    except Exception as error:
        raise BadSample("unreadable", f"sample {i}: {type(error).__name__}: {one_line(error)}") from None


def _encoded(data: bytes, key: bytes) -> bytes:
    if not data:
        raise BadSample("empty", as_text(key))
    return data


def image_array(image: Any) -> np.ndarray:
    """An array, or a PIL image of any mode, as uint8 or uint16 of shape (H, W) or (H, W, channels).

    Raises:
        BadSample: another dtype or shape, or an image opened from a damaged file.
    """
    if hasattr(image, "getbands"):  # a PIL image, without importing PIL
        from pipeline.image.pixel_modes import image_to_array

        try:
            return image_to_array(image)
        except ValueError as error:
            raise BadSample("unsupported", f"PIL mode {image.mode}: {error}") from None
        except OSError as error:  # what PIL raises for a damaged file has no number
            if error.errno is not None:
                raise
            raise BadSample("corrupt", str(error)) from None
    array = np.asarray(image)
    shape_fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if array.dtype.newbyteorder("=") not in _DTYPES or not shape_fits or not array.size:
        raise BadSample("bad-shape", f"{array.dtype} {array.shape}")
    return array


def open_sequence(src: Any, options: SourceOptions) -> SourceSet:
    """The sequence source: samples, or a mapping from split names to samples."""
    if isinstance(src, str | os.PathLike | bytes):
        raise UsageError(f"{src!r}: --source sequence is for samples that a Python program passes; use another kind")
    by_split: Mapping[str, Any] = src if isinstance(src, Mapping) else {options.only_split: src}
    for samples in by_split.values():
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            remedy = "load it without streaming" if hasattr(samples, "features") else "pass a list of them"
            raise UsageError(f"the samples are a {type(samples).__name__}, which has no length; {remedy}")
    parts = {split: Part(split, samples) for split, samples in by_split.items()}
    return assemble("sequence", parts, options)


class Part:
    """One split: keys and labels of its samples; those of a list or tuple are packed."""

    def __init__(self, name: str, samples: Any) -> None:
        self.name, self.samples = name, samples
        self.packer = _Packer() if isinstance(samples, list | tuple) else None
        self.column = LabelColumn()
        listed = stated_labels(samples) if self.packer is None else None
        if listed is None:
            self.keys = _go_through(samples, self.column, self.packer)
        else:
            self.keys = numbered(len(listed))
            for label in listed:
                self.column.add(label)

    def where(self, i: int) -> str:
        return f"sample {as_text(self.keys[i])} of {self.name}"

    def source(self, labels: np.ndarray) -> Source:
        if self.packer is not None:
            return self.packer.build(self.keys, labels)
        return LazySource(self.keys, labels, self.samples)


def stated_labels(samples: Any) -> list[str | int | None] | None:
    """The labels that a dataset lists beside its items, as torchvision's do; None where it lists none that agree."""
    for name in ("targets", "labels", "_labels", "samples"):
        try:
            listed = [_label(one[1] if name == "samples" else one, i) for i, one in enumerate(getattr(samples, name))]
            looked_at = {i: samples[i] for i in {0, len(listed) // 2, len(listed) - 1}}
            if len(listed) == len(samples) and all(
                len(item) == 2 and not isinstance(item[0], str | os.PathLike) and _label(item[1], i) == listed[i]
                for i, item in looked_at.items()
            ):
                return listed
        except Exception:
            continue
    return None


class _Packer:
    """Collects a `PackedSource`."""

    def __init__(self) -> None:
        self._payload = ByteStringsBuilder()
        self._kind = bytearray()
        self._shape = array("i")

    def add(self, image: Any) -> None:
        kind, shape = ENCODED, (0, 0, 0, 0)
        if isinstance(image, bytes | bytearray | memoryview):
            payload = bytes(image)
        elif isinstance(image, str | os.PathLike):
            kind, payload = PATH, os.path.abspath(os.fsencode(image))  # workers may run elsewhere
        else:
            try:
                pixels = image_array(image)
            except BadSample as error:
                kind, payload = BAD, f"{error.reason}: {error.detail}".encode()
            else:
                kind, dtype = ARRAY, _DTYPES.index(pixels.dtype.newbyteorder("="))
                payload = np.ascontiguousarray(pixels, _DTYPES[dtype]).tobytes()
                shape = (*pixels.shape[:2], pixels.shape[2] if pixels.ndim == 3 else 0, dtype)
        self._payload.append(payload)
        self._kind.append(kind)
        self._shape.extend(shape)

    def build(self, keys: ByteStrings, labels: np.ndarray) -> PackedSource:
        kind, shape = np.array(self._kind, np.uint8), np.array(self._shape, np.int32).reshape(-1, 4)
        return PackedSource(keys, labels, self._payload.build(), kind, shape)


def _go_through(samples: Any, column: LabelColumn, pack: _Packer | None) -> ByteStrings:
    """The samples' keys; their labels go into `column`, and the samples into `pack`, where it is given.

    Without keys of its own a sample's key is its path or, where there are none or they repeat, its number. A sample
    that can't be loaded is unlabelled; it will be a bad sample when it is read.
    """
    keys, explicit = ByteStringsBuilder(), False
    for i in range(len(samples)):
        try:
            sample = item(samples, i)
        except BadSample:
            sample = None, None
        if not isinstance(sample, tuple | list) or len(sample) not in (2, 3):
            raise UsageError(
                f"sample {i} is a {type(sample).__name__}; pass (image, label) or (image, label, key), such as "
                "list(zip(images, labels))"
            )
        image, label, *key = sample
        column.add(_label(label, i))
        if key:
            explicit = True
            keys.append(key[0] if isinstance(key[0], bytes) else os.fsencode(str(key[0])))
        elif isinstance(image, str | os.PathLike):
            keys.append(os.fsencode(image))
        else:
            keys.append(b"%d" % i)
        if pack is not None:
            pack.add(image)
    built = keys.build()
    if twice := first_duplicate(built):
        if explicit:
            raise UsageError(f"samples {twice[0]} and {twice[1]} have the same key {built[twice[0]]!r}; change one")
        built = numbered(len(built))
    return built


def numbered(count: int) -> ByteStrings:
    """The keys of samples that have no names: 0, 1, ..."""
    return ByteStrings.pack(b"%d" % i for i in range(count))


def _label(label: Any, i: int) -> str | int | None:
    if label is None or isinstance(label, str):
        return label
    value = label
    if hasattr(label, "item"):  # a numpy or torch scalar
        with suppress(ValueError, RuntimeError):  # an array of several
            value = label.item()
    if isinstance(value, bool) or not isinstance(value, int):
        shown = printable(one_line(repr(label)), 60)
        raise UsageError(f"sample {i} has the label {shown}; pass an integer (the argmax of one-hot), text or None")
    return value
