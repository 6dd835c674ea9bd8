"""Ways in which training scripts use a model and an optimizer, each as one loop that is run twice on every rank.

Once by Offbeat, once by an obvious reference: a plain model whose gradients are averaged by hand after every backward
pass that synchronises. Both must end with the same parameters, bit for bit.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.graph.skeleton import skeleton
from offbeat.strategy import build_strategy

STEPS = 7
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap": {"bucket": 700, "slice_bytes": 1024},
    "sharded": {"bucket": 900},
    "ps_load_balanced": {"servers": "ranks"},
    "partitioned_ps": {"threshold": 200, "servers": "ranks"},
}
"""Messages small enough that a tiny model has several."""


class Net(nn.Module):
    """A few dense layers with a name each."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(9, width)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(torch.tanh(self.first(x))))


class Job:
    """A model and an optimizer under training, by Offbeat or by hand."""

    def __init__(
        self,
        strategy: str | None,
        make: Callable[[], nn.Module] = Net,
        optimize: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
        *,
        single: bool = False,
    ) -> None:
        """By default in double precision."""
        torch.manual_seed(4)
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        made = make()
        self.model = (made if single else made.double()).to(self.device)
        if prepare is not None:
            prepare(self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = (
            torch.optim.SGD(trainable, lr=0.1, momentum=0.9, weight_decay=0.01)
            if optimize is None
            else optimize(self.model)
        )
        self.ours = strategy is not None
        self.strategy = strategy
        if strategy == "auto":
            offbeat.distribute(self.model, self.optimizer, quiet=True)
        elif strategy is not None:
            graph, cluster = skeleton(self.model), ClusterSpec.local(dist.get_world_size())
            built = build_strategy(strategy, graph, cluster, **OPTIONS.get(strategy, {}))
            offbeat.distribute(self.model, self.optimizer, built.model_copy(update={"graph": "", "cluster": ""}))
        self.seen: list[torch.Tensor] = []
        """Whatever the loop has looked at, to be compared."""

    def batch(self, step: int, size: int = 4, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        rank = dist.get_rank() if rank is None else rank
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(size, 9, dtype=torch.float64, generator=generator)
        return x.to(self.device), torch.randint(0, 3, (size,), generator=generator).to(self.device)

    def loss(self, step: int, size: int = 4) -> torch.Tensor:
        if not self.ours:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        x, y = self.batch(step, size)
        return F.cross_entropy(self.model(x), y)

    def backward(self, loss: torch.Tensor, sync: bool = True, **options: Any) -> None:
        with self.model.no_sync() if self.ours and not sync else nullcontext():
            loss.backward(**options)
        if sync:
            self.average()

    def average(self) -> None:
        """By hand, where Offbeat has done it."""
        if self.ours:
            return
        for parameter in self.model.parameters():
            used = torch.tensor([parameter.grad is not None and parameter.requires_grad], device=self.device).int()
            dist.all_reduce(used)
            if used.item() and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                dense = dense / dist.get_world_size()
                dist.all_reduce(dense)
                parameter.grad = dense

    def step(self, step: int, size: int = 4) -> None:
        """One ordinary step."""
        self.optimizer.zero_grad()
        self.backward(self.loss(step, size))
        self.optimizer.step()

    def see(self, *tensors: torch.Tensor) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors]


Pattern = Callable[[Job], None]
PATTERNS: dict[str, Pattern] = {}
MAKERS: dict[str, dict[str, Any]] = {}


def pattern(**maker: Any) -> Callable[[Pattern], Pattern]:
    def register(function: Pattern) -> Pattern:
        name = function.__name__.strip("_")
        PATTERNS[name], MAKERS[name] = function, maker
        return function

    return register
