"""What is refused: each mistake raises one sentence, before or instead of training wrongly."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from guest_job import Net
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.strategy import OperatorConfig, Shard, Strategy, VariableConfig

MISTAKES: dict[str, Callable[[], Any]] = {}
"""By name: what raises an error."""


def mistake_in(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        MISTAKES[name] = function
        return function

    return register


class Around(nn.Module):
    """A user's wrapper of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _split_strategy() -> Strategy:
    split = OperatorConfig(mesh=(dist.get_world_size(),), outputs=((0, -1),))
    return Strategy(operators={"addmm": split})


def distributed_model(kind: str = "overlap") -> Any:
    """A model with replicated variables, with split operators or fully sharded."""
    net, batch = Net().double(), torch.ones(4, 9).double()
    given = _split_strategy() if kind == "split" else kind
    model, _ = offbeat.distribute(net, _sgd(net), given, example_inputs=None if kind == "overlap" else batch)
    return model


KINDS = ("overlap", "split", "fsdp")
for _kind in KINDS:

    @mistake_in(f"ddp before {_kind}")
    def _(kind: str = _kind) -> None:
        net = DistributedDataParallel(Net())
        given = _split_strategy() if kind == "split" else kind
        offbeat.distribute(net, _sgd(net), given, example_inputs=torch.ones(2, 9))

    @mistake_in(f"ddp after {_kind}")
    def _(kind: str = _kind) -> None:
        DistributedDataParallel(distributed_model(kind))

    @mistake_in(f"ddp around a wrapper of {_kind}")
    def _(kind: str = _kind) -> None:
        DistributedDataParallel(Around(distributed_model(kind)))

    @mistake_in(f"a wrapper of {_kind}")
    def _(kind: str = _kind) -> None:
        model = Around(distributed_model(kind))
        offbeat.distribute(model, _sgd(model), "overlap")

    @mistake_in(f"fsdp around a wrapper of {_kind}")
    def _(kind: str = _kind) -> None:
        FullyShardedDataParallel(Around(distributed_model(kind)), device_id=torch.device("cpu"))

    @mistake_in(f"Join of {_kind}")
    def _(kind: str = _kind) -> None:
        Join([distributed_model(kind)])

    if _kind == "overlap":
        continue

    @mistake_in(f"{_kind} twice")
    def _(kind: str = _kind) -> None:
        model = distributed_model(kind)
        offbeat.distribute(model, _sgd(model), "overlap")

    @mistake_in(f"join of {_kind}")
    def _(kind: str = _kind) -> None:
        distributed_model(kind).join()

    @mistake_in(f"a copy of {_kind}")
    def _(kind: str = _kind) -> None:
        copy.deepcopy(distributed_model(kind))

    @mistake_in(f"a pickle of {_kind}")
    def _(kind: str = _kind) -> None:
        pickle.dumps(distributed_model(kind).module)


@mistake_in("a part of a distributed model")
def _() -> None:
    part = distributed_model().middle
    offbeat.distribute(part, _sgd(part), "overlap")


@mistake_in("fsdp before")
def _() -> None:
    net = Net()
    fully_shard(net)
    offbeat.distribute(net, _sgd(net))


@mistake_in("fsdp after")
def _() -> None:
    fully_shard(distributed_model())


@mistake_in("fsdp with original parameters inside")
def _() -> None:
    inner = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    model = Around(inner)
    offbeat.distribute(model, _sgd(model))


@mistake_in("zero redundancy")
def _() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Net()
    offbeat.distribute(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1), "overlap")


@mistake_in("absent later")
def _() -> None:
    net = Net()
    model, optimizer = offbeat.distribute(net, _sgd(net), "overlap")
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.first(torch.ones(2, 9)).sum().backward()


@mistake_in("join with another divisor")
def _() -> None:
    with distributed_model().join(divide_by_initial_world_size=False):
        pass


@mistake_in("join that throws")
def _() -> None:
    with distributed_model().join(throw_on_early_termination=True):
        pass


@mistake_in("a closure in join")
def _() -> None:
    net = Net()
    model, optimizer = offbeat.distribute(net, _sgd(net), "overlap")
    with model.join():
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step(lambda: 0.0)


@mistake_in("frozen in join")
def _() -> None:
    net = Net()
    model, optimizer = offbeat.distribute(net, _sgd(net), "overlap")
    with model.join():
        for step in range(2):
            model(torch.ones(2, 9)).sum().backward()
            optimizer.step()
            model.first.requires_grad_(step == 1)


@mistake_in("asynchronous in join")
def _() -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    server = Shard(synchronizer="parameter_server", placement=(0,), asynchronous=True)
    strategy = Strategy(variables=dict.fromkeys(names, VariableConfig(shards=(server,))))
    model, _ = offbeat.distribute(net, _sgd(net), strategy)
    try:
        with model.join():
            pass
    finally:
        dist.barrier()
        model._offbeat.release()


class Repeated(Net):
    """Recomputes its middle as often as it is told."""

    times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(self.times):
            hidden = checkpoint(self.middle, hidden, use_reentrant=True)
        return self.head(hidden)


@mistake_in("a checkpoint used more often later")
def _() -> None:
    net = Repeated()
    model, optimizer = offbeat.distribute(net, _sgd(net), "overlap")
    for times in (1, 1, 2):
        net.times = times
        optimizer.zero_grad()
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
