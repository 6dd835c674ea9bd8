"""AutoDist's UnevenPartitionedPS: row shards of unequal sizes on balanced servers."""

from collections.abc import Sequence

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import ServerLoads, even_lengths, rows, server_ranks, trained
from offbeat.strategy.model import Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, servers: str = "nodes") -> Strategy:
    """As many shards as the smallest number that does not divide axis 0 (AutoDist's `UnevenPartitionedPS`).

    Use it for servers whose links differ in bandwidth.

    Between servers of unequal bandwidth the shards are cut in proportion to it, so that they take equally long.
    `servers` is 'nodes' or 'ranks'.
    """
    ranks = server_ranks(cluster, servers)
    speeds = {rank: _bandwidth(cluster, rank) for rank in ranks}
    loads = ServerLoads(ranks, speeds)
    configs = {}
    for variable in trained(graph):
        length = rows(variable)
        # The smallest number below the length that does not divide it; there is none for lengths 1 and 2.
        owners = loads.least(next((parts for parts in range(2, length) if length % parts), 1))
        lengths = _proportional_lengths(length, [speeds[owner] for owner in owners])
        configs[variable.name] = loads.place_lengths(variable, lengths, owners)
    return Strategy(variables=configs)


def _bandwidth(cluster: ClusterSpec, rank: int) -> float:
    """Bytes per second between a server and the best reachable rank of another node; 1 where there is no other node."""
    away = [other for other in range(cluster.world_size) if cluster.node_of(other) != cluster.node_of(rank)]
    return max((cluster.bandwidth(rank, other) for other in away), default=1.0)


def _proportional_lengths(length: int, speeds: Sequence[float]) -> list[int]:
    """Whole lengths of at least 1, as near to the speeds' shares of `length` as that allows."""
    if len(set(speeds)) == 1:
        return even_lengths(length, len(speeds))
    lengths: list[int] = []
    stop = 0
    for part in range(len(speeds)):
        ideal = round(length * sum(speeds[: part + 1]) / sum(speeds))
        start, stop = stop, max(stop + 1, min(ideal, length - (len(speeds) - part - 1)))
        lengths.append(stop - start)
    return lengths
