"""Points of the frontier that `find_frontier` returns, executed: how far training with each is from a single device."""

import math
import random
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import offbeat
from offbeat.runtime.sharded import runtime as sharded_runtime
from offbeat.runtime.sharded.trace import Program, trace_forward
from offbeat.search.frontier.evaluate import Strategies, expanded
from offbeat.search.frontier.find import ModelFrontier
from offbeat.strategy import Strategy

BATCH, WORDS, CLASSES = 8, 16, 4
STEPS = 5
Batch = tuple[torch.Tensor, ...]


class Mlp(nn.Module):
    """Three dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)


class Cnn(nn.Module):
    """Convolutions with BatchNorm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


class Transformer(nn.Module):
    """One block with attention, and the words' table as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.decoder = nn.Linear(8, WORDS, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.feed(self.norm2(x))
        return F.cross_entropy(self.decoder(x).flatten(0, 1), following.flatten())


class Block(nn.Module):
    """Causal attention and a dense part, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mixed, self.project = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.mixed(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class Gpt2(nn.Module):
    """Two blocks between learnt places and the words' table, which is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(4, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(4, device=tokens.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), following.flatten())


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer, "gpt2": Gpt2}


def make(name: str, seed: int = 0, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double().to(device)


def batch(name: str, step: int, device: str = "cpu") -> Batch:
    g = torch.Generator().manual_seed(step)
    if name in ("transformer", "gpt2"):
        x, y = torch.randint(WORDS, (BATCH, 4), generator=g), torch.randint(WORDS, (BATCH, 4), generator=g)
    else:
        shape = (BATCH, 16) if name == "mlp" else (BATCH, 4, 8, 8)
        x, y = torch.randn(*shape, generator=g).double(), torch.randint(CLASSES, (BATCH,), generator=g)
    return x.to(device), y.to(device)


def chosen_strategies(name: str, world: int, count: int, device: str = "cpu") -> tuple[int, list[Strategy]]:
    """So many different strategies: points spread over the frontier, then random ones where it has fewer.

    The first number is how many are of the frontier."""
    graph = offbeat.capture(make(name, device=device), batch(name, 0, device), name=name)
    cluster = offbeat.ClusterSpec.homogeneous(nodes=world, devices_per_node=1, bandwidth="10Gbit/s", latency="2us")
    frontier = offbeat.find_frontier(graph, cluster, engines=("split",))
    places = torch.linspace(0, len(frontier.points) - 1, min(count, len(frontier.points))).round().int().tolist()
    limits = [math.ceil(frontier.points[place].memory_bytes) for place in places]
    strategies = _different([frontier.min_time(memory=limit) for limit in limits])
    spread = len(strategies)
    draw = random.Random(world)
    while len(strategies) < count:
        strategies = _different([*strategies, random_strategy(frontier, draw)])
    return spread, strategies


def random_strategy(frontier: ModelFrontier, draw: random.Random) -> Strategy:
    """Any configuration for every unit, and any of the ways to keep re-scheduled tensors."""
    prices = frontier.prices
    assert prices is not None
    choices = torch.tensor([[draw.randrange(len(configs)) for configs in prices.configs]]).numpy()
    found = expanded(prices, choices)
    strategy = Strategies(prices, "random").point(choices, found, draw.randrange(len(found.row))).strategy
    assert strategy is not None
    return strategy


def _different(strategies: list[Strategy]) -> list[Strategy]:
    known = {strategy.model_copy(update={"name": ""}).digest: strategy for strategy in strategies}
    return list(known.values())


def train(model: nn.Module, name: str, device: str = "cpu", strategy: Strategy | None = None) -> list[float]:
    """The losses of some steps; with a strategy on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy is not None:
        offbeat.distribute(model, optimizer, strategy=strategy)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(name, step, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@cache
def alone(name: str) -> tuple[nn.Module, list[float]]:
    """What a single device makes of the model, and its losses."""
    model = make(name)
    return model, train(model, name)


@cache
def _program(name: str, device: str) -> Program:
    """Traced once for all strategies: it takes longer than five steps."""
    model = make(name, device=device)
    return trace_forward(model, model.forward, batch(name, 0, device), {})


def run_point(name: str, strategy: Strategy, device: str = "cpu") -> dict[str, float]:
    """Trains with a strategy, on every rank: distances of losses and weights from a single device, and the share of
    the weights that this rank holds."""
    model = make(name, dist.get_rank(), device)
    sharded_runtime.trace_forward = lambda *_: _program(name, device)
    try:
        losses = train(model, name, device, strategy)
    finally:
        sharded_runtime.trace_forward = trace_forward
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    reference, expected = alone(name)
    state = model.state_dict()
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": max(float((state[key].cpu() - value).abs().max()) for key, value in reference.state_dict().items()),
        "held": held / sum(p.numel() for p in reference.parameters()),
    }


def run_points(name: str, count: int) -> dict[str, Any]:
    """Every chosen strategy, for which rank 0 searches."""
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        shared[0], found = chosen_strategies(name, dist.get_world_size(), count)
        shared[1] = [strategy.to_json() for strategy in found]
    dist.broadcast_object_list(shared)
    return {
        "of_the_frontier": shared[0],
        "runs": [run_point(name, Strategy.from_json(content)) for content in shared[1]],
    }
