"""AutoDist's partition-then-all-reduce → large variables cut by rows, each shard all-reduced alone."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import (
    SPARSE_ALL_GATHER,
    bytes_option,
    count_option,
    parts_within,
    row_partition,
    trained,
)
from offbeat.strategy.model import Strategy, VariableConfig
from offbeat.strategy.registry import register_builder


@register_builder("partitioned_all_reduce")
def build(
    graph: ModelGraph, cluster: ClusterSpec, *, threshold: str | float = "4MiB", max_shards: int = 16
) -> Strategy:
    """The pattern AutoDist's search found for BERT-large and NCF (§3.3), where one flow cannot fill the network.

    Axis 0 of a variable above `threshold` is cut so that no shard exceeds it, into at most `max_shards` shards.
    """
    limit, bound = bytes_option("threshold", threshold), count_option("max_shards", max_shards)
    return Strategy(
        variables={
            variable.name: SPARSE_ALL_GATHER
            if variable.sparse
            else VariableConfig(partition=row_partition(variable, min(parts_within(variable, limit), bound)))
            for variable in trained(graph)
        }
    )
