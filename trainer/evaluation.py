"""Evaluation that gives the same figures for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.augment import DeviceTransform
from trainer.loader import Loader
from trainer.ranks import Ranks, all_gather


def sync_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank rank 0's buffers: batch norm's running statistics have seen other samples on each rank."""
    if ranks.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Loader,
    transform: DeviceTransform,
    ranks: Ranks,
    *,
    amp: bool = False,
    flip: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Loss and accuracies over each sample of all ranks' loaders exactly once.

    Each rank counts its own share, which may be empty; the counts are summed once at the end. Samples without a label
    (negative) don't count. With no labelled sample at all the figures are NaN.

    Args:
        model: the bare module, not DDP's wrapper.
        flip: average the logits of each image and its mirror image.
        stopped: asked after each batch; when true on any rank the result is None on all.

    Returns:
        `val_loss` (mean cross-entropy), `val_top1`, `val_top5` (0 to 1), `val_samples`; or None.
    """
    sync_buffers(model, ranks)
    training, device_type = model.training, next(model.parameters()).device.type
    model.eval()
    counts: list[torch.Tensor] = []  # per batch: loss, top-1, top-5, samples
    event: torch.Event | None = None
    for images, labels in loader:
        x = transform.evaluation(images, loader.source_sizes if transform.stretched else None)
        with torch.autocast(device_type, torch.bfloat16, enabled=amp):
            logits = model(x).float()
            if flip:
                logits = (logits + model(x.flip(3)).float()) / 2
        known = labels >= 0
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (n, 5)
        counts.append(torch.stack([(losses * known).sum(), hits[:, 0].sum(), hits.sum(), known.sum()]))
        if device_type != "cpu":  # at most one batch ahead of the device, or batches pile up in its memory
            if event:
                event.synchronize()
            event = torch.Event(x.device)
            event.record()
        if stopped():
            break
    model.train(training)
    sums = torch.stack(counts).cpu().double().sum(0) if counts else torch.zeros(4)
    rows = all_gather([*sums.tolist(), float(stopped())], ranks)  # (ranks, 5)
    if rows[:, 4].any():
        return None
    loss, top1, top5, samples = rows[:, :4].sum(0).tolist()
    share = 1 / samples if samples else float("nan")
    return {
        "val_loss": loss * share,
        "val_top1": top1 * share,
        "val_top5": top5 * share,
        "val_samples": int(samples),
    }
