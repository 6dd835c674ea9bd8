"""AutoDist's partition-then-all-reduce: large variables cut by rows, each shard all-reduced alone."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import Size, bytes_option, count_option, parts_within, row_partition, unfused
from offbeat.strategy.model import Strategy, VariableConfig


def build(graph: ModelGraph, cluster: ClusterSpec, *, threshold: Size = "4MiB", max_shards: int = 16) -> Strategy:
    """The pattern AutoDist's search found for BERT-large and NCF (§3.3), where one flow cannot fill the network.

    Use it for a few very large variables on links that one flow cannot fill.

    Axis 0 of a variable above `threshold` is cut so that no shard exceeds it, into at most `max_shards` shards.
    """
    limit, bound = bytes_option("threshold", threshold), count_option("max_shards", max_shards)

    def partitioned(variable: Variable) -> VariableConfig:
        return VariableConfig(partition=row_partition(variable, min(parts_within(variable, limit), bound)))

    return Strategy(variables=unfused(graph, partitioned))
