"""Jobs that must stop: strategies that do not fit, ranks that disagree, ranks that die. Runs on every rank."""

import sys
import time
from datetime import timedelta
from typing import Any

import small_models
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.strategy import Shard, Strategy, VariableConfig


def apply_strategy(content: str) -> None:
    """The MLP with a strategy of whatever kind."""
    model = small_models.make("mlp")
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    offbeat.distribute(model, optimizer, Strategy.from_json(content), timeout=timedelta(seconds=10))


def strategy_of_another_model() -> None:
    """A strategy built for the CNN, given to the MLP."""
    other = small_models.make("cnn")
    cluster = offbeat.ClusterSpec.local(dist.get_world_size())
    graph = offbeat.capture(other, small_models.batch("cnn", 0, 0))
    apply_strategy(offbeat.build_strategy("overlap", graph, cluster).to_json())


def coupled_optimizer(builder: str) -> None:
    """LBFGS with variables that are not whole on every rank."""
    model = small_models.make("mlp")
    offbeat.distribute(model, torch.optim.LBFGS(model.parameters()), builder, timeout=timedelta(seconds=10))


def ranks_disagree(about: str) -> None:
    """The last rank has a wider model, or another strategy."""
    last = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    width = 8 if about == "model" and last else 7
    model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
    shard = Shard(group=1) if about == "strategy" and last else Shard()
    strategy = Strategy(variables={"0.weight": VariableConfig(shards=(shard,))})
    offbeat.distribute(model, small_models.make_optimizer("sgd", model.parameters()), strategy)


def train_forever(builder: str, timeout: float, options: dict[str, Any]) -> None:
    """Trains until somebody stops it, and says on stdout when a step has ended."""
    offbeat.api.join_job(timedelta(seconds=timeout), torch.device("cpu"))
    rank = dist.get_rank()
    model = small_models.make("mlp")
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    cluster = offbeat.ClusterSpec.homogeneous(nodes=dist.get_world_size(), devices_per_node=1)
    example = small_models.batch("mlp", 0, rank)
    graph = offbeat.capture(model, example)
    strategy = offbeat.build_strategy(builder, graph, cluster, **options)
    offbeat.distribute(
        model, optimizer, strategy, example_inputs=example, cluster=cluster, timeout=timedelta(seconds=timeout)
    )
    for step in range(10**6):
        optimizer.zero_grad()
        model(*small_models.batch("mlp", step, rank)).backward()
        optimizer.step()
        time.sleep(0.005)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
