"""VGG-16 (Simonyan and Zisserman 2015, configuration D): communication-bound, most of it in one dense layer."""

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.images import classes, initialise_convolutions, labelled_images
from offbeat.zoo.scaling import Inputs, check_dropout, length, samples, width

# Convolutions per stage and their channels; a pooling ends each stage.
STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
POOLED_SIDE = 7


class VGG(nn.Module):
    """3×3 convolutions in stages, three dense layers, cross-entropy."""

    def __init__(self, stages: tuple[tuple[int, int], ...], hidden: int, class_count: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for repeats, size in stages:
            for _ in range(repeats):
                # No in-place ReLU anywhere in the zoo: module hooks, which profilers use, forbid it.
                layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU()]
                channels = size
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(POOLED_SIDE)
        self.classifier = nn.Sequential(
            nn.Linear(channels * POOLED_SIDE**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, class_count),
        )
        initialise_convolutions(self, mode="fan_out")
        for module in self.classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.features(images))
        return F.cross_entropy(self.classifier(pooled.flatten(1)), labels)


def vgg16(scale: float, batch: int | None, *, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """138,357,544 parameters in 32 tensors, as in PACE's table II; 224×224 images, batch 32. Published dropout: 0.5."""
    # Stages have two or three convolutions each, too few to shrink: the depth stays.
    stages = tuple((repeats, width(size, scale)) for repeats, size in STAGES)
    class_count = classes(scale)
    model = VGG(stages, width(4096, scale), class_count, check_dropout(dropout))
    side = length(224, scale, least=32)
    return model, labelled_images(samples(32, scale, batch), side, class_count)
