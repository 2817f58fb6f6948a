"""One split's part of the dataset report: samples, classes, original sizes, brightness, bad samples."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from markupsafe import Markup

from pipeline.commands.gallery import Picture
from pipeline.commands.survey import SplitSurvey
from pipeline.errors import BAD_SAMPLE_REASONS
from pipeline.html.charts import Axis, heat_map, histogram, profile
from pipeline.html.page import count
from pipeline.store.format import UNLABELLED
from pipeline.store.reader import Store
from pipeline.text import as_text

MOST_NAMED_CLASSES = 40
EXTREME_CLASSES = 5
LISTED_BAD = 50
MOST_BINS = 40
CHANNELS = {1: ["gray"], 3: ["red", "green", "blue"]}


def split_values(store: Store, survey: SplitSurvey, pictures: list[Picture]) -> dict[str, Any]:
    """What the split's part of the page prints."""
    attrs, mean = survey.split.attrs, survey.split.mean
    bad = [(entry["slot"], str(entry["key"]), entry["reason"]) for entry in attrs.get("bad_samples", [])[:LISTED_BAD]]
    keys = [as_text(survey.split.key(picture.slot)) for picture in pictures]
    folder = _shared_folder([*keys, *(key for _, key, _ in bad)])
    return {
        "survey": survey,
        "key_folder": folder,
        "pictures": [
            _caption(store, survey, picture, key.removeprefix(folder))
            for picture, key in zip(pictures, keys, strict=True)
        ],
        "classes": _classes(store, survey) if survey.counts.any() else None,
        "sizes": _sizes(survey.sizes, store.geometry) if len(survey.sizes) else None,
        "modes": sorted(attrs.get("source_modes", {}).items(), key=lambda item: -item[1]),
        "channels": list(zip(CHANNELS.get(len(mean)) or range(len(mean)), mean, survey.split.std, strict=True)),
        "reasons": [(code, BAD_SAMPLE_REASONS.get(code, ""), number) for code, number in survey.bad_reasons.items()],
        "bad": [(slot, key.removeprefix(folder), reason) for slot, key, reason in bad],
    }


def class_text(store: Store, label: int) -> str:
    """A class as people call it: its name, and its id where that's another."""
    if not 0 <= label < len(store.class_ids):
        return "unlabelled" if label == UNLABELLED else f"label {label}"
    name, class_id = store.class_names[label], store.class_ids[label]
    return name if name == class_id else f"{name} ({class_id})"


def _shared_folder(keys: list[str]) -> str:
    """The folder, with a slash at its end, that holds all the keys' files where they are absolute paths, else ""."""
    if not keys or not all(os.path.isabs(key) for key in keys):
        return ""
    folder = os.path.commonpath([os.path.dirname(key) for key in keys])
    return folder if folder.endswith("/") else f"{folder}/"


def _caption(store: Store, survey: SplitSurvey, picture: Picture, key: str) -> dict[str, Any]:
    label = int(survey.split.labels[picture.slot])
    height, width = survey.split.source_size[picture.slot].tolist()
    name = class_text(store, label)
    short = store.class_names[label] if 0 <= label < len(store.class_names) else name
    remark = f"slot {picture.slot}, originally {width} × {height}"
    return {"uri": picture.uri, "class": name, "short": short, "key": key, "remark": remark}


def _quantiles(values: np.ndarray) -> list[Any]:
    """Least, 5 %, median, 95 % and most of a non-empty array; each is one of its values."""
    return np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0), method="inverted_cdf").tolist()


def _classes(store: Store, survey: SplitSurvey) -> dict[str, Any]:
    counts, empty = survey.counts, np.flatnonzero(survey.counts == 0)
    by_size = np.argsort(-counts, kind="stable")
    smallest, _, median, _, largest = at = _quantiles(counts)

    def rows(labels: np.ndarray) -> list[tuple[int, str, int]]:
        return [(label, class_text(store, label), int(counts[label])) for label in labels.tolist()]

    is_named, chart = len(counts) <= MOST_NAMED_CLASSES, None
    if not is_named and largest > smallest + 1:
        label = (
            f"Samples per class, classes sorted by size: the largest has {count(largest)}, the median {count(median)}, "
            f"the smallest {count(smallest)}."
        )
        chart = profile(counts[by_size], label, "classes, the largest first", "samples")
    return {
        "num": len(counts),
        "quantiles": at,
        "num_unlabelled": survey.num_unlabelled,
        "num_empty": len(empty),
        "first_empty": [class_text(store, label) for label in empty[:5].tolist()],
        "named": rows(np.arange(len(counts))) if is_named else [],
        "chart": chart,
        "largest": rows(by_size[:EXTREME_CLASSES]),
        "smallest": rows(by_size[::-1][:EXTREME_CLASSES]),
    }


def _sizes(sizes: np.ndarray, geometry: dict[str, Any]) -> dict[str, Any]:
    short, long, target = sizes.min(axis=1), sizes.max(axis=1), geometry["size"]
    # Height and width in one number: many times as fast as rows.
    distinct, numbers = np.unique(sizes[:, 0].astype(np.int64) << 32 | sizes[:, 1], return_counts=True)
    most = np.argsort(-numbers, kind="stable")[:3]
    return {
        "num": len(sizes),
        "num_distinct": len(distinct),
        "common": [(*divmod(int(distinct[i]), 1 << 32), int(numbers[i])) for i in most],
        "target": target,
        "num_enlarged": int(np.count_nonzero((long if geometry["fit"] == "pad" else short) < target)),
        "heat_map": _heat_map(sizes) if len(distinct) > 1 else "",
        "short_side": _short_side(short, target) if len(distinct) > 1 else "",
        "quantiles": [
            ("Shorter side", [count(value) for value in _quantiles(short)]),
            ("Longer side", [count(value) for value in _quantiles(long)]),
            ("Width ÷ height", [f"{value:.2f}" for value in _quantiles(sizes[:, 1] / sizes[:, 0])]),
        ],
    }


def _heat_map(sizes: np.ndarray) -> Markup:
    heights, widths = sizes.T
    rows, columns = (log_edges(int(side.min()), int(side.max())) for side in (heights, widths))
    cells = np.histogram2d(heights, widths, (rows, columns))[0].astype(np.int64)
    x_axis = Axis(columns[0], columns[-1], "width in pixels", log=True)
    y_axis = Axis(rows[0], rows[-1], "height in pixels", log=True)
    label = (
        f"Heights and widths of the original images: widths from {count(widths.min())} to {count(widths.max())}, "
        f"heights from {count(heights.min())} to {count(heights.max())} pixels."
    )
    return heat_map(cells, x_axis, y_axis, label)


def _short_side(short: np.ndarray, target: int) -> Markup:
    edges = log_edges(int(short.min()), int(short.max()))
    axis = Axis(edges[0], edges[-1], "pixels", log=True)
    label = (
        f"Shorter side of the original images: from {count(short.min())} to {count(short.max())} pixels, "
        f"median {count(float(np.median(short)))}."
    )
    numbers, marked = np.histogram(short, edges)[0].tolist(), (target, f"stored: {target}")
    return histogram(edges.tolist(), numbers, label, axis, "images", marked)


def log_edges(low: int, high: int) -> np.ndarray:
    """float64: at most `MOST_BINS` bins, equal on a logarithmic scale, that hold all whole numbers from low to high.

    Ends lie between whole numbers, so that no value falls on an edge by design.
    """
    start, stop = low - 0.5, high + 0.5
    octaves = math.log2(stop / start)
    bins = min(MOST_BINS, max(1, high - low + 1), max(8, round(octaves * 8)))
    return np.geomspace(start, stop, bins + 1)
