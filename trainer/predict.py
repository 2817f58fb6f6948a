"""What images show, by the weights of a run: `python -m trainer.predict RUN IMAGE... [--top K] [--json]`.

An image goes the way that evaluation's images went: decoded and resized as the run's store was made, cut and normalised
as the run evaluates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import BAD_SAMPLE_REASONS, BadSample, Error, UsageError
from pipeline.image.decode import decode_into
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Store, open_store
from pipeline.store.remote import check_local, is_remote, place
from pipeline.store.split import Split
from pipeline.store.transfer import failures
from pipeline.text import as_text, one_line, printable
from trainer.augment import DeviceTransform, device_transform
from trainer.flags import parse
from trainer.models import load_weights, make_model, read_weights
from trainer.order import centre_offsets
from trainer.ranks import Ranks
from trainer.report.records import CONFIG

AGAIN = "mend that and run it again"
BATCH = 64
"""Images that go through the model together."""


class Square(NamedTuple):
    """One image as the store would hold it: its name, uint8 (S, S, C), and its height and width before."""

    name: str
    pixels: np.ndarray
    source_size: tuple[int, int]


@dataclass
class Predictor:
    """A run's model with all that its images need.

    Attributes:
        crop: side of the centre crop in pixels; None for whole images.
        flip: average the logits of each image and its mirror image, as the run's evaluation does.
    """

    model: nn.Module
    transform: DeviceTransform
    geometry: Geometry
    class_ids: list[str]
    class_names: list[str]
    crop: int | None
    flip: bool
    device: torch.device

    @classmethod
    def of_run(cls, run: Path, data: str | None = None, weights: Path | None = None) -> Predictor:
        """From a run's folder: its `config.yaml`, its `best.pt` or `last.pt`, and its store's metadata.

        Args:
            data: the store where it has moved; otherwise the config's.
            weights: another file of weights.

        Raises:
            UsageError, StoreError: what is missing there.
        """
        if not (run / CONFIG).is_file():
            raise UsageError(f"{run}: no run's folder, it has no {CONFIG}; give the --out of a training")
        config = parse([f"--config={run / CONFIG}"])
        size = config.eval_size or (config.stages or [config.stage(0)])[-1].size
        store = open_store((data or config.data).replace("{size}", str(size)))
        files = [weights] if weights else [run / "best.pt", run / "last.pt"]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise UsageError(f"{files[-1]}: no such file of weights; train first, or give --weights")
        geometry, device = Geometry(**store.geometry), Ranks().device(config.device)
        model = make_model(config, len(store.class_ids), config.final_crop or geometry.size)
        load_weights(model, read_weights(str(file), config.model), str(file), new_head=False)
        model = model.to(device).to(memory_format=torch.channels_last).eval()
        transform = device_transform(config, store, device)
        names = list(store.class_names) or list(store.class_ids)
        crop = None if transform.stretched else config.final_crop
        return cls(model, transform, geometry, list(store.class_ids), names, crop, config.flip_eval, device)

    def square(self, name: str, data: bytes) -> Square:
        """An encoded image as the store would hold it.

        Raises:
            BadSample: it can't be read.
        """
        pixels = np.empty(self.geometry.image_shape, np.uint8)
        decoded = decode_into(data, [self.geometry], [pixels])
        return Square(name, pixels, (decoded.height, decoded.width))

    @torch.inference_mode()
    def probabilities(self, squares: Sequence[Square]) -> Tensor:
        """float32 (n, classes) on the CPU."""
        images = np.stack([square.pixels for square in squares])  # (n, S, S, C)
        if self.crop:
            side = self.crop
            rows, columns = centre_offsets(1, (images.shape[1] - side, images.shape[2] - side))
            images = images[:, rows[0] : rows[0] + side, columns[0] : columns[0] + side]
        batch = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).to(self.device)
        x = self.transform.evaluation(batch, np.array([square.source_size for square in squares]))
        logits = self.model(x).float()
        if self.flip:
            logits = (logits + self.model(x.flip(3)).float()) / 2
        return logits.softmax(1).cpu()


def read_squares(predictor: Predictor, paths: Sequence[str], failed: list[str]) -> Iterator[Square]:
    """The images of files and of a store's splits, one after the other; those that can't be read go to `failed`."""
    for path in paths:
        where = place(path)
        square = None
        try:
            if not (where / "zarr.json").exists():
                if not is_remote(where) and where.is_dir():
                    raise UsageError(
                        f"{path}: a folder; give image files, {path}/*.jpg or {path}/*/*.jpg, or a store's split"
                    )
                square = predictor.square(path, where.read_bytes())
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")
        except BadSample as error:
            failed.append(f"{path}: {BAD_SAMPLE_REASONS[error.reason]} ({error.detail or error.reason})")
        else:
            with failures(where, AGAIN):
                yield from [square] if square else _split_squares(predictor, where)


def _split_squares(predictor: Predictor, where: Path) -> Iterator[Square]:
    store, split = _split(where)
    fit, wanted_fit = store.geometry["fit"], predictor.geometry.fit
    if fit != wanted_fit:
        raise UsageError(f"{where}: made with --fit {fit}, the run's store with {wanted_fit}; give another split")
    wanted = predictor.geometry.image_shape
    if split.image_shape != wanted:
        raise UsageError(f"{where}: its images are {split.image_shape}, the run's {wanted}; give another split")
    for slot in split.valid_slots.tolist():
        height, width = split.source_size[slot].tolist()
        yield Square(as_text(split.key(slot)), split.image(slot), (height, width))


def _split(path: Path) -> tuple[Store, Split]:
    """The store and its split at STORE/NAME.

    Raises:
        UsageError: it is the store itself.
    """
    if (path.parent / "zarr.json").exists():
        store = open_store(path.parent)
        return store, store[path.name]
    store = open_store(path)
    raise UsageError(f"{path}: a store; give one of its splits: {', '.join(f'{path}/{name}' for name in store.splits)}")


def batches(squares: Iterator[Square]) -> Iterator[list[Square]]:
    batch: list[Square] = []
    for square in squares:
        batch.append(square)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def predict(options: argparse.Namespace) -> list[str]:
    """Print each image's likeliest classes; returns a line for each image that can't be read."""
    check_local(options.run, "RUN")
    check_local(options.weights or "", "--weights")
    run = Path(options.run)
    with failures(run, AGAIN):
        predictor = Predictor.of_run(run, options.data, options.weights and Path(options.weights))
    failed: list[str] = []
    for batch in batches(read_squares(predictor, options.image, failed)):
        best = predictor.probabilities(batch).topk(min(options.top, len(predictor.class_ids)))
        for square, values, labels in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
            found = [
                {"id": predictor.class_ids[i], "name": predictor.class_names[i], "probability": value}
                for value, i in zip(values, labels, strict=True)
            ]
            line: dict[str, Any] = {"image": square.name, "classes": found}
            named = ", ".join(f"{item['name']} {item['probability']:.1%}" for item in found)
            text = json.dumps(line) if options.json else printable(f"{square.name}: {named}")
            sys.stdout.write(text + "\n")
    sys.stdout.flush()  # here, where a reader that is gone is noticed
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 (an image that can't be read, a damaged store), 2 (wrong use)
    or 141 (nobody reads the output)."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.predict",
        description="Say what images show, by the weights of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, the --out of a training")
    parser.add_argument(
        "image", nargs="+", metavar="IMAGE", help="an image file, or a split of a store (x.zarr/val); or the URL of one"
    )
    parser.add_argument("--top", type=int, default=5, metavar="K", help="the K likeliest classes (default: 5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each image")
    parser.add_argument("--data", help="the run's store, where it has moved")
    parser.add_argument("--weights", help="instead of RUN/best.pt, which holds the epoch with the highest top-1")
    try:
        options = parser.parse_args(argv)
        if options.top < 1:
            raise UsageError(f"--top {options.top}: must be at least 1")
        failed = predict(options)
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python can flush it at the end
        return 141
    except OSError as error:
        sys.stderr.write(f"predict: output: {error.strerror}; {AGAIN}\n")
        return 1
    except Error as error:
        sys.stderr.write(printable(f"predict: {one_line(error)}") + "\n")
        return error.exit_code
    for line in failed:
        sys.stderr.write(printable(f"predict: {one_line(line)}") + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
