"""Convolutional networks for images.

VGG-16 (Simonyan and Zisserman 2015, configuration D) is communication-bound, most of it in one dense layer. ResNet-50,
ResNet-101 (He et al. 2016) and the wide ResNet (Zagoruyko and Komodakis 2016) have bottleneck blocks. DenseNet-121
(Huang et al. 2017) has few parameters in many small tensors, each layer reading all before it.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.blocks import Built, classes, dense_layers, depth, he_normal, initialise, labelled_images, length
from offbeat.zoo.blocks import width as shrunk_width

# Convolutions per stage and their channels; a pooling ends each stage.
VGG_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
POOLED_SIDE = 7


class VGG(nn.Module):
    """3×3 convolutions in stages, three dense layers, cross-entropy."""

    def __init__(self, scale: float, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        # Stages have two or three convolutions each, too few to shrink: the depth stays.
        for repeats, size in VGG_STAGES:
            for _ in range(repeats):
                outputs = shrunk_width(size, scale)
                # No in-place ReLU anywhere in the zoo: module hooks, which profilers use, forbid it.
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(POOLED_SIDE)
        hidden = shrunk_width(4096, scale)
        dense = dense_layers((channels * POOLED_SIDE**2, hidden, hidden), dropout)
        self.classifier = nn.Sequential(*dense, nn.Linear(hidden, classes(scale)))
        initialise(self, {nn.Conv2d: he_normal("fan_out"), nn.Linear: partial(nn.init.normal_, std=0.01)})

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.features(images))
        return F.cross_entropy(self.classifier(pooled.flatten(1)), labels)


def vgg16(scale: float, batch: int | None, *, dropout: float = 0.0) -> Built:
    """138,357,544 parameters in 32 tensors, as in PACE's table II; 224×224 images, batch 32. Published dropout: 0.5."""
    return VGG(scale, dropout), labelled_images(scale, batch, length(224, scale, least=32))


RESNET_CHANNELS = (64, 128, 256, 512)
EXPANSION = 4


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


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

    def __init__(self, repeats: tuple[int, ...], scale: float, widen: float) -> None:
        super().__init__()
        channels = [shrunk_width(size, scale) for size in RESNET_CHANNELS]
        size = channels[0]
        self.stem = _unit(3, size, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = nn.ModuleList()
        for stage, (count, base) in enumerate(zip(repeats, channels, strict=True)):
            blocks = []
            for block in range(depth(count, scale)):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(size, max(1, int(base * widen)), base * EXPANSION, stride))
                size = base * EXPANSION
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Linear(size, classes(scale))
        initialise(self, {nn.Conv2d: he_normal("fan_out")})

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.stem(images)))
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _resnet(repeats: tuple[int, ...], widen: float, scale: float, batch: int | None) -> Built:
    # 64 pixels end as 2×2, so that batch norm sees more than one value even for a single sample.
    return ResNet(repeats, scale, widen), labelled_images(scale, batch, length(224, scale, least=64))


# 224×224 images, batch 32.
resnet50 = partial(_resnet, (3, 4, 6, 3), 1.0)
"""25,557,032 parameters in 161 tensors: 53 convolutions, two of each of 53 batch norms, and the dense layer's two.

PACE's table II counts 157 for MXNet's model, which fixes the scale of some batch norms.
"""
resnet101 = partial(_resnet, (3, 4, 23, 3), 1.0)
"""44,549,160 parameters in 314 tensors."""


def wide_resnet(scale: float, batch: int | None, *, width: float = 2.0) -> Built:
    """Wide ResNet-50-2: 68,883,240 parameters in 161 tensors; 224×224 images, batch 32.

    `width` widens the 3×3 convolutions: 1 is ResNet-50, and 12.25 gives 1.82 billion parameters, the 7.3 GB of
    TensorOpt's table 1 (its batch is 256).
    """
    return _resnet((3, 4, 6, 3), width, scale, batch)


BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Norm, ReLU, 1×1 and norm, ReLU, 3×3: adds `growth` channels."""

    def __init__(self, inputs: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.dropout(self.conv2(F.relu(self.norm2(x))))


class DenseBlock(nn.Module):
    """Layers that each read the block's input and the results of all layers before them."""

    def __init__(self, layers: int, inputs: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth, dropout) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """A 7×7 stem, dense blocks with halving transitions between them, one dense layer, cross-entropy."""

    def __init__(self, scale: float, dropout: float) -> None:
        super().__init__()
        growth, channels = shrunk_width(32, scale, multiple=4), shrunk_width(64, scale)
        body = [*_unit(3, channels, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
        for index, published in enumerate((6, 12, 24, 16)):
            count = depth(published, scale)
            if index:
                body += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
                body.append(nn.AvgPool2d(2))
                channels //= 2
            body.append(DenseBlock(count, channels, growth, dropout))
            channels += count * growth
        self.body = nn.Sequential(*body, nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, classes(scale))
        initialise(self, {nn.Conv2d: he_normal("fan_in")})
        nn.init.zeros_(self.head.bias)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


def densenet121(scale: float, batch: int | None, *, dropout: float = 0.0) -> Built:
    """7,978,856 parameters in 364 tensors; 224×224 images, batch 32."""
    # 64 pixels end as 2×2, as with ResNets.
    return DenseNet(scale, dropout), labelled_images(scale, batch, length(224, scale, least=64))
