"""PyTorch DistributedDataParallel's default: buckets in gradient order, closed by size."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import Size, bytes_option, count_option, fused, size_buckets
from offbeat.strategy.model import Schedule, Strategy


def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    first_bucket: Size = "1MiB",
    bucket: Size = "25MiB",
    growth: int | None = None,
) -> Strategy:
    """The buckets DDP has after its first step (Li et al., VLDB 2020, §4.2; torch's `Reducer::rebuild_buckets`).

    Use it as the baseline: it is what DistributedDataParallel does by default.

    Gradients fill a bucket in the order in which backward completes them, each dtype its own; it closes once it holds
    `first_bucket` bytes, later ones `bucket`. With `growth`, the limit is multiplied by it from one bucket to the next,
    as DDP's `bucket_cap_mb_list` can say. A sparse gradient travels alone, and `step()` waits for everything.
    """
    limits = [bytes_option("first_bucket", first_bucket)]
    last = bytes_option("bucket", bucket)
    factor = 1 if growth is None else count_option("growth", growth, minimum=2)
    while factor > 1 and limits[-1] * factor < last:
        limits.append(limits[-1] * factor)
    buckets = size_buckets(graph, *limits, last)
    return Strategy(variables=fused(graph, buckets), schedule=Schedule(mode="barrier"))
