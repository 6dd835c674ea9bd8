"""Queries, keys and values → attended values, the same for every transformer of the zoo."""

import torch
import torch.nn.functional as F


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Multi-head attention over (batch, length, features) tensors; `mask` is added to the scores of every head."""
    q, k, v = [tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (query, key, value)]
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)
    return attended.transpose(1, 2).flatten(2)


def additive_mask(keep: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(batch, keys) → (batch, 1, 1, keys): 0 where `keep` holds and -10000 elsewhere, as BERT adds to its scores.

    Finite, so that a row with nothing to attend to gives numbers.
    """
    return (~keep)[:, None, None, :].to(like.dtype) * -10000.0
