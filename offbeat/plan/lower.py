"""Lower a model, a cluster and a strategy to a Plan."""

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.plan.compress import compress
from offbeat.plan.compute import accumulate, fuse, recompute, replicate
from offbeat.plan.fsdp import shard_units
from offbeat.plan.messages import partition, synchronise
from offbeat.plan.model import Draft, Plan
from offbeat.plan.schedule import schedule
from offbeat.strategy import Strategy, check_fits

KERNELS = (replicate, fuse, recompute, accumulate, partition, synchronise, compress, shard_units, schedule)
"""The rewriting kernels in the order in which they are applied; each reads its part of the strategy."""


def lower(graph: ModelGraph, cluster: ClusterSpec, strategy: Strategy, rank: int | None = None) -> Plan:
    """Returns the plan of the whole cluster, or of one rank.

    A rank's part depends only on these three values, so every process derives its own (AutoDist §2.3) and all agree; it
    equals `lower(graph, cluster, strategy).for_rank(rank)`. A rank without a replica only has tasks for the messages it
    owns.
    """
    check_fits(strategy, graph, cluster)
    draft = Draft(graph, cluster, strategy, rank)
    for kernel in KERNELS:
        kernel(draft)
    if rank is not None and not 0 <= rank < cluster.world_size:
        raise StrategyError(f"rank {rank} is outside the cluster of {cluster.world_size} ranks")
    plan = Plan(
        graph=graph,
        cluster=cluster,
        strategy=strategy,
        replicas=draft.replicas,
        weights=draft.weights,
        segments=tuple(draft.segments),
        messages=tuple(draft.messages),
        tasks=tuple(draft.tasks),
        rank=rank,
    )
    plan.check()
    return plan
