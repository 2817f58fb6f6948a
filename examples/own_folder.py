"""A labelled folder of your own, end to end: convert it, train a small model, predict.

    python examples/own_folder.py PHOTOS [--work data/own] [--size 64] [--epochs 10] [IMAGE ...]

PHOTOS holds one folder per class (`PHOTOS/cat/001.jpg`, ...). About a fifth of each class is kept for validation, and
files that can't be read are left out. Without IMAGEs the first validation image of each class is predicted. A rerun
goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch

from pipeline import convert, open_store
from pipeline.errors import BadSample, Error
from pipeline.image.decode import decode_into
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Store
from trainer.main import main as train
from trainer.models import build_model


def predict(store: Store, weights: Path, model_name: str, image: Path) -> tuple[str, float]:
    """The class name and its probability; the image goes through the very conversion that the store's went through."""
    geometry = Geometry(**store.geometry)
    pixels = np.empty(geometry.image_shape, np.uint8)
    decode_into(image.read_bytes(), [geometry], [pixels])  # raises BadSample for what can't be read
    model = build_model(model_name, len(store.class_ids), geometry.size)
    model.load_state_dict(torch.load(weights, weights_only=True))
    x = torch.from_numpy((pixels / 255 - store["train"].mean) / store["train"].std).float().permute(2, 0, 1)
    with torch.inference_mode():
        probabilities = model.eval()(x[None]).softmax(1)[0]
    best = int(probabilities.argmax())
    return store.class_names[best], float(probabilities[best])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("images", type=Path, nargs="*")
    parser.add_argument("--work", type=Path, default=Path("data/own"), help="folder for the store and the run")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    path, run, model = args.work / f"{args.size}.zarr", args.work / "run", "resnet_small"
    convert(args.photos, path, size=args.size, val_fraction=0.2, val_per_class=1, on_error="skip")
    store = open_store(path)
    val = store["val"]
    batch = max(1, min(64, store["train"].num_valid // 8))
    settings = {
        "data": path,
        "out": run,
        "resume": "auto",
        "model": model,
        "epochs": args.epochs,
        "global-batch": batch,
    }
    code = train([f"--{name}={value}" for name, value in settings.items()] + ["--lr=0.4", f"--pad={args.size // 16}"])
    if code:
        return code
    keys = {int(val.labels[slot]): os.fsdecode(val.key(slot)) for slot in reversed(val.valid_slots.tolist())}
    for image in args.images or [args.photos / keys[label] for label in sorted(keys)]:
        try:
            name, probability = predict(store, run / "best.pt", model, image)
        except BadSample as bad:
            print(f"{image}: can't be read ({bad.reason})")
        else:
            print(f"{image}: {name} ({probability:.0%})")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Error as error:  # one line that says what to do
        sys.exit(f"error: {error}")
