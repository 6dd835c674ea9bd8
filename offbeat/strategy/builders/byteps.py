"""BytePS → small partitions on balanced servers, in the order in which the next forward needs them."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import (
    Size,
    bytes_option,
    parts_within,
    rows,
    served,
    server_ranks,
    server_speeds,
)
from offbeat.strategy.model import Schedule, Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, partition: Size = "4MiB", servers: str = "nodes") -> Strategy:
    """BytePS (Jiang et al., OSDI 2020) with ByteScheduler's priorities; 4 MB partitions are its default (dPRO §7.1).

    Use it to compare with BytePS; between equal machines a ring sends no more bytes.

    Each variable is cut by rows into the fewest shards of at most `partition` bytes (a longer row stays whole), each
    on the lightest server. Sparse variables make one shard per server.
    """
    limit = bytes_option("partition", partition)
    ranks = server_ranks(cluster, servers)

    def shards(variable: Variable) -> int:
        return min(len(ranks), rows(variable)) if variable.sparse else parts_within(variable, limit)

    return Strategy(
        variables=served(graph, ranks, shards, server_speeds(cluster)), schedule=Schedule(policy="priority")
    )
