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
    relayed: Size = "128KiB",
    bucket: Size = "512KiB",
    in_flight: int = 4,
) -> Strategy:
    """Cuts variables of at least `threshold` by rows into shards of at most `shard` bytes, which servers keep.

    Use it on machines whose links differ in speed, where a ring is as slow as its slowest link.

    A ring of w ranks sends 2(w−1)/w of all bytes over its slowest link. A server's clients send each byte once and
    receive it once, in opposite directions, so a slow link carries less if the servers are elsewhere.

    If the cluster has servers without a replica, they and the workers with fast links sum all gradients in slices of
    at most `relayed` bytes, each as many as its link allows, and every replica applies the update. The sum of a slice
    can return while other gradients are still being computed; new parameters cannot. A slice is small because it
    crosses two links one after the other, and its sum leaves only when the slowest rank has sent all of it. A message
    is no larger than a slice unless one module is: what the next forward needs first, such as an embedding, is complete
    last, and whatever shares its message keeps forward waiting.
    """
    limit, most = bytes_option("threshold", threshold), bytes_option("shard", shard, minimum=1024)
    least = bytes_option("relayed", relayed, minimum=1024)
    full = bytes_option("bucket", bucket)
    if cluster.servers:
        full, most = min(full, least), least
    base = overlap.build(graph, cluster, bucket=full, slice_bytes=most, in_flight=in_flight)
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
