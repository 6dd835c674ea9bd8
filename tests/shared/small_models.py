"""A name → a tiny model that takes a batch and returns its loss, and batches for it.

Sizes are odd on purpose, so that nothing divides evenly over 2 or 4 ranks.
"""

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.dense import NeuMF

Batch = tuple[torch.Tensor, ...]

USERS, ITEMS, WORDS, CLASSES = 23, 17, 13, 5


class Mlp(nn.Module):
    """Three dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(23, 37), nn.ReLU(), nn.Linear(37, 9), nn.Tanh(), nn.Linear(9, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)


class Cnn(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 7, 3, stride=2),
            nn.BatchNorm2d(7),
            nn.ReLU(),
        )
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


class Transformer(nn.Module):
    """Attention that reads its output projection itself, a bare position parameter, and tied input and output words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.positions = nn.Parameter(torch.randn(4, 6) * 0.1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm1 = nn.LayerNorm(6)
        self.feed = nn.Sequential(nn.Linear(6, 15), nn.GELU(), nn.Linear(15, 6))
        self.norm2 = nn.LayerNorm(6)
        self.decoder = nn.Linear(6, WORDS)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.feed(self.norm2(x))
        return F.cross_entropy(self.decoder(x).flatten(0, 1), following.flatten())


class Gpt2(nn.Module):
    """Causal blocks in a list, with tied input and output words, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.places = nn.Embedding(4, 6)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 11, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        mask = torch.full((4, 4), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


class Everything(nn.Module):
    """Every kind of variable: a sparse table, a convolution, dense layers, a scalar, a tied weight, an early use."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.table = nn.Embedding(USERS, 6, sparse=sparse)
        self.filter = nn.Conv1d(1, 3, 3)
        self.dense = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh())
        self.tied = nn.Linear(9, 9, bias=False)
        self.tied.weight = self.dense[2].weight
        self.head = nn.Linear(9, CLASSES)

    def forward(self, users: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = self.table(users) * self.scale
        filtered = self.filter(rows.unsqueeze(1)).flatten(1)
        hidden = self.dense(filtered)
        # The head's weight is read here before its own module runs.
        early = F.linear(hidden, self.head.weight)
        return F.cross_entropy(self.head(self.tied(hidden)) + 0.1 * early, y)


_MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "mlp": lambda _: Mlp(),
    "cnn": lambda _: Cnn(),
    "transformer": lambda _: Transformer(),
    "gpt2": lambda _: Gpt2(),
    "ncf": lambda sparse: NeuMF(USERS, ITEMS, 4, (8, 6, 3), sparse),
    "everything": Everything,
}
_seeding = threading.Lock()
"""torch has one default generator for all threads."""


def make(name: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, sparse: bool = True) -> nn.Module:
    """The model with weights drawn from `seed`; `sparse=False` gives embeddings dense gradients."""
    with _seeding:
        torch.manual_seed(seed)
        return _MODELS[name](sparse).to(dtype)


def batch(name: str, step: int, rank: int, dtype: torch.dtype = torch.float64, size: int = 4) -> Batch:
    """What one rank trains on in one step."""
    g = torch.Generator().manual_seed(1000 * step + rank)

    def whole(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=g)

    match name:
        case "mlp":
            return torch.randn(size, 23, generator=g).to(dtype), whole(CLASSES, size)
        case "cnn":
            return torch.randn(size, 3, 6, 6, generator=g).to(dtype), whole(CLASSES, size)
        case "transformer" | "gpt2":
            return whole(WORDS, size, 4), whole(WORDS, size, 4)
        case "ncf":
            return whole(USERS, size), whole(ITEMS, size), whole(2, size).to(dtype)
        case "everything":
            return whole(USERS, size), whole(CLASSES, size)
        case _:
            raise KeyError(name)


def make_optimizer(kind: str, parameters: object) -> torch.optim.Optimizer:
    match kind:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=0.01)
        case _:
            raise KeyError(kind)
