"""Replicator: the graph-level configuration → which ranks hold a replica, and each one's share in the average."""

from dataclasses import fields

from offbeat.errors import StrategyError
from offbeat.graph.coarsen import segments
from offbeat.plan.draft import Draft
from offbeat.plan.model import Segment


def replicate(draft: Draft) -> None:
    """Places a replica on each rank the strategy names, and lays out the compute of one of them."""
    strategy = draft.strategy
    if strategy.operators:
        raise StrategyError(
            f"the strategy splits {len(strategy.operators)} operators over devices; "
            f"this version lowers strategies that replicate the graph"
        )
    draft.replicas = strategy.replicas or tuple(range(draft.cluster.world_size))
    shares = strategy.weights or (1.0,) * len(draft.replicas)
    total = sum(shares)
    draft.weights = tuple(share / total for share in shares)
    draft.segments = [
        Segment(*(getattr(segment, field.name) for field in fields(segment)))
        for segment in segments(draft.graph)
        if segment.phase != "optimizer"
    ]
