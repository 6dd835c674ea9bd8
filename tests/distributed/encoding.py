"""Training whose gradients travel in a lossy encoding. Runs on every rank."""

import hashlib
from typing import Any

import small_models
import torch
import torch.distributed as dist
from reference import flat_parameters, graph_of, make_strategy
from torch import nn
from training import _cluster, _distributed, _quick_setup

from offbeat.strategy import Encoder, Schedule, Shard, Strategy, VariableConfig


def _encoded(synchronizer: str, encoder: dict[str, Any], model: nn.Module, stations: tuple[int, ...] = ()) -> Strategy:
    """Every variable synchronised this way: all-reduced in two messages, or on servers in turn."""
    world = dist.get_world_size()
    configs = {}
    for number, (name, _) in enumerate(model.named_parameters()):
        fields: dict[str, Any] = {"group": number % 2}
        if synchronizer == "parameter_server":
            fields = {"placement": (number % world,), "stations": stations}
        shard = Shard(synchronizer=synchronizer, encoder=Encoder(**encoder), **fields)  # type: ignore[arg-type]
        configs[name] = VariableConfig(shards=(shard,))
    return Strategy(variables=configs)


def lossy(
    synchronizer: str,
    encoder: dict[str, Any],
    nodes: int | None = None,
    stations: list[int] | None = None,
    slice_bytes: int | None = None,
) -> dict[str, Any]:
    """Five steps, twice: digests of the parameters each time, and how far they are from those without an encoder."""
    digests, ends = [], []
    for used in (encoder, encoder, {"name": "none"}):
        model = small_models.make("mlp", seed=dist.get_rank())
        optimizer = small_models.make_optimizer("sgd", model.parameters())
        chosen = _encoded(synchronizer, used, model, tuple(stations or ()))
        if slice_bytes is not None:
            schedule = Schedule(policy="priority", slice_bytes=slice_bytes)
            chosen = chosen.model_copy(update={"schedule": schedule})
        batches = [small_models.batch("mlp", step, dist.get_rank()) for step in range(5)]
        with (
            _quick_setup("mlp", torch.float64, "sgd"),
            _distributed(model, optimizer, chosen, batches[0], _cluster(nodes)),
        ):
            for batch in batches:
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            mode, tasks = model.offbeat.mode, len(model._offbeat.plan.communication)
            ends.append(flat_parameters(model).clone())
        digests.append(hashlib.sha256(ends[-1].numpy().tobytes()).hexdigest())
    start = flat_parameters(small_models.make("mlp"))
    return {
        "digests": digests[:2],
        "mode": mode,
        "tasks": tasks,
        "off": (ends[0] - ends[2]).abs().max().item(),
        "moved": (ends[2] - start).abs().max().item(),
    }


def residuals(encoder: dict[str, Any], steps: int) -> dict[str, Any]:
    """What is applied and what is kept back add up to the gradients and what was kept back before, in every step.

    Summed over the ranks: sent + residual = gradient + previous residual, for every message.
    """
    graph = graph_of("mlp", torch.float64, "sgd")
    options = {"chunk": 3, "encoder": {**encoder, "error_feedback": True}}
    chosen = make_strategy({"builder": "all_reduce", "options": options}, graph, _cluster(None), "barrier")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = small_models.make("mlp", seed=rank)
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    worst, kept_back = 0.0, 0.0
    with (
        _quick_setup("mlp", torch.float64, "sgd"),
        _distributed(model, optimizer, chosen, small_models.batch("mlp", 0, rank), _cluster(None)) as engine,
    ):
        for step in range(steps):
            alone = small_models.make("mlp")
            alone.load_state_dict(model.state_dict())
            alone(*small_models.batch("mlp", step, rank)).backward()
            own = dict(alone.named_parameters())
            before = [each.encoder.residual.clone() for each in engine.synchronisers]
            optimizer.zero_grad()
            model(*small_models.batch("mlp", step, rank)).backward()
            for each, earlier in zip(engine.synchronisers, before, strict=True):
                names = [piece.variable for piece in each.message.pieces]
                gradient = torch.cat([own[name].grad.reshape(-1) for name in names]) / world
                applied = torch.cat([engine.parameters[name].grad.reshape(-1) for name in names])
                put_in, residual = gradient + earlier, each.encoder.residual.clone()
                dist.all_reduce(put_in)
                dist.all_reduce(residual)
                worst = max(worst, (applied + residual - put_in).abs().max().item())
                kept_back = max(kept_back, residual.abs().max().item())
            optimizer.step()
    return {"error": worst, "kept_back": kept_back}


class _Teacher(nn.Module):
    """Regression on a noisy teacher: the noise is a floor that every good training reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def final_loss(synchronizer: str, encoder: dict[str, Any], steps: int) -> dict[str, Any]:
    """Loss on all ranks' data after training with a falling rate."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher, model = _Teacher().double(), _Teacher().double()
    x = torch.randn(64 * world, 8, dtype=torch.float64)
    with torch.no_grad():
        y = teacher.layers(x) + 0.5 * torch.randn(64 * world, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    chosen = _encoded(synchronizer, encoder, model)
    mine = slice(rank * 64, rank * 64 + 64)
    with _distributed(model, optimizer, chosen):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x[mine], y[mine]).backward()
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            return {"loss": model(x, y).item()}
