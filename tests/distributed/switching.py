"""One strategy after another in one run → how far training ends up from its reference. Runs on every rank."""

from typing import Any

import small_models
import torch
import torch.distributed as dist
from reference import flat_parameters, graph_of, make_strategy, reference_run
from training import _cluster, _distributed, _quick_setup, _shared

from offbeat.plan import lower


def switch(model: str, optimizer: str, builders: list[str], steps: int = 3) -> dict[str, Any]:
    """Trains `steps` steps with each builder's strategy, in one run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    graph, cluster = graph_of(model, torch.float64, optimizer), _cluster(None)
    total = steps * len(builders)
    equal, sizes = (1.0,) * world, (4,) * world
    key = (model, optimizer, "float64", total, world, equal, sizes)
    expected = _shared(key, lambda: reference_run(model, optimizer, torch.float64, total, world, equal, sizes))
    net = small_models.make(model, torch.float64, seed=rank)
    trainer = small_models.make_optimizer(optimizer, net.parameters())
    strategies = [make_strategy({"builder": builder}, graph, cluster, None) for builder in builders]
    example = small_models.batch(model, 0, rank, torch.float64)
    with (
        _quick_setup(model, torch.float64, optimizer),
        _distributed(net, trainer, strategies[0], example, cluster),
    ):
        runtime = net._offbeat
        modes = []
        for step in range(total):
            if step and step % steps == 0:
                runtime.switch(lower(graph, cluster, strategies[step // steps], rank=rank))
            trainer.zero_grad()
            net(*small_models.batch(model, step, rank, torch.float64)).backward()
            modes.append(runtime.engine.mode)
            trainer.step()
        error = (flat_parameters(net) - expected).abs().max().item()
        runtime.engine.detach()
        runtime.engine.channels.close()
        runtime.gate.detach()
    return {"error": error, "modes": modes}
