"""A small classifier for tests and demos."""

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.scaling import Inputs, check_dropout, length, samples, width

PIXELS = 784
CLASSES = 10


class MLP(nn.Module):
    """Linear layers with ReLU between them, then cross-entropy."""

    def __init__(self, features: int, hidden: tuple[int, ...], classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(features, size), nn.ReLU(), nn.Dropout(dropout)]
            features = size
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(features, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images)), labels)


def mlp(scale: float, batch: int | None, *, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """784 → 1024 → 1024 → 512 → 10: 2,383,370 parameters in 8 tensors, batch 64."""
    pixels = length(PIXELS, scale)
    hidden = tuple(width(size, scale) for size in (1024, 1024, 512))
    model = MLP(pixels, hidden, CLASSES, check_dropout(dropout))
    count = samples(64, scale, batch)
    return model, (torch.randn(count, pixels), torch.randint(CLASSES, (count,)))
