"""ZeRO's synchronisation: buckets that are reduce-scattered, updated in shards and gathered again."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import Size, bytes_option, fused, size_buckets
from offbeat.strategy.model import Shard, Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, bucket: Size = "25MiB") -> Strategy:
    """ZeRO (Rajbhandari et al., SC 2020, stages 1 and 2): each rank reduces and updates its part of every bucket.

    Use it when memory is short: each rank keeps only its part of the optimizer's state.

    Gradients fill a bucket in the order in which backward completes them, each dtype its own; it closes once it holds
    `bucket` bytes. Sparse gradients are gathered.
    """
    buckets = size_buckets(graph, bytes_option("bucket", bucket))
    return Strategy(variables=fused(graph, buckets, Shard(synchronizer="sharded")))
