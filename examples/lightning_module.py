"""PyTorch Lightning: a store as its data module, on any number of devices.

    python examples/lightning_module.py data/digits-32.zarr [EPOCHS]

Lightning knows the rank only once it runs, so the loaders are made in the hooks. They are no DataLoaders, so Lightning
puts no DistributedSampler of its own in front of them: the Dataset has divided the samples already, without duplicates.
"""

from __future__ import annotations

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import resnet18

from pipeline import open_store
from pipeline.store.reader import Store
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader


class StoreDataModule(lightning.LightningDataModule):
    """Batches of uint8 (B, C, crop, crop) and int64 (B,), already on the device.

    Args:
        path: the store's folder, with splits `train` and `val`.
        global_batch: samples per step over all devices; a multiple of their number.
        crop: side of the crops in pixels; 7/8 of the square by default.
    """

    def __init__(self, path: str, global_batch: int = 64, crop: int | None = None) -> None:
        super().__init__()
        self.store, self.global_batch = open_store(path), global_batch
        self.crop = crop or int(self.store.geometry["size"]) * 7 // 8

    def _loader(self, split: str) -> Loader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        data = RankPartitionedDataset(self.store, split, rank=rank, world_size=world_size, crop=self.crop)
        return Loader(data, self.global_batch // world_size, device=self.trainer.strategy.root_device)

    def train_dataloader(self) -> Loader:
        return self._loader("train")

    def val_dataloader(self) -> Loader:
        return self._loader("val")


class Classifier(lightning.LightningModule):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.model = resnet18(num_classes=len(store.class_ids)).to(memory_format=torch.channels_last)
        for name in ("mean", "std"):
            self.register_buffer(name, (255 * torch.tensor(getattr(store["train"], name))).view(-1, 1, 1))
        self.register_buffer("counts", torch.zeros(2))  # hits, samples

    def forward(self, images: Tensor) -> Tensor:
        return self.model((images - self.mean) / self.std)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def on_validation_epoch_start(self) -> None:
        self.counts.zero_()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.counts += torch.stack(
            [(self(images).argmax(1) == labels).sum(), torch.tensor(len(labels), device=self.device)]
        )

    def on_validation_epoch_end(self) -> None:
        hits, samples = self.trainer.strategy.reduce(self.counts, reduce_op="sum").tolist()  # each sample once
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch + 1}: top-1 {hits / samples:.1%} of {int(samples):,}")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=int(sys.argv[2]) if len(sys.argv) > 2 else 3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    data = StoreDataModule(sys.argv[1])
    trainer.fit(Classifier(data.store), datamodule=data)
