"""Code shared by several model families: sizes at a scale, attention, initial weights, batches of labelled images.

A published size and a scale in (0, 1] give the size of the shrunk model: it grows with the scale and is the published
one at scale 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 1000
Inputs = tuple[torch.Tensor, ...]
Built = tuple[nn.Module, Inputs]
"""A model and its example inputs."""


def width(size: int, scale: float, multiple: int = 8) -> int:
    """Channels or features, kept a multiple of `multiple` below full scale."""
    return size if scale == 1 else _clip(round(size * scale / multiple) * multiple, multiple, size)


def depth(layers: int, scale: float) -> int:
    """Repeats of a block. At least two, so that a first block that differs from the others keeps a successor."""
    return _clip(round(layers * scale), 2, layers)


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


def _clip(size: int, least: int, most: int) -> int:
    return max(min(least, most), min(size, most))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dropout: nn.Dropout | None = None,
) -> torch.Tensor:
    """Multi-head attention over (batch, length, features) tensors; `mask` is added to the scores of every head."""
    q, k, v = [tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key, value)]
    dropped = dropout.p if dropout is not None and dropout.training else 0.0
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropped)
    return attended.transpose(1, 2).flatten(2)


def dense_layers(sizes: Sequence[int], dropout: float) -> list[nn.Module]:
    """Linear layers from each size to the next, with ReLU and dropout after each."""
    triples = ((nn.Linear(*ends), nn.ReLU(), nn.Dropout(dropout)) for ends in pairwise(sizes))
    return list(chain.from_iterable(triples))


def additive_mask(keep: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(batch, keys) → (batch, 1, 1, keys): 0 where `keep` holds and -10000 elsewhere, as BERT adds to its scores.

    Finite, so that a row with nothing to attend to gives numbers.
    """
    return (~keep)[:, None, None, :].to(like.dtype) * -10000.0


def initialise(model: nn.Module, weights: Mapping[type[nn.Module], Callable[[Any], Any]]) -> None:
    """Draws the weights of each kind of layer and sets the biases of such layers to zero."""
    for module in model.modules():
        if type(module) in weights:
            weights[type(module)](module.weight)
            bias: Any = getattr(module, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)


def he_normal(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """He initialisation of the weights before a ReLU."""
    return lambda weight: nn.init.kaiming_normal_(weight, mode=mode, nonlinearity="relu")


def classes(scale: float) -> int:
    """ImageNet's classes, shrunk."""
    return length(CLASSES, scale, least=10)


def labelled_images(scale: float, batch: int | None, side: int) -> Inputs:
    """Random images and labels; all image models are published with batch 32."""
    count = samples(32, scale, batch)
    return torch.randn(count, 3, side, side), torch.randint(classes(scale), (count,))
