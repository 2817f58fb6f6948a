"""torch.multiprocessing.spawn in torchrun's place, as notebooks and scripts need it: ranks started from Python.

    python examples/spawn.py data/digits-32.zarr [EPOCHS] [RANKS]

From a notebook: put the function that ranks run into a file (a cell's can't be sent to another process), import it and
`launch`, and call `launch(work, 2, ...)`. On a machine with GPUs RANKS is at most their number. The whole trainer
starts like this, too: `from trainer.main import main`, and `launch(main, 2, ["--data", "x.zarr", ...])`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline import open_store
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.models import build_model
from trainer.ranks import Ranks, all_gather, process_group

GLOBAL_BATCH = 64


def launch(function: Callable[..., Any], ranks: int, *arguments: Any) -> None:
    """Run `function(*arguments)` in so many processes, with the environment that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_start, (ranks, port, function, arguments), nprocs=ranks)


def _start(rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update(
        {name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    function(*arguments)


def work(path: str, epochs: int) -> None:
    """What each rank does."""
    ranks = Ranks.from_env()
    device = ranks.device("auto")
    with process_group(ranks, device, timeout_seconds=60):
        store = open_store(path)
        mean, std = (
            (255 * torch.tensor(x, device=device)).view(-1, 1, 1) for x in (store["train"].mean, store["train"].std)
        )
        size = int(store.geometry["size"])
        crop = size * 7 // 8
        mine = {"rank": ranks.rank, "world_size": ranks.world_size, "crop": crop}
        train = Loader(RankPartitionedDataset(store, "train", **mine), GLOBAL_BATCH // ranks.world_size, device=device)
        val = Loader(RankPartitionedDataset(store, "val", **mine), 256, device=device)
        torch.manual_seed(0)
        bare = build_model("resnet_small", len(store.class_ids), crop).to(device, memory_format=torch.channels_last)
        model = DistributedDataParallel(bare, device_ids=None if device.type == "cpu" else [device.index])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        for epoch in range(epochs):
            bare.train()
            for images, labels in train:
                loss = nn.functional.cross_entropy(model((images - mean) / std), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            bare.eval()
            with torch.inference_mode():
                hits = sum(int((bare((x - mean) / std).argmax(1) == y).sum()) for x, y in val)
            all_hits, samples = all_gather([hits, len(val.data)], ranks).sum(0)  # the same on every rank
            if ranks.rank == 0:
                print(
                    f"epoch {epoch + 1}: top-1 {all_hits / samples:.1%} of {int(samples):,}, {ranks.world_size} ranks"
                )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    launch(
        work, int(sys.argv[3]) if len(sys.argv) > 3 else 2, sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    )
