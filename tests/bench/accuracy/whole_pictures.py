"""What a pretrained network sees in stores of whole pictures (`--fit stretch`), beside torchvision's crops of JPEGs.

    PYTHONPATH=FOLDER python -m tests.bench.accuracy.whole_pictures --images imagenet_sample_700.tar [--docs docs]

Three views of each picture, of 224 px: the centre that `Resize(256)` and `CenterCrop(224)` show, and a box of
`RandomResizedCrop` for each of two scales, the same box from the JPEG and from each store. Boxes of the store whose
squares were cut lie within its square, so they have a row of their own from the JPEG. What FOLDER holds: `parity.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from pipeline.errors import Error
from tests.bench.accuracy.parity import BATCH, CROP, SIZE, Pictures, ask, run
from trainer.dataset import RankPartitionedDataset
from trainer.resample import FILTERS, Boxes, centre_boxes, resized_crop, resized_crop_boxes, unstretched_crop

STRETCHED = (256, 288, 320)
SCALES = (0.35, 0.08)
CENTRE = 0.0
"""Stands for a scale."""

MODES = ("bilinear", "bicubic")


def boxes(slots: np.ndarray, sizes: np.ndarray, scale: float, *, cut: bool) -> Boxes:
    """Of a view, in source pixels, (n,) each; `cut`: within the square that `--fit crop` keeps."""
    if scale == CENTRE:
        return centre_boxes(sizes, SIZE, CROP)
    if not cut:
        return resized_crop_boxes(0, 0, slots, sizes.T, scale)
    shorter = sizes.min(1)
    found = resized_crop_boxes(0, 0, slots, (SIZE, SIZE), scale).mapped(shorter / SIZE, shorter / SIZE)
    top, left = ((sizes - shorter[:, None]) / 2).T
    return Boxes(found.top + top, found.left + left, found.height, found.width)


def originals(
    pictures: Pictures, data: RankPartitionedDataset, scale: float, mode: str, *, cut: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a view, uint8 (n, 3, 224, 224), and labels, from the JPEGs by torchvision."""
    how = {"interpolation": v2.InterpolationMode(mode), "antialias": True}
    centre = v2.Compose([v2.Resize(SIZE, **how), v2.CenterCrop(CROP)])
    slots = np.array([data.slot(i) for i in range(len(data))])
    places = boxes(slots, data.split.source_size[slots], scale, cut=cut)
    corners = np.rint([places.top, places.left, places.height, places.width]).astype(int).T.tolist()
    for begin in range(0, len(data), BATCH):
        images, labels = [], []
        for i in range(begin, min(begin + BATCH, len(data))):
            picture, label = pictures.original(data, i)
            shown = centre(picture) if scale == CENTRE else tv.resized_crop(picture, *corners[i], [CROP, CROP], **how)
            images.append(tv.pil_to_tensor(shown))
            labels.append(label)
        yield torch.stack(images), torch.tensor(labels)


def from_whole(pictures: Pictures, size: int, scale: float, resample: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The same from a store of whole pictures: float32 (n, 3, 224, 224), 0 to 255."""

    def change(images: Tensor, slots: np.ndarray, sizes: np.ndarray) -> Tensor:
        return unstretched_crop(images, sizes, boxes(slots, sizes, scale, cut=False), CROP, None, resample)

    return pictures.stored(pictures.data("bicubic", size, "stretch", None), change)


def from_cut(pictures: Pictures, scale: float, resample: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The same from the store of squares that were cut; its centre needs no resampling."""
    if scale == CENTRE:
        return pictures.stored(pictures.data("bicubic"))

    def change(images: Tensor, slots: np.ndarray, sizes: np.ndarray) -> Tensor:
        return resized_crop(images, resized_crop_boxes(0, 0, slots, (SIZE, SIZE), scale), CROP, None, resample)

    return pictures.stored(pictures.data("bicubic", crop=None), change)


def measure(network: nn.Module, source: Path, folder: Path) -> list[dict[str, Any]]:
    """A row per way to read the pictures: `from`, `filter`, `pictures`, and for each scale `top1` and `same`.

    `same` is the share of pictures with the first choice that the network has for the JPEG's bilinear view.
    """
    pictures = Pictures(source, folder)
    data = pictures.data("bicubic")
    ways: list[tuple[str, str, dict[float, Iterator[tuple[Tensor, Tensor]]]]] = []
    views = (CENTRE, *SCALES)
    for mode in MODES:
        ways.append(("JPEG", mode, {scale: originals(pictures, data, scale, mode, cut=False) for scale in views}))
    for size in STRETCHED:
        for resample in FILTERS:
            shown = {scale: from_whole(pictures, size, scale, resample) for scale in views}
            ways.append((f"whole {size}", resample, shown))
    boxed = {scale: originals(pictures, data, scale, MODES[0], cut=True) for scale in SCALES}
    ways.append(("JPEG, within the cut square", MODES[0], boxed))
    for resample in FILTERS:
        scales = views if resample == "triangle" else SCALES
        ways.append((f"cut {SIZE}", resample, {scale: from_cut(pictures, scale, resample) for scale in scales}))
    rows: list[dict[str, Any]] = []
    answers: dict[float, np.ndarray] = {}
    for name, filter, shown in ways:
        row: dict[str, Any] = {"from": name, "filter": filter, "top1": {}, "same": {}}
        for scale, batches in shown.items():
            figures = ask(network, batches)
            if name.startswith("JPEG") and filter == MODES[0]:
                answers[scale] = figures["answers"]
            row["pictures"] = figures["pictures"]
            row["top1"][str(scale)] = figures["top1"]
            row["same"][str(scale)] = float((figures["answers"] == answers[scale]).mean())
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    return rows


def table(rows: list[dict[str, Any]], machine: dict[str, Any], seconds: float) -> str:
    """Markdown: a row per way."""
    heads = ["centre", *(f"boxes of {scale}" for scale in SCALES)]
    lines = [f"| from | filter | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    for row in rows:
        reference = row["from"].startswith("JPEG") and row["filter"] == MODES[0]
        cells = []
        for scale in map(str, (CENTRE, *SCALES)):
            top1, same = row["top1"].get(scale), row["same"].get(scale)
            cells.append("" if top1 is None else f"{top1:.1%}" + ("" if reference else f" ({same:.1%})"))
        lines.append(f"| {row['from']} | {row['filter']} | {' | '.join(cells)} |")
    note = (
        f"Top-1 of EfficientNet-Lite0 on {rows[0]['pictures']} ImageNet images, one box of each picture; in brackets "
        f"the share with the first choice that the network has for the same view of the JPEG, bilinear. "
        f"{seconds / 60:.0f} minutes on {machine['cores']} cores of {machine['processor']}, which did other work, too."
    )
    return "\n".join([*lines, "", note, ""])


def main() -> int:
    """The command line; returns the exit code."""
    try:
        run(__doc__ or "", "whole pictures", "views", measure, table)
    except Error as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
