"""A training loop of one's own over a store: the Loader for training, an ordinary DataLoader for evaluation.

python examples/plain_loop.py data/digits-32.zarr [EPOCHS]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torchvision.models import resnet18

from pipeline import open_store
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader


def main(path: str, epochs: int = 3) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    store = open_store(path)
    mean, std = (
        (255 * torch.tensor(x, device=device)).view(-1, 1, 1) for x in (store["train"].mean, store["train"].std)
    )
    crop = int(store.geometry["size"]) * 7 // 8
    train = Loader(RankPartitionedDataset(store, "train", crop=crop), batch_size=64, device=device)
    # the same Dataset under a default DataLoader; num_workers=4 is as right, and slower than the Loader
    val = torch.utils.data.DataLoader(RankPartitionedDataset(store, "val", crop=crop), batch_size=256)

    torch.manual_seed(0)
    model = resnet18(num_classes=len(store.class_ids)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=epochs * len(train))
    for epoch in range(epochs):
        model.train()
        for images, labels in train:  # uint8 (B, 3, crop, crop) on the device; each epoch has its own order and crops
            loss = F.cross_entropy(model((images - mean) / std), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            hits = [model((x.to(device) - mean) / std).argmax(1).cpu() == y for x, y in val]
        top1 = torch.cat(hits).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, top-1 {top1:.1%} of {len(val.dataset):,}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
