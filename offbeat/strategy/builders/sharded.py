"""ZeRO's synchronisation → buckets that are reduce-scattered, updated in shards and gathered again."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import (
    SPARSE_ALL_GATHER,
    bytes_option,
    fused,
    in_forward_order,
    size_buckets,
    trained,
)
from offbeat.strategy.model import Strategy
from offbeat.strategy.registry import register_builder


@register_builder("sharded")
def build(graph: ModelGraph, cluster: ClusterSpec, *, bucket: str | float = "25MiB") -> Strategy:
    """ZeRO (Rajbhandari et al., SC 2020, stages 1 and 2): each rank reduces and updates its part of every bucket.

    Gradients fill a bucket in the order in which backward completes them, each dtype its own; it closes once it holds
    `bucket` bytes. Sparse gradients are gathered.
    """
    limits = (bytes_option("bucket", bucket),)
    dense = [variable for variable in graph.gradient_order if not variable.sparse]
    configs = fused(size_buckets(dense, limits), synchronizer="sharded")
    configs |= {variable.name: SPARSE_ALL_GATHER for variable in trained(graph) if variable.sparse}
    return Strategy(variables=in_forward_order(graph, configs))
