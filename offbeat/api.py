"""The public verbs that wire several stages together."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.optim import Optimizer

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.skeleton import skeleton
from offbeat.plan import lower
from offbeat.runtime.channel import Channel
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.retime import fit_link
from offbeat.runtime.sharded import ShardedRuntime
from offbeat.strategy import Strategy, build_strategy, builders, check_fits

NEGLIGIBLE_NETWORK_SECONDS = 2e-3
"""Below this, what a step sends hides behind any backward pass, and updating in many small pieces costs more."""
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"
"""Set by `offbeat run`: what "auto" stands for in this job."""
MIN_BUCKET_BYTES = 2**18
MAX_BUCKET_BYTES = 25 * 2**20


def distribute(
    model: torch.nn.Module,
    optimizer: Optimizer,
    strategy: str | os.PathLike[str] | Strategy = "auto",
    *,
    example_inputs: Any = None,
    loss_fn: Any = None,
    cluster: ClusterSpec | None = None,
    timeout: timedelta | None = None,
) -> tuple[torch.nn.Module, Optimizer]:
    """Trains `model` on every rank of the job; call it on each of them, then train as on one device.

    `strategy` is "auto", a builder's name, the path of a strategy file, or a Strategy. With `example_inputs` (one
    replica's batch) the step is captured first, so that strategies which depend on its operators can be built. "auto"
    starts with a plan that fits the link as measured, records some steps, and moves to a better plan if there is one
    (`offbeat.online`). The process group is the user's, or made from the launcher's environment. Returns the same two
    objects.

    A strategy that splits operators over ranks is given the same whole batch on every rank, and its model returns the
    whole output on every rank (`offbeat.runtime.sharded`).
    """
    if isinstance(strategy, str) and strategy == "auto":
        strategy = os.environ.get(STRATEGY_VARIABLE) or "auto"
    join_job(timeout)
    world = dist.get_world_size()
    cluster = cluster or _this_cluster(world)
    if cluster.world_size != world:
        raise OffbeatError(f"the cluster {cluster.name!r} has {cluster.world_size} devices, the job has {world} ranks")
    graph = skeleton(model) if example_inputs is None else capture(model, example_inputs, loss_fn, optimizer=optimizer)
    chosen = resolve_strategy(strategy, graph, cluster)
    if chosen.operators:
        if example_inputs is not None:
            check_fits(chosen, graph, cluster)
        ShardedRuntime(model, optimizer, chosen, example_inputs, loss_fn)
        return model, optimizer
    plan = lower(graph, cluster, chosen, rank=dist.get_rank())
    runtime = Runtime(model, optimizer, plan, timeout or timedelta(minutes=10))
    if strategy == "auto" and world > 1 and next(model.parameters()).device.type == "cpu":
        # Replay and search load a compiler, which a job with a strategy of its own need not wait for.
        from offbeat.online import Tuner

        Tuner(runtime, graph, cluster)
    return model, optimizer


def resolve_strategy(strategy: str | os.PathLike[str] | Strategy, graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """A Strategy from whatever a user may pass for one."""
    if isinstance(strategy, str) and strategy == "auto":
        return _starting_strategy(graph, cluster)
    if isinstance(strategy, str) and strategy in builders():
        return build_strategy(strategy, graph, cluster)
    if not isinstance(strategy, Strategy):
        if not Path(strategy).exists():
            raise StrategyError(f"{str(strategy)!r} is neither a builder ({', '.join(builders())}) nor a strategy file")
        strategy = Strategy.load(strategy)
    # A job knows its ranks, not the bandwidths the strategy was made for; what must fit is checked rank by rank.
    return strategy.model_copy(update={"cluster": ""})


def _starting_strategy(graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """A plan fit for the link as it is measured now: overlapped into the next forward where the network takes time.

    A message should be long enough that what each collective costs beside its bytes is a ninth of it at the most, and
    short enough that there are some to choose from.
    """
    seconds, seconds_per_byte = measure_link()
    network = seconds_per_byte * graph.parameter_bytes
    if network < NEGLIGIBLE_NETWORK_SECONDS:
        return build_strategy("ddp", graph, cluster)
    bucket = min(max(8 * seconds / seconds_per_byte, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES, graph.parameter_bytes / 16)
    return build_strategy("overlap", graph, cluster, bucket=max(1024, bucket), slice_bytes=max(1024, 2 * bucket))


def measure_link() -> tuple[float, float]:
    """(seconds per all-reduce, seconds per byte) of the whole job, the same on every rank."""
    if dist.get_world_size() == 1:
        return 0.0, 0.0
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    everyone = tuple(range(dist.get_world_size()))
    return fit_link(Channel(_get_default_group()._get_backend(device), everyone, dist.get_rank()), device)


def join_job(timeout: timedelta | None = None) -> None:
    """Joins the process group of the launcher's environment, unless the user has made one."""
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise OffbeatError(
            f"there is no process group and {missing[0]} is not set: start the script with torchrun or offbeat run, "
            f"or call torch.distributed.init_process_group first"
        )
    backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun keeps its store over a restart, with the addresses of ranks that are gone in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"offbeat/attempt{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _this_cluster(world: int) -> ClusterSpec:
    """The job's ranks as far as the launcher tells: so many on each node."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    if 0 < local < world and world % local == 0:
        return ClusterSpec.homogeneous(nodes=world // local, devices_per_node=local)
    return ClusterSpec.local(world)
