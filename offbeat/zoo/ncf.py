"""Neural collaborative filtering (He et al. 2017, NeuMF): nearly all parameters in two embeddings.

The sizes are those of TensorFlow's official model, which AutoSync timed: 8 factors and dense layers 64-32-16-8, on
MovieLens-20M enlarged by 16 × 32. Both halves of the model read one table of users and one of items, cut by column.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.scaling import Inputs, check_dropout, length, samples, width

# Distinct ids in MLPerf's expanded data set.
USERS = 2_197_225
ITEMS = 855_776
FACTORS = 8
LAYERS = (64, 32, 16, 8)


class NeuMF(nn.Module):
    """A user and an item → cross-entropy of whether they met."""

    def __init__(
        self, users: int, items: int, factors: int, layers: tuple[int, ...], sparse: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.factors = factors
        columns = factors + layers[0] // 2
        self.user_embedding = nn.Embedding(users, columns, sparse=sparse)
        self.item_embedding = nn.Embedding(items, columns, sparse=sparse)
        dense: list[nn.Module] = []
        for inputs, outputs in pairwise(layers):
            dense += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
        self.dense = nn.Sequential(*dense)
        self.head = nn.Linear(factors + layers[-1], 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, users: torch.Tensor, items: torch.Tensor, met: torch.Tensor) -> torch.Tensor:
        user, item = self.user_embedding(users), self.item_embedding(items)
        product = user[:, : self.factors] * item[:, : self.factors]
        deep = self.dense(torch.cat((user[:, self.factors :], item[:, self.factors :]), 1))
        logits = self.head(torch.cat((product, deep), 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), met)


def ncf_dense(scale: float, batch: int | None, *, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """122,122,801 parameters in 10 tensors (AutoSync: 122M); batch 256. Gradients of the embeddings are dense."""
    return _build(scale, batch, False, dropout)


def ncf_sparse(scale: float, batch: int | None, *, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """ncf_dense with sparse gradients of the embeddings: only the rows the batch looked up."""
    return _build(scale, batch, True, dropout)


def _build(scale: float, batch: int | None, sparse: bool, dropout: float) -> tuple[nn.Module, Inputs]:
    users, items = length(USERS, scale), length(ITEMS, scale)
    layers = tuple(width(size, scale, multiple=4) for size in LAYERS)
    model = NeuMF(users, items, width(FACTORS, scale, multiple=4), layers, sparse, check_dropout(dropout))
    count = samples(256, scale, batch)
    return model, (
        torch.randint(users, (count,)),
        torch.randint(items, (count,)),
        torch.randint(2, (count,)).float(),
    )
