"""Operator fusion: modules that are compiled into one operator each (dPRO's theorem 1).

Theorem 1: fusing p_{n-1} and p_n pays if the compute it saves is at least q_{n-1}, the time to synchronise the tensor
that must now wait for the fused operator's end. A compiled module's time is the one measured offline where it is given
(`fused_seconds`), else what `offbeat.plan.fuse` predicts. With symmetry on, a decision for one of several alike modules
(`layers.0`, `layers.1`, ...) is taken for all of them.

Compiling changes what runs more than any other pass, so by default it is only tried for modules that were measured.
"""

import re
from collections.abc import Iterator

from offbeat.plan import Plan, Segment
from offbeat.plan.memory import within
from offbeat.search.oracle import arrays_of
from offbeat.search.passes.modules import blocks
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Strategy


@register_pass("op_fusion", order=40)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Each kind of measured module, compiled."""
    yield from _compiled(candidate, problem, sorted(problem.fused_seconds))


@register_pass("op_fusion_predicted", order=45, default=False)
def propose_predicted(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Each kind of block, compiled, by predicted times; runs only if it is named."""
    yield from _compiled(candidate, problem, [path for path in blocks(problem.graph) if path])


def _compiled(candidate: Candidate, problem: Problem, paths: list[str]) -> Iterator[Strategy]:
    done = {path for region in candidate.strategy.fusion for path in region}
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kind = re.sub(r"\d+", "*", path) if problem.oracle.symmetry else path
        if path not in done:
            kinds.setdefault(kind, []).append(path)
    for alike in kinds.values():
        regions = tuple((path,) for path in alike)
        strategy = candidate.strategy.model_copy(update={"fusion": candidate.strategy.fusion + regions})
        plan = problem.with_fused_seconds(problem.oracle.plan(strategy))
        if pays(candidate.plan, plan, alike[0], problem):
            yield strategy


def pays(before: Plan, after: Plan, path: str, problem: Problem) -> bool:
    """Theorem 1, with the time of the message that would have left first in place of q_{n-1}."""
    node = before.cluster.device_of(before.replicas[0])

    def inside(segment: Segment) -> bool:
        return any(within(before.graph.operator(name).module, path) for name in segment.operators)

    def backward_seconds(plan: Plan) -> float:
        return sum(
            s.estimate(node.peak_flops, node.memory_bandwidth)
            for s in plan.segments
            if s.phase == "backward" and inside(s)
        )

    saved = backward_seconds(before) - backward_seconds(after)
    held_up = [name for s in before.segments if s.phase == "backward" and inside(s) for name in s.completes][:-1]
    arrays = arrays_of(before, problem.costs)
    if not held_up or arrays is None:
        return saved >= 0
    messages = {m.index for m in before.messages if set(m.variables) <= set(held_up)}
    sent = [arrays.occupied[i] for i, t in enumerate(before.communication) if t.message in messages]
    return saved >= 0 and saved >= min(sent, default=0.0)
