"""Points of the frontier that `find_frontier` returns, executed: how far training with each is from a single device.

Runs on every rank; rank 0 searches for all.
"""

import math
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import offbeat
from offbeat.runtime.sharded import runtime as sharded_runtime
from offbeat.runtime.sharded.trace import trace_forward
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


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().double()


def batch(name: str, step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    if name == "transformer":
        return torch.randint(WORDS, (BATCH, 4), generator=g), torch.randint(WORDS, (BATCH, 4), generator=g)
    shape = (BATCH, 16) if name == "mlp" else (BATCH, 4, 8, 8)
    return torch.randn(*shape, generator=g).double(), torch.randint(CLASSES, (BATCH,), generator=g)


def chosen_strategies(name: str, world: int, count: int) -> tuple[int, list[Strategy]]:
    """So many different strategies: points spread over the frontier, then random ones where it has fewer.

    The first number is how many are of the frontier."""
    graph = offbeat.capture(make(name), batch(name, 0), name=name)
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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(name, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_points(name: str, count: int) -> dict[str, Any]:
    """Trains with every chosen strategy; the distances of losses and weights from a single device."""
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        shared[0], found = chosen_strategies(name, dist.get_world_size(), count)
        shared[1] = [strategy.to_json() for strategy in found]
    dist.broadcast_object_list(shared)
    strategies = [Strategy.from_json(content) for content in shared[1]]
    alone = make(name)
    expected = train(alone, _optimizer(alone), name)
    answers = []
    model = make(name)
    # Traced once for all: it takes longer than five steps.
    program = trace_forward(model, model.forward, batch(name, 0), {})
    sharded_runtime.trace_forward = lambda *_: program
    try:
        for strategy in strategies:
            model = make(name, seed=dist.get_rank())
            optimizer = _optimizer(model)
            offbeat.distribute(model, optimizer, strategy=strategy)
            losses = train(model, optimizer, name)
            held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
            state = model.state_dict()
            weights = [float((state[key] - value).abs().max()) for key, value in alone.state_dict().items()]
            answers.append(
                {
                    "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
                    "weights": max(weights),
                    "held": held / sum(p.numel() for p in alone.parameters()),
                }
            )
    finally:
        sharded_runtime.trace_forward = trace_forward
    return {"of_the_frontier": shared[0], "runs": answers}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
