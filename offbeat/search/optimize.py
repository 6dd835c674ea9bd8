"""Find the fastest strategy that fits, by replay alone: dPRO's optimiser.

Algorithm 1 of dPRO with its search speed-ups, each of which can be switched off: the coarsened view (`coarsen`),
partial replay (`partial_replay`) and symmetry (`symmetry`). The search starts from the best of the builders, so it is
never worse than any of them. If memory is short, the memory passes come first. Then passes propose, replay decides,
until none shortens the step; at last annealing looks for changes that only pay together (`offbeat.search.anneal`).
`candidates` lists strategies worth a trial in a running job, each with the step time that replay predicts;
`ddp_sizes` are those among them that do what DDP does.
`by_memory` lists what the search finds under one memory limit after another, for the frontier.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.search.anneal import anneal
from offbeat.search.arrange import arranged, arrangement_of, rescheduled
from offbeat.search.fsdp import UNITS, limit_bytes, sharded_starts
from offbeat.search.pace.strategy import pace_strategy
from offbeat.search.passes import AMP, Candidate, Pass, Problem, select_passes
from offbeat.search.passes.encoding import allowed_encoders
from offbeat.simulate import step_seconds
from offbeat.strategy import Recipe, Strategy, build_strategy
from offbeat.strategy.model import Engine
from offbeat.units import format_bytes

STARTS = ("ddp", "overlap", "horovod", "all_reduce", "wfbp", "sharded", "byteps")
"""Builders whose plans are the starting points, in addition to PACE's."""
_GAIN = 1e-6
"""Share of the step by which a proposal must shorten it."""
_MOST_ROUNDS = 12
"""Times that all passes run one after another; they converge in two to four."""
OVERLAP_BUCKETS = tuple(2**power for power in range(17, 24))
SEARCH_SECONDS = 2.0
SCHEDULING_PASSES = ("schedule", "tensor_fusion", "tensor_partition")
"""What changes when things are sent, not how: a running job has measured the cost of its all-reduces only."""
SLACK_SECONDS = 1e-3
"""A gradient that is later than planned holds up everything after it in a fixed order."""
REPLICAS: tuple[Engine, ...] = ("replicated", "sharded", "fsdp")
"""Engines whose ranks compute a batch each, which is what a plan can say."""
LIMIT_STEP = 0.88
"""A memory limit of `by_memory` as a share of what was needed under the one before."""
_seconds, _peak = attrgetter("seconds"), attrgetter("peak_bytes")
BARRIER_BUCKETS = (2**19, 2**20, 2**21, 2**22, 2**23, 25 * 2**20)
TIMED_BUCKETS = (2**20, 2**22, 25 * 2**20)
"""Sizes far enough apart that a few steps tell them from each other."""


class TooLittleMemory(OffbeatError):
    """Nothing that the search can think of fits the limit."""


def optimize(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    memory_limit: str | float | None = None,
    time_limit: float = 30.0,
    allow: Sequence[str] = (),
    **options: Any,
) -> Strategy:
    """The strategy with the shortest predicted step (`offbeat.optimize` once blocks are timed)."""
    options |= {"memory_limit": memory_limit, "time_limit": time_limit, "allow": allow}
    return search(graph, cluster, **options).strategy


def search(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    costs: Costs | None = None,
    memory_limit: str | float | None = None,
    time_limit: float = 30.0,
    seed: int = 0,
    rounds: int | None = None,
    passes: Sequence[str] | None = None,
    **options: Any,
) -> Candidate:
    """The best strategy found, with its predicted step and the decisions that led to it.

    `memory_limit` is in bytes per rank (or '16GiB'; 'auto' is nine tenths of the smallest device's memory). With it,
    FSDP2's strategies are candidates too, unless `passes` are named. `time_limit` is in seconds;
    with `rounds` of annealing given instead, the clock is not looked at and the result depends on the arguments alone.
    `passes` names the passes to run (see `offbeat.search.passes.PASSES`). The other options are those of `Problem`:
    `mode`, `allow`, `whole_state`, `micro_batches`, and the speed-ups `coarsen`, `partial_replay`, `symmetry`.
    """
    if not (isinstance(time_limit, (int, float)) and 0 <= time_limit < math.inf):
        raise OffbeatError(f"time_limit: {time_limit!r} must be a number of seconds, at least 0")
    if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0):
        raise OffbeatError(f"rounds: {rounds!r} must be a whole number, at least 0")
    limit = limit_bytes(memory_limit, cluster)
    deadline = None if rounds is not None else time.monotonic() + time_limit
    problem = Problem(graph, cluster, costs or Costs(), memory_limit=limit, deadline=deadline, **options)
    allowed_encoders(problem.allow)
    if AMP in problem.allow and not any("bf16" in block.seconds for block in graph.blocks):
        raise OffbeatError(
            "allow: 'amp' needs the times of the model's blocks under autocast, which were not measured; pass the "
            "model and its example_inputs to optimize(), or --measure on the command line"
        )
    if passes is None and limit is not None:
        problem.engines = REPLICAS
    return _best(problem, _starts(problem), select_passes(passes), seed, rounds)


def by_memory(graph: ModelGraph, cluster: ClusterSpec, engines: Sequence[Engine] = REPLICAS) -> Iterator[Candidate]:
    """What `search` without annealing finds under falling memory limits, until nothing fits: less memory each, and
    mostly more time."""
    problem = Problem(graph, cluster, Costs(), memory_limit=sys.maxsize, engines=engines)
    starts = _starts(problem)
    try:
        while starts:
            found = _best(problem, starts, select_passes(None), rounds=0)
            yield found
            problem = replace(problem, memory_limit=int(found.peak_bytes * LIMIT_STEP))
    except TooLittleMemory:
        return


def _best(
    problem: Problem, starts: Sequence[Candidate], passes: Sequence[Pass], seed: int = 0, rounds: int | None = None
) -> Candidate:
    """The fastest that fits of what passes and annealing make of the starting points."""
    memory_passes, speed_passes = ([each for each in passes if each.aim == aim] for aim in ("memory", "speed"))
    improved = [
        _improve(problem, start, [UNITS])
        if start.strategy.fsdp is not None
        else _annealed(problem, _improve(problem, start, speed_passes), seed, rounds)
        for start in _chosen(problem, starts, memory_passes)
    ]
    best = min(improved, key=_seconds)
    graph, cluster = problem.graph, problem.cluster
    names = {"name": "optimize", "model": graph.name, "graph": graph.signature, "cluster": cluster.digest}
    return replace(best, strategy=best.strategy.model_copy(update=names))


def _starts(problem: Problem) -> list[Candidate]:
    """What builders, PACE and FSDP2 make of the model, as far as the engines may be used."""
    starts = [
        problem.evaluate(build_strategy(name, problem.graph, problem.cluster), name)
        for name in (*STARTS, *(["fast_servers"] if problem.cluster.servers else []))
        if name == "ddp" or not problem.expired
    ]
    pace = pace_strategy(problem.graph, problem.cluster, problem.costs, coarsen=problem.coarsen)
    starts.append(problem.evaluate(pace, "pace"))
    starts += sharded_starts(problem) if "fsdp" in problem.engines else []
    return [start for start in starts if start.strategy.engine in problem.engines]


def _chosen(problem: Problem, starts: Sequence[Candidate], memory_passes: Sequence[Pass]) -> list[Candidate]:
    """The fastest starting point that fits in memory, made to fit where none does; and the fastest whose gradients
    can be rearranged, which is what most passes do."""
    sharded = [start for start in starts if start.strategy.fsdp is not None]
    others = [start for start in starts if start.strategy.fsdp is None]
    fitting = sorted(filter(problem.fits, others), key=_seconds)
    small = sorted(filter(problem.fits, sharded), key=_seconds)[:1]
    if fitting:
        movable = next((each for each in fitting if problem.gradients(each) is not None), fitting[0])
        return [*small, fitting[0]] if movable is fitting[0] else [*small, fitting[0], movable]
    ends = [min(group, key=key) for group in (others, sharded) if group for key in (_seconds, _peak)]
    return [*small, *_made_to_fit(problem, ends, memory_passes, needed=not small)]


def _made_to_fit(
    problem: Problem, starts: Sequence[Candidate], memory_passes: Sequence[Pass], needed: bool
) -> list[Candidate]:
    """Memory passes alone, then on top of each other, until something fits: the fastest of that. Nothing, or if it is
    `needed` an error, where nothing ever does."""
    current = list(starts)
    least = min(current, key=_peak)
    while current:
        made = [
            problem.evaluate(strategy, each.name, start)
            for start in current
            for each in memory_passes
            for strategy in each.propose(start, problem)
        ]
        if fitting := list(filter(problem.fits, made)):
            return [min(fitting, key=_seconds)]
        smaller = [candidate for candidate in made if candidate.peak_bytes < least.peak_bytes]
        current = sorted(smaller, key=_peak)[:2]
        least = current[0] if current else least
    if not needed:
        return []
    assert problem.memory_limit is not None
    raise TooLittleMemory(
        f"memory_limit: {format_bytes(problem.memory_limit)} is not enough for {problem.graph.name!r}: "
        f"the smallest peak found is {format_bytes(least.peak_bytes)} ({', '.join(least.decisions)})"
    )


def _improve(problem: Problem, best: Candidate, speed_passes: Sequence[Pass]) -> Candidate:
    """All passes in order, again and again until none shortens the step."""
    for _ in range(_MOST_ROUNDS):
        before = best.seconds
        for each in speed_passes:
            for strategy in each.propose(best, problem):
                if problem.expired:
                    return best
                best = _better(problem, best, problem.evaluate(strategy, each.name, best))
        if best.seconds >= before * (1 - _GAIN):
            break
    return best


def _better(problem: Problem, best: Candidate, made: Candidate) -> Candidate:
    return made if problem.fits(made) and made.seconds < best.seconds * (1 - _GAIN) else best


def _annealed(problem: Problem, best: Candidate, seed: int, rounds: int | None) -> Candidate:
    """The walk from the candidate's groups, in each mode that is allowed; it needs partial replay to be fast enough."""
    gradients = problem.gradients(best)
    if gradients is None or rounds == 0 or not problem.partial_replay or len(best.plan.replicas) < 2:
        return best
    start = arrangement_of(gradients, best.strategy)
    modes = {"auto": (False, True), "deferred": (False,), "barrier": (True,)}[problem.mode]
    origin = best
    for barrier in modes:
        found = anneal(gradients, replace(start, barrier=barrier), seed=seed, rounds=rounds, deadline=problem.deadline)
        if gradients.seconds(found) < best.seconds * (1 - _GAIN):
            strategy = arranged(gradients, found, origin.strategy)
            best = _better(problem, best, problem.evaluate(strategy, "anneal", origin))
    return best


def candidates(
    graph: ModelGraph,
    cluster: ClusterSpec,
    costs: Costs,
    present: Strategy,
    barrier: bool = False,
    issue_seconds: float = 0.0,
    allow: Sequence[str] = (),
    whole_state: bool = False,
) -> list[Candidate]:
    """The present strategy (by the name 'present') and others, the quickest first.

    `barrier` says that the training loop allows no deferred updates, whatever a strategy would like. `issue_seconds` is
    what each collective adds to a step whose host launches its work too late, which replay does not know. `allow` names
    encoders that may be tried. With `whole_state` every replica goes on holding all of the optimizer's state. Deferred
    plans have as many collectives under way as the present one.
    """
    problem = Problem(graph, cluster, costs)
    found = []
    for name, strategy in (*_others(graph, cluster, costs, allow, whole_state), ("present", present)):
        waits = barrier or strategy.schedule.mode == "barrier"
        changes = {"mode": "barrier"} if waits else {"mode": "auto", "in_flight": present.schedule.in_flight}
        candidate = problem.evaluate(rescheduled(strategy, **changes), name)
        issuing = issue_seconds * len(candidate.plan.communication)
        found.append(replace(candidate, seconds=candidate.seconds + issuing))
    return sorted(found, key=_seconds)


def recommend(
    graph: ModelGraph, cluster: ClusterSpec, costs: Costs, memory_limit: str | float | None = None
) -> tuple[Recipe, Strategy]:
    """The builder and its options with the shortest predicted step, for a model whose variables have no names here."""
    problem = Problem(graph, cluster, costs, memory_limit=limit_bytes(memory_limit, cluster))
    made_to_size = (*_overlap_recipes(graph), *_ddp_recipes(graph))
    sized = [Recipe(builder=builder, options=options) for builder, options in made_to_size]
    recipes = [*sized, *(Recipe(builder=name) for name in STARTS)]
    made = [(recipe, problem.evaluate(recipe.build(graph, cluster), recipe.builder)) for recipe in recipes]
    fitting = [(recipe, candidate) for recipe, candidate in made if problem.fits(candidate)]
    if not fitting:
        least = format_bytes(min(candidate.peak_bytes for _, candidate in made))
        raise OffbeatError(f"memory_limit: {memory_limit} is not enough for {graph.name!r}: the least found is {least}")
    recipe, best = min(fitting, key=lambda each: each[1].seconds)
    return recipe, best.strategy


def predict(graph: ModelGraph, cluster: ClusterSpec, costs: Costs, strategy: Strategy) -> float:
    """Seconds of a step, by replay."""
    return step_seconds(lower(graph, cluster, strategy), costs)


def _others(
    graph: ModelGraph, cluster: ClusterSpec, costs: Costs, allow: Sequence[str], whole_state: bool
) -> Iterator[tuple[str, Strategy]]:
    for builder, options in _overlap_recipes(graph):
        yield f"{builder} {options['bucket'] // 1024} KiB", build_strategy(builder, graph, cluster, **options)
    yield from ddp_sizes(graph, cluster)
    yield "pace", pace_strategy(graph, cluster, costs, slack_seconds=SLACK_SECONDS)
    limits: dict[str, Any] = {"costs": costs, "time_limit": SEARCH_SECONDS, "whole_state": whole_state}
    yield "searched", optimize(graph, cluster, passes=SCHEDULING_PASSES, **limits)
    if allow:
        yield "encoded", optimize(graph, cluster, passes=(*SCHEDULING_PASSES, "encode"), allow=allow, **limits)


def ddp_sizes(
    graph: ModelGraph, cluster: ClusterSpec, buckets: Sequence[int] = BARRIER_BUCKETS
) -> Iterator[tuple[str, Strategy]]:
    """DDP's own way with these sizes of buckets, as far as they make a difference, and with growing ones; by name."""
    for builder, options in _ddp_recipes(graph, buckets):
        made = build_strategy(builder, graph, cluster, **options)
        growing = "growing to " if "growth" in options else ""
        yield f"{builder} {growing}{options['bucket'] // 1024} KiB", rescheduled(made, mode="barrier")


def _overlap_recipes(graph: ModelGraph) -> Iterator[tuple[str, dict[str, int]]]:
    for bucket in OVERLAP_BUCKETS:
        if bucket <= graph.parameter_bytes:
            for slice_bytes in (bucket, 2 * bucket):
                yield "overlap", {"bucket": bucket, "slice_bytes": slice_bytes}


def _ddp_recipes(graph: ModelGraph, buckets: Sequence[int] = BARRIER_BUCKETS) -> Iterator[tuple[str, dict[str, int]]]:
    for bucket in buckets:
        # A bucket that holds the whole model is what the largest, DDP's default, makes of it too.
        if bucket < graph.parameter_bytes or bucket == buckets[-1]:
            yield "ddp", {"bucket": bucket, "first_bucket": min(bucket, 2**20)}
    if graph.parameter_bytes > BARRIER_BUCKETS[0]:
        yield "ddp", {"bucket": buckets[-1], "first_bucket": BARRIER_BUCKETS[0] // 2, "growth": 2}
