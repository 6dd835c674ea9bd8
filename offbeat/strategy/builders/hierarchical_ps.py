"""AutoDist's hand-tuned PS builder: partitioned servers that each node reaches through one transfer station."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders import partitioned_ps
from offbeat.strategy.builders._common import Size
from offbeat.strategy.model import Strategy


def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    threshold: Size = "1MiB",
    max_shards: int | None = None,
    servers: str = "nodes",
) -> Strategy:
    """AutoDist §3.1 (5) in full: partitioned servers, and reduce and broadcast in two levels on nodes of many ranks.

    Use it if nodes have several ranks and the links between nodes are slow.

    The first rank of each node with more than one replica is its station. Options as in `partitioned_ps`; sparse
    gradients go to their servers directly.
    """
    stations = {"stations": cluster.stations}
    base = partitioned_ps.build(graph, cluster, threshold=threshold, max_shards=max_shards, servers=servers)
    configs = dict(base.variables)
    for name, config in base.variables.items():
        if config.shards[0].synchronizer == "parameter_server":
            shards = tuple(shard.model_copy(update=stations) for shard in config.shards)
            configs[name] = config.model_copy(update={"shards": shards})
    return base.model_copy(update={"variables": configs})
