"""The trainer's arithmetic in plain PyTorch: of trainer/ only the order and the crops are used.

One process does what each rank does, on a replica of its own, so that batch norm and mixup see each rank's batches.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from math import cos, exp, log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import v2

from pipeline import open_store
from trainer.order import centre_offsets, crop_offsets, epoch_order, uniform

Fields = dict[str, Any]


@dataclass
class Result:
    """`weights` after each step would be much: the last ones, the average's, and the figures of each epoch."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    lines: list[dict[str, float | None]] = field(default_factory=list)


def tiny_resnet(classes: int) -> nn.Module:
    """A residual block of torchvision's with strided convolutions around it: 10,000 parameters."""
    norms = [nn.BatchNorm2d(16) for _ in range(2)]
    convs = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.Conv2d(16, 16, 3, 2, 1, bias=False)
    parts = convs[0], norms[0], nn.ReLU(), BasicBlock(16, 16), convs[1], norms[1], nn.ReLU()
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def make_model(name: str, classes: int, size: int) -> nn.Module:
    if name == "tiny_resnet":
        return tiny_resnet(classes)
    assert name == "flatten_linear"
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 128), nn.ReLU(), nn.Linear(128, classes))


def rate(c: Fields, step: int, steps: int) -> float:
    peak, warmup = c["lr"] * c["global_batch"] / 256, c["warmup_epochs"] * steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    share = (step - warmup) / (c["epochs"] * steps - warmup)
    return peak * (1 - share) if c["schedule"] == "linear" else peak * (1 + cos(pi * share)) / 2


def statistics(c: Fields, split: Any) -> tuple[Tensor, Tensor]:
    mean, std = (split.mean, split.std)
    if c["normalize"] == "imagenet":
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return 255 * torch.tensor(mean)[:, None, None], 1 / (255 * torch.tensor(std)[:, None, None])


def cropped(split: Any, slot: int, place: tuple[int, int], crop: int) -> Tensor:
    top, left = place
    return torch.from_numpy(split.image(slot)[top : top + crop, left : left + crop].copy()).permute(2, 0, 1)


def resized_crop(c: Fields, image: Tensor, epoch: int, slot: int, out: int) -> Tensor:
    """As torchvision's RandomResizedCrop, with random numbers that are keyed by the sample."""

    def draw(stream: int) -> float:
        return float(uniform(c["seed"], epoch, np.array([slot]), stream)[0])

    size = image.shape[1]
    height = width = size
    for attempt in range(10):
        area = size * size * (c["rrc_scale"] + (1 - c["rrc_scale"]) * draw(7 + 2 * attempt))
        aspect = exp(log(3 / 4) + log(16 / 9) * draw(8 + 2 * attempt))
        w, h = round(sqrt(area * aspect)), round(sqrt(area / aspect))
        if 0 < w <= size and 0 < h <= size:
            height, width = h, w
            break
    top, left = int(draw(5) * (size - height + 1)), int(draw(6) * (size - width + 1))
    box, how = (top, left, height, width), "bicubic" if c["resample"] == "cubic" else "bilinear"
    crop = v2.functional.resized_crop(image.float(), *box, [out, out], v2.InterpolationMode(how), antialias=True)
    return crop.clamp(0, 255)


def training_image(c: Fields, split: Any, epoch: int, slot: int, crop: int | None) -> Tensor:
    """0 to 255, augmented."""
    size, one, seed = split.image_shape[0], np.array([slot]), c["seed"]
    if c["augment"] == "rrc":
        image = resized_crop(c, cropped(split, slot, (0, 0), size), epoch, slot, crop or size)
    else:
        room = size - (crop or size)
        top, left = crop_offsets(seed, epoch, one, (room, room))
        image = cropped(split, slot, (int(top[0]), int(left[0])), crop or size)
        if pad := c["pad"]:
            top, left = (int(uniform(seed, epoch, one, stream)[0] * (2 * pad + 1)) for stream in (3, 4))
            wide = F.pad(image[None].float(), [pad] * 4, mode="reflect")[0]
            image = wide[:, top : top + image.shape[1], left : left + image.shape[2]]
    mirrored = bool(uniform(seed, 0 if c["alternate_flip"] else epoch, one, 2)[0] < c["flip"])
    if mirrored != (c["alternate_flip"] and epoch % 2 == 1):
        image = image.flip(2)
    changes: list[nn.Module] = []
    if c["randaugment"]:
        changes.append(v2.RandAugment(num_ops=2, magnitude=c["randaugment"]))
    if c["random_erasing"]:
        changes += [
            v2.ToDtype(torch.float32),
            v2.RandomErasing(c["random_erasing"], value=statistics(c, split)[0].flatten().tolist()),
        ]
    if changes:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(uniform(seed, epoch, one, 64)[0] * 2**53))
            image = v2.Compose(changes)(image.round().to(torch.uint8))
    return image.float()


@torch.no_grad()
def evaluate(
    c: Fields, model: nn.Module, split: Any, stats: tuple[Tensor, Tensor], crop: int | None, flip: bool
) -> Fields:
    """Loss, top-1 and top-5, one image at a time."""
    model.eval()
    losses, ranks = [], []
    crop = crop or split.image_shape[0]
    for slot in split.valid_slots.tolist():
        top, left = centre_offsets(1, (split.image_shape[0] - crop,) * 2)
        image = cropped(split, slot, (int(top[0]), int(left[0])), crop)
        if c["eval_resize"]:
            image = cropped(split, slot, (0, 0), split.image_shape[0]).float()
            image = v2.functional.center_crop(v2.functional.resize(image, [c["eval_resize"]], antialias=True), [crop])
        x = ((image - stats[0]) * stats[1])[None]
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(c["amp"])):
            logits = model(x).float()
            if flip:
                logits = (logits + model(x.flip(3)).float()) / 2
        label = int(split.labels[slot])
        losses.append(float(F.cross_entropy(logits, torch.tensor([label]))))
        ranks.append(logits[0].topk(logits.shape[1]).indices.tolist().index(label))
    hits = np.array(ranks)
    return {
        "val_loss": float(np.mean(losses)),
        "val_top1": float((hits < 1).mean()),
        "val_top5": float((hits < 5).mean()),
    }


def train(c: Fields, data: Path | str, world_size: int = 1) -> Result:
    """Train as a config's fields say; all fields have to be given."""
    stages = c["stages"] or [{"epoch": 0, "size": c["eval_size"], "crop": c["crop"]}]

    def opened(size: int | None) -> Any:
        return open_store(str(data).replace("{size}", str(size)))

    last = stages[-1]
    stats = statistics(c, opened(last["size"])["train"])
    val, eval_crop = opened(c["eval_size"] or last["size"])["val"], c["eval_crop"] or last["crop"]
    torch.manual_seed(c["seed"])
    model = make_model(c["model"], len(opened(last["size"]).class_ids), eval_crop or val.image_shape[0])
    if c["zero_init_residual"]:
        nn.init.zeros_(model[3].bn2.weight)
    if c["blurpool"]:
        for conv in [
            m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2) and m.in_channels > 3
        ]:
            conv.register_forward_pre_hook(lambda m, x: (blurred(x[0]),))
    if c["weights"]:
        model.load_state_dict(torch.load(c["weights"]))
    replicas = [model, *(copy.deepcopy(model) for _ in range(world_size - 1))]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": c["weight_decay"]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, 0.1, momentum=c["momentum"], nesterov=c["nesterov"])
    if c["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(groups, 0.1, betas=(c["momentum"], 0.999))
    average = copy.deepcopy(model)
    mixes = [
        kind(alpha=a, num_classes=model_classes(model))
        for kind, a in ((v2.MixUp, c["mixup"]), (v2.CutMix, c["cutmix"]))
        if a
    ]
    result, step, total = Result(), 0, c["global_batch"]
    micro = c["batch_size"] or total // world_size
    for epoch in range(c["epochs"]):
        stage = [s for s in stages if s["epoch"] <= epoch][-1]
        split = opened(stage["size"])["train"]
        chunk = split.chunk_images if c["order"] == "windowed" else None
        chosen = np.loadtxt(c["subset"], np.int64) if c["subset"] else split.valid_slots
        order = chosen[epoch_order(c["seed"], epoch, len(chosen), chunk, c["window"])]
        steps, losses = len(chosen) // total, []
        for k in range(steps):
            for rank, replica in enumerate(replicas):
                replica.train()
                number = np.random.SeedSequence([c["seed"], step, rank]).generate_state(1)[0]
                torch.default_generator.manual_seed(int(number))
                for slots in np.split(
                    order[k * total : (k + 1) * total][rank::world_size], total // world_size // micro
                ):
                    x = torch.stack([training_image(c, split, epoch, slot, stage["crop"]) for slot in slots.tolist()])
                    x, y = (x - stats[0]) * stats[1], torch.from_numpy(split.labels[slots].astype(np.int64))
                    if mixes:
                        x, y = v2.RandomChoice(mixes)(x, y)
                    with torch.autocast("cpu", torch.bfloat16, enabled=bool(c["amp"])):
                        logits = replica(x)
                    loss = F.cross_entropy(logits.float(), y, label_smoothing=c["label_smoothing"])
                    (loss * len(slots) / total).backward()
                    losses.append(loss.item())
            for parameter, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                for other in others:
                    parameter.grad += other.grad
                    other.grad = None
            if c["clip_grad"]:
                norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
                for parameter in model.parameters():
                    parameter.grad *= min(1.0, c["clip_grad"] / (float(norm) + 1e-6))
            lr = rate(c, step, steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                    for other in others:
                        other.copy_(parameter)
                decay = c["ema"] if step else 0.0
                for mine, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    if mine.is_floating_point():
                        mine.copy_(decay * mine + (1 - decay) * now)
            step += 1
        line: Fields = {"epoch": epoch + 1, "step": step, "train_loss": float(np.mean(losses)), "lr": lr}
        final = epoch + 1 == c["epochs"]
        if final or (epoch + 1) % c["eval_every"] == 0:
            flip = c["flip_eval"] and final
            line |= evaluate(c, average if c["ema"] else model, val, stats, eval_crop, flip)
        result.lines.append(line)
    result.weights, result.average = model.state_dict(), average.state_dict()
    return result


def model_classes(model: nn.Module) -> int:
    return [m for m in model.modules() if isinstance(m, nn.Linear)][-1].out_features


def blurred(x: Tensor) -> Tensor:
    """Each pixel's neighbourhood weighted by 1 2 1 in both directions."""
    wide = F.pad(x, [1] * 4)
    rows = (wide[:, :, :-2] + 2 * wide[:, :, 1:-1] + wide[:, :, 2:]) / 4
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:]) / 4
