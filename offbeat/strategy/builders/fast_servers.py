"""Unequal links: gradients summed by servers on the fastest links, the rest as in `overlap`."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders import overlap
from offbeat.strategy.builders._common import ServerLoads, Size, bytes_option, parts_within, server_ranks
from offbeat.strategy.model import Strategy


def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    threshold: Size = "1MiB",
    shard: Size = "512KiB",
    bucket: Size = "512KiB",
    in_flight: int = 4,
) -> Strategy:
    """Variables of at least `threshold` are cut into shards of at most `shard` bytes by rows, which servers keep.

    Use it on machines whose links differ in speed, where a ring is as slow as its slowest link.

    A ring of w ranks leads 2(w−1)/w of all bytes through its slowest link. A server's clients send each byte once and
    receive it once, in opposite directions, so that the slowest link carries less where the servers are elsewhere.

    Where the cluster has servers that hold no replica, all gradients are summed in slices of at most `shard` bytes by
    them and by workers with fast links, each as many as fit its link, and every replica applies the update. The sum of
    a slice is on its way back while others are still being computed, which new parameters cannot be.
    """
    limit, most = bytes_option("threshold", threshold), bytes_option("shard", shard, minimum=1024)
    base = overlap.build(graph, cluster, bucket=bucket, slice_bytes=most, in_flight=in_flight)
    if cluster.servers:
        return base.model_copy(update={"variables": {name: each.summed for name, each in base.variables.items()}})
    bandwidths = {rank: cluster.node_bandwidth(cluster.node_of(rank)) for rank in server_ranks(cluster, "nodes")}
    fastest = [rank for rank, bandwidth in bandwidths.items() if bandwidth == max(bandwidths.values())]
    loads = ServerLoads(fastest)
    served = {
        variable.name: loads.place(variable, parts_within(variable, most))
        for variable in graph.gradient_order
        if variable.bytes >= limit and not variable.sparse
    }
    return base.model_copy(update={"variables": base.variables | served})
