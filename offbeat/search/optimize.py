"""ModelGraph + ClusterSpec (+ Costs) → the fastest Strategy that fits: dPRO's optimiser, by replay alone.

Algorithm 1 of dPRO with its search speed-ups, each of which can be switched off: the coarsened view (`coarsen`),
partial replay (`partial_replay`) and symmetry (`symmetry`). The search starts from the best of the builders, so it is
never worse than any of them. If memory is short, the memory passes come first. Then passes propose, replay decides,
until none shortens the step; at last annealing looks for changes that only pay together (`offbeat.search.anneal`).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.search.anneal import anneal
from offbeat.search.oracle import Oracle
from offbeat.search.pace_strategy import pace_strategy
from offbeat.search.passes import Candidate, Pass, Problem, select_passes
from offbeat.search.passes.problem import Mode
from offbeat.strategy import Strategy, build_strategy
from offbeat.units import format_bytes, parse_bytes

STARTS = ("ddp", "overlap", "horovod", "all_reduce", "wfbp", "sharded", "byteps")
"""Builders whose plans are the starting points, beside PACE's."""
_GAIN = 1e-6
"""Share of the step by which a proposal must shorten it."""
_MOST_ROUNDS = 12
"""Times that all passes run one after another; they converge in two to four."""


def optimize(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    memory_limit: str | float | None = None,
    time_limit: float = 30.0,
    **options: Any,
) -> Strategy:
    """The strategy with the shortest predicted step; `search` names the other options."""
    return search(graph, cluster, memory_limit=memory_limit, time_limit=time_limit, **options).strategy


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
    coarsen: bool = True,
    partial_replay: bool = True,
    symmetry: bool = True,
    mode: Mode = "auto",
    allow_lossy: bool = False,
    fused_seconds: Mapping[str, tuple[float, float]] | None = None,
) -> Candidate:
    """The best strategy found, with its predicted step and the decisions that led to it.

    `memory_limit` is in bytes per rank (or '16GiB'). `time_limit` is in seconds; with `rounds` of annealing given
    instead, the clock is not looked at and the result depends on the arguments alone. `passes` names the passes to run
    (see `offbeat.search.passes.pass_names`). `mode` says whether updates may reach into the next forward: 'auto' and
    'deferred' let them, 'barrier' does not. Gradients are only ever rounded if `allow_lossy`. `fused_seconds` holds
    forward and backward seconds of compiled modules, by path.
    """
    _check(time_limit, rounds, mode)
    chosen = select_passes(passes)
    problem = Problem(
        oracle=Oracle(graph, cluster, costs or Costs(), symmetry, partial_replay),
        mode=mode,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit, "memory_limit"),
        allow_lossy=allow_lossy,
        coarsen=coarsen,
        fused_seconds=fused_seconds or {},
        deadline=None if rounds is not None else time.monotonic() + time_limit,
    )
    starts = _starts(problem, [each for each in chosen if each.aim == "memory"])
    speed_passes = [each for each in chosen if each.aim == "speed"]
    improved = [_annealed(problem, _improve(problem, start, speed_passes), seed, rounds) for start in starts]
    return _named(min(improved, key=lambda candidate: candidate.seconds), graph, cluster)


def _check(time_limit: float, rounds: int | None, mode: str) -> None:
    if not (isinstance(time_limit, (int, float)) and 0 <= time_limit < math.inf):
        raise OffbeatError(f"time_limit: {time_limit!r} must be a number of seconds, at least 0")
    if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0):
        raise OffbeatError(f"rounds: {rounds!r} must be a whole number, at least 0")
    if mode not in ("auto", "deferred", "barrier"):
        raise OffbeatError(f"mode: {mode!r} must be 'auto', 'deferred' or 'barrier'")


def _starts(problem: Problem, memory_passes: Sequence[Pass]) -> list[Candidate]:
    """The fastest starting point that fits in memory, made to fit where none does; and the fastest that has a chain,
    which most passes work on."""
    starts = [
        problem.evaluate(build_strategy(name, problem.graph, problem.cluster), name)
        for name in STARTS
        if name == "ddp" or not problem.expired
    ]
    starts.append(_pace(problem))
    fitting = [candidate for candidate in starts if problem.fits(candidate)]
    if fitting:
        fitting.sort(key=lambda candidate: candidate.seconds)
        chained = next((each for each in fitting if problem.chain(each) is not None), fitting[0])
        return [fitting[0]] if chained is fitting[0] else [fitting[0], chained]
    fastest = min(starts, key=lambda candidate: candidate.seconds)
    smallest = min(starts, key=lambda candidate: candidate.peak_bytes)
    return [_made_to_fit(problem, [fastest, smallest], memory_passes)]


def _pace(problem: Problem) -> Candidate:
    strategy = pace_strategy(problem.graph, problem.cluster, problem.costs, coarsen=problem.coarsen)
    if problem.mode == "auto":
        strategy = strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update={"mode": "auto"})})
    return problem.evaluate(strategy, "pace")


def _made_to_fit(problem: Problem, starts: Sequence[Candidate], memory_passes: Sequence[Pass]) -> Candidate:
    """Memory passes alone, then on top of each other, until something fits: the fastest of that."""
    current = list(starts)
    least = min(current, key=lambda candidate: candidate.peak_bytes)
    while current:
        made = [
            problem.evaluate(strategy, each.name, start)
            for start in current
            for each in memory_passes
            for strategy in each.propose(start, problem)
        ]
        fitting = [candidate for candidate in made if problem.fits(candidate)]
        if fitting:
            return min(fitting, key=lambda candidate: candidate.seconds)
        smaller = [candidate for candidate in made if candidate.peak_bytes < least.peak_bytes]
        current = sorted(smaller, key=lambda candidate: candidate.peak_bytes)[:2]
        least = min([least, *current], key=lambda candidate: candidate.peak_bytes)
    assert problem.memory_limit is not None
    raise OffbeatError(
        f"memory_limit: {format_bytes(problem.memory_limit)} is not enough for {problem.graph.name!r}: "
        f"the least that was found is {format_bytes(least.peak_bytes)} ({', '.join(least.decisions)})"
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
    chain = problem.chain(best)
    if chain is None or rounds == 0 or not problem.oracle.partial_replay or len(best.plan.replicas) < 2:
        return best
    start = chain.state_of(best.strategy)
    modes = {"auto": (False, True), "deferred": (False,), "barrier": (True,)}[problem.mode]
    origin = best
    for barrier in modes:
        found = anneal(chain, replace(start, barrier=barrier), seed=seed, rounds=rounds, deadline=problem.deadline)
        if found.seconds < best.seconds * (1 - _GAIN):
            strategy = chain.strategy(found.state, origin.strategy)
            best = _better(problem, best, problem.evaluate(strategy, "anneal", origin))
    return best


def _named(best: Candidate, graph: ModelGraph, cluster: ClusterSpec) -> Candidate:
    strategy = best.strategy.model_copy(
        update={"name": "optimize", "model": graph.name, "graph": graph.signature, "cluster": cluster.digest}
    )
    return replace(best, strategy=strategy)
