"""Dense models: a small classifier, and neural collaborative filtering (He et al. 2017, NeuMF).

The latter has nearly all its parameters in two embeddings. Its sizes are those of TensorFlow's official model, which
AutoSync timed: 8 factors and dense layers 64-32-16-8, on MovieLens-20M enlarged by 16 × 32. Both halves of the model
read one table of users and one of items, cut by column.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.blocks import Built, dense_layers, initialise, length, samples, width

PIXELS = 784
CLASSES = 10


class MLP(nn.Module):
    """Linear layers with ReLU between them, then cross-entropy."""

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(*dense_layers(sizes, dropout))
        self.head = nn.Linear(sizes[-1], CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images)), labels)


def mlp(scale: float, batch: int | None, *, dropout: float = 0.0) -> Built:
    """784 → 1024 → 1024 → 512 → 10: 2,383,370 parameters in 8 tensors, batch 64."""
    pixels = length(PIXELS, scale)
    model = MLP((pixels, *(width(size, scale) for size in (1024, 1024, 512))), dropout)
    count = samples(64, scale, batch)
    return model, (torch.randn(count, pixels), torch.randint(CLASSES, (count,)))


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
        self.dense = nn.Sequential(*dense_layers(layers, dropout))
        self.head = nn.Linear(factors + layers[-1], 1)
        initialise(self, {nn.Embedding: partial(nn.init.normal_, std=0.01), nn.Linear: nn.init.xavier_uniform_})

    def forward(self, users: torch.Tensor, items: torch.Tensor, met: torch.Tensor) -> torch.Tensor:
        user, item = self.user_embedding(users), self.item_embedding(items)
        product = user[:, : self.factors] * item[:, : self.factors]
        deep = self.dense(torch.cat((user[:, self.factors :], item[:, self.factors :]), 1))
        logits = self.head(torch.cat((product, deep), 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), met)


def _ncf(sparse: bool, scale: float, batch: int | None, *, dropout: float = 0.0) -> Built:
    users, items = length(USERS, scale), length(ITEMS, scale)
    layers = tuple(width(size, scale, multiple=4) for size in LAYERS)
    model = NeuMF(users, items, width(FACTORS, scale, multiple=4), layers, sparse, dropout)
    shape = (samples(256, scale, batch),)
    return model, (torch.randint(users, shape), torch.randint(items, shape), torch.randint(2, shape).float())


ncf_dense = partial(_ncf, False)
"""122,122,801 parameters in 10 tensors (AutoSync: 122M); batch 256. Gradients of the embeddings are dense."""
ncf_sparse = partial(_ncf, True)
"""ncf_dense with sparse gradients of the embeddings: only the rows the batch looked up."""
