"""DenseNet-121 (Huang et al. 2017): few parameters in many small tensors, each layer reading all before it."""

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.images import classes, initialise_convolutions, labelled_images
from offbeat.zoo.scaling import Inputs, check_dropout, depth, length, samples, width

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

    def __init__(self, layers: tuple[int, ...], growth: int, stem: int, class_count: int, dropout: float) -> None:
        super().__init__()
        body: list[nn.Module] = [
            nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        channels = stem
        for index, count in enumerate(layers):
            if index:
                body += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
                body.append(nn.AvgPool2d(2))
                channels //= 2
            body.append(DenseBlock(count, channels, growth, dropout))
            channels += count * growth
        self.body = nn.Sequential(*body, nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, class_count)
        initialise_convolutions(self, mode="fan_in")
        nn.init.zeros_(self.head.bias)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


def densenet121(scale: float, batch: int | None, *, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """7,978,856 parameters in 364 tensors; 224×224 images, batch 32."""
    layers = tuple(depth(count, scale) for count in (6, 12, 24, 16))
    class_count = classes(scale)
    model = DenseNet(layers, width(32, scale, multiple=4), width(64, scale), class_count, check_dropout(dropout))
    # 64 pixels end as 2×2, so that batch norm sees more than one value even for a single sample.
    side = length(224, scale, least=64)
    return model, labelled_images(samples(32, scale, batch), side, class_count)
