"""BytePS → small partitions on balanced servers, the ones that the next forward needs first going first."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import ServerLoads, bytes_option, parts_within, rows, server_ranks, trained
from offbeat.strategy.model import Schedule, Strategy
from offbeat.strategy.registry import register_builder


@register_builder("byteps")
def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    partition: str | float = "4MiB",
    credit_bytes: str | float | None = None,
    servers: str = "nodes",
) -> Strategy:
    """BytePS (Jiang et al., OSDI 2020) with ByteScheduler's priorities; 4 MB partitions are its default (dPRO §7.1).

    Each variable is cut by rows into the fewest shards of at most `partition` bytes (a longer row stays whole), each
    on the lightest server. `credit_bytes` limits the bytes under way; sparse variables make one shard per server.
    """
    limit = bytes_option("partition", partition)
    credit = None if credit_bytes is None else bytes_option("credit_bytes", credit_bytes, minimum=1024)
    ranks = server_ranks(cluster, servers)
    loads = ServerLoads(ranks)
    return Strategy(
        variables={
            variable.name: loads.place(
                variable, min(len(ranks), rows(variable)) if variable.sparse else parts_within(variable, limit)
            )
            for variable in trained(graph)
        },
        schedule=Schedule(policy="priority", credit_bytes=credit),
    )
