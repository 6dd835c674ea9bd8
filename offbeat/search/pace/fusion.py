"""Choose which neighbouring tensors to fuse into one all-reduce.

PACE's section V. A fused all-reduce is ready with its last tensor, has the longest tail of its tensors and pays the
overhead of a collective once. `max_min_sizes` and `balanced_borders` are MaxMinSize (algorithm 1, lines 11-23): the
partition of the chain into R groups whose smallest is largest. Algorithm 1 takes the best of that partition for every
R, the scheduler being the judge (`_balanced_groupings`). `search_fusion` starts from there and moves the borders
between groups, because equal sizes suit the bandwidth but not the tails; it is never worse than algorithm 1.

The scheduler takes microseconds, and most groupings need not even be scheduled: a makespan is at least that of free
cuts with one overhead per group (`lower_bound`), and one whose bound is no better than the best known is skipped.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.compiled import compiled
from offbeat.search.pace.schedule import (
    CUT_BUDGET,
    ROUNDING,
    Floats,
    LinkSchedule,
    Values,
    best_served,
    lower_bound,
    makespan_of,
    schedule_of,
)

# Beyond this many groups only 'no fusion' is tried: MaxMinSize keeps a table of tensors times groups.
_MOST_GROUPS = 512
# Jobs that moving borders may simulate, summed over all trials, each taking about 0.05 µs.
_BORDER_BUDGET = 20_000_000
# Jobs simulated to choose the cuts of one grouping while borders move; what is kept at the end gets the full search.
_QUICK_BUDGET = 6_000
# Groupings of algorithm 1 from which borders are moved: the best few, and no fusion at all.
_STARTS = 3


class _Chain(NamedTuple):
    """Tensors in the order they become ready, as the kernels take them."""

    ready: Any
    seconds: Any
    """On the link, without overhead."""
    tail: Any
    overhead: float
    floor: float
    """A lower bound of the step: the tensors that make the bound without overhead need at least one collective."""


def search_fusion(ready: Values, sizes: Values, tail: Values, seconds_per_byte: float, overhead: float) -> LinkSchedule:
    """The grouping and the schedule of least makespan found; `.groups` holds the tensors of each job of `.slices`.

    `ready` and `tail` in seconds, `sizes` in bytes. From the best results of algorithm 1 and from no fusion, one border
    at a time is set, removed or moved anywhere between its neighbours while that shortens the step, or keeps its length
    with fewer groups.
    """
    order = np.argsort(np.asarray(ready, np.float64), kind="stable")
    if not len(order):
        return LinkSchedule(0.0, (), ())
    times, amounts, tails = (np.asarray(values, np.float64)[order] for values in (ready, sizes, tail))
    seconds = amounts * seconds_per_byte
    sent = seconds > 0
    bound = lower_bound(times[sent], seconds[sent], tails[sent], 0.0)
    chain = _Chain(times, seconds, tails, float(overhead), (bound + overhead) * (1 + ROUNDING))
    starts = _balanced_groupings(chain, amounts)
    best = _scheduled(chain, starts[0], order)
    starts.append(np.ones(len(order), np.bool_))
    for borders in starts:
        _move_borders(chain, borders, _BORDER_BUDGET // len(starts))
        found = _scheduled(chain, borders, order)
        fewer = len(found.slices) < len(best.slices)
        if found.makespan < best.makespan * (1 + ROUNDING * (1 if fewer else -1)):
            best = found
    return best


def _balanced_groupings(chain: _Chain, sizes: Floats) -> list[NDArray[np.bool_]]:
    """Borders of the best few results of MaxMinSize over the number of groups, best first."""
    limit = min(len(sizes), _MOST_GROUPS)
    edges = np.append(0.0, np.cumsum(sizes))
    table = max_min_sizes(edges, limit)
    candidates = [balanced_borders(edges, table, groups) for groups in range(1, limit + 1)]
    if len(sizes) > limit:
        candidates.append(np.ones(len(sizes), np.bool_))
    bounds = [lower_bound(*_fuse(chain, borders), chain.overhead) for borders in candidates]
    found: list[tuple[float, int]] = []
    for index in np.argsort(bounds, kind="stable").tolist():
        if len(found) == _STARTS and (bounds[index] > found[-1][0] or found[-1][0] <= chain.floor):
            break
        jobs = _fuse(chain, candidates[index])
        served = best_served(*jobs, chain.overhead, chain.floor, True, CUT_BUDGET // limit // len(jobs[0]))
        found = sorted([*found, (max(chain.floor, makespan_of(served[1], jobs[2])), index)])[:_STARTS]
    return [candidates[index] for _, index in found]


def _scheduled(chain: _Chain, borders: NDArray[np.bool_], order: NDArray[np.int64]) -> LinkSchedule:
    """The best schedule of a grouping."""
    jobs = _fuse(chain, borders)
    served = best_served(*jobs, chain.overhead, chain.floor, True, CUT_BUDGET // len(jobs[0]))
    return schedule_of(served, jobs[2], [part.tolist() for part in np.split(order, np.flatnonzero(borders)[1:])])


@compiled
def max_min_sizes(edges: Any, most: int) -> Any:
    """best[r, s]: the largest possible smallest group, when tensors s.. make r + 1 groups; -1 if they are too few.

    min(edges[e] - edges[s], best[r - 1, e]) rises with the end e of the first group, then falls, as the first term
    rises and the second falls: the best e is where they cross, and moves right with s.
    """
    count = len(edges) - 1
    best = np.full((most, count + 1), -1.0)
    for start in range(count):
        best[0, start] = edges[count] - edges[start]
    for row in range(1, most):
        end = 1
        last = count - row
        for start in range(last):
            end = max(end, start + 1)
            while end < last and edges[end] - edges[start] < best[row - 1, end]:
                end += 1
            value = min(edges[end] - edges[start], best[row - 1, end])
            if end > start + 1:
                value = max(value, min(edges[end - 1] - edges[start], best[row - 1, end - 1]))
            best[row, start] = value
    return best


@compiled
def balanced_borders(edges: Any, best: Any, groups: int) -> Any:
    """Where groups begin: each ends as soon as it holds what the largest smallest group must hold.

    Exact. Of several solutions it gives the paper's: the shortest first group, then the paper's solution of the rest.
    """
    borders = np.zeros(len(edges) - 1, np.bool_)
    start = 0
    for row in range(groups - 1, 0, -1):
        borders[start] = True
        end = start + 1
        while edges[end] - edges[start] < best[row, start]:
            end += 1
        start = end
    borders[start] = True
    return borders


@compiled
def _fuse(chain: Any, borders: Any) -> Any:
    """Ready time, seconds and tail of each group."""
    fused = np.zeros((3, borders.sum()))
    group = -1
    for index in range(len(borders)):
        group += borders[index]
        fused[0, group] = max(fused[0, group], chain.ready[index])
        fused[1, group] += chain.seconds[index]
        fused[2, group] = max(fused[2, group], chain.tail[index])
    return fused[0], fused[1], fused[2]


@compiled
def _move_borders(chain: Any, borders: Any, budget: int) -> None:
    """Local search in place, until no single border can be set, removed or moved to advantage.

    A border is also removed if the step stays as long: fewer collectives suffer less from timing errors.
    """
    floor = chain.floor
    shortest, spent = _quick_makespan(chain, borders, np.inf)
    changed = True
    while changed and spent < budget:
        changed = False
        for index in range(1, len(borders)):
            if spent >= budget or (shortest <= floor and not borders[index]):
                continue
            borders[index] = not borders[index]
            limit = shortest * (1.0 - ROUNDING) if borders[index] else max(shortest * (1.0 + ROUNDING), floor)
            length, used = _quick_makespan(chain, borders, limit)
            spent += used
            if length <= limit:
                shortest = length
                changed = True
                continue
            borders[index] = not borders[index]
            if borders[index] and shortest > floor:
                length, used = _shift_border(chain, borders, index, shortest)
                spent += used
                if length < shortest:
                    shortest = length
                    changed = True


@compiled
def _shift_border(chain: Any, borders: Any, index: int, shortest: float) -> Any:
    """Moves one border to the first place between its neighbours that shortens the step, if there is one."""
    limit = shortest * (1.0 - ROUNDING)
    spent = 0
    borders[index] = False
    for step in (-1, 1):
        place = index + step
        while 0 < place < len(borders) and not borders[place]:
            borders[place] = True
            length, used = _quick_makespan(chain, borders, limit)
            spent += used
            if length <= limit:
                return length, spent
            borders[place] = False
            place += step
    borders[index] = True
    return shortest, spent


@compiled
def _quick_makespan(chain: Any, borders: Any, limit: float) -> Any:
    """The makespan of a grouping, or its bound where that exceeds `limit`; and the jobs simulated for it."""
    ready, seconds, tail = _fuse(chain, borders)
    groups = len(ready)
    bound = lower_bound(ready, seconds, tail, chain.overhead)
    if bound > limit:
        return bound, groups
    trials = max(4, _QUICK_BUDGET // groups)
    served = best_served(ready, seconds, tail, chain.overhead, chain.floor, False, trials)
    return makespan_of(served[1], tail), groups * (1 + served[2])
