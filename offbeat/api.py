"""The public verbs that wire several stages together."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.outcomes import expectation_of
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.model import Way
from offbeat.graph.skeleton import skeleton
from offbeat.launch import this_place
from offbeat.plan import lower
from offbeat.runtime.comm import TorchWorld, torch_world
from offbeat.runtime.distribute import Runtime, serve
from offbeat.runtime.handle import Decision, tell
from offbeat.runtime.retime import fit_link
from offbeat.strategy import Strategy, build_strategy, builders, check_fits, strategy_for

NEGLIGIBLE_NETWORK_SECONDS = 2e-3
"""Below this, what a step sends hides behind any backward pass, and updating in many small pieces costs more."""
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"
"""Set by `offbeat run`: what "auto" stands for in this job."""
SERVERS_VARIABLE = "OFFBEAT_SERVERS"
"""Set by `offbeat run --servers`: the ranks that hold no replica, separated by commas."""
CALLED_VARIABLE = "OFFBEAT_CALLED"
"""Set by `offbeat run`: a file that distribute() makes, so that a script which never calls it is found out."""
MIN_BUCKET_BYTES = 2**18
MOST_GPU_MESSAGES = 24
"""At the start on GPUs: a host that issues and applies many small messages launches kernels too late."""
MAX_BUCKET_BYTES = 25 * 2**20
Wanted = str | os.PathLike[str] | Strategy
"""What a user may pass for a strategy: "auto", a builder's name, a file's path, or a Strategy."""
GivenModel = TypeVar("GivenModel", bound=torch.nn.Module)
GivenOptimizer = TypeVar("GivenOptimizer", bound=Optimizer)


def distribute(
    model: GivenModel,
    optimizer: GivenOptimizer,
    strategy: Wanted = "auto",
    *,
    example_inputs: Any = None,
    loss_fn: Any = None,
    memory_limit: str | float | None = None,
    allow: Sequence[str] = (),
    cluster: ClusterSpec | None = None,
    timeout: timedelta | None = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    find_unused_parameters: bool | None = None,
    quiet: bool = False,
) -> tuple[GivenModel, GivenOptimizer]:
    """Trains `model` on every rank of the job; call it on each of them, then train as on one device.

    `strategy` is "auto", a builder's name, the path of a strategy file, or a Strategy. With `example_inputs` (one
    replica's batch) the step is captured first, so that strategies which depend on its operators can be built. "auto"
    starts with a plan that fits the link as measured, records some steps, and moves to a better plan if there is one
    (`offbeat.online`). The process group is the user's, or made from the launcher's environment. Returns the same two
    objects.

    With `memory_limit` (bytes of each device, '20GiB', or 'auto' for what the devices have) and `example_inputs`, the
    strategy is the one with the shortest predicted step among those that fit: replicated, with sharded updates, or
    fully sharded by torch's FSDP2, with recomputation and micro-batches where they are needed.

    "auto" keeps gradients exact unless `allow` names encoders ('bf16', 'powersgd:4'): variables are then encoded where
    that shortens the step.

    A job with parallelism of its own passes its data-parallel ranks as `process_group`, or as a `device_mesh` of one
    dimension. With `find_unused_parameters` ranks ask each other in every step which parameters none of them used; by
    default they do if the first step leaves some out. `quiet` keeps the decisions of "auto" off rank 0's terminal, as
    the variable OFFBEAT_QUIET does; `model.offbeat.summary()` has them all the same.

    On a rank that holds no replica, because the strategy's `replicas` leave it out or because it is one of the
    cluster's servers, it keeps parameters for the others until they have ended, and then ends the process. "auto" is
    `fast_servers` in a job with servers, and keeps that plan.

    A strategy that splits operators over ranks is given the same whole batch on every rank, and its model returns the
    whole output on every rank (`offbeat.runtime.sharded`).
    """
    if called := os.environ.get(CALLED_VARIABLE):
        with contextlib.suppress(OSError):
            Path(called).touch()
    _check(model, optimizer, timeout)
    if allow:
        _check_allowed(allow, strategy)
    if isinstance(strategy, str) and strategy == "auto":
        strategy = os.environ.get(STRATEGY_VARIABLE) or "auto"
    join_job(timeout)
    world = torch_world(_group(process_group, device_mesh))
    cluster = cluster or _this_cluster(world)
    if ranks := os.environ.get(SERVERS_VARIABLE):
        cluster = cluster.with_servers(_server_ranks(ranks))
    if cluster.world_size != world.size:
        raise OffbeatError(
            f"the cluster {cluster.name!r} has {cluster.world_size} devices, the job has {world.size} ranks"
        )
    graph = skeleton(model) if example_inputs is None else capture(model, example_inputs, loss_fn, optimizer=optimizer)
    if memory_limit is not None:
        if example_inputs is None or not (isinstance(strategy, str) and strategy == "auto"):
            raise OffbeatError("distribute: memory_limit needs example_inputs, and strategy='auto', which it decides")
        from offbeat.search.within import strategy_within

        encoding = _encoding_seconds(allow, next(model.parameters()).device, cluster)
        whole = loss_fn is None
        strategy = strategy_within(memory_limit, graph, cluster, world, whole, allow, encoding)
    chosen = resolve_strategy(strategy, graph, cluster, world)
    if chosen.operators:
        if world.size != dist.get_world_size():
            raise OffbeatError("a strategy that splits operators runs on the whole job, not on a process_group")
        if example_inputs is not None:
            check_fits(chosen, graph, cluster)
        # Loads torch's tracer, which other jobs need not wait for.
        from offbeat.runtime.sharded import ShardedRuntime

        ShardedRuntime(model, optimizer, chosen, example_inputs, loss_fn)
        return model, optimizer
    plan = lower(graph, cluster, chosen, rank=world.rank)
    if chosen.fsdp is not None:
        from offbeat.runtime.fsdp import FsdpRuntime

        FsdpRuntime(model, optimizer, plan, world)
        return model, optimizer
    if world.rank not in plan.replicas:
        serve(model, optimizer, plan, timeout or timedelta(minutes=10), world)
        sys.exit(0)
    runtime = Runtime(model, optimizer, plan, timeout or timedelta(minutes=10), world, find_unused_parameters)
    runtime.quiet = quiet
    if strategy == "auto" and world.size > 1:
        _tune(runtime, graph, cluster, allow)
    elif world.rank == 0 and (expected := expectation_of(chosen, world.size)) is not None:
        from offbeat.online.expected import Watch

        Watch(runtime, expected)
    return model, optimizer


def _tune(runtime: Runtime, graph: ModelGraph, cluster: ClusterSpec, allow: Sequence[str]) -> None:
    """Looks for a better plan while the job runs; one with servers keeps its first and says so."""
    if len(runtime.plan.replicas) < runtime.world.size:
        name = runtime.plan.strategy.name
        tell(runtime, Decision(0, f"a job with servers that hold no replica keeps its first plan, {name}"))
        return
    # Replay and search load a compiler, which a job with a strategy of its own need not wait for.
    from offbeat.online import Tuner

    Tuner(runtime, graph, cluster, allow)


def optimize(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    model: torch.nn.Module | None = None,
    example_inputs: Any = None,
    memory_limit: str | float | None = None,
    time_limit: float = 30.0,
    allow: Sequence[str] = (),
    **options: Any,
) -> Strategy:
    """The strategy with the shortest predicted step; `offbeat.search.optimize.search` names the other options.

    With the `model` and its `example_inputs`, its blocks are timed on its device: as they are, compiled and recomputed.
    That takes a minute or so the first time. Regions are then compiled where it pays, and what recomputing takes is not
    guessed. Without the model nothing is compiled.

    Gradients are exact unless `allow` names encoders for them: 'bf16', 'fp16', 'int8', 'sign', 'topk:0.01',
    'randomk:0.01', 'powersgd:4'. Each variable is then encoded where that shortens the step, and only there. With 'amp'
    forward may run under autocast to bfloat16, which needs the model.
    """
    # Replay and search load a compiler, which jobs need not wait for.
    from offbeat.search.optimize import optimize as search

    if model is not None:
        if example_inputs is None:
            raise OffbeatError("optimize: a model is timed on its example_inputs, which are not given")
        options["costs"] = options.get("costs") or Costs()
        graph, options["costs"], _ = measure(graph, cluster, options["costs"], model, example_inputs, allow)
    return search(graph, cluster, memory_limit=memory_limit, time_limit=time_limit, allow=allow, **options)


def measure(
    graph: ModelGraph,
    cluster: ClusterSpec,
    costs: Costs,
    model: torch.nn.Module,
    example_inputs: Any,
    allow: Sequence[str],
) -> tuple[ModelGraph, Costs, list[str]]:
    """(graph, costs, notes) with what the model's blocks and the allowed encoders take on the model's device."""
    from offbeat.profile.blocks import time_blocks
    from offbeat.search.passes import AMP

    ways: tuple[Way, ...] = ("compiled", "recomputed")
    timing = time_blocks(graph, model, example_inputs, (*ways, "bf16", "compiled bf16") if AMP in allow else ways)
    device = next(model.parameters()).device
    known = {**costs.encoding_seconds_per_byte, **_encoding_seconds(allow, device, cluster)}
    return timing.graph, replace(costs, encoding_seconds_per_byte=known), timing.notes


def _encoding_seconds(allow: Sequence[str], device: torch.device, cluster: ClusterSpec) -> dict[str, float]:
    from offbeat.profile.blocks import time_encoders
    from offbeat.search.passes.encoding import allowed_encoders

    return time_encoders(allowed_encoders(allow), device, len(cluster.workers))


def _server_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise OffbeatError(f"{SERVERS_VARIABLE}: {text!r} is not a list of ranks such as 4,5") from None


def _group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group that the user names; None for the whole job."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise OffbeatError("distribute: pass process_group or device_mesh, not both")
    if device_mesh.ndim != 1:
        names = device_mesh.mesh_dim_names or tuple(range(device_mesh.ndim))
        raise OffbeatError(
            f"distribute: device_mesh has {device_mesh.ndim} dimensions {list(names)}; pass the data-parallel one, as "
            f"in mesh[{names[0]!r}]"
        )
    return device_mesh.get_group()


def _check(model: torch.nn.Module, optimizer: Optimizer, timeout: timedelta | None) -> None:
    """Refuses a model that no strategy can train, and an optimizer that distributes itself."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise OffbeatError(
            f"distribute: model {type(model).__name__} has no trainable parameter; pass one with parameters that "
            f"require gradients"
        )
    devices = sorted({str(parameter.device) for parameter in trained})
    if len(devices) > 1:
        raise OffbeatError(
            f"distribute: model {type(model).__name__} has parameters on {' and '.join(devices)}; move it to one device"
        )
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise OffbeatError(
            "distribute: optimizer is a ZeroRedundancyOptimizer, which spreads its state over ranks itself; pass the "
            "optimizer that it wraps, and strategy='sharded' to have each rank keep a part of the state"
        )
    if timeout is not None and timeout <= timedelta(0):
        raise OffbeatError(f"distribute: timeout must be longer than zero, got {timeout}")


def _check_allowed(allow: Sequence[str], strategy: Wanted) -> None:
    """Refuses what "auto" could not choose in a job under way."""
    from offbeat.search.passes import AMP
    from offbeat.search.passes.encoding import allowed_encoders

    if not (isinstance(strategy, str) and strategy == "auto"):
        raise OffbeatError("distribute: allow belongs to strategy='auto'; another strategy says itself what it encodes")
    if AMP in allow:
        raise OffbeatError(
            "distribute: 'amp' is decided before a job starts; offbeat optimize --allow amp --measure makes a strategy"
        )
    allowed_encoders(allow)


def resolve_strategy(
    strategy: Wanted, graph: ModelGraph, cluster: ClusterSpec, world: TorchWorld | None = None
) -> Strategy:
    """A Strategy from whatever a user may pass for one; `world` is the job whose link "auto" measures."""
    if isinstance(strategy, str) and strategy == "auto":
        return _starting_strategy(graph, cluster, world or torch_world())
    if isinstance(strategy, str) and strategy in builders():
        return build_strategy(strategy, graph, cluster)
    if not isinstance(strategy, Strategy):
        strategy = strategy_for(strategy, graph, cluster, "strategy")
    # A job knows its ranks, not the bandwidths the strategy was made for; what must fit is checked rank by rank.
    return strategy.model_copy(update={"cluster": ""})


def _starting_strategy(graph: ModelGraph, cluster: ClusterSpec, world: TorchWorld) -> Strategy:
    """A plan fit for the link as it is measured now: overlapped into the next forward where the network takes time.

    A message should be long enough that what each collective costs beside its bytes is a ninth of it at the most, and
    short enough that there are some to choose from.
    """
    if cluster.servers:
        return build_strategy("fast_servers", graph, cluster)
    seconds, seconds_per_byte = fit_link(world.default_channel(), world.device) if world.size > 1 else (0.0, 0.0)
    network = seconds_per_byte * graph.parameter_bytes
    if network < NEGLIGIBLE_NETWORK_SECONDS:
        return build_strategy("ddp", graph, cluster)
    least = MIN_BUCKET_BYTES if world.device.type == "cpu" else graph.parameter_bytes / MOST_GPU_MESSAGES
    bucket = min(max(8 * seconds / seconds_per_byte, least), MAX_BUCKET_BYTES, graph.parameter_bytes / 16)
    return build_strategy("overlap", graph, cluster, bucket=max(1024, bucket), slice_bytes=max(1024, 2 * bucket))


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


def _this_cluster(world: TorchWorld) -> ClusterSpec:
    """The nodes that the job's ranks say they run on."""
    nodes = world.all_gather_object(this_place().node)
    if world.device.type == "cuda":
        return ClusterSpec.of_ranks(nodes, device=torch.cuda.get_device_name()) or ClusterSpec.local(world.size)
    several = ClusterSpec.of_ranks(nodes) if len(set(nodes)) > 1 else None
    return several or ClusterSpec.local(world.size)
