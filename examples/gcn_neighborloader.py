"""A two-layer GCN over sampled neighbourhoods on several ranks: this project's order, rank partition and process group
around PyTorch Geometric's NeighborLoader. What is divided among ranks here is the seed nodes.

    torchrun --nproc-per-node=2 examples/gcn_neighborloader.py [ROOT]

ROOT is a folder into which PyTorch Geometric has put AmazonProducts (1.6 M nodes; 264 M edges, which take 4.2 GB in a
rank, and half of that again in its sampler); nothing is downloaded here. Without ROOT the graph is a stochastic block
model of 4,000 nodes. NeighborLoader needs pyg-lib, or torch-sparse, beside torch-geometric.

Measured on the block model with torch-sparse: micro-F1 83.0 % after 5 epochs on two ranks, 84.9 % on one (each rank
samples for itself), in 3.9 and 4.4 s on 2 cores of an EPYC that were busy otherwise. The features alone name 28.5 % of
the nodes rightly. AmazonProducts itself was not run, only files of its form.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.datasets import AmazonProducts
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCNConv
from torch_geometric.utils import stochastic_blockmodel_graph

from trainer.order import epoch_order
from trainer.ranks import Ranks, all_gather, process_group

SEED, EPOCHS, GLOBAL_BATCH, NEIGHBOURS, WIDTH = 0, 5, 256, [15, 10], 128
AMAZON = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")  # what its download consists of


def block_model(blocks: int = 8, nodes: int = 500) -> Data:
    """A graph whose classes are its blocks, with features that hint at them weakly. Half the nodes are for training."""
    torch.manual_seed(SEED)  # the same on all ranks
    probabilities = torch.full((blocks, blocks), 0.002) + 0.048 * torch.eye(blocks)
    labels = torch.arange(blocks).repeat_interleave(nodes)
    features = F.one_hot(labels, blocks) + 1.5 * torch.randn(len(labels), blocks)
    train = torch.rand(len(labels)) < 0.5
    edges = stochastic_blockmodel_graph([nodes] * blocks, probabilities)
    return Data(x=features, y=labels, edge_index=edges, train_mask=train, val_mask=~train)


def load(root: str | None) -> Data:
    if root is None:
        return block_model()
    folder = Path(root)
    if not (folder / "processed" / "data.pt").exists() and not all((folder / "raw" / name).exists() for name in AMAZON):
        sys.exit(f"{root}: no AmazonProducts there; get it with torch_geometric.datasets.AmazonProducts(ROOT)")
    return AmazonProducts(root)[0]


class RankSampler(torch.utils.data.Sampler[int]):
    """Positions of one rank's training nodes: whole global batches, the same sets for every number of ranks."""

    def __init__(self, num_nodes: int, ranks: Ranks) -> None:
        self.num_nodes, self.ranks, self.epoch = num_nodes, ranks, 0

    def __len__(self) -> int:
        return self.num_nodes // GLOBAL_BATCH * GLOBAL_BATCH // self.ranks.world_size

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(SEED, self.epoch, self.num_nodes)
        return iter(order[self.ranks.rank :: self.ranks.world_size][: len(self)].tolist())


class GCN(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(features, WIDTH), GCNConv(WIDTH, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.conv2(F.dropout(self.conv1(x, edges).relu(), 0.5, self.training), edges)


def main(root: str | None = None) -> None:
    ranks = Ranks.from_env()
    device = ranks.device("auto")
    with process_group(ranks, device, timeout_seconds=300):
        data = load(root) if ranks.rank == 0 else None  # the first time it brings the files into another form
        all_gather([0.0], ranks)  # the others wait for that
        data = data if data is not None else load(root)
        several = data.y.dim() == 2  # AmazonProducts has several classes per node
        classes = data.y.shape[1] if several else int(data.y.max()) + 1
        train_nodes, val_nodes = data.train_mask.nonzero()[:, 0], data.val_mask.nonzero()[:, 0]
        sampler = RankSampler(len(train_nodes), ranks)
        size = GLOBAL_BATCH // ranks.world_size
        train = NeighborLoader(data, NEIGHBOURS, input_nodes=train_nodes, batch_size=size, sampler=sampler)
        # each node on exactly one rank, none twice
        val = NeighborLoader(data, NEIGHBOURS, input_nodes=val_nodes[ranks.rank :: ranks.world_size], batch_size=size)
        torch.manual_seed(SEED)
        bare = GCN(data.num_features, classes).to(device)
        model: nn.Module = bare
        if ranks.world_size > 1:
            model = DistributedDataParallel(bare, device_ids=None if device.type == "cpu" else [device.index])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(SEED + ranks.rank)  # each rank samples and drops out for itself
        start = time.perf_counter()
        for epoch in range(EPOCHS):
            sampler.epoch = epoch
            bare.train()
            for batch in train:
                logits, y = model(batch.x.to(device), batch.edge_index.to(device))[:size], batch.y[:size].to(device)
                loss = F.binary_cross_entropy_with_logits(logits, y.float()) if several else F.cross_entropy(logits, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            bare.eval()
            counts = torch.zeros(2)  # right ones, and the mean of claimed and true ones
            with torch.inference_mode():
                for batch in val:
                    logits = bare(batch.x.to(device), batch.edge_index.to(device))[: batch.batch_size].cpu()
                    y = batch.y[: batch.batch_size]
                    claimed = logits > 0 if several else F.one_hot(logits.argmax(1), classes).bool()
                    true = y.bool() if several else F.one_hot(y, classes).bool()
                    counts += torch.tensor([(claimed & true).sum(), (claimed.sum() + true.sum()) / 2])
            right, mean = all_gather(counts.tolist(), ranks).sum(0)  # micro-F1; with one class per node the accuracy
            if ranks.rank == 0:
                seconds = time.perf_counter() - start
                print(f"epoch {epoch + 1}: micro-F1 {right / mean:.1%} on {len(val_nodes):,} nodes, {seconds:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
