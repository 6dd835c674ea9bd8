"""One NCCL rank: every builder, two optimizers, both modes, float64 → distances from the reference.

The model has a variable of every kind: sparse, convolutional, dense, scalar, tied and used by a sibling.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))
import small_models
from small_strategies import ENGINE_BUILDERS

import offbeat
from offbeat.cluster import ClusterSpec
from offbeat.graph import capture
from offbeat.strategy import build_strategy

STEPS = 5


def on_gpu(tensors):
    return tuple(tensor.cuda() for tensor in tensors)


def reference(name: str, kind: str, world: int) -> torch.Tensor:
    model = small_models.make(name, sparse=kind != "adamw").cuda()
    optimizer = small_models.make_optimizer(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            (model(*on_gpu(small_models.batch(name, step, rank))) / world).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for name in ("everything",):
        for kind in ("sgd", "adamw"):
            expected = reference(name, kind, world)
            # A small model's graph is captured once: on the CPU, as the variables are the same.
            graph = capture(small_models.make(name), small_models.batch(name, 0, rank))
            cluster = ClusterSpec.homogeneous(nodes=world, devices_per_node=1)
            for builder in ENGINE_BUILDERS:
                for mode in ("auto", "barrier"):
                    strategy = build_strategy(builder, graph, cluster)
                    schedule = strategy.schedule.model_copy(update={"mode": mode})
                    strategy = strategy.model_copy(update={"schedule": schedule})
                    model = small_models.make(name, seed=rank).cuda()
                    optimizer = small_models.make_optimizer(kind, model.parameters())
                    example = on_gpu(small_models.batch(name, 0, rank))
                    offbeat.distribute(model, optimizer, strategy, example_inputs=example, cluster=cluster)
                    for step in range(STEPS):
                        optimizer.zero_grad()
                        model(*on_gpu(small_models.batch(name, step, rank))).backward()
                        optimizer.step()
                    found = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
                    error = float((found - expected).abs().max())
                    case = {"model": name, "optimizer": kind, "builder": builder, "mode": model.offbeat.mode}
                    rows.append({**case, "error": error, "limit": 1e-10})
                    model._offbeat.engine.detach()
                    model._offbeat.engine.channels.close()
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
