"""A labelled folder of your own, end to end: convert it, train a small model, predict.

    python examples/own_folder.py PHOTOS [--work data/own] [--size 64] [--epochs 10] [IMAGE ...]

PHOTOS holds one folder per class (`PHOTOS/cat/001.jpg`, ...). Every fifth image of a class is kept for validation.
Without IMAGEs the first validation image of each class is predicted. A rerun goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from pipeline import convert, open_store
from pipeline.image.decode import decode_into
from pipeline.store.geometry import Geometry
from pipeline.store.reader import Store
from trainer.main import main as train
from trainer.models import build_model

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
VAL_EVERY = 5


def samples(photos: Path) -> dict[str, list[tuple[Path, str]]]:
    """Split name -> (path, class name) of its images."""
    splits: dict[str, list[tuple[Path, str]]] = {"train": [], "val": []}
    for folder in sorted(path for path in photos.iterdir() if path.is_dir()):
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
        for i, path in enumerate(images):
            splits["val" if i % VAL_EVERY == 0 else "train"].append((path, folder.name))
    return splits


def predict(store: Store, weights: Path, model_name: str, image: Path) -> tuple[str, float]:
    """The class name and its probability; the image goes through the very conversion that the store's went through."""
    geometry = Geometry(**store.geometry)
    pixels = np.empty(geometry.image_shape, np.uint8)
    decode_into(image.read_bytes(), [geometry], [pixels])
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

    splits, path, run, model = samples(args.photos), args.work / f"{args.size}.zarr", args.work / "run", "resnet_small"
    args.work.mkdir(parents=True, exist_ok=True)
    convert(splits, path, size=args.size)
    batch = max(1, min(64, len(splits["train"]) // 8))
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
    wanted = {name: image for image, name in reversed(splits["val"])}  # the first of each class
    for image in args.images or [wanted[name] for name in sorted(wanted)]:
        name, probability = predict(open_store(path), run / "best.pt", model, image)
        print(f"{image}: {name} ({probability:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
