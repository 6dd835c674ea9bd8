"""A small model's graph, a strategy for it, and what one process computes that averages all replicas' gradients."""

import threading
from functools import cache
from typing import Any

import small_models
import torch
from torch import nn

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, capture
from offbeat.strategy import Encoder, Strategy, build_strategy

_capturing = threading.Lock()


def graph_of(model: str, dtype: torch.dtype, optimizer: str) -> ModelGraph:
    """Captured once for all strategies: it takes longer than five steps."""
    with _capturing:
        return _captured(model, dtype, optimizer)


@cache
def _captured(model: str, dtype: torch.dtype, optimizer: str) -> ModelGraph:
    fresh = small_models.make(model, dtype)
    name = type(small_models.make_optimizer(optimizer, [nn.Parameter(torch.zeros(1))])).__name__
    return capture(fresh, small_models.batch(model, 0, 0, dtype), optimizer=name)


def make_strategy(given: dict[str, Any], graph: ModelGraph, cluster: ClusterSpec, mode: str | None) -> Strategy:
    """From {"builder": name, "options": …} or {"json": text}."""
    if "json" in given:
        strategy = Strategy.from_json(given["json"])
    else:
        options = dict(given.get("options", {}))
        if isinstance(options.get("encoder"), dict):
            options["encoder"] = Encoder(**options["encoder"])
        strategy = build_strategy(given["builder"], graph, cluster, **options)
    if mode is not None:
        strategy = strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update={"mode": mode})})
    return strategy


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])


@cache
def reference_run(
    name: str, kind: str, dtype: torch.dtype, steps: int, world: int, weights: tuple[float, ...], sizes: tuple[int, ...]
) -> torch.Tensor:
    """Parameters of one process that computes each replica's gradient on its own batch and averages them."""
    model = small_models.make(name, dtype, sparse=kind != "adamw")
    optimizer = small_models.make_optimizer(kind, model.parameters())
    total = sum(weights)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            loss = model(*small_models.batch(name, step, rank, dtype, sizes[rank]))
            (loss * (weights[rank] / total)).backward()
        optimizer.step()
    return flat_parameters(model)
