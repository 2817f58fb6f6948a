"""Attributes of a store's groups as `docs/format.md` specifies them: their names and types, and their digest.

What is wrong with them is raised as a `ValueError`; whoever read them knows where they lie.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from pipeline.store.format import SMALL_ARRAYS, is_kind, short
from pipeline.store.geometry import Geometry

_INT_OR_NULL = (int, type(None))
_ROOT_ATTRIBUTES = {
    "format_version": int,
    "geometry": {"size": int, "fit": str, "filter": str, "channels": str, "exif_transpose": bool},
    "class_ids": [str],
    "class_names": [str],
}
_SPLIT_ATTRIBUTES = {
    "num_samples": int,
    "num_valid": int,
    "recipe": {},
    "bad_samples": [{"slot": int, "key": str, "reason": str}],
    "order": {"shuffled": bool, "seed": _INT_OR_NULL},
    "mean": [float],
    "std": [float],
    "sample_fingerprint": str,
    "sha256": dict.fromkeys(SMALL_ARRAYS, str),
}
_OPTIONAL_ATTRIBUTES = {"source_modes": {}, "decoder_warnings": int, "software": {}, "resizer": str}


def check_group_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """A group's attributes after the rest of its `zarr.json` was checked."""
    if metadata.get("node_type") != "group" or metadata.get("zarr_format") != 3:
        raise ValueError("not a group of Zarr version 3")
    attributes = metadata.get("attributes")
    if not isinstance(attributes, dict):
        raise ValueError("attributes are missing")
    return attributes


def attributes_digest(attributes: dict[str, Any]) -> str:
    """Hexadecimal SHA-256 of a group's attributes but this digest itself, as JSON with sorted names and no spaces."""
    rest = {name: value for name, value in attributes.items() if name != "attributes_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_digest(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes and, as the last one, their digest."""
    rest = {name: value for name, value in attributes.items() if name != "attributes_sha256"}
    return {**rest, "attributes_sha256": attributes_digest(rest)}


def _check_digest(attributes: dict[str, Any]) -> None:
    _check_types(attributes, {"attributes_sha256": str}, {})
    if attributes["attributes_sha256"] != attributes_digest(attributes):
        raise ValueError("attributes are altered (SHA-256 differs from attributes_sha256)")


def check_root_attributes(attributes: dict[str, Any]) -> Geometry:
    """The geometry that a root group's attributes give, after all of them were checked."""
    _check_types(attributes, _ROOT_ATTRIBUTES, {})
    if attributes["format_version"] > 1:
        _check_types(attributes, {"splits": [str]}, {})
        _check_digest(attributes)
    if len(attributes["class_ids"]) != len(attributes["class_names"]):
        raise ValueError("class_ids and class_names differ in length")
    try:
        return Geometry(**attributes["geometry"])
    except TypeError:  # a field too many
        raise ValueError("attribute geometry is damaged") from None


def check_split_attributes(attributes: dict[str, Any], num_images: int, num_channels: int, version: int) -> None:
    """Check types and lengths of a split's attributes; whether they fit the arrays is `integrity`'s to say."""
    _check_types(attributes, _SPLIT_ATTRIBUTES, _OPTIONAL_ATTRIBUTES)
    if version > 1:
        _check_digest(attributes)
    num_samples, num_valid = attributes["num_samples"], attributes["num_valid"]
    if num_samples != num_images or not 0 <= num_valid <= num_samples:
        raise ValueError(f"num_samples {num_samples}, num_valid {num_valid} don't fit {num_images} images")
    for name in ("mean", "std"):
        values = attributes[name]
        if len(values) != num_channels or not all(map(math.isfinite, values)):
            raise ValueError(f"attribute {name} is {short(values)}, must be {num_channels} numbers")


def _check_types(attributes: dict[str, Any], required: dict[str, Any], optional: dict[str, Any]) -> None:
    for name, kind in {**required, **optional}.items():
        if name in required and name not in attributes:
            raise ValueError(f"attribute {name} is missing")
        if name in attributes and not is_kind(attributes[name], kind):
            raise ValueError(f"attribute {name} is damaged")
