"""AutoDist's hand-tuned PS builder → partitioned servers that each node reaches through one transfer station."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import (
    ServerLoads,
    bytes_option,
    optional_count,
    server_ranks,
    shards_for,
    trained,
)
from offbeat.strategy.model import Strategy
from offbeat.strategy.registry import register_builder


@register_builder("hierarchical_ps")
def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    threshold: str | float = "1MiB",
    max_shards: int | None = None,
    servers: str = "nodes",
) -> Strategy:
    """AutoDist §3.1 (5) in full: partitioned servers, and reduce and broadcast in two levels on nodes of many ranks.

    The first rank of each node with more than one replica is its station. Options as in `partitioned_ps`; sparse
    gradients go to their servers directly.
    """
    limit, bound = bytes_option("threshold", threshold, minimum=0), optional_count("max_shards", max_shards)
    ranks = server_ranks(cluster, servers)
    per_node = [tuple(cluster.ranks_of(node)) for node in range(len(cluster.nodes))]
    stations = tuple(members[0] for members in per_node if len(members) > 1)
    loads = ServerLoads(ranks)
    return Strategy(
        variables={
            variable.name: loads.place(variable, shards_for(variable, limit, len(ranks), bound), stations)
            for variable in trained(graph)
        }
    )
