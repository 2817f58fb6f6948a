"""What a run is: one frozen dataclass. `trainer.flags` fills it from YAML recipes and flags."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from pipeline.errors import UsageError
from pipeline.store.remote import check_local, is_remote, place


@dataclass(frozen=True)
class Stage:
    """One stage of progressive resolution."""

    epoch: int
    """The stage starts when this many epochs are done; the first one's is 0."""
    size: int | None = None
    """Store size that replaces {size} in --data."""
    crop: int | None = None
    """Training crop in pixels; the whole image by default."""


@dataclass(frozen=True)
class Config:
    """Train or evaluate an image classifier on a store that `python -m pipeline convert` wrote."""

    data: str
    """The store, or with --cache its URL. May hold {size}, which the stages' sizes and --eval-size fill in."""
    out: str | None = None
    """Folder of the run; runs/STORE-MODEL by default."""
    resume: str | None = None
    """auto: from the newest valid checkpoint in --out, or fresh where there is none. PATH: that checkpoint or run."""
    weights: str | None = None
    """Start from these weights: a file of this trainer or a plain state dict, or `torchvision` for its pretrained."""
    eval_only: bool = False
    """Only evaluate --weights on the val split."""
    cache: str | None = None
    """For a store at a URL: a folder on this machine's disk to which it is brought, beside training."""
    model: str = "resnet50"
    """A torchvision classifier, one of our own (resnet_small, resnet_small_wide, whitened_net, flatten_linear,
    vit_s_16), or timm's."""
    blurpool: bool = False
    """Blur before each strided convolution of 16 channels or more."""
    zero_init_residual: bool = False
    """Residual branches of torchvision's ResNets start at 0."""
    epochs: int = 16
    """Passes over the train split."""
    global_batch: int | None = None
    """Samples per optimizer step over all ranks, G; batch_size x ranks where that is given, else 256."""
    batch_size: int | None = None
    """Samples per rank and micro-step (lower it to save memory); the largest divisor of G / ranks up to 256."""
    lr: float = 0.1
    """Peak learning rate per 256 samples of the global batch; the rate in use is lr x G / 256."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd (with momentum) or adamw."""
    momentum: float = 0.9
    """Momentum of sgd, or the first beta of adamw."""
    nesterov: bool = False
    """Nesterov momentum for sgd."""
    weight_decay: float = 5e-5
    """Weight decay of matrices and kernels; norms and biases have none."""
    warmup_epochs: float = 0.5
    """Linear warm-up before the schedule, both by step."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the rate falls to 0 after the warm-up."""
    label_smoothing: float = 0.1
    """Label smoothing of the training loss."""
    clip_grad: float = 0.0
    """Largest norm of the gradient; 0 for no clipping."""
    ema: float = 0.0
    """Decay per step of an exponential moving average of the weights, which is then what is evaluated; 0 for none."""
    augment: Literal["crop", "rrc"] = "crop"
    """crop: random crop and flip, no resampling. rrc: random resized crop, antialiased, on the device, and flip."""
    crop: int | None = None
    """Training crop in pixels (the size rrc gives); the whole stored image by default."""
    pad: int = 0
    """Shift images at random by up to so many pixels, borders reflected; for stores without room to crop."""
    flip: float = 0.5
    """Probability of the horizontal flip."""
    alternate_flip: bool = False
    """Draw the flip in the first epoch only; then mirror every other epoch, so that each image is seen both ways."""
    randaugment: int = 0
    """Magnitude (1 to 30) of RandAugment's two operations; 0 for none."""
    random_erasing: float = 0.0
    """Probability that a random rectangle is erased."""
    rrc_scale: float = 0.08
    """Smallest share of the image's area that rrc takes."""
    resample: Literal["triangle", "cubic"] = "triangle"
    """Filter of what is resampled on the device: rrc, and all crops of a store of --fit stretch."""
    mixup: float = 0.0
    """Alpha of mixup; 0 for none. Mixes within a rank's batch."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0 for none. With mixup too, each step draws one of them."""
    normalize: Literal["store", "imagenet"] = "store"
    """Mean and std of pixels: the train split's own, or ImageNet's usual ones (for pretrained weights)."""
    eval_crop: int | None = None
    """Centre crop for evaluation in pixels; the (last stage's) training crop by default."""
    eval_size: int | None = None
    """Store size that replaces {size} for evaluation; the last stage's by default."""
    eval_resize: int | None = None
    """For a store of --fit stretch: the shorter side that evaluation resizes to before its centre crop, in pixels;
    the store's size by default."""
    flip_eval: bool = False
    """The last evaluation averages each image's and its mirror image's logits; so does --eval-only."""
    eval_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    stages: list[Stage] = field(default_factory=list)
    """Progressive resolution: a list of {epoch, size, crop}."""
    seed: int = 0
    """Seed of initial weights, order and augmentation."""
    subset: str | None = None
    """Train only on the samples whose store slots are in this file: a text with one on each line, or a .npy."""
    order: Literal["random", "windowed"] = "random"
    """random, or windowed for disks that hate random reads."""
    window: int | None = None
    """Chunks per window of the windowed order."""
    threads: int = 1
    """Loader threads per rank."""
    warm: Literal["auto", "never"] = "auto"
    """auto: read the store into memory, in sequence, beside the first steps, where it fits and isn't there yet."""
    device: str = "auto"
    """auto (the accelerator, else the CPU), cpu, cuda, ..."""
    amp: bool | None = None
    """bfloat16 autocast; by default on an accelerator only."""
    compile: bool = False
    """torch.compile the model."""
    sync_bn: bool = False
    """Batch-norm statistics over all ranks."""
    checkpoint_every: int = 500
    """Optimizer steps between checkpoints; one is also written after each epoch, on SIGTERM and on Ctrl-C."""
    checkpoint_minutes: float = 0.0
    """Minutes between checkpoints, counted beside the steps; 0 for steps alone."""
    profile: bool = False
    """Write a torch.profiler trace of a few steps to OUT/trace.json."""
    timeout: float = 300.0
    """Seconds after which a rank gives up on others that are silent."""
    debug: bool = False
    """Show tracebacks."""

    def __post_init__(self) -> None:
        def check(name: str, good: bool, wanted: str) -> None:
            if not good:
                given = {"": "(empty)", None: "null"}.get(getattr(self, name), getattr(self, name))
                raise UsageError(f"--{name.replace('_', '-')} {given}: must be {wanted}")

        for name, kind in get_type_hints(Config).items():
            value = getattr(self, name)
            check(name, value is not None or type(None) in get_args(kind), "given a value, or left out")
            if isinstance(value, str) and "\0" in value:
                raise UsageError(f"--{name.replace('_', '-')}: holds a NUL byte")
        check("data", self.data != "", "the path of a store")
        check("cache", self.cache != "", "the path of a folder, or left out")
        for name in ("cache", "out", "resume", "weights", "subset"):
            check_local(getattr(self, name) or "", f"--{name}")
        if self.is_remote:
            if self.cache is None:
                raise UsageError(f"--data {self.data}: at a URL; give --cache DIR, a folder on this machine's disk")
            if self.order != "windowed" and not self.eval_only:
                raise UsageError(f"--order {self.order}: --data at a URL needs --order windowed")
        elif self.cache is not None and os.path.abspath(os.path.dirname(self.data)) != os.path.abspath(self.cache):
            raise UsageError(f"--cache {self.cache}: only for --data at a URL, which {self.data} isn't; leave it out")
        check("out", self.out != "", "the path of a folder, or left out")
        for name in ("epochs", "threads", "checkpoint_every", "eval_every", "timeout"):
            check(name, getattr(self, name) > 0, "above 0")
        for name in ("global_batch", "batch_size", "crop", "eval_crop", "eval_size", "eval_resize", "window"):
            check(name, getattr(self, name) is None or getattr(self, name) > 0, "above 0")
        for name in ("lr", "weight_decay", "clip_grad", "mixup", "cutmix", "pad", "checkpoint_minutes"):
            check(name, 0 <= getattr(self, name) < float("inf"), "0 or more, and finite")
        check("seed", 0 <= self.seed < 2**32, "0 or more, and below 2^32")
        for name in ("momentum", "label_smoothing", "ema"):
            check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("flip", "random_erasing"):
            check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        check("randaugment", 0 <= self.randaugment <= 30, "from 0 to 30")
        check("rrc_scale", 0 < self.rrc_scale <= 1, "above 0 and at most 1")
        check("warmup_epochs", 0 <= self.warmup_epochs < self.epochs, f"at least 0 and below --epochs {self.epochs}")
        check("nesterov", not self.nesterov or self.momentum > 0, "false without --momentum")
        if any(stage.epoch is None for stage in self.stages):
            raise UsageError("--stages: each needs the epoch at which it starts; the first one's is 0")
        starts = [stage.epoch for stage in self.stages]
        if starts != sorted(set(starts)) or starts[:1] not in ([], [0]):
            raise UsageError(f"--stages at epochs {', '.join(map(str, starts))}: must rise, the first at 0")
        if self.stages and self.crop:
            raise UsageError(f"--crop {self.crop}: not with --stages, each of which has a crop of its own")
        for stage in self.stages:
            if any(pixels is not None and pixels < 1 for pixels in (stage.size, stage.crop)):
                raise UsageError(f"--stages at epoch {stage.epoch}: size and crop must be above 0")
        if "{size}" in self.data and not (all(s.size for s in self.stages) and (self.stages or self.eval_size)):
            raise UsageError(f"--data {self.data}: {{size}} needs a size in each of the stages (or --eval-size)")
        if self.eval_only and self.weights is None:
            raise UsageError("--eval-only needs --weights PATH, such as runs/NAME/best.pt (or `torchvision`)")

    @property
    def is_remote(self) -> bool:
        """--data is at a URL."""
        return is_remote(place(self.data))

    def stage(self, epoch: int) -> Stage:
        """The stage that trains epoch number `epoch`, counted from 0."""
        own = Stage(epoch=0, size=self.eval_size, crop=self.crop)
        return next((stage for stage in reversed(self.stages) if stage.epoch <= epoch), own)

    @property
    def final_crop(self) -> int | None:
        """Side of evaluation's centre crop in pixels; None for whole images."""
        return self.eval_crop or (self.stages[-1].crop if self.stages else self.crop)

    def store_path(self, size: int | None) -> str:
        return self.data.replace("{size}", str(size))
