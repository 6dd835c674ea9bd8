"""Sizes → an example batch of labelled images; a network → its usual initial weights."""

import torch
from torch import nn

from offbeat.zoo.scaling import Inputs, length

CLASSES = 1000


def classes(scale: float) -> int:
    """ImageNet's classes, shrunk."""
    return length(CLASSES, scale, least=10)


def labelled_images(count: int, side: int, class_count: int) -> Inputs:
    """Random images and labels."""
    return torch.randn(count, 3, side, side), torch.randint(class_count, (count,))


def initialise_convolutions(model: nn.Module, mode: str) -> None:
    """He initialisation for convolutions, the identity for batch norms."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
