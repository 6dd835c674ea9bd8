"""PyTorch DistributedDataParallel's default → buckets in gradient order, closed by size."""

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
from offbeat.strategy.model import Schedule, Strategy
from offbeat.strategy.registry import register_builder


@register_builder("ddp")
def build(
    graph: ModelGraph, cluster: ClusterSpec, *, first_bucket: str | float = "1MiB", bucket: str | float = "25MiB"
) -> Strategy:
    """The buckets DDP has after its first step (Li et al., VLDB 2020, §4.2; torch's `Reducer::rebuild_buckets`).

    Gradients fill a bucket in the order in which backward completes them, each dtype its own; it closes once it holds
    `first_bucket` bytes, later ones `bucket`. A sparse gradient travels alone, and `step()` waits for everything.
    """
    limits = (bytes_option("first_bucket", first_bucket), bytes_option("bucket", bucket))
    dense = [variable for variable in graph.gradient_order if not variable.sparse]
    configs = fused(size_buckets(dense, limits))
    configs |= {variable.name: SPARSE_ALL_GATHER for variable in trained(graph) if variable.sparse}
    return Strategy(variables=in_forward_order(graph, configs), schedule=Schedule(mode="barrier"))
