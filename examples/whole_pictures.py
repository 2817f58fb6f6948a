"""Random resized crops of whole pictures, at their own aspect ratio, from a store of `--fit stretch`.

python -m pipeline convert SRC data/own-64.zarr --size 64 --fit stretch
python examples/whole_pictures.py data/own-64.zarr [EPOCHS]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.models import resnet18

from pipeline import open_store
from trainer.augment import unstretched_crop
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader


def main(path: str, epochs: int = 3) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    store = open_store(path)
    mean, std = (
        (255 * torch.tensor(x, device=device)).view(-1, 1, 1) for x in (store["train"].mean, store["train"].std)
    )
    out = int(store.geometry["size"]) * 7 // 8
    train, val = (Loader(RankPartitionedDataset(store, name), 64, device=device) for name in ("train", "val"))
    rng = np.random.default_rng(0)

    torch.manual_seed(0)
    model = resnet18(num_classes=len(store.class_ids)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for epoch in range(epochs):
        model.train()
        for squares, labels in train:
            height, width = train.source_sizes.T  # of the pictures, before they were stretched into squares
            side = np.minimum(height, width) * rng.uniform(0.6, 1, len(height))
            top, left = rng.uniform(size=(2, len(height))) * (height - side, width - side)
            crops = unstretched_crop(squares, train.source_sizes, np.stack([top, left, side, side], 1), out)
            loss = F.cross_entropy(model((crops.float() - mean) / std), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        with torch.inference_mode():
            for squares, labels in val:
                height, width = val.source_sizes.T
                side = np.minimum(height, width)
                boxes = np.stack([(height - side) / 2, (width - side) / 2, side, side], 1)
                crops = unstretched_crop(squares, val.source_sizes, boxes, out)
                hits.append(model((crops.float() - mean) / std).argmax(1) == labels)
        top1 = torch.cat(hits).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, top-1 {top1:.1%} of {len(val.data):,}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
