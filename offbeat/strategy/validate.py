"""Strategy + graph + cluster → nothing, or one sentence that says where they do not fit."""

from collections.abc import Iterable

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.model import SERVERS, Shard, Strategy, VariableConfig
from offbeat.units import quote

_SPARSE = ("sparse_all_gather", "sparse_parameter_server")


def check_fits(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec) -> None:
    """Raises StrategyError unless the strategy can be lowered for this graph and cluster."""
    _check_made_for(strategy, graph, cluster)
    world = cluster.world_size
    _check_ranks(strategy.replicas, world, "replicas")
    replicas = frozenset(strategy.replicas or range(world))
    if strategy.weights and len(strategy.weights) != len(replicas):
        raise StrategyError(f"{len(strategy.weights)} weights are given for {len(replicas)} replicas")
    modules = _module_paths(graph)
    for path in (*strategy.recompute, *(path for region in strategy.fusion for path in region)):
        if path not in modules:
            raise StrategyError(f"the model has no module {quote(path)} to recompute or fuse")
    for name in strategy.operators:
        if name not in graph.operator_index:
            raise StrategyError(f"operators: the model has no operator {quote(name)}")
    for name, config in strategy.variables.items():
        if name not in graph.variable_index:
            raise StrategyError(f"variables: the model {graph.name!r} has no trainable variable {quote(name)}")
        _check_variable(graph.variable(name), config, replicas, cluster)


def transfer(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """The strategy carried over to another model or cluster: what fits is kept, the rest falls back to all-reduce.

    Ranks beyond the new cluster wrap around, so that server loads stay spread.
    """
    replicas = frozenset(range(cluster.world_size))
    moved = strategy.model_copy(
        update={
            "model": graph.name,
            "graph": graph.signature,
            "cluster": cluster.digest,
            "replicas": (),
            "weights": (),
            "recompute": tuple(path for path in strategy.recompute if path in _module_paths(graph)),
            "fusion": (),
            "operators": {},
            "variables": {},
            "schedule": strategy.schedule.model_copy(update={"policy": "priority", "order": ()})
            if strategy.schedule.policy == "explicit"
            else strategy.schedule,
        }
    )
    kept: dict[str, VariableConfig] = {}
    for name, config in strategy.variables.items():
        if name not in graph.variable_index:
            continue
        wrapped = config.model_copy(update={"shards": tuple(_wrap_ranks(shard, cluster) for shard in config.shards)})
        try:
            _check_variable(graph.variable(name), wrapped, replicas, cluster)
        except StrategyError:
            continue
        kept[name] = wrapped
    return moved.model_copy(update={"variables": kept})


def _check_made_for(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec) -> None:
    if strategy.graph and strategy.graph != graph.signature:
        raise StrategyError(
            f"the strategy was made for model {strategy.model!r} (graph {strategy.graph}), not for {graph.name!r} "
            f"(graph {graph.signature}); offbeat.transfer carries it over"
        )
    if strategy.cluster and strategy.cluster != cluster.digest:
        raise StrategyError(
            f"the strategy was made for cluster {strategy.cluster}, not for {cluster.name!r} ({cluster.digest}); "
            f"offbeat.transfer carries it over"
        )


def _check_variable(variable: Variable, config: VariableConfig, replicas: frozenset[int], cluster: ClusterSpec) -> None:
    where = f"variable {variable.name!r}"
    if config.partition and len(config.partition) != len(variable.shape):
        raise StrategyError(
            f"{where}: partition {list(config.partition)} has {len(config.partition)} axes, "
            f"the variable has shape {list(variable.shape)}"
        )
    for axis, parts in enumerate(config.partition):
        length = variable.shape[axis]
        if parts > max(length, 1):
            raise StrategyError(f"{where}: axis {axis} has {length} elements and cannot make {parts} shards")
        if config.cuts and config.cuts[axis] and config.cuts[axis][-1] >= length:
            raise StrategyError(f"{where}: cut {config.cuts[axis][-1]} lies outside axis {axis} of {length} elements")
    for shard in config.shards:
        _check_shard_ranks(where, shard, replicas, cluster)
        _check_synchronizer(where, variable, config, shard)


def _check_shard_ranks(where: str, shard: Shard, replicas: frozenset[int], cluster: ClusterSpec) -> None:
    for field in ("placement", "stations", "reduction_order"):
        ranks = getattr(shard, field)
        _check_ranks(ranks, cluster.world_size, f"{where}: {field}")
        for rank in ranks:
            if rank not in replicas:
                raise StrategyError(f"{where}: {field} names rank {rank}, which holds no replica")
    if shard.reduction_order and len(shard.reduction_order) != len(replicas):
        raise StrategyError(f"{where}: reduction_order {list(shard.reduction_order)} does not name every replica once")
    if len({cluster.node_of(rank) for rank in shard.stations}) != len(shard.stations):
        raise StrategyError(f"{where}: stations {list(shard.stations)} name two ranks of one node")
    if shard.synchronizer not in SERVERS and shard.placement and set(shard.placement) != replicas:
        raise StrategyError(f"{where}: {shard.synchronizer} places the shard on every replica; leave placement out")


def _check_synchronizer(where: str, variable: Variable, config: VariableConfig, shard: Shard) -> None:
    if shard.synchronizer in _SPARSE:
        if not variable.sparse:
            raise StrategyError(f"{where}: {shard.synchronizer} needs a sparse gradient, this one is dense")
        if any(parts > 1 for parts in config.partition[1:]):
            raise StrategyError(f"{where}: a sparse variable is partitioned by rows only, not {list(config.partition)}")
    if shard.synchronizer == "factor_broadcast":
        if not variable.factor_rows:
            raise StrategyError(f"{where}: factor_broadcast needs the weight of a dense layer")
        if config.shard_count > 1:
            raise StrategyError(f"{where}: factor_broadcast needs the whole variable, not {config.shard_count} shards")


def _check_ranks(ranks: Iterable[int], world: int, what: str) -> None:
    for rank in ranks:
        if rank >= world:
            raise StrategyError(f"{what}: rank {rank} is outside the cluster of {world} ranks")


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


def _module_paths(graph: ModelGraph) -> frozenset[str]:
    paths: set[str] = set()
    for operator in graph.operators:
        path = operator.module
        while path and path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
    return frozenset(paths)
