"""Grain: a store as the data source of a pipeline of its own, without torch.

    python examples/grain_source.py data/digits-32.zarr [EPOCHS]

Grain shuffles, divides the samples among processes and batches them. The source only says which bytes of the memory
maps are sample i.
"""

from __future__ import annotations

import sys

import grain
import numpy as np

from pipeline import open_store

BATCH = 64


class StoreSource(grain.sources.RandomAccessDataSource):
    """The served samples of a split: bad ones are left out.

    Args:
        path: the store's folder.
        split: its split's name.
    """

    def __init__(self, path: str, split: str) -> None:
        self.split = open_store(path)[split]
        self.slots = self.split.valid_slots

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """`image`, uint8 (H, W, C), read-only, and `label`, int32."""
        slot = self.slots[i]
        return {"image": self.split.image(slot), "label": self.split.labels[slot]}


class RandomCrop(grain.transforms.RandomMap):
    def __init__(self, size: int) -> None:
        self.size = size

    def random_map(self, sample: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        top, left = rng.integers(0, sample["image"].shape[0] - self.size + 1, 2)
        return sample | {"image": sample["image"][top : top + self.size, left : left + self.size]}


def main(path: str, epochs: int) -> None:
    source = StoreSource(path, "train")
    crop = source.split.image_shape[0] * 7 // 8
    data = grain.MapDataset.source(source).seed(0).shuffle().random_map(RandomCrop(crop)).repeat(epochs)
    seen = 0
    for batch in data.batch(BATCH, drop_remainder=True).to_iter_dataset():
        assert batch["image"].shape == (BATCH, crop, crop, source.split.image_shape[2])
        seen += len(batch["label"])
    print(f"{seen:,} crops of {crop} px in {epochs} epochs of {len(source):,} samples")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2)
