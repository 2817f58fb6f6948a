"""What a user would pick instead: each function writes the images in a peer's format and returns a way to iterate.

A peer is `prepare(images, labels, folder, workers) -> epoch`, where labels is int64 (N,) and
`epoch()` iterates once over batches of `BATCH` random crops of `CROP` pixels, in random order. A package that isn't
installed shows as ImportError. The pixels served are those of the store; only the random order and crops differ.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.store.reader import Split
from tests.stores import as_format_1
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader

BATCH, CROP = 256, 224
Epoch = Callable[[], Iterable[Any]]


class Images:
    """The stored images as a sequence of uint8 (S, S, 3), read from the maps."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.shape = (split.num_samples, *split.image_shape)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, i: int) -> np.ndarray:
        if i >= len(self):
            raise IndexError(i)
        return self.split.image(i)

    def write(self, path: Path) -> None:
        """All pixels end to end."""
        with open(path, "wb") as file:
            for image in self:
                file.write(image.data)


def random_crop(image: np.ndarray) -> np.ndarray:
    """uint8 (CROP, CROP, 3): a view of a random place."""
    top, left = np.random.randint(0, image.shape[0] - CROP + 1, 2)
    return image[top : top + CROP, left : left + CROP]


def _dataloader(dataset: Dataset, workers: int, *, shuffle: bool = True) -> DataLoader:
    return DataLoader(
        dataset, BATCH, shuffle=shuffle, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )


class MapDataset(Dataset):
    """One plain np.memmap, which serves (H, W, C), or contiguous (C, H, W)."""

    def __init__(self, path: Path, shape: tuple[int, ...], labels: np.ndarray, *, permuted: bool) -> None:
        self.images, self.labels, self.permuted = np.memmap(path, np.uint8, "r", shape=shape), labels, permuted

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        crop = random_crop(self.images[i])
        pixels = torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)) if self.permuted else crop.copy())
        return pixels, int(self.labels[i])


def format_1(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    """Ours, from the store as releases before format 2 wrote it."""
    store = as_format_1(Path(shutil.copytree(images.split.path.parent, folder / "s.zarr")))
    loader = Loader(RankPartitionedDataset(store, crop=CROP), BATCH, threads=workers)
    return lambda: loader


def memmap(images: Images, labels: np.ndarray, folder: Path, workers: int, *, permuted: bool = False) -> Epoch:
    images.write(folder / "images.bin")
    loader = _dataloader(MapDataset(folder / "images.bin", images.shape, labels, permuted=permuted), workers)
    return lambda: loader


def memmap_permuted(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    return memmap(images, labels, folder, workers, permuted=True)


def imagefolder(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    """JPEGs of the same squares (quality 90), so that there is less to decode than in the originals."""
    from PIL import Image
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / f"{label:04d}" / f"{i:06d}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path, quality=90)
    transform = v2.Compose([v2.PILToTensor(), v2.RandomCrop(CROP)])
    loader = _dataloader(ImageFolder(str(folder), transform), workers)
    return lambda: loader


def _ffcv(images: Images, labels: np.ndarray, folder: Path, workers: int, resized: bool) -> Epoch:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    class Samples:
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            return np.ascontiguousarray(images[i]), int(labels[i])

    path = folder / "images.beton"
    if not path.exists():
        writer = DatasetWriter(
            str(path), {"image": RGBImageField(write_mode="raw"), "label": IntField()}, num_workers=workers
        )
        writer.from_indexed_dataset(Samples(), shuffle_indices=False)
    # FFCV crops only while it resizes. A fixed area makes it crop CROP x CROP pixels and "resize" them to that size.
    same = {"scale": ((CROP / images.shape[1]) ** 2,) * 2, "ratio": (1.0, 1.0)}
    decode = RandomResizedCropRGBImageDecoder((CROP, CROP), **({} if resized else same))
    loader = Loader(
        str(path),
        batch_size=BATCH,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [decode, ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )
    return lambda: loader


def ffcv_raw(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    return _ffcv(images, labels, folder, workers, resized=False)


def ffcv_resized(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    return _ffcv(images, labels, folder, workers, resized=True)


def _decode_raw(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    size = int((len(sample["img"]) // 3) ** 0.5)
    image = np.frombuffer(sample["img"], np.uint8).reshape(size, size, 3)
    return torch.from_numpy(random_crop(image).copy()), int(sample["cls"])


def webdataset(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    """Raw pixels in tar shards of 512, shuffled in a buffer of 1,000."""
    import tarfile

    import webdataset as wds

    shards = []
    for first in range(0, len(images), 512):
        shards.append(str(folder / f"{first:06d}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for i in range(first, min(first + 512, len(images))):
                for name, data in ("img", images[i].tobytes()), ("cls", str(labels[i]).encode()):
                    entry = tarfile.TarInfo(f"{i:06d}.{name}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000).map(_decode_raw)
    loader = wds.WebLoader(dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    return lambda: (batch for batch in loader if len(batch[1]) == BATCH)


class _WriteRaw:
    """Picklable function of one index, for LitData's workers."""

    def __init__(self, path: Path, shape: tuple[int, ...], labels: np.ndarray) -> None:
        self.path, self.shape, self.labels = path, shape, labels

    def __call__(self, i: int) -> dict[str, Any]:
        images = np.memmap(self.path, np.uint8, "r", shape=self.shape)
        return {"img": images[i].tobytes(), "cls": int(self.labels[i])}


def litdata(images: Images, labels: np.ndarray, folder: Path, workers: int) -> Epoch:
    """Raw pixels in LitData's chunks of 64 MB."""
    import litdata as ld

    raw = folder / "raw.bin"
    images.write(raw)
    ld.optimize(
        fn=_WriteRaw(raw, images.shape, labels),
        inputs=list(range(len(images))),
        output_dir=str(folder / "chunks"),
        chunk_bytes="64MB",
        num_workers=workers,
    )
    raw.unlink()
    loader = ld.StreamingDataLoader(
        ld.StreamingDataset(str(folder / "chunks"), shuffle=True, drop_last=True, transform=_decode_raw),
        batch_size=BATCH,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )
    return lambda: loader


PEERS: dict[str, tuple[Callable[[Images, np.ndarray, Path, int], Epoch], int]] = {
    "Efficient ImageNet, format 1, 1 thread": (format_1, 1),
    "FFCV raw, random crop": (ffcv_raw, 1),
    "FFCV raw, random crop, 2 workers": (ffcv_raw, 2),
    "FFCV raw, random resized crop": (ffcv_resized, 1),
    "FFCV raw, random resized crop, 2 workers": (ffcv_resized, 2),
    "np.memmap + DataLoader, 2 workers": (memmap, 2),
    "np.memmap, permuted, + DataLoader, 2 workers": (memmap_permuted, 2),
    "LitData raw, 2 workers": (litdata, 2),
    "WebDataset raw, 2 workers": (webdataset, 2),
    "torchvision ImageFolder + DataLoader, 2 workers": (imagefolder, 2),
}
"""Name -> (prepare, workers), fastest first."""
