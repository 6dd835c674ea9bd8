"""Partitioned parameter servers: large variables spread by rows over all servers, small ones balanced."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import (
    Size,
    bytes_option,
    count_option,
    served,
    server_ranks,
    server_speeds,
    shards_for,
)
from offbeat.strategy.model import Strategy


def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    threshold: Size = "1MiB",
    max_shards: int | None = None,
    servers: str = "nodes",
) -> Strategy:
    """The partitioning of AutoDist §3.1 (5): variables above `threshold` make one shard per server along axis 0.

    Use it if a few large variables would overload one server.

    `max_shards` bounds the shards of one variable; `servers` is 'nodes' or 'ranks'.
    """
    limit = bytes_option("threshold", threshold, minimum=0)
    ranks = server_ranks(cluster, servers)
    most = len(ranks) if max_shards is None else min(len(ranks), count_option("max_shards", max_shards))
    speeds = server_speeds(cluster)
    return Strategy(variables=served(graph, ranks, lambda variable: shards_for(variable, limit, most), speeds))
