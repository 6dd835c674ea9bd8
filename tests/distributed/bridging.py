"""Stale, asynchronous, micro-batched and recomputed training. Runs on every rank."""

import random
import time
from typing import Any
from unittest import mock

import small_models
import torch
import torch.distributed as dist
import training
from reference import flat_parameters, reference_run
from torch._dynamo import lookup_backend

from offbeat.runtime import fusion
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig


def _bridged(synchronizer: str, staleness: int = 0, asynchronous: bool = False) -> Strategy:
    """Every variable of the MLP synchronised this way, servers in turn."""
    world = dist.get_world_size()
    configs = {}
    for number, (name, _) in enumerate(small_models.make("mlp").named_parameters()):
        placement = (number % world,) if synchronizer == "parameter_server" else ()
        shard = Shard(synchronizer=synchronizer, placement=placement, staleness=staleness, asynchronous=asynchronous)
        configs[name] = VariableConfig(shards=(shard,))
    return Strategy(variables=configs)


def clocks(synchronizer: str, staleness: int, steps: int, longest_nap: float) -> dict[str, Any]:
    """Trains with random naps; when each step began and when its backward ended, and the parameters at the end."""
    rank = dist.get_rank()
    draw = random.Random(rank)
    net = small_models.make("mlp", seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    # Gradients that are K steps old and momentum do not go together at a high rate.
    trainer.param_groups[0].update(lr=0.05, momentum=0.0)
    began, ended, losses = [], [], []
    with training._distributed(net, trainer, _bridged(synchronizer, staleness)):
        dist.barrier()
        for step in range(steps):
            began.append(time.monotonic())
            trainer.zero_grad()
            loss = net(*small_models.batch("mlp", step % 4, rank))
            time.sleep(draw.uniform(0, longest_nap))
            loss.backward()
            ended.append(time.monotonic())
            trainer.step()
            losses.append(loss.item())
        net.flush()
        digest = flat_parameters(net).tolist()[:50]
    return {"began": began, "ended": ended, "losses": losses, "parameters": digest}


def without_staleness(synchronizer: str) -> list[float]:
    """Parameters after five steps with staleness 0, and with the field left out."""
    rank = dist.get_rank()
    results = []
    for strategy in (_bridged(synchronizer, 0), _bridged(synchronizer)):
        net = small_models.make("mlp", seed=rank)
        trainer = small_models.make_optimizer("sgd", net.parameters())
        with training._distributed(net, trainer, strategy):
            for step in range(5):
                trainer.zero_grad()
                net(*small_models.batch("mlp", step, rank)).backward()
                trainer.step()
            results.append(flat_parameters(net))
    return [float((results[0] - results[1]).abs().max()), float(results[0].abs().sum())]


def asynchronous(steps: int) -> dict[str, Any]:
    """Trains against an asynchronous server while rank 0 is slow; how long each rank took, and the losses."""
    rank = dist.get_rank()
    net = small_models.make("mlp", seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    trainer.param_groups[0].update(momentum=0.0, lr=0.4)
    losses = []
    with training._distributed(net, trainer, _bridged("parameter_server", asynchronous=True)):
        dist.barrier()
        begin = time.monotonic()
        for step in range(steps):
            trainer.zero_grad()
            loss = net(*small_models.batch("mlp", step % 4, rank))
            loss.backward()
            if rank == 0:
                time.sleep(0.08)
            trainer.step()
            losses.append(loss.item())
        seconds = time.monotonic() - begin
        dist.barrier()
    return {"seconds": seconds, "first": sum(losses[:4]), "last": sum(losses[-4:])}


def accumulated(parts: int, scale: float) -> float:
    """Micro-batches against whole batches: the largest difference of the parameters after five steps.

    `scale` multiplies the loss as a gradient scaler would; gradients are divided by it again before the step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = training._shared(
        ("accumulated", world),
        lambda: reference_run("mlp", "sgd", torch.float64, 5, world, (1.0,) * world, (4,) * world),
    )
    net = small_models.make("mlp", seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    with training._distributed(net, trainer, Strategy(accumulation=parts)):
        for step in range(5):
            loss = net(*small_models.batch("mlp", step, rank))
            trainer.zero_grad()
            (loss * scale).backward()
            if scale != 1.0:
                for parameter in net.parameters():
                    parameter.grad.div_(scale)
            trainer.step()
        return float((flat_parameters(net) - expected).abs().max())


def fused(regions: list[list[str]], mode: str, recompute: list[str] = (), backend: str = "aot_eager") -> dict[str, Any]:
    """Compiled regions of the CNN, from a strategy file: functions compiled, and the distance to the reference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = training._shared(
        ("fused", world), lambda: reference_run("cnn", "sgd", torch.float64, 5, world, (1.0,) * world, (4,) * world)
    )
    chosen = Strategy(fusion=regions, recompute=recompute, schedule=Schedule(mode=mode, policy="priority"))
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    torch.compiler.reset()
    net = small_models.make("cnn", seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    example = small_models.batch("cnn", 0, rank)
    with (
        mock.patch.object(fusion, "backend", counted),
        training._distributed(net, trainer, Strategy.from_json(chosen.to_json()), example),
    ):
        for step in range(5):
            trainer.zero_grad()
            net(*small_models.batch("cnn", step, rank)).backward()
            trainer.step()
        net.flush()
        error = float((flat_parameters(net) - expected).abs().max())
        ran = net._offbeat.mode
    layers = [
        sorted(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function") for graph in graphs
    ]
    return {"error": error, "graphs": layers, "mode": ran}


def recomputed(module: str) -> dict[str, Any]:
    """Recomputation of one module: how often its forward ran in three steps, and the distance to the reference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = training._shared(
        ("recomputed", world),
        lambda: reference_run("transformer", "sgd", torch.float64, 3, world, (1.0,) * world, (4,) * world),
    )
    net = small_models.make("transformer", seed=rank)
    counts = []
    trainer = small_models.make_optimizer("sgd", net.parameters())
    first = next(net.get_submodule(module).children())
    first.register_forward_pre_hook(lambda *_: counts.append(1))
    example = small_models.batch("transformer", 0, rank)
    with training._distributed(net, trainer, Strategy(recompute=(module,)), example):
        counts.clear()
        for step in range(3):
            trainer.zero_grad()
            net(*small_models.batch("transformer", step, rank)).backward()
            trainer.step()
        return {"runs": len(counts), "error": float((flat_parameters(net) - expected).abs().max())}
