"""The public functions that combine several stages."""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.outcomes import expectation_of
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.model import Way
from offbeat.graph.skeleton import skeleton
from offbeat.launch import named_servers, this_place
from offbeat.plan import lower
from offbeat.runtime.comm import TorchWorld, torch_world
from offbeat.runtime.distribute import Runtime, serve
from offbeat.runtime.handle import Decision, tell
from offbeat.runtime.retime import fit_link
from offbeat.runtime.server import Served
from offbeat.strategy import Strategy, build_strategy, builders, check_fits, strategy_for

if TYPE_CHECKING:
    from offbeat.runtime.fsdp import FsdpRuntime
    from offbeat.search.within import Choice

log = logging.getLogger("offbeat")

NEGLIGIBLE_NETWORK_SECONDS = 2e-3
"""Below this, any backward pass hides a step's traffic, and updating in many small pieces costs more."""
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"
"""Set by `offbeat run`: the strategy that replaces "auto" in this job."""
CALLED_VARIABLE = "OFFBEAT_CALLED"
"""Set by `offbeat run`: a file that distribute() creates, so that a script which never calls it is detected."""
MIN_BUCKET_BYTES = 2**18
MOST_GPU_MESSAGES = 48
"""At the start on GPUs. The fewer there are, the longer an urgent one waits for the one under way; but a host that
issues and applies many small messages launches kernels too late."""
MAX_BUCKET_BYTES = 25 * 2**20
Wanted = str | os.PathLike[str] | Strategy
"""What a user may pass as a strategy: "auto", a builder's name, a file's path, or a Strategy."""
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
    batch: Literal["whole", "part"] = "whole",
    quiet: bool = False,
) -> tuple[GivenModel, GivenOptimizer]:
    """Distributes `model` over the ranks of the job; call it on every rank, then train as on one device.

    `strategy` is "auto", a builder's name, the path of a strategy file, or a Strategy. With `example_inputs` (one
    replica's batch) the step is captured first, for strategies that depend on its operators. "auto" starts with a plan
    that suits the measured link, records some steps, and switches to a better plan if it finds one (`offbeat.online`).
    The process group is the user's, or is created from the launcher's environment. Returns the same two objects.

    With `memory_limit` (bytes per device, '20GiB', or 'auto' for the devices' memory) and `example_inputs`, Offbeat
    chooses the strategy with the shortest predicted step among those that fit: replicated, with sharded updates, or
    fully sharded by torch's FSDP2, with recomputation and micro-batches if needed.

    "auto" keeps gradients exact unless `allow` names encoders ('bf16', 'powersgd:4'): variables are then encoded if
    that shortens the step.

    A job with its own model parallelism passes its data-parallel ranks as `process_group`, or as a `device_mesh` of one
    dimension. With `find_unused_parameters`, ranks check in every step which parameters none of them used; by default
    they do so only if the first step leaves some unused. `quiet` (or the variable OFFBEAT_QUIET) stops rank 0 from
    printing the decisions of "auto"; `model.offbeat.summary()` still has them.

    On a rank without a replica (left out of the strategy's `replicas`, or one of the cluster's servers) this call
    serves parameters to the others until they have ended, and then ends the process. In a job with servers, "auto" is
    `fast_servers`, and keeps that plan.

    A strategy that splits operators over ranks is given the same whole batch on every rank, and its model returns the
    whole output on every rank. With `batch="part"` each rank gives only the samples that its first operator works on,
    as data-parallel loaders do, and gets the output for these (`offbeat.runtime.sharded`).
    """
    if called := os.environ.get(CALLED_VARIABLE):
        with contextlib.suppress(OSError):
            Path(called).touch()
    _check(model, optimizer, timeout)
    if allow:
        _check_allowed(allow, strategy)
    if isinstance(strategy, str) and strategy == "auto":
        strategy = os.environ.get(STRATEGY_VARIABLE) or "auto"
    device = next(model.parameters()).device
    join_job(timeout, device, servers=bool(named_servers() or (cluster and cluster.servers)))
    group = _group(process_group, device_mesh)
    world = torch_world(group, device)
    cluster = _cluster_of(world, cluster)
    graph = skeleton(model) if example_inputs is None else capture(model, example_inputs, loss_fn, optimizer=optimizer)
    choice = None
    if memory_limit is not None:
        if example_inputs is None or not (isinstance(strategy, str) and strategy == "auto"):
            raise OffbeatError("distribute: memory_limit needs example_inputs and strategy='auto'")
        timed = _timed(graph, model, example_inputs) if group is None else graph
        choice = _choice(memory_limit, timed, cluster, world, device, loss_fn is None, allow)
        strategy = choice.strategy
    chosen = resolve_strategy(strategy, graph, cluster, world)
    patience = timeout or timedelta(minutes=10)
    if chosen.operators:
        if world.size != dist.get_world_size():
            raise OffbeatError("a strategy that splits operators runs on the whole job, not on a process_group")
        if example_inputs is not None:
            check_fits(chosen, graph, cluster)
        # Loads torch's tracer, which other jobs need not wait for.
        from offbeat.runtime.sharded import ShardedRuntime

        ShardedRuntime(model, optimizer, chosen, example_inputs, loss_fn, batch, patience, world)
        return model, optimizer
    plan = lower(graph, cluster, chosen, rank=world.rank)
    if chosen.fsdp is not None:
        from offbeat.runtime.fsdp import FsdpRuntime

        sharded = FsdpRuntime(model, optimizer, plan, world)
        sharded.quiet = quiet
        _tell_choice(sharded, choice)
        return model, optimizer
    if len(plan.replicas) < world.size and not world.takes_host_memory:
        raise OffbeatError(
            "servers without a replica need gloo beside NCCL: let distribute() create the process group, or create it "
            "with init_process_group('cpu:gloo,cuda:nccl')"
        )
    if world.rank not in plan.replicas:
        # The optimizer keeps its parameters: only their memory moves.
        serve(model.cpu(), optimizer, plan, patience, torch_world(group, torch.device("cpu")))
        raise Served
    runtime = Runtime(model, optimizer, plan, patience, world, find_unused_parameters)
    runtime.quiet = quiet
    _tell_choice(runtime, choice)
    if strategy == "auto" and world.size > 1:
        _tune(runtime, graph, cluster, allow)
    elif world.rank == 0 and (expected := expectation_of(chosen, world.size)) is not None:
        from offbeat.online.expected import Watch

        Watch(runtime, expected)
    return model, optimizer


def _timed(graph: ModelGraph, model: torch.nn.Module, example_inputs: Any) -> ModelGraph:
    """The graph with what the model's blocks take on this device, where they can be timed: each rank runs them as often
    as it likes, so they must not speak to other ranks."""
    from offbeat.profile.blocks import time_blocks

    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        return graph
    try:
        return time_blocks(graph, model, example_inputs, ways=())[0]
    except Exception as error:
        # Such as too little memory, or a batch that is not given as positional arguments.
        log.info("offbeat predicts computing from the device's peak, as it could not time the model: %s", error)
        return graph
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _choice(
    memory_limit: str | float,
    graph: ModelGraph,
    cluster: ClusterSpec,
    world: TorchWorld,
    device: torch.device,
    micro_batches: bool,
    allow: Sequence[str],
) -> "Choice":
    # The search loads a compiler, which other jobs need not wait for.
    from offbeat.search.within import strategy_within

    encoding = _encoding_seconds(allow, device, cluster)
    return strategy_within(memory_limit, graph, cluster, world, micro_batches, allow, encoding)


def _tell_choice(runtime: "Runtime | FsdpRuntime", choice: "Choice | None") -> None:
    if choice is not None:
        name, seconds, peak = choice.strategy.name, choice.seconds, choice.peak_bytes
        tell(runtime, Decision(0, choice.words, name, kept=True, predicted_seconds=seconds, predicted_bytes=peak))


def _tune(runtime: Runtime, graph: ModelGraph, cluster: ClusterSpec, allow: Sequence[str]) -> None:
    """Searches for a better plan while the job runs; a job with servers keeps its first plan and says so."""
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
    """Returns the strategy with the shortest predicted step; `offbeat.search.optimize.search` lists other options.

    With `model` and `example_inputs`, the model's blocks are timed on its device: plain, compiled and recomputed. This
    takes about a minute the first time. Regions are then compiled if it pays off, and the cost of recomputation is
    measured, not estimated. Without the model nothing is compiled.

    Gradients are exact unless `allow` names encoders: 'bf16', 'fp16', 'int8', 'sign', 'topk:0.01', 'randomk:0.01',
    'powersgd:4'. A variable is then encoded only if that shortens the step. With 'amp', which needs the model, forward
    may run under autocast to bfloat16.
    """
    # Replay and search load a compiler, which jobs need not wait for.
    from offbeat.search.optimize import optimize as search

    if model is not None:
        if example_inputs is None:
            raise OffbeatError("optimize: timing a model needs its example_inputs")
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
    """(graph, costs, notes) with the times of the model's blocks and the allowed encoders on the model's device."""
    from offbeat.profile.blocks import time_blocks
    from offbeat.search.passes import AMP

    ways: tuple[Way, ...] = ("compiled", "recomputed")
    asked = (*ways, "bf16", "compiled bf16") if AMP in allow else ways
    graph, notes = time_blocks(graph, model, example_inputs, asked)
    device = next(model.parameters()).device
    known = {**costs.encoding_seconds_per_byte, **_encoding_seconds(allow, device, cluster)}
    return graph, replace(costs, encoding_seconds_per_byte=known), notes


def _encoding_seconds(allow: Sequence[str], device: torch.device, cluster: ClusterSpec) -> dict[str, float]:
    from offbeat.profile.blocks import time_encoders
    from offbeat.search.passes.encoding import allowed_encoders

    return time_encoders(allowed_encoders(allow), device, len(cluster.workers))


def _group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group given by the user; None for the whole job."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise OffbeatError("distribute: pass process_group or device_mesh, not both")
    if device_mesh.ndim != 1:
        names = device_mesh.mesh_dim_names or tuple(range(device_mesh.ndim))
        raise OffbeatError(
            f"distribute: device_mesh has {device_mesh.ndim} dimensions {list(names)}; pass the data-parallel one, "
            f"such as mesh[{names[0]!r}]"
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
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise OffbeatError(f"distribute: parameter {name!r} has no shape yet; call the model with a batch first")
        if parameter.is_inference() or torch.is_inference_mode_enabled():
            raise OffbeatError("distribute: torch.inference_mode() has no training; make and distribute models outside")
    if len(devices) > 1:
        raise OffbeatError(
            f"distribute: model {type(model).__name__} has parameters on {' and '.join(devices)}; move it to one device"
        )
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise OffbeatError(
            "distribute: optimizer is a ZeroRedundancyOptimizer, which shards its state itself; pass the wrapped "
            "optimizer, and strategy='sharded' to shard the state over ranks"
        )
    if timeout is not None and timeout <= timedelta(0):
        raise OffbeatError(f"distribute: timeout must be longer than zero, got {timeout}")


def _check_allowed(allow: Sequence[str], strategy: Wanted) -> None:
    """Rejects encoders that "auto" could not choose in a running job."""
    from offbeat.search.passes import AMP
    from offbeat.search.passes.encoding import allowed_encoders

    if not (isinstance(strategy, str) and strategy == "auto"):
        raise OffbeatError("distribute: allow needs strategy='auto'; other strategies define their encoders themselves")
    if AMP in allow:
        raise OffbeatError(
            "distribute: 'amp' must be decided before the job starts, with offbeat optimize --allow amp --measure"
        )
    allowed_encoders(allow)


def resolve_strategy(
    strategy: Wanted, graph: ModelGraph, cluster: ClusterSpec, world: TorchWorld | None = None
) -> Strategy:
    """A Strategy from anything a user may pass as one; "auto" measures the link of the job `world`."""
    if isinstance(strategy, str) and strategy == "auto":
        return _starting_strategy(graph, cluster, world or torch_world())
    if isinstance(strategy, str) and strategy in builders():
        return build_strategy(strategy, graph, cluster)
    if not isinstance(strategy, Strategy):
        strategy = strategy_for(strategy, graph, cluster, "strategy")
    # A job knows its ranks, not the bandwidths the strategy was made for; what must fit is checked rank by rank.
    return strategy.model_copy(update={"cluster": ""})


def _starting_strategy(graph: ModelGraph, cluster: ClusterSpec, world: TorchWorld) -> Strategy:
    """A plan that suits the measured link: updates overlap the next forward where the network takes time.

    A message should be large enough that the fixed cost of its collective is at most a ninth of its time, and small
    enough that there are several to choose from.
    """
    if cluster.servers:
        return build_strategy("fast_servers", graph, cluster)
    seconds, seconds_per_byte = fit_link(world.default_channel(), world.device)
    network = seconds_per_byte * graph.parameter_bytes
    if network < NEGLIGIBLE_NETWORK_SECONDS:
        return build_strategy("ddp", graph, cluster)
    on_cpu = world.device.type == "cpu"
    least = MIN_BUCKET_BYTES if on_cpu else graph.parameter_bytes / MOST_GPU_MESSAGES
    bucket = max(1024, min(max(8 * seconds / seconds_per_byte, least), MAX_BUCKET_BYTES, graph.parameter_bytes / 16))
    # NCCL runs a channel's collectives one after another, on one stream, and a slice costs it little.
    sizes = {"bucket": bucket, "slice_bytes": 2 * bucket if on_cpu else bucket, "in_flight": 2 if on_cpu else 1}
    return build_strategy("overlap", graph, cluster, **sizes)


def join_job(timeout: timedelta | None, device: torch.device, servers: bool = False) -> None:
    """Joins the process group of the launcher's environment, unless the user has created one.

    It uses the backend for tensors on `device`, the model's. With `servers`, ranks on processors are in it too.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise OffbeatError(
            f"there is no process group and {missing[0]} is not set: start the script with torchrun or offbeat run, "
            f"or call torch.distributed.init_process_group first"
        )
    on_gpus = (device.type == "cuda" or (servers and torch.cuda.is_available())) and dist.is_nccl_available()
    backend = ("cpu:gloo,cuda:nccl" if servers else "nccl") if on_gpus else "gloo"
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun keeps its store over a restart, with the addresses of ranks that are gone in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"offbeat/attempt{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _cluster_of(world: TorchWorld, given: ClusterSpec | None) -> ClusterSpec:
    """The user's cluster, or the nodes on which the job's ranks run, with the servers that their launcher has named."""
    cluster = given or _this_cluster(world)
    if servers := named_servers():
        cluster = cluster.with_servers(servers)
    if cluster.world_size != world.size:
        raise OffbeatError(
            f"the cluster {cluster.name!r} has {cluster.world_size} devices, the job has {world.size} ranks"
        )
    return cluster


def _this_cluster(world: TorchWorld) -> ClusterSpec:
    """The nodes on which the job's ranks run, as the ranks report them."""
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    places = world.all_gather_object((this_place().node, device))
    nodes = [node for node, _ in places]
    # Rank 0's: servers may have none, and all ranks must come to the same cluster.
    if places[0][1] is not None:
        return ClusterSpec.of_ranks(nodes, device=places[0][1]) or ClusterSpec.local(world.size)
    several = ClusterSpec.of_ranks(nodes, device="cpu") if len(set(nodes)) > 1 else None
    return several or ClusterSpec.local(world.size)
