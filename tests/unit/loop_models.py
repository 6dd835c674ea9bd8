"""A name → a model of a hundred parameters that returns its loss, and batches for it."""

import copy
import threading
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from offbeat.graph import ModelGraph, capture

WIDTH, CLASSES, WORDS = 7, 3, 11


class Dense(nn.Module):
    """Dense layers; the parts have the same names in all models here."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(5, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.hidden(x)), y)


class Normed(Dense):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        # A bias there would have no gradient but rounding errors, which adaptive optimizers magnify.
        first, last = nn.Linear(WIDTH, 13, bias=False), nn.Linear(13, WIDTH)
        self.middle = nn.Sequential(first, nn.BatchNorm1d(13), nn.Tanh(), last)


class Tied(Dense):
    """One weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.middle[2].weight = self.middle[0].weight


class Frozen(Dense):
    """A part does not train at first."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


class Sparse(Dense):
    """A table with sparse gradients comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(WORDS, WIDTH, sparse=True)


class Heads(Dense):
    """Two heads, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, CLASSES)
        self.chosen = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((self.head, self.second)[self.chosen](self.hidden(x)), y)


class Moving(Dense):
    """Replaces a buffer in each training forward that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * hidden.detach().abs().mean(0)
        return self.middle(hidden)


class Recomputed(Dense):
    """Its middle is shared by two calls, the second of which is recomputed in the backward pass."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(torch.tanh(self.first(x)))
        # Ranks are threads here, and torch has one default generator for all.
        return checkpoint(self.middle, hidden, use_reentrant=False, preserve_rng_state=False)


class Parametrized(Dense):
    """A weight is computed from two others."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense,
    "normed": Normed,
    "tied": Tied,
    "frozen": Frozen,
    "sparse": Sparse,
    "heads": Heads,
    "moving": Moving,
    "recomputed": Recomputed,
    "parametrized": Parametrized,
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "decay": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8, weight_decay=0.01, nesterov=True),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, momentum=0.5),
}
TAKES_SPARSE = ("sgd", "plain", "adagrad")
"""Optimizers that torch gives sparse gradients to."""
_seeding = threading.Lock()
"""torch has one default generator for all threads."""
_models: dict[tuple[str, int], nn.Module] = {}
"""Made once, because other threads may draw from that generator too."""
_capturing = threading.Lock()
_graphs: dict[str, ModelGraph] = {}


def make(name: str, seed: int = 0) -> nn.Module:
    with _seeding:
        if (name, seed) not in _models:
            torch.manual_seed(seed)
            _models[name, seed] = MODELS[name]().double()
        return copy.deepcopy(_models[name, seed])


def batch(name: str, number: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees in one forward."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if name == "sparse":
        x = torch.randint(WORDS, (size,), generator=generator)
    else:
        x = torch.randn(size, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def graph_of(name: str) -> ModelGraph:
    """The model's captured graph, once for all loops."""
    with _capturing:
        if name not in _graphs:
            _graphs[name] = capture(make(name), batch(name, 0, 0), optimizer="SGD")
        return _graphs[name]
