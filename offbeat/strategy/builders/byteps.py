"""BytePS: small partitions on balanced servers, in the order in which the next forward needs them."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import Size, bytes_option, parts_within, rows, served, server_ranks, unfused
from offbeat.strategy.model import Schedule, Strategy, VariableConfig


def build(graph: ModelGraph, cluster: ClusterSpec, *, partition: Size = "4MiB", servers: str = "nodes") -> Strategy:
    """BytePS (Jiang et al., OSDI 2020) with ByteScheduler's priorities; 4 MB partitions are its default (dPRO §7.1).

    Use it to compare with BytePS; on equal machines a ring sends no more bytes.

    If the cluster has servers without a replica, they and the workers sum gradients in slices of at most
    `partition` bytes, each as many as fit its link, and every replica applies the update: BytePS's summation service.
    Elsewhere each variable is cut by rows into the fewest shards of at most `partition` bytes (a longer row stays
    whole), each on the lightest server, which updates it; sparse variables make one shard per server.
    """
    limit = bytes_option("partition", partition)
    if cluster.servers:
        schedule = Schedule(policy="priority", slice_bytes=max(1024, limit))
        return Strategy(variables=unfused(graph, lambda _: VariableConfig().summed), schedule=schedule)
    ranks = server_ranks(cluster, servers)

    def shards(variable: Variable) -> int:
        return min(len(ranks), rows(variable)) if variable.sparse else parts_within(variable, limit)

    return Strategy(variables=served(graph, ranks, shards), schedule=Schedule(policy="priority"))
