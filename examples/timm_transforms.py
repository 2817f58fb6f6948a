"""timm's model, mixup, cutmix and random erasing on the Loader's batches; and RandAugment, image by image.

    python examples/timm_transforms.py data/digits-32.zarr [EPOCHS] [--randaugment]

Whatever works on a batch works on the device, after the Loader. Transforms of single PIL images, such as timm's
RandAugment, need a DataLoader's workers again: the Dataset gives them crops that are decoded and resized already.
"""

from __future__ import annotations

import sys

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import Mixup
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

from pipeline import open_store
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader


class RandAugmented(torch.utils.data.Dataset):
    """The Dataset's crops through timm's RandAugment: uint8 (3, crop, crop), int."""

    def __init__(self, data: RankPartitionedDataset) -> None:
        self.data = data
        self.transform = rand_augment_transform("rand-m5-n1", {"img_mean": (128, 128, 128)})

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image, label = self.data[i]
        augmented = self.transform(Image.fromarray(image.permute(1, 2, 0).numpy()))
        return torch.from_numpy(np.array(augmented)).permute(2, 0, 1), label


def main(path: str, epochs: int = 3, rand_augment: bool = False) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    store = open_store(path)
    classes, crop = len(store.class_ids), int(store.geometry["size"]) * 7 // 8
    mean, std = (
        (255 * torch.tensor(x, device=device)).view(-1, 1, 1) for x in (store["train"].mean, store["train"].std)
    )
    data = RankPartitionedDataset(store, "train", crop=crop)
    train = Loader(data, 64, device=device)
    if rand_augment:
        train = torch.utils.data.DataLoader(RandAugmented(data), 64, num_workers=2, drop_last=True)
    val = Loader(RankPartitionedDataset(store, "val", crop=crop), 64, device=device)

    torch.manual_seed(0)
    np.random.seed(0)  # timm's mixup draws from numpy's global generator
    mixup = Mixup(
        mixup_alpha=0.1, cutmix_alpha=1.0, switch_prob=0.5, prob=0.5, label_smoothing=0.1, num_classes=classes
    )
    erase = RandomErasing(probability=0.1, mode="pixel", device=device)
    model = timm.create_model("resnet18", num_classes=classes).to(device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.05, weight_decay=5e-4, momentum=0.9)
    soft_loss = SoftTargetCrossEntropy()
    for epoch in range(epochs):
        data.set_epoch(epoch)
        model.train()
        for images, labels in train:
            x, target = mixup((images.to(device) - mean) / std, labels.to(device))  # (64, 3, crop, crop), (64, classes)
            loss = soft_loss(model(erase(x)), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            hits = torch.cat([model((x - mean) / std).argmax(1) == y for x, y in val])
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, top-1 {hits.float().mean().item():.1%} of {len(hits):,}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    arguments = [argument for argument in sys.argv[1:] if argument != "--randaugment"]
    main(arguments[0], *map(int, arguments[1:]), rand_augment="--randaugment" in sys.argv)
