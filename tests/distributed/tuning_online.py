"""strategy="auto" on a job under way → what it decided, and how far training ends up from its reference."""

import time
from typing import Any

import small_models
import torch
import torch.distributed as dist
from training import TIMEOUT, _parameters, _reference, _shared

import offbeat
from offbeat import online
from offbeat.search.candidates import Candidate
from offbeat.strategy import build_strategy

STEPS = 32


def tune_online(builder: str, slower: bool) -> dict[str, Any]:
    """Trains with "auto" while the search always favours one builder, whose steps are made slow if asked."""
    rank, world = dist.get_rank(), dist.get_world_size()
    equal, sizes = (1.0,) * world, (4,) * world
    key = ("mlp", "sgd", "float64", STEPS, world, equal, sizes)
    expected = _shared(key, lambda: _reference("mlp", "sgd", torch.float64, STEPS, world, equal, sizes))

    def favour(graph: Any, cluster: Any, costs: Any, present: Any, barrier: bool) -> list[Candidate]:
        chosen = build_strategy(builder, graph, cluster)
        return [Candidate(builder, chosen, 1e-3), Candidate("present", present, 2e-3)]

    net = small_models.make("mlp", torch.float64, seed=rank)
    trainer = small_models.make_optimizer("sgd", net.parameters())
    original, online.candidates = online.candidates, favour
    names = []
    try:
        offbeat.distribute(net, trainer, timeout=TIMEOUT)
        runtime = net._offbeat
        for step in range(STEPS):
            trainer.zero_grad()
            net(*small_models.batch("mlp", step, rank, torch.float64)).backward()
            name = runtime.plan.strategy.name
            # What the job starts with takes 50 ms a step, what it is offered 2 or 100.
            time.sleep(0.05 if name != builder else 0.1 if slower else 0.002)
            trainer.step()
            names.append(name)
        error = (_parameters(net) - expected).abs().max().item()
        runtime.engine.detach()
        runtime.gate.detach()
    finally:
        online.candidates = original
    return {"error": error, "names": names}
