"""A training script that ends in the way it is told to.

exit_job.py STRATEGY STEPS ENDING [INSIDE [watch]]: INSIDE is the recorder's folder, "monitor" or empty. With "watch"
a thread ends a rank that has lost another one, as on NCCL.
"""

import multiprocessing
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from offbeat.graph.skeleton import skeleton
from offbeat.runtime import lifetime
from offbeat.runtime.comm.liveness import DeathWatch
from offbeat.runtime.comm.torch_world import torch_world
from offbeat.strategy import OperatorConfig, Shard, Strategy, VariableConfig

WIDTH = 256
FAILING = 1
"""The rank on which something happens that does not happen on the other."""
PATIENCE_SECONDS = 4.0
"""How long a rank waits for one that hangs; in earnest it is longer."""
RELAXED = {
    "stale": Shard(synchronizer="all_reduce", staleness=2),
    "stale_server": Shard(synchronizer="parameter_server", placement=(0,), staleness=2),
    "asynchronous": Shard(synchronizer="parameter_server", placement=(0,), asynchronous=True),
    "asynchronous_both": Shard(synchronizer="parameter_server", placement=(0,), asynchronous=True),
}


class Planned(Exception):
    """What the script raises itself."""


def strategy_of(name: str, model: torch.nn.Module) -> str | Strategy:
    if name == "split":
        samples, columns = (OperatorConfig(mesh=(2,), outputs=(axes,)) for axes in ((0, -1), (-1, 0)))
        products = ["addmm", *(f"addmm_{index}" for index in range(1, 6))]
        return Strategy(operators=dict(zip(products, [samples, columns] * 3, strict=True)))
    if name not in RELAXED:
        return name.removesuffix("_batchnorm")
    variables = {}
    for number, variable in enumerate(skeleton(model).variables):
        shard = RELAXED[name]
        if name == "asynchronous_both":
            shard = shard.model_copy(update={"placement": (number % 2,)})
        variables[variable.name] = VariableConfig(shards=(shard,))
    return Strategy(name=name, variables=variables)


def make_model(name: str) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers.append(torch.nn.Linear(WIDTH, WIDTH))
        if name.endswith("_batchnorm"):
            layers.append(torch.nn.BatchNorm1d(WIDTH))
    return torch.nn.Sequential(*layers)


def fail(*_: Any) -> None:
    raise Planned("the script failed")


def fail_in_flight(model: Any) -> None:
    """Lets the forward of a split model fail where its first collective has started."""
    from offbeat.runtime.sharded.overlap import is_collective

    for parts in model._offbeat._parts.values():
        graph = parts.forward.graph
        started = next(filter(is_collective, graph.nodes))
        with graph.inserting_after(started):
            graph.call_function(fail)
        parts.forward.recompile()


def train(name: str, steps: int, ending: str, inside: str, watch: bool) -> tuple[torch.nn.Module, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(name)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if name == "plain_ddp":
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)  # type: ignore[assignment]
    else:
        offbeat.distribute(model, optimizer, strategy_of(name, model), timeout=timedelta(seconds=60))
    if watch:
        ports = torch_world().liveness
        assert ports is not None
        DeathWatch(ports).start()
    rank = dist.get_rank()
    recorder: Any = nullcontext()
    if inside == "monitor":
        recorder = offbeat.Monitor(model, every=2)
    elif inside:
        recorder = offbeat.Recorder(inside, calibrate=False)
    fails_here = rank == FAILING or ending.endswith("_both")
    alone = ending.startswith("raise") and not ending.endswith("_both")
    endless = ending.startswith("signal") or (alone and not fails_here)
    layers = list(model.modules())
    with recorder:
        for step in range(1_000_000 if endless else steps):
            last = step == steps - 1
            if last and fails_here and ending.startswith("raise_backward"):
                # Gradients of the later layers are on their way by then.
                layers[-3 - 2 * rank].register_full_backward_pre_hook(fail)
            optimizer.zero_grad()
            if last and fails_here and ending.startswith("raise_forward"):
                if name == "split":
                    fail_in_flight(model)
                layers[-3].register_forward_pre_hook(fail)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            if hasattr(recorder, "step"):
                recorder.step()
            print("step", step + 1, flush=True)
        if fails_here and ending in ("raise", "raise_both"):
            fail()
        if ending == "exit_inside":
            sys.exit(3)
    return model, optimizer


def main(name: str, steps: int, ending: str, inside: str = "", watch: str = "") -> None:
    model, _ = train(name, steps, ending, inside, watch == "watch")
    rank = dist.get_rank()
    if ending.startswith("destroy"):
        dist.destroy_process_group()
    if ending.endswith("read") or (ending == "read_on_one" and rank == 0):
        print("sum", sum(float(parameter.detach().sum()) for parameter in model.parameters()), flush=True)
    if ending == "workers":
        # As a DataLoader has them: forked, and without the threads of this process.
        child = multiprocessing.get_context("fork").Process(target=print, args=("worker",))
        child.start()
        child.join()
        assert child.exitcode == 0
    lifetime.GRACE_SECONDS = min(lifetime.GRACE_SECONDS, PATIENCE_SECONDS)
    if ending == "hang" and rank == FAILING:
        os.kill(os.getpid(), signal.SIGSTOP)
    if ending == "exit":
        sys.exit(3)
    if ending == "os_exit":
        os._exit(4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
