"""ResNet-50, ResNet-101 (He et al. 2016) and the wide ResNet (Zagoruyko and Komodakis 2016) with bottleneck blocks."""

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.images import classes, initialise_convolutions, labelled_images
from offbeat.zoo.scaling import Inputs, check_positive, depth, length, samples
from offbeat.zoo.scaling import width as shrunk_width

STAGE_CHANNELS = (64, 128, 256, 512)
EXPANSION = 4


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut; the stride is in the 3×3 (version 1.5, as torchvision)."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = _unit(inputs, inner, 1)
        self.convolve = _unit(inner, inner, 3, stride)
        self.expand = _unit(inner, outputs, 1)
        changes_shape = stride != 1 or inputs != outputs
        self.shortcut = _unit(inputs, outputs, 1, stride) if changes_shape else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = F.relu(self.convolve(F.relu(self.reduce(x))))
        return F.relu(self.expand(residual) + self.shortcut(x))


class ResNet(nn.Module):
    """A 7×7 stem, four stages of bottlenecks, one dense layer, cross-entropy.

    `widen` multiplies the channels of the 3×3 convolutions only, as torchvision's wide ResNets do.
    """

    def __init__(
        self, repeats: tuple[int, ...], channels: tuple[int, ...], class_count: int, widen: float = 1.0
    ) -> None:
        super().__init__()
        size = channels[0]
        self.stem = _unit(3, size, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = nn.ModuleList()
        for stage, (count, base) in enumerate(zip(repeats, channels, strict=True)):
            blocks = []
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(size, max(1, int(base * widen)), base * EXPANSION, stride))
                size = base * EXPANSION
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Linear(size, class_count)
        initialise_convolutions(self, mode="fan_out")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.stem(images)))
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet50(scale: float, batch: int | None) -> tuple[nn.Module, Inputs]:
    """25,557,032 parameters in 161 tensors; 224×224 images, batch 32.

    The 161 are 53 convolutions, 53 batch norms with two tensors each, and the dense layer's two. PACE's table II counts
    157 for MXNet's model, which fixes the scale of some batch norms.
    """
    return _build((3, 4, 6, 3), scale, batch)


def resnet101(scale: float, batch: int | None) -> tuple[nn.Module, Inputs]:
    """44,549,160 parameters in 314 tensors; 224×224 images, batch 32."""
    return _build((3, 4, 23, 3), scale, batch)


def wide_resnet(scale: float, batch: int | None, *, width: float = 2.0) -> tuple[nn.Module, Inputs]:
    """Wide ResNet-50-2: 68,883,240 parameters in 161 tensors; 224×224 images, batch 32.

    `width` widens the 3×3 convolutions: 1 is ResNet-50, and 12.25 gives 1.82 billion parameters, the 7.3 GB of
    TensorOpt's table 1 (its batch is 256).
    """
    check_positive(width, "width")
    return _build((3, 4, 6, 3), scale, batch, width)


def _build(repeats: tuple[int, ...], scale: float, batch: int | None, widen: float = 1.0) -> tuple[nn.Module, Inputs]:
    shrunk = tuple(depth(count, scale) for count in repeats)
    channels = tuple(shrunk_width(size, scale) for size in STAGE_CHANNELS)
    class_count = classes(scale)
    # 64 pixels end as 2×2, so that batch norm sees more than one value even for a single sample.
    side = length(224, scale, least=64)
    return ResNet(shrunk, channels, class_count, widen), labelled_images(samples(32, scale, batch), side, class_count)
