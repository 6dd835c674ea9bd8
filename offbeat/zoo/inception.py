"""Inception v3 (Szegedy et al. 2016) without its auxiliary head: parallel branches of unequal cost."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.blocks import Built, classes, depth, labelled_images, length, width


class Branches(nn.Module):
    """Runs each branch on the same input and joins the results by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Blocks:
    """Builds the paper's blocks one after another, with their channels shrunk by `scale`.

    A branch is a list of convolutions: (channels, kernel), or (channels, kernel, stride) without padding. Several of
    them in one tuple, which may end a branch, run beside each other.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.channels = 3

    def unit(self, outputs: int, kernel: int | tuple[int, int], stride: int = 1, *, same: bool = False) -> nn.Module:
        """Convolution, batch norm and ReLU; padded where the image keeps its size (`same`)."""
        tall, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (tall // 2, wide // 2) if same else (0, 0)
        inputs, self.channels = self.channels, width(outputs, self.scale)
        convolution = nn.Conv2d(inputs, self.channels, (tall, wide), stride, padding, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(self.channels, eps=1e-3), nn.ReLU())

    def block(self, *branches: list[Any], pool: int | None = None) -> nn.Module:
        """The branches and a pooling: an average that is projected to `pool` channels, or one that halves the image."""
        inputs, made = self.channels, self._beside(branches)
        joined, self.channels = self.channels, inputs
        if pool is None:
            made.append(nn.MaxPool2d(3, stride=2))
        else:
            made.append(nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), self.unit(pool, 1, same=True)))
        self.channels += joined
        return Branches(*made)

    def _beside(self, branches: Iterable[list[Any]]) -> list[nn.Module]:
        """Branches that read the same input; their channels add up."""
        inputs, made, joined = self.channels, [], 0
        for branch in branches:
            self.channels = inputs
            layers = [
                Branches(*self._beside([each] for each in step))
                if isinstance(step[0], tuple)
                else self.unit(*step, same=len(step) == 2)
                for step in branch
            ]
            made.append(layers[0] if len(layers) == 1 else nn.Sequential(*layers))
            joined += self.channels
        self.channels = joined
        return made


class Inception(nn.Module):
    """A stem of convolutions, blocks of branches, one dense layer, cross-entropy."""

    def __init__(self, scale: float, dropout: float) -> None:
        super().__init__()
        blocks = Blocks(scale)
        self.stem = nn.Sequential(
            blocks.unit(32, 3, stride=2),
            blocks.unit(32, 3),
            blocks.unit(64, 3, same=True),
            nn.MaxPool2d(3, stride=2),
            blocks.unit(80, 1),
            blocks.unit(192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.body = nn.Sequential(
            # 35×35: 1×1, 5×5, double 3×3.
            *[
                blocks.block([(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], pool=pool)
                for pool in (32, 64, 64)[: depth(3, scale)]
            ],
            blocks.block([(384, 3, 2)], [(64, 1), (96, 3), (96, 3, 2)]),
            # 17×17: 7×7 convolutions factored into 1×7 and 7×1.
            *[
                blocks.block(
                    [(192, 1)],
                    [(m, 1), (m, (1, 7)), (192, (7, 1))],
                    [(m, 1), (m, (7, 1)), (m, (1, 7)), (m, (7, 1)), (192, (1, 7))],
                    pool=192,
                )
                for m in (128, 160, 160, 192)[: depth(4, scale)]
            ],
            blocks.block([(192, 1), (320, 3, 2)], [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)]),
            # 8×8: 3×3 convolutions split into parallel 1×3 and 3×1.
            *[
                blocks.block([(320, 1)], [(384, 1), split], [(448, 1), (384, 3), split], pool=192)
                for split in [((384, (1, 3)), (384, (3, 1)))] * 2
            ],
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(blocks.channels, classes(scale))
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.1, a=-0.2, b=0.2)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.body(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(self.dropout(x)), labels)


def inception_v3(scale: float, batch: int | None, *, dropout: float = 0.0) -> Built:
    """23,834,568 parameters in 284 tensors; 299×299 images, batch 32. Published dropout: 0.5.

    The auxiliary head, which would add 3.3 million, is left out as in the counts of AutoSync's table 1.
    """
    # 107 pixels end as 2×2, so that batch norm sees more than one value even for a single sample.
    return Inception(scale, dropout), labelled_images(scale, batch, length(299, scale, least=107))
