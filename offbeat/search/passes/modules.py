"""Passes that change how modules are computed: recomputed, in micro-batches, compiled, or in bfloat16.

Recomputing and micro-batches save memory and are used as little as the limit allows. Compiling is operator fusion:

    theorem 1   fusing p_{n-1} and p_n pays, where compute is the bottleneck, if it saves at least the time to
                synchronise q_{n-1}, which must now wait for the fused operator's end          `op_fusion_pays`
    theorem 3   where operators are fused, so should their tensors be, and where tensors are, so should the operators
                that complete them                                                            `op_fusion`

In a region of several operators q_{n-1} is all that was ready before its last one. What the theorems are for is tried
first, and replay decides on all: theorem 1 says nothing where the network is the bottleneck. Compiling and autocast
change what runs more than any other pass, so they are only tried for blocks that were measured so on a device
(`ModelGraph.blocks`, made by `offbeat.profile.blocks`), and autocast only with the user's leave. With symmetry on, a
decision for one of several alike regions (`layers.0`, `layers.1`, ...) is taken for all of them.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from offbeat.graph.blocks import blocks
from offbeat.graph.model import within
from offbeat.plan import Plan, Segment
from offbeat.search.arrange import arranged, arrangement_of
from offbeat.search.passes.problem import AMP, Candidate, Problem, register_pass
from offbeat.simulate.fast.arrays import arrays_of
from offbeat.strategy import Strategy

_MOST_MICRO_BATCHES = 64


@register_pass("recompute", aim="memory", order=10)
def recompute(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Modules whose activations are computed again in backward: the fewest that fit, then all.

    Modules that repeat the least work for each byte they free come first. Work is in seconds where all operators were
    measured (times what recomputing was measured to repeat of them), else in FLOP and bytes moved.
    """
    done = candidate.strategy.recompute
    forward = problem.graph.phase("forward")
    measured = all(op.seconds is not None for op in forward)
    repeated = {block.modules: block.recomputing() for block in problem.graph.blocks}
    cost = {}
    for path in blocks(problem.graph):
        operators = [op for op in forward if within(op.module, path)]
        work = sum((op.seconds or 0.0) if measured else op.flops + op.bytes_moved for op in operators)
        share = repeated.get((path,))
        work *= 1.0 if share is None else share
        freed = sum(op.activation_bytes for op in operators)
        if freed and path not in done:
            cost[path] = work / freed
    ranked = sorted(cost, key=lambda path: cost[path])
    if not ranked:
        return

    def recomputed(count: int) -> Strategy:
        return candidate.strategy.model_copy(update={"recompute": (*done, *ranked[:count])})

    fewest = 1 + bisect_left(
        range(1, len(ranked)), True, key=lambda count: problem.fits(problem.evaluate(recomputed(count), "trial"))
    )
    yield recomputed(fewest)
    if fewest < len(ranked):
        yield recomputed(len(ranked))


@register_pass("accumulate", aim="memory", order=20)
def micro_batches(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """The smallest number of equal micro-batches that fits; the largest if none does."""
    batch = next((tensor.shape[0] for tensor in problem.graph.inputs if tensor.shape), _MOST_MICRO_BATCHES)
    most = min(batch, _MOST_MICRO_BATCHES)
    counts = [n for n in range(2, most + 1) if batch % n == 0 and n > candidate.strategy.accumulation]
    for count in counts if problem.micro_batches else ():
        strategy = candidate.strategy.model_copy(update={"accumulation": count})
        if count == counts[-1] or problem.fits(problem.evaluate(strategy, "trial")):
            yield strategy
            return


Region = tuple[str, ...]


@register_pass("op_fusion", order=40)
def op_fusion(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Each kind of region that was measured compiled, with its gradients in one message and unchanged."""
    kinds: dict[str, list[Region]] = defaultdict(list)
    taken = set().union(*candidate.strategy.fusion)
    for block in problem.graph.blocks:
        if "compiled" in block.seconds and taken.isdisjoint(block.modules):
            name = " ".join(block.modules)
            kinds[re.sub(r"\d+", "*", name) if problem.symmetry else name].append(block.modules)
    later: list[Strategy] = []
    for alike in kinds.values():
        strategy = candidate.strategy.model_copy(update={"fusion": (*candidate.strategy.fusion, *alike)})
        made = problem.evaluate(strategy, "op_fusion")
        proposed = [*_with_tensors_fused(made, alike, problem), strategy]
        if _together(candidate.plan, alike[0]) or op_fusion_pays(candidate.plan, made.plan, alike[0], problem):
            yield from proposed
        else:
            later += proposed
    yield from later


@register_pass("amp", order=30)
def amp(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Forward under autocast to bfloat16, if the user allows it and the model's blocks were measured with it."""
    measured = any("bf16" in block.seconds for block in problem.graph.blocks)
    if AMP in problem.allow and measured and candidate.strategy.precision is None:
        yield candidate.strategy.model_copy(update={"precision": "bf16"})


def op_fusion_pays(before: Plan, after: Plan, region: Region, problem: Problem) -> bool:
    """Theorem 1 for a region, of whose gradients all but those of its last operator are q_{n-1}."""
    node = before.cluster.device_of(before.replicas[0])
    inside = {operator.name for operator in before.graph.operators if _holds(region, operator.module)}

    def backward(plan: Plan) -> list[Segment]:
        return [s for s in plan.segments if s.phase == "backward" and not inside.isdisjoint(s.operators)]

    def seconds(plan: Plan) -> float:
        return sum(s.estimate(node.peak_flops, node.memory_bandwidth) for s in backward(plan))

    saved = seconds(before) - seconds(after)
    completing = [segment.completes for segment in backward(before) if segment.completes]
    held_up = {name for names in completing[:-1] for name in names}
    arrays = arrays_of(before, problem.costs)
    if not held_up or arrays is None:
        return saved >= 0
    messages = {m.index for m in before.messages if held_up.issuperset(m.variables)}
    sends = zip(before.program.sends, arrays.occupied, strict=True)
    return bool(saved >= sum(seconds for send, seconds in sends if send.task.message in messages))


def _holds(region: Region, module: str) -> bool:
    return any(within(module, path) for path in region)


def _together(plan: Plan, region: Region) -> bool:
    """Whether one message carries all gradients of a region that has several."""
    names = [name for name in plan.program.carriers if _holds(region, name.rpartition(".")[0])]
    return len(names) > 1 and len({index for name in names for index in plan.program.carriers[name]}) == 1


def _with_tensors_fused(candidate: Candidate, regions: list[Region], problem: Problem) -> Iterator[Strategy]:
    """The candidate with the gradients of each of these regions in one message, if they are not."""
    gradients = problem.gradients(candidate)
    if gradients is None:
        return
    present = arrangement_of(gradients, candidate.strategy)
    home = [
        next((region for region in regions if all(_holds(region, name.rpartition(".")[0]) for name in names)), None)
        for names in gradients.names
    ]
    inner = np.array([i > 0 and home[i] is not None and home[i] == home[i - 1] for i in range(len(home))], np.bool_)
    borders = present.borders & ~(inner & ~gradients.forced)
    if not np.array_equal(borders, present.borders):
        yield arranged(gradients, replace(present, borders=borders), candidate.strategy)
