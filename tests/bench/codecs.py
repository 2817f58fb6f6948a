"""What compressed copies save: whole chunks as in format 1, or each picture by itself as in format 2.

python -m tests.bench.codecs STORE [--chunk-images 508]

Result (508 photographs of ImageNet at 256 px, zarr 3.1.6): the table in docs/format.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import zarr

from pipeline.commands.chunk_codec import codec_arguments
from pipeline.store.format import CODECS
from pipeline.store.reader import open_store
from pipeline.store.writer import known_codecs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--chunk-images", type=int, default=508)
    args = parser.parse_args()
    split = open_store(args.store)["train"]
    slots = split.valid_slots[: args.chunk_images]
    images = np.stack([split.image(slot) for slot in slots])
    result: dict[str, dict[str, float]] = {}
    for codec in CODECS[1:]:
        for way in ("whole chunk", "each picture"):
            each = {"chunks": images.shape} if way == "whole chunk" else {"chunks": (1, *images.shape[1:])}
            with tempfile.TemporaryDirectory() as folder, known_codecs():
                array = zarr.create_array(
                    folder,
                    shape=images.shape,
                    dtype="uint8",
                    shards=images.shape if way == "each picture" else None,
                    **each,
                    **codec_arguments(codec),
                )
                array[...] = images
                assert np.array_equal(array[...], images)
                size = sum(path.stat().st_size for path in Path(folder, "c").rglob("*") if path.is_file())
            result.setdefault(codec, {})[way] = round(size / images.nbytes, 4)
    sys.stdout.write(
        json.dumps({"images": len(images), "shape": split.image_shape, "bytes_left": result}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
