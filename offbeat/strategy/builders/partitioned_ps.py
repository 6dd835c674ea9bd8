"""Partitioned parameter servers → large variables spread by rows over all servers, small ones balanced."""

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


@register_builder("partitioned_ps")
def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    threshold: str | float = "1MiB",
    max_shards: int | None = None,
    servers: str = "nodes",
) -> Strategy:
    """The partitioning of AutoDist §3.1 (5): variables above `threshold` make one shard per server along axis 0.

    `max_shards` bounds the shards of one variable; `servers` is 'nodes' or 'ranks'.
    """
    limit, bound = bytes_option("threshold", threshold, minimum=0), optional_count("max_shards", max_shards)
    ranks = server_ranks(cluster, servers)
    loads = ServerLoads(ranks)
    return Strategy(
        variables={
            variable.name: loads.place(variable, shards_for(variable, limit, len(ranks), bound))
            for variable in trained(graph)
        }
    )
