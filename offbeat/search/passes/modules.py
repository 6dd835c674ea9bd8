"""Passes that change how modules are computed: again in backward, in micro-batches, or compiled.

Recomputing and micro-batches save memory and are used as little as the limit allows. Compiling is operator fusion:

    theorem 1   fusing p_{n-1} and p_n pays, where compute is the bottleneck, if it saves at least the time to
                synchronise q_{n-1}, which must now wait for the fused operator's end          `op_fusion_pays`
    theorem 3   where operators are fused, so should their tensors be, and where tensors are, so should the operators
                that complete them                                                            `op_fusion`

In a region of several operators q_{n-1} is all that was ready before its last one. What the theorems are for is tried
first, and replay decides on all: theorem 1 says nothing where the network is the bottleneck. Compiling changes what
runs more than any other pass, so it is only tried for modules whose compiled time was measured (`fused_seconds`). With
symmetry on, a decision for one of several alike modules (`layers.0`, `layers.1`, ...) is taken for all of them.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from offbeat.graph import ModelGraph
from offbeat.plan import Plan, Segment
from offbeat.plan.compute import within
from offbeat.search.arrange import arranged, arrangement_of
from offbeat.search.passes.problem import Candidate, Problem, register_pass
from offbeat.simulate.fast.arrays import arrays_of
from offbeat.strategy import Strategy

LARGEST_SHARE = 0.125
"""A block that keeps more of the activations than this is taken apart, where it has parts."""
_MOST_MICRO_BATCHES = 64


@register_pass("recompute", aim="memory", order=10)
def recompute(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Modules whose activations are computed again in backward: the fewest that fit, then all.

    Modules that repeat the least work for each byte they free come first. Work is in seconds where all operators were
    measured, else in FLOP and bytes moved.
    """
    done = candidate.strategy.recompute
    forward = problem.graph.phase("forward")
    measured = all(op.seconds is not None for op in forward)
    cost = {}
    for path in blocks(problem.graph):
        operators = [op for op in forward if within(op.module, path)]
        work = sum((op.seconds or 0.0) if measured else op.flops + op.bytes_moved for op in operators)
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
    """The smallest number of equal micro-batches that fits; the largest where none does."""
    batch = next((tensor.shape[0] for tensor in problem.graph.inputs if tensor.shape), _MOST_MICRO_BATCHES)
    most = min(batch, _MOST_MICRO_BATCHES)
    counts = [n for n in range(2, most + 1) if batch % n == 0 and n > candidate.strategy.accumulation]
    for count in counts if problem.micro_batches else ():
        strategy = candidate.strategy.model_copy(update={"accumulation": count})
        if count == counts[-1] or problem.fits(problem.evaluate(strategy, "trial")):
            yield strategy
            return


def blocks(graph: ModelGraph) -> list[str]:
    """Paths of disjoint modules of moderate size, which together hold what forward keeps, in forward's order."""
    kept = Counter[str]()
    direct: set[str] = set()
    children: dict[str, dict[str, None]] = defaultdict(dict)
    for operator in graph.phase("forward"):
        direct.add(operator.module)
        paths = ["", *accumulate(operator.module.split("."), "{}.{}".format)] if operator.module else [""]
        for path in paths:
            kept[path] += operator.activation_bytes
        for path, below in pairwise(paths):
            children[path][below] = None
    limit = LARGEST_SHARE * max(1, graph.activation_bytes)
    found: list[str] = []
    waiting = [""]
    while waiting:
        path = waiting.pop()
        inner = children[path]
        # A list of modules is never called itself, so nothing can be done to it as a whole.
        listing = path not in direct and all(each.rpartition(".")[2].isdigit() for each in inner)
        if inner and (not path or listing or kept[path] > limit):
            waiting.extend(reversed(inner))
        elif path:
            found.append(path)
    return found


@register_pass("op_fusion", order=40)
def op_fusion(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Each kind of measured module compiled, with its gradients in one message and as they are."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for path in sorted(set(problem.fused_seconds or ()).difference(*candidate.strategy.fusion)):
        kinds[re.sub(r"\d+", "*", path) if problem.symmetry else path].append(path)
    later: list[Strategy] = []
    for alike in kinds.values():
        regions = tuple((path,) for path in alike)
        strategy = candidate.strategy.model_copy(update={"fusion": candidate.strategy.fusion + regions})
        made = problem.evaluate(strategy, "op_fusion")
        proposed = [*_with_tensors_fused(made, alike, problem), strategy]
        if _together(candidate.plan, alike[0]) or op_fusion_pays(candidate.plan, made.plan, alike[0], problem):
            yield from proposed
        else:
            later += proposed
    yield from later


def op_fusion_pays(before: Plan, after: Plan, path: str, problem: Problem) -> bool:
    """Theorem 1 for a module, of whose gradients all but those of its last operator are q_{n-1}."""
    node = before.cluster.device_of(before.replicas[0])
    inside = {operator.name for operator in before.graph.operators if within(operator.module, path)}

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


def _together(plan: Plan, path: str) -> bool:
    """Whether one message carries all gradients of a module that has several."""
    names = [name for name in plan.program.carriers if within(name.rpartition(".")[0], path)]
    return len(names) > 1 and len({index for name in names for index in plan.program.carriers[name]}) == 1


def _with_tensors_fused(candidate: Candidate, paths: list[str], problem: Problem) -> Iterator[Strategy]:
    """The candidate with the gradients of each of these modules in one message, if they are not."""
    gradients = problem.gradients(candidate)
    if gradients is None:
        return
    present = arrangement_of(gradients, candidate.strategy)
    home = [
        next((path for path in paths if all(within(name.rpartition(".")[0], path) for name in names)), None)
        for names in gradients.names
    ]
    inner = np.array([i > 0 and home[i] is not None and home[i] == home[i - 1] for i in range(len(home))], np.bool_)
    borders = present.borders & ~(inner & ~gradients.forced)
    if not np.array_equal(borders, present.borders):
        yield arranged(gradients, replace(present, borders=borders), candidate.strategy)
