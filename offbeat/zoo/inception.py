"""Inception v3 (Szegedy et al. 2016) without its auxiliary head: parallel branches of unequal cost."""

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.images import classes, labelled_images
from offbeat.zoo.scaling import Inputs, check_dropout, depth, length, samples, width


class Unit(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True):
        tall, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (tall // 2, wide // 2) if same else (0, 0)
        super().__init__(
            nn.Conv2d(inputs, outputs, (tall, wide), stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(),
        )


class Branches(nn.Module):
    """Runs each branch on the same input and joins the results by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Blocks:
    """Builds the paper's blocks one after another, with their channels shrunk by `scale`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.channels = 3

    def _c(self, size: int) -> int:
        return width(size, self.scale)

    def _pooled(self, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Unit(self.channels, outputs, 1))

    def unit(self, outputs: int, kernel: int, stride: int = 1, same: bool = False) -> nn.Module:
        unit = Unit(self.channels, self._c(outputs), kernel, stride, same)
        self.channels = self._c(outputs)
        return unit

    def block_a(self, pool: int) -> nn.Module:
        """The 35×35 block: 1×1, 5×5, double 3×3, pooling."""
        n, c = self.channels, self._c
        block = Branches(
            Unit(n, c(64), 1),
            nn.Sequential(Unit(n, c(48), 1), Unit(c(48), c(64), 5)),
            nn.Sequential(Unit(n, c(64), 1), Unit(c(64), c(96), 3), Unit(c(96), c(96), 3)),
            self._pooled(c(pool)),
        )
        self.channels = c(64) + c(64) + c(96) + c(pool)
        return block

    def block_b(self) -> nn.Module:
        """35×35 → 17×17."""
        n, c = self.channels, self._c
        block = Branches(
            Unit(n, c(384), 3, 2, same=False),
            nn.Sequential(Unit(n, c(64), 1), Unit(c(64), c(96), 3), Unit(c(96), c(96), 3, 2, same=False)),
            nn.MaxPool2d(3, stride=2),
        )
        self.channels = c(384) + c(96) + n
        return block

    def block_c(self, inner: int) -> nn.Module:
        """The 17×17 block: 7×7 convolutions factored into 1×7 and 7×1."""
        n, m, out = self.channels, self._c(inner), self._c(192)
        block = Branches(
            Unit(n, out, 1),
            nn.Sequential(Unit(n, m, 1), Unit(m, m, (1, 7)), Unit(m, out, (7, 1))),
            nn.Sequential(
                Unit(n, m, 1), Unit(m, m, (7, 1)), Unit(m, m, (1, 7)), Unit(m, m, (7, 1)), Unit(m, out, (1, 7))
            ),
            self._pooled(out),
        )
        self.channels = 4 * out
        return block

    def block_d(self) -> nn.Module:
        """17×17 → 8×8."""
        n, c = self.channels, self._c
        m = c(192)
        block = Branches(
            nn.Sequential(Unit(n, m, 1), Unit(m, c(320), 3, 2, same=False)),
            nn.Sequential(Unit(n, m, 1), Unit(m, m, (1, 7)), Unit(m, m, (7, 1)), Unit(m, m, 3, 2, same=False)),
            nn.MaxPool2d(3, stride=2),
        )
        self.channels = c(320) + m + n
        return block

    def block_e(self) -> nn.Module:
        """The 8×8 block: 3×3 convolutions split into parallel 1×3 and 3×1."""
        n, c = self.channels, self._c
        m = c(384)
        block = Branches(
            Unit(n, c(320), 1),
            nn.Sequential(Unit(n, m, 1), Branches(Unit(m, m, (1, 3)), Unit(m, m, (3, 1)))),
            nn.Sequential(Unit(n, c(448), 1), Unit(c(448), m, 3), Branches(Unit(m, m, (1, 3)), Unit(m, m, (3, 1)))),
            self._pooled(c(192)),
        )
        self.channels = c(320) + 4 * m + c(192)
        return block


class Inception(nn.Module):
    """A stem of convolutions, the five kinds of block, one dense layer, cross-entropy."""

    def __init__(self, scale: float, class_count: int, dropout: float) -> None:
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
            *[blocks.block_a(pool) for pool in (32, 64, 64)[: depth(3, scale)]],
            blocks.block_b(),
            *[blocks.block_c(inner) for inner in (128, 160, 160, 192)[: depth(4, scale)]],
            blocks.block_d(),
            *[blocks.block_e() for _ in range(2)],
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(blocks.channels, class_count)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.1, a=-0.2, b=0.2)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.body(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(self.dropout(x)), labels)


def inception_v3(scale: float, batch: int | None, *, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """23,834,568 parameters in 284 tensors; 299×299 images, batch 32. Published dropout: 0.5.

    The auxiliary head, which would add 3.3 million, is left out as in the counts of AutoSync's table 1.
    """
    class_count = classes(scale)
    model = Inception(scale, class_count, check_dropout(dropout))
    # 107 pixels end as 2×2, so that batch norm sees more than one value even for a single sample.
    side = length(299, scale, least=107)
    return model, labelled_images(samples(32, scale, batch), side, class_count)
