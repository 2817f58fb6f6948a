"""Networks that torchvision doesn't have, and changes to those that it has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from pipeline.errors import UsageError


class ResNetSmall(nn.Module):
    """A nine-layer ResNet for 32-px images: four 3x3 layers with pooling, and two residual blocks between them.

    After D. Page, How to Train Your ResNet (2018), which has width 64 (6.6 M parameters); narrower ones suit a CPU.
    """

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = _conv(3, width)
        self.layer1 = nn.Sequential(_conv(width, 2 * width), nn.MaxPool2d(2))
        self.block1 = nn.Sequential(_conv(2 * width, 2 * width), _conv(2 * width, 2 * width))
        self.layer2 = nn.Sequential(_conv(2 * width, 4 * width), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(_conv(4 * width, 8 * width), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(_conv(8 * width, 8 * width), _conv(8 * width, 8 * width))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer1(self.stem(images))
        x = self.layer3(self.layer2(x + self.block1(x)))
        return self.fc((x + self.block2(x)).amax((2, 3))) / 8


def _conv(planes: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(planes, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class WhitenedNet(nn.Module):
    """A seven-layer network for 32-px images whose first layer whitens 2x2 patches and stays as it is.

    After K. Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU (2024), with plain batch norm and PyTorch's scales.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad = False
        widths = (24, 64, 256, 256)
        self.groups = nn.Sequential(*(_pooled_pair(a, b) for a, b in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], num_classes, bias=False)

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first layer from normalised training images, float (n, 3, H, W)."""
        patches = F.unfold(images, 2).transpose(1, 2).reshape(-1, 12)  # (n, 12, places) -> (n x places, 12)
        values, vectors = torch.linalg.eigh(patches.T.double() @ patches.double() / len(patches))
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))
        nn.init.zeros_(self.whitening.get_parameter("bias"))

    def forward(self, images: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whitening(images)))
        return self.fc(x.amax((2, 3))) / 9


def _pooled_pair(planes: int, out: int) -> nn.Sequential:
    first, second = (nn.Conv2d(width, out, 3, padding=1, bias=False) for width in (planes, out))
    for conv in (first, second):  # the first channels start as the identity
        nn.init.dirac_(conv.weight[: conv.in_channels])
    norms = [nn.BatchNorm2d(out, momentum=0.4) for _ in range(2)]
    return nn.Sequential(first, nn.MaxPool2d(2), norms[0], nn.GELU(), second, norms[1], nn.GELU())


class BlurConv2d(nn.Conv2d):
    """A strided convolution of blurred pixels (R. Zhang, Making Convolutional Networks Shift-Invariant Again, 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.conv2d(x, self.get_buffer("blur"), padding=1, groups=self.in_channels))


def add_blurpool(model: nn.Module) -> None:
    """Blur by [1 2 1] / 4, both ways, before strided convolutions of 16 channels or more; state dicts stay the same."""
    line = torch.tensor([0.25, 0.5, 0.25])
    for conv in [module for module in model.modules() if type(module) is nn.Conv2d]:
        if max(conv.stride) > 1 and conv.in_channels >= 16:
            conv.__class__ = BlurConv2d
            conv.register_buffer("blur", torch.outer(line, line).repeat(conv.in_channels, 1, 1, 1), persistent=False)


def zero_init_residual(model: nn.Module, name: str) -> None:
    """Let each residual branch start at 0 (Goyal et al., Accurate, Large Minibatch SGD, 2017).

    Raises:
        UsageError: the model, called `name`, isn't one of torchvision's ResNets.
    """
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    if not blocks:
        raise UsageError(f"--zero-init-residual: not for --model {name}; only torchvision's ResNets have such blocks")
    for block in blocks:
        nn.init.zeros_((block.bn3 if isinstance(block, Bottleneck) else block.bn2).weight)


def _flatten_linear(num_classes: int, size: int) -> nn.Module:
    """The two-layer network that DDP's textbook examples train on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 128), nn.ReLU(), nn.Linear(128, num_classes))


def _vit_s_16(num_classes: int, size: int) -> nn.Module:
    """ViT-S/16 as in Touvron et al., DeiT (2021), table 1; torchvision has only the larger ones."""
    return torchvision.models.VisionTransformer(size, 16, 12, 6, 384, 1536, num_classes=num_classes)


OWN: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet_small": lambda num_classes, _: ResNetSmall(num_classes, 16),
    "resnet_small_wide": lambda num_classes, _: ResNetSmall(num_classes, 64),
    "whitened_net": lambda num_classes, _: WhitenedNet(num_classes),
    "flatten_linear": _flatten_linear,
    "vit_s_16": _vit_s_16,
}
