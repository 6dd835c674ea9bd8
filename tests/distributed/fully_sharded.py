"""Training by FSDP2 strategies, and how far it ends from one process. Runs on every rank."""

from typing import Any

import small_models
import torch
import torch.distributed as dist
from reference import graph_of, reference_run
from torch import nn
from torch.distributed.tensor import DTensor
from training import _cluster, _quick_setup, _shared

import offbeat
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.strategy import Strategy, build_strategy
from offbeat.strategy.code import torch_code

STEPS = 4
DTYPE = torch.float64


def _distributed(
    model: str, kind: str, strategy: Strategy | str, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    rank = dist.get_rank()
    # Only rank 0 has the reference's weights: distribute() must share them.
    net = small_models.make(model, seed=rank, sparse=False)
    trainer = small_models.make_optimizer(kind, net.parameters())
    with _quick_setup(model, DTYPE, kind):
        example = small_models.batch(model, 0, rank)
        offbeat.distribute(net, trainer, strategy, example_inputs=example, cluster=_cluster(None), **options)
    return net, trainer


def _train(net: nn.Module, trainer: torch.optim.Optimizer, model: str, steps: range) -> None:
    for step in steps:
        trainer.zero_grad()
        loss = net(*small_models.batch(model, step, dist.get_rank()))
        loss.backward()
        trainer.step()


def _error(net: nn.Module, model: str, kind: str, steps: int = STEPS) -> float:
    return _distance(net.state_dict(), net, model, kind, steps)


def _distance(whole: dict[str, torch.Tensor], net: nn.Module, model: str, kind: str, steps: int) -> float:
    world = dist.get_world_size()
    key = ("fully_sharded", model, kind, steps, world)
    expected = _shared(key, lambda: reference_run(model, kind, DTYPE, steps, world, (1.0,) * world, (4,) * world))
    # In the order of the parameters, tied ones once.
    mine = torch.cat([whole[name].reshape(-1) for name, _ in net.named_parameters()])
    return (mine - expected).abs().max().item()


def fsdp_points(model: str, kind: str, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trains by each point: a builder's options, with `accumulation` beside them."""
    answers = []
    for options in points:
        accumulation = options.pop("accumulation", 1)
        strategy = build_strategy("fsdp", graph_of(model, DTYPE, kind), _cluster(None), **options)
        net, trainer = _distributed(model, kind, strategy.model_copy(update={"accumulation": accumulation}))
        _train(net, trainer, model, range(STEPS))
        held = sum(p.to_local().numel() for p in net.parameters() if isinstance(p, DTensor))
        share = held / sum(p.numel() for p in net.parameters())
        answers.append({"error": _error(net, model, kind), "held": share, "summary": net.offbeat.summary()})
    return answers


def fsdp_pasted(model: str, kind: str, points: list[dict[str, Any]]) -> list[float]:
    """Trains by the torch code of each point, in a script without Offbeat."""
    errors = []
    for options in points:
        strategy = build_strategy("fsdp", graph_of(model, DTYPE, kind), _cluster(None), **options)
        net = small_models.make(model)
        exec(torch_code(strategy, "cpu"), {"model": net})
        trainer = small_models.make_optimizer(kind, net.parameters())
        _train(net, trainer, model, range(STEPS))
        whole = {name: value.full_tensor() for name, value in net.named_parameters()}
        errors.append(_distance(whole, net, model, kind, STEPS))
    return errors


def fsdp_limited(model: str = "gpt2", kind: str = "adamw") -> dict[str, Any]:
    """The strategy that distribute() takes for a limit that replication breaks, and what it says where none fits."""
    graph, cluster = graph_of(model, DTYPE, kind), _cluster(None)
    replicated = build_strategy("ddp", graph, cluster)
    sharded = build_strategy("fsdp", graph, cluster, root=True, recompute=True)
    ddp, limit = (peak_memory(lower(graph, cluster, strategy)).total for strategy in (replicated, sharded))
    net, trainer = _distributed(model, kind, "auto", memory_limit=limit)
    _train(net, trainer, model, range(STEPS))
    try:
        _distributed(model, kind, "auto", memory_limit=100)
        refusal = ""
    except OffbeatError as error:
        refusal = str(error)
    plan = net.offbeat.plan
    return {
        "error": _error(net, model, kind),
        "peak": peak_memory(plan).total / limit,
        "ddp": ddp / limit,
        "sharded": plan.strategy.fsdp is not None,
        "told": net.offbeat.summary(),
        "seconds": net.offbeat.history[0].predicted_seconds,
        "bytes": net.offbeat.history[0].predicted_bytes / limit,
        "refusal": refusal,
    }


def fsdp_checkpoints(model: str, kind: str) -> list[float]:
    """Two steps by FSDP2, two by another engine that loads its checkpoint, two by FSDP2 again."""
    strategy = build_strategy("fsdp", graph_of(model, DTYPE, kind), _cluster(None))
    net, trainer = _distributed(model, kind, strategy)
    _train(net, trainer, model, range(2))
    errors = []
    for first, engine in ((2, "sharded"), (4, "fsdp")):
        saved = net.state_dict(), trainer.state_dict()
        assert not any(isinstance(value, DTensor) for value in saved[0].values())
        net, trainer = _distributed(model, kind, engine)
        net.load_state_dict(saved[0])
        trainer.load_state_dict(saved[1])
        _train(net, trainer, model, range(first, first + 2))
        net.flush()
        errors.append(_error(net, model, kind, first + 2))
    return errors


def fsdp_loop(model: str = "gpt2", kind: str = "adamw") -> dict[str, float]:
    """What a training loop may do: state from before, no_sync(), clipping, evaluation in between."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def loop(net: nn.Module, trainer: torch.optim.Optimizer, ranks: list[int], alone: bool) -> torch.Tensor:
        for step in range(1, STEPS):
            trainer.zero_grad()
            for part in range(2):
                for each in ranks:
                    loss = net(*small_models.batch(model, 10 * step + part, each)) / (2 * len(ranks))
                    if alone or part == 1:
                        loss.backward()
                    else:
                        with net.no_sync():
                            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            trainer.step()
            with torch.no_grad():
                net(*small_models.batch(model, step, rank))
        state = net.state_dict()
        return torch.cat([state[name].reshape(-1) for name, _ in net.named_parameters()])

    def started() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = small_models.make(model)
        trainer = small_models.make_optimizer(kind, net.parameters())
        net(*small_models.batch(model, 0, 0)).backward()
        trainer.step()
        return net, trainer

    expected = loop(*started(), list(range(world)), alone=True)
    net, trainer = started()
    strategy = build_strategy("fsdp", graph_of(model, DTYPE, kind), _cluster(None), root=True, prefetch=2)
    with _quick_setup(model, DTYPE, kind):
        example = small_models.batch(model, 0, rank)
        offbeat.distribute(net, trainer, strategy, example_inputs=example, cluster=_cluster(None))
    return {"error": (loop(net, trainer, [rank], alone=False) - expected).abs().max().item()}
