"""Check that a strategy fits a graph and a cluster, with one sentence where it does not."""

from collections.abc import Iterable, Iterator

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph, Variable
from offbeat.graph.blocks import around
from offbeat.graph.model import within
from offbeat.strategy.model import SERVERS, FullyShard, Shard, Strategy, VariableConfig
from offbeat.units import quote

_SERVED_ENCODERS = ("none", "fp16", "bf16")
"""Encoders whose sum a server without a replica can take: others keep state that follows the replicas'."""
_SPARSE = ("sparse_all_gather", "sparse_parameter_server")


def check_fits(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec) -> None:
    """Raises StrategyError unless the strategy can be lowered for this graph and cluster."""
    problem = next(_problems(strategy, graph, cluster), None)
    if problem is not None:
        raise StrategyError(problem)


def transfer(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """Adapts a strategy to another model or cluster: what fits is kept, the rest falls back to all-reduce.

    Ranks beyond the new cluster wrap around, so that server loads stay spread.
    """
    schedule = strategy.schedule
    if schedule.policy == "explicit":
        schedule = schedule.model_copy(update={"policy": "priority", "order": (), "pinned": False})
    kept: dict[str, VariableConfig] = {}
    for name, config in strategy.variables.items():
        if name in graph.variable_index:
            shards = tuple(_wrap_ranks(shard, cluster) for shard in config.shards)
            wrapped = config.model_copy(update={"shards": shards})
            if not any(_variable_problems(graph.variable(name), wrapped, cluster, cluster.workers)):
                kept[name] = wrapped
    return strategy.model_copy(
        update={
            "model": graph.name,
            "graph": graph.signature,
            "cluster": cluster.digest,
            "replicas": (),
            "weights": (),
            "recompute": tuple(path for path in strategy.recompute if path in _module_paths(graph)),
            "fusion": (),
            "operators": {},
            "variables": kept,
            "schedule": schedule,
            "fsdp": None if strategy.fsdp is None else _carried_over(strategy.fsdp, graph, cluster),
        }
    )


def _carried_over(fsdp: FullyShard, graph: ModelGraph, cluster: ClusterSpec) -> FullyShard:
    """The units that another model has too; one group of ranks where the cluster does not divide into as many."""
    fits = {"replicas": fsdp.replicas if cluster.world_size % fsdp.replicas == 0 else 1}
    shards = cluster.world_size // fits["replicas"]
    known = _module_paths(graph) | {""}
    units = {
        path: True if not isinstance(reshard, bool) and not _smaller(reshard, shards) else reshard
        for path, reshard in fsdp.units.items()
        if path in known and not any(unit_problems(FullyShard(units={path: True}), graph))
    }
    return fsdp.model_copy(update={"units": units, **fits})


def _smaller(group: int, shards: int) -> bool:
    """Whether gathered variables can be kept in parts on groups of so many of the ranks that share them."""
    return 1 < group < shards and shards % group == 0


def unit_problems(fsdp: FullyShard, graph: ModelGraph) -> Iterator[str]:
    """Why `fully_shard` could not wrap these modules: something outside a unit reads or shares its variables."""
    for variable in graph.variables:
        unit = fsdp.unit_of(variable.name)
        other = next((alias for alias in variable.aliases if fsdp.unit_of(alias) != unit), None)
        if other is not None:
            yield f"fsdp: {variable.name!r} and {other!r} are one tensor and must lie in one unit"
        if variable.sparse:
            yield f"fsdp: {variable.name!r} has a sparse gradient, which fully_shard cannot reduce"
    for operator in graph.phase("forward"):
        for name in operator.variables:
            unit = fsdp.unit_of(name)
            if unit and not within(operator.module, unit):
                where = repr(operator.module) if operator.module else "the model itself"
                yield f"fsdp: unit {unit!r} holds {name!r}, which {where} reads; leave it to a unit around both"


def _fsdp_problems(fsdp: FullyShard, graph: ModelGraph, cluster: ClusterSpec) -> Iterator[str]:
    world, modules = cluster.world_size, _module_paths(graph)
    if world % fsdp.replicas:
        yield f"fsdp: {fsdp.replicas} replicas do not divide the {world} ranks evenly"
    for path, reshard in fsdp.units.items():
        if path and path not in modules:
            yield f"fsdp: the model has no module {quote(path)}"
        if not isinstance(reshard, bool) and not _smaller(reshard, world // fsdp.replicas):
            yield f"fsdp: unit {quote(path)}: {reshard} is no smaller group that divides {world // fsdp.replicas} ranks"
    yield from unit_problems(fsdp, graph)


def _problems(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec) -> Iterator[str]:
    if strategy.graph and strategy.graph != graph.signature:
        made, here = f"model {strategy.model!r} (graph {strategy.graph})", f"{graph.name!r} (graph {graph.signature})"
        yield f"the strategy was made for {made}, not for {here}; offbeat.transfer carries it over"
    if strategy.cluster and strategy.cluster != cluster.digest:
        made, here = f"cluster {strategy.cluster}", f"{cluster.name!r} ({cluster.digest})"
        yield f"the strategy was made for {made}, not for {here}; offbeat.transfer carries it over"
    world = cluster.world_size
    yield from _outside(strategy.replicas, world, "replicas")
    replicas = strategy.replicas or cluster.workers
    if strategy.weights and len(strategy.weights) != len(replicas):
        yield f"{len(strategy.weights)} weights are given for {len(replicas)} replicas"
    modules = _module_paths(graph)
    for path in (*strategy.recompute, *(path for region in strategy.fusion for path in region)):
        if path not in modules:
            yield f"the model has no module {quote(path)} to recompute or fuse"
    if strategy.fsdp is not None:
        yield from _fsdp_problems(strategy.fsdp, graph, cluster)
    for name in strategy.operators:
        if name not in graph.operator_index:
            yield f"operators: the model has no operator {quote(name)}"
    for name, config in strategy.variables.items():
        if name not in graph.variable_index:
            yield f"variables: the model {graph.name!r} has no trainable variable {quote(name)}"
        else:
            for problem in _variable_problems(graph.variable(name), config, cluster, replicas):
                yield f"variable {name!r}: {problem}"


def _variable_problems(
    variable: Variable, config: VariableConfig, cluster: ClusterSpec, replicas: tuple[int, ...]
) -> Iterator[str]:
    partition, shape = config.partition, list(variable.shape)
    if partition and len(partition) != len(shape):
        yield f"partition {list(partition)} has {len(partition)} axes, the variable has shape {shape}"
    for axis, (parts, length) in enumerate(zip(partition, shape, strict=False)):
        if parts > max(length, 1):
            yield f"axis {axis} has {length} elements and cannot make {parts} shards"
        if config.cuts and config.cuts[axis] and config.cuts[axis][-1] >= length:
            yield f"cut {config.cuts[axis][-1]} lies outside axis {axis} of {length} elements"
    for shard in config.shards:
        yield from _rank_problems(shard, cluster, replicas)
        if shard.synchronizer in _SPARSE:
            if not variable.sparse:
                yield f"{shard.synchronizer} needs a sparse gradient, this one is dense"
            if any(parts > 1 for parts in partition[1:]):
                yield f"a sparse variable is partitioned by rows only, not {list(partition)}"
        if shard.synchronizer == "factor_broadcast":
            if not variable.factor_rows:
                yield "factor_broadcast needs the weight of a dense layer"
            if config.shard_count > 1:
                yield f"factor_broadcast needs the whole variable, not {config.shard_count} shards"


def _rank_problems(shard: Shard, cluster: ClusterSpec, replicas: tuple[int, ...]) -> Iterator[str]:
    world = cluster.world_size
    for field in ("placement", "stations", "reduction_order"):
        yield from _outside(getattr(shard, field), world, field)
    if shard.reduction_order and sorted(shard.reduction_order) != sorted(replicas):
        yield f"reduction_order {list(shard.reduction_order)} does not name every replica once"
    if len({cluster.node_of(rank) for rank in shard.stations}) != len(shard.stations):
        yield f"stations {list(shard.stations)} name two ranks of one node"
    apart = next((rank for rank in shard.stations if rank not in replicas), None)
    if apart is not None:
        yield f"station {apart} holds no replica"
    if shard.owner is not None and shard.owner not in replicas and shard.encoder.name not in _SERVED_ENCODERS:
        yield f"encoder {shard.encoder.name!r} needs a server that holds a replica, which rank {shard.owner} does not"
    placed = (*SERVERS, "summation_server")
    if shard.synchronizer not in placed and shard.placement and len(shard.placement) != len(replicas):
        yield f"{shard.synchronizer} places the shard on every replica; leave placement out"


def _outside(ranks: Iterable[int], world: int, what: str) -> Iterator[str]:
    return (f"{what}: rank {rank} is outside the cluster of {world} ranks" for rank in ranks if rank >= world)


def _wrap_ranks(shard: Shard, cluster: ClusterSpec) -> Shard:
    world = cluster.world_size
    stations = {cluster.node_of(rank % world): rank % world for rank in reversed(shard.stations)}
    return shard.model_copy(
        update={
            "placement": tuple(dict.fromkeys(rank % world for rank in shard.placement)),
            "stations": tuple(sorted(stations.values())),
            "reduction_order": (),
        }
    )


def _module_paths(graph: ModelGraph) -> set[str]:
    """The modules that operators belong to, and all modules around them."""
    modules = {operator.module for operator in graph.operators}
    return {path for module in modules for path in around(module)} - {""}
