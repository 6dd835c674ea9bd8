"""Operator fusion: regions of modules → compute segments merged into one.

A fused region reads its inputs and writes its outputs once, so traffic between its own operators disappears; its
gradients all become ready when it ends (dPRO §2.3), which is what may make fusion not worth it.
"""

from dataclasses import replace
from itertools import groupby

from offbeat.plan.draft import Draft
from offbeat.plan.memory import within
from offbeat.plan.model import Segment


def fuse(draft: Draft) -> None:
    """Merges adjacent segments of one phase that lie in one region."""
    for number, region in enumerate(draft.strategy.fusion):
        merged: list[Segment] = []
        for (inside, _), run in groupby(draft.segments, key=lambda s: (_inside(draft, s, region), s.phase)):
            segments = list(run)
            merged.extend([_merge(draft, number, segments)] if inside else segments)
        draft.segments[:] = merged


def _inside(draft: Draft, segment: Segment, region: tuple[str, ...]) -> bool:
    if segment.recomputed:
        return False
    modules = (draft.graph.operator(name).module for name in segment.operators)
    return all(any(within(module, path) for path in region) for module in modules)


def _merge(draft: Draft, number: int, segments: list[Segment]) -> Segment:
    operators = tuple(name for segment in segments for name in segment.operators)
    own = set(operators)
    read_again = {name for op in map(draft.graph.operator, operators) for name in op.inputs if name in own}
    internal = sum(sum(out.bytes for out in draft.graph.operator(name).outputs) for name in read_again)
    measured = [segment.seconds for segment in segments]
    return replace(
        segments[0],
        name=f"fused{number}.{segments[0].name}",
        operators=operators,
        flops=sum(segment.flops for segment in segments),
        # Each internal tensor was written once and read at least once.
        bytes_moved=max(0.0, sum(segment.bytes_moved for segment in segments) - 2 * internal),
        activation_bytes=sum(segment.activation_bytes for segment in segments),
        seconds=None if None in measured else sum(second for second in measured if second is not None),
        reads=tuple(name for segment in segments for name in segment.reads),
        completes=tuple(name for segment in segments for name in segment.completes),
    )
