"""Hugging Face Accelerate: `prepare` takes model and optimizer, the Loader serves each process its share.

    python examples/accelerate_loop.py data/digits-32.zarr [EPOCHS]
    accelerate launch --num_processes 8 examples/accelerate_loop.py data/imagenet-256.zarr
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node=2 examples/accelerate_loop.py data/digits-32.zarr

The Loader isn't given to `prepare`, which would divide the samples once more.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torchvision.models import resnet18

from pipeline import open_store
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader

GLOBAL_BATCH = 64  # the same training on any number of processes that divides it


def main(path: str, epochs: int = 3) -> None:
    accelerator = Accelerator()
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    store = open_store(path)
    mean, std = (
        (255 * torch.tensor(x, device=device)).view(-1, 1, 1) for x in (store["train"].mean, store["train"].std)
    )
    crop = int(store.geometry["size"]) * 7 // 8
    train, val = (
        Loader(
            RankPartitionedDataset(store, split, rank=rank, world_size=world_size, crop=crop),
            GLOBAL_BATCH // world_size,
            device=device,
        )
        for split in ("train", "val")
    )
    torch.manual_seed(0)
    bare = resnet18(num_classes=len(store.class_ids)).to(device, memory_format=torch.channels_last)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), momentum=0.9, weight_decay=5e-4))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=0.05, total_steps=epochs * len(train))
    for epoch in range(epochs):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model((images - mean) / std), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        bare.eval()
        counts = torch.zeros(2, device=device)  # hits, samples; processes may have unequal numbers of batches
        with torch.inference_mode():
            for images, labels in val:
                hits = bare((images - mean) / std).argmax(1) == labels
                counts += torch.stack([hits.sum(), torch.tensor(len(labels), device=device)])
        hits, samples = accelerator.reduce(counts, "sum").tolist()
        accelerator.print(
            f"epoch {epoch + 1}: loss {loss.item():.3f}, top-1 {hits / samples:.1%} of {int(samples):,}, "
            f"{world_size} process{'es' if world_size > 1 else ''}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
