"""A model's name and a strategy → how far distributed training ends up from its reference. Runs on every rank."""

import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import small_models
import torch
import torch.distributed as dist
from random_strategies import random_strategy
from reference import flat_parameters, graph_of, make_strategy, reference_run
from torch import nn

import offbeat
from offbeat import api
from offbeat.cluster import ClusterSpec
from offbeat.graph import capture
from offbeat.runtime import distribute
from offbeat.strategy import Strategy

TIMEOUT = timedelta(seconds=30)


@contextmanager
def _quick_setup(model: str, dtype: torch.dtype, optimizer: str) -> Generator[None, None, None]:
    """Leaves out what takes longest in a run of five steps: capturing the model, and timing the links."""
    api.capture = lambda *_, **__: graph_of(model, dtype, optimizer)
    try:
        with untimed_links():
            yield
    finally:
        api.capture = capture


@contextmanager
def untimed_links() -> Generator[None, None, None]:
    """Leaves out timing the links, which changes no number."""
    with mock.patch.object(distribute, "fit_link", return_value=(1e-4, 1e-9)):
        yield


def _cluster(nodes: int | None) -> ClusterSpec:
    """The job's ranks spread over so many nodes; one node each if not given."""
    world = dist.get_world_size()
    nodes = nodes or world
    return ClusterSpec.homogeneous(nodes=nodes, devices_per_node=world // nodes)


@contextmanager
def _distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str,
    example_inputs: Any = None,
    cluster: ClusterSpec | None = None,
) -> Generator[Any, None, None]:
    """distribute(), and its hooks and channels gone afterwards."""
    offbeat.distribute(model, optimizer, strategy, example_inputs=example_inputs, cluster=cluster, timeout=TIMEOUT)
    engine = model._offbeat.engine
    try:
        yield engine
    except BaseException:
        # The others may wait for this rank: closing its channels tells them.
        engine.channels.close()
        raise
    engine.detach()
    engine.channels.close()


def _flat(model: nn.Module) -> torch.Tensor:
    """All parameters of the state dict, tied ones as often as they are named."""
    return torch.cat([value.detach().reshape(-1).double() for value in model.state_dict().values()])


_references: dict[Any, torch.Tensor] = {}


def _shared(key: Any, compute: Any) -> torch.Tensor:
    """What rank 0 computes, on every rank; computed once."""
    if key not in _references:
        result = compute() if dist.get_rank() == 0 else None
        length = torch.tensor([0 if result is None else result.numel()])
        dist.broadcast(length, src=0)
        if result is None:
            result = torch.empty(int(length), dtype=torch.float64)
        dist.broadcast(result, src=0)
        _references[key] = result
    return _references[key]


def train(
    model: str,
    optimizer: str,
    strategy: dict[str, Any],
    dtype: str = "float64",
    mode: str | None = None,
    nodes: int | None = None,
    steps: int = 5,
    sizes: list[int] | None = None,
    delays: int | None = None,
) -> dict[str, Any]:
    """Trains as told and says how far the parameters are from the reference, and in which mode it ended.

    `sizes` are the ranks' batch sizes; `delays` seeds random sleeps in forward and backward, different on each rank.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = getattr(torch, dtype)
    graph, cluster = graph_of(model, kind, optimizer), _cluster(nodes)
    chosen = make_strategy(strategy, graph, cluster, mode)
    batch_sizes = tuple(sizes or [4] * world)
    weights = chosen.weights or (1.0,) * world
    key = (model, optimizer, dtype, steps, world, weights, batch_sizes)
    expected = _shared(key, lambda: reference_run(model, optimizer, kind, steps, world, weights, batch_sizes))
    # Only rank 0 has the reference's weights: distribute() must share them.
    net = small_models.make(model, kind, seed=rank)
    trainer = small_models.make_optimizer(optimizer, net.parameters())
    example = small_models.batch(model, 0, rank, kind)
    with (
        _quick_setup(model, kind, optimizer),
        _distributed(net, trainer, chosen, example, cluster) as engine,
        _sleeping(net, delays),
    ):
        for step in range(steps):
            trainer.zero_grad()
            net(*small_models.batch(model, step, rank, kind, batch_sizes[rank])).backward()
            trainer.step()
        ended = net.offbeat.mode
        kinds = sorted({message.synchronizer for message in engine.plan.messages})
        error = (flat_parameters(net) - expected).abs().max().item()
        messages, tasks = len(engine.plan.messages), len(engine.plan.communication)
    return {"error": error, "mode": ended, "synchronizers": kinds, "messages": messages, "tasks": tasks}


@contextmanager
def _sleeping(model: nn.Module, seed: int | None) -> Generator[None, None, None]:
    """Modules that take up to 3 ms longer at random, in forward and in backward."""
    if seed is None:
        yield
        return
    draw = random.Random(seed * 100 + dist.get_rank())

    def nap(*_: Any) -> None:
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, 0.003))

    def forward(_: nn.Module, __: Any, output: Any) -> None:
        nap()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(nap)

    handles = [module.register_forward_hook(forward) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()


def by_name(builder: str) -> dict[str, Any]:
    """The builder's own defaults, named as a user names them, with and without an example batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = _shared(
        ("by_name", world),
        lambda: reference_run("mlp", "sgd", torch.float64, 3, world, (1.0,) * world, (4,) * world),
    )
    errors = {}
    for captured in (True, False):
        net = small_models.make("mlp", seed=rank)
        trainer = small_models.make_optimizer("sgd", net.parameters())
        example = small_models.batch("mlp", 0, rank) if captured else None
        with _distributed(net, trainer, builder, example):
            for step in range(3):
                trainer.zero_grad()
                net(*small_models.batch("mlp", step, rank)).backward()
                trainer.step()
            errors["captured" if captured else "uncaptured"] = (flat_parameters(net) - expected).abs().max().item()
    return errors


def sync_batch_norm(builder: str, mode: str) -> dict[str, Any]:
    """SyncBatchNorm with the batch spread over the ranks, against BatchNorm with the whole batch in one process.

    torch's SyncBatchNorm refuses CPU tensors, so a layer with its arithmetic stands in: collectives inside forward and
    backward, between the engine's own.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def whole() -> torch.Tensor:
        model = small_models.make("cnn")
        optimizer = small_models.make_optimizer("sgd", model.parameters())
        for step in range(5):
            parts = [small_models.batch("cnn", step, each) for each in range(world)]
            optimizer.zero_grad()
            model(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))).backward()
            optimizer.step()
        return _flat(model)

    expected = _shared(("sync_batch_norm", world), whole)
    net = small_models.make("cnn", seed=rank)
    _replace_batch_norm(net)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    cluster = _cluster(None)
    example = small_models.batch("cnn", 0, rank)
    graph = graph_of("cnn", torch.float64, "sgd")
    chosen = make_strategy({"builder": builder}, graph, cluster, mode)
    with _quick_setup("cnn", torch.float64, "sgd"), _distributed(net, trainer, chosen, example, cluster):
        for step in range(5):
            trainer.zero_grad()
            net(*small_models.batch("cnn", step, rank)).backward()
            trainer.step()
        return {"error": (_flat(net) - expected).abs().max().item(), "mode": net.offbeat.mode}


class SyncedBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the batch of all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size()
        axes = (0, 2, 3)
        mean = _Sum.apply(x.mean(axes)) / world
        square = _Sum.apply((x * x).mean(axes)) / world
        variance = square - mean * mean
        with torch.no_grad():
            count = world * x.numel() // x.shape[1]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        column = (None, slice(None), None, None)
        normed = (x - mean[column]) * torch.rsqrt(variance + self.eps)[column]
        return normed * self.weight[column] + self.bias[column]


class _Sum(torch.autograd.Function):
    """Sum over ranks; so is its gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _replace_batch_norm(model: nn.Module) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                replacement = SyncedBatchNorm(child.num_features).to(child.weight.dtype)
                replacement.load_state_dict(child.state_dict())
                setattr(module, name, replacement)


def weighted(model: str, optimizer: str, builder: str, options: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """A builder's strategy with each replica's share in the average set to its batch size."""
    cluster = _cluster(None)
    strategy = make_strategy(
        {"builder": builder, "options": options}, graph_of(model, torch.float64, optimizer), cluster, "auto"
    )
    strategy = strategy.model_copy(update={"weights": tuple(float(size) for size in sizes)})
    return train(model, optimizer, {"json": strategy.to_json()}, sizes=sizes)


def train_random(seed: int) -> dict[str, Any]:
    """The strategy that `seed` makes, on ranks of two nodes that take naps."""
    optimizer = ("sgd", "adamw")[seed // 2 % 2]
    strategy = random_strategy(seed, graph_of("everything", torch.float64, optimizer), _cluster(2))
    return train("everything", optimizer, {"json": strategy.to_json()}, nodes=2, steps=3, delays=seed)
