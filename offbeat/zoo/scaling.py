"""A published size and a scale in (0, 1] → the size of the shrunk model.

Every function grows with the scale and returns the published size at scale 1.
"""

import math

import torch

from offbeat.errors import OffbeatError

Inputs = tuple[torch.Tensor, ...]


def width(size: int, scale: float, multiple: int = 8) -> int:
    """Channels or features, kept a multiple of `multiple` below full scale."""
    return size if scale == 1 else _clip(round(size * scale / multiple) * multiple, multiple, size)


def depth(layers: int, scale: float, least: int = 2) -> int:
    """Repeats of a block. At least two, so that a first block that differs from the others keeps a successor."""
    return _clip(round(layers * scale), least, layers)


def length(size: int, scale: float, least: int = 8) -> int:
    """Image side, sequence length, vocabulary or number of classes."""
    return _clip(round(size * scale), least, size)


def heads(count: int, size: int, scale: float) -> tuple[int, int]:
    """Attention heads and features of one head; both shrink with the root of the scale, so their product with it."""
    root = math.sqrt(scale)
    return _clip(round(count * root), 2, count), width(size, root)


def samples(published: int, scale: float, batch: int | None) -> int:
    """The batch asked for, or the published one shrunk to no fewer than two samples."""
    return batch if batch is not None else _clip(round(published * scale), 2, published)


def check_dropout(dropout: float) -> float:
    """The probability itself, if it is one."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise OffbeatError(f"dropout: {dropout!r} must be a probability from 0 to below 1")
    return float(dropout)


def check_positive(value: float, what: str, whole: bool = False) -> None:
    """Refuses what is not a finite number above 0 (a whole one if asked)."""
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise OffbeatError(f"{what}: {value!r} must be a {'whole ' if whole else ''}number above 0")


def _clip(size: int, least: int, most: int) -> int:
    return max(min(least, most), min(size, most))
