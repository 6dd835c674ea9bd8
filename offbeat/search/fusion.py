"""Tensors in the order they become ready, and the cost of a collective → which neighbours to fuse into one all-reduce.

PACE's section V. A fused all-reduce is ready with its last tensor, has the longest tail of its tensors and pays the
overhead of a collective once. `balanced_fusion` is MaxMinSize (algorithm 1, lines 11-23): the partition of the chain
into R groups whose smallest is largest. `balanced_search` is algorithm 1: that partition for every R, the scheduler
being the oracle. `search_fusion` starts from there and moves the borders between groups, because equal sizes suit the
bandwidth but not the tails; it is never worse than `balanced_search`.

The oracle takes microseconds, and most groupings need not even be scheduled: a grouping's makespan is at least that of
free cuts with one overhead per group (`lower_bound`), and one whose bound is no better than the best known is skipped.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.search.pace_link import (
    CUT_BUDGET,
    ROUNDING,
    Floats,
    Schedule,
    Values,
    best_served,
    checked,
    checked_seconds,
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


def balanced_fusion(sizes: Values, groups: int) -> list[list[int]]:
    """Indices of `sizes` in `groups` runs of neighbours, so that the smallest run is as large as it can be.

    Exact. Of several solutions it gives the paper's: the shortest first group, then the paper's solution of the rest.
    """
    amounts = checked("sizes", sizes)
    if not (isinstance(groups, (int, np.integer)) and 1 <= groups <= len(amounts)):
        raise OffbeatError(f"groups must be between 1 and the {len(amounts)} tensors, got {groups}")
    edges = _prefix(amounts)
    borders = _balanced_borders(edges, _max_min_sizes(edges, int(groups)), int(groups))
    return _runs(borders, np.arange(len(amounts)))


def balanced_search(ready: Values, sizes: Values, tail: Values, seconds_per_byte: float, overhead: float) -> Schedule:
    """PACE's algorithm 1: balanced groups for every number of groups, and the best schedule of the best of them."""
    chain = _Chain(ready, sizes, tail, seconds_per_byte, overhead)
    ranked = chain.balanced_groupings(1)
    return chain.schedule(ranked[0][1]) if ranked else chain.schedule(np.empty(0, np.bool_))


def search_fusion(ready: Values, sizes: Values, tail: Values, seconds_per_byte: float, overhead: float) -> Schedule:
    """The grouping and the schedule of least makespan found; `.groups` holds the tensors of each job of `.slices`.

    `ready` and `tail` in seconds, `sizes` in bytes. From the best results of `balanced_search` and from no fusion, one
    border at a time is set, removed or moved anywhere between its neighbours while that shortens the step, or keeps its
    length with fewer groups.
    """
    chain = _Chain(ready, sizes, tail, seconds_per_byte, overhead)
    ranked = chain.balanced_groupings(_STARTS)
    if not ranked:
        return chain.schedule(np.empty(0, np.bool_))
    starts = [borders for _, borders in ranked]
    best = chain.schedule(starts[0])
    starts.append(np.ones(len(chain.ready), np.bool_))
    budget = _BORDER_BUDGET // len(starts)
    for borders in starts:
        _move_borders(chain.ready, chain.seconds, chain.tail, chain.overhead, borders, chain.floor, budget)
        found = chain.schedule(borders)
        fewer = len(found.slices) < len(best.slices)
        if found.makespan < best.makespan * (1 + ROUNDING * (1 if fewer else -1)):
            best = found
    return best


class _Chain:
    """Tensors in the order they become ready, with their seconds on the link."""

    def __init__(self, ready: Values, sizes: Values, tail: Values, seconds_per_byte: float, overhead: float) -> None:
        readiness = checked("ready", ready)
        amounts = checked("sizes", sizes, len(readiness))
        tails = checked("tail", tail, len(readiness))
        rate = checked_seconds("seconds_per_byte", seconds_per_byte)
        self.order: NDArray[np.int64] = np.argsort(readiness, kind="stable")
        self.ready: Floats = readiness[self.order]
        self.sizes: Floats = amounts[self.order]
        self.tail: Floats = tails[self.order]
        self.seconds: Floats = self.sizes * rate
        self.overhead = checked_seconds("overhead", overhead)
        # The tensors that make the bound without overhead cannot go in less than one collective.
        sent = self.seconds > 0
        bound = lower_bound(self.ready[sent], self.seconds[sent], self.tail[sent], 0.0)
        self.floor = (bound + self.overhead) * (1 + ROUNDING)

    def balanced_groupings(self, most: int) -> list[tuple[float, NDArray[np.bool_]]]:
        """The best `most` results of MaxMinSize over the number of groups: makespan and borders, best first."""
        count = len(self.ready)
        limit = min(count, _MOST_GROUPS)
        edges = _prefix(self.sizes)
        table = _max_min_sizes(edges, limit)
        candidates = [_balanced_borders(edges, table, groups) for groups in range(1, limit + 1)]
        if count > limit:
            candidates.append(np.ones(count, np.bool_))
        bounds = [lower_bound(*_fuse(self.ready, self.seconds, self.tail, b), self.overhead) for b in candidates]
        found: list[tuple[float, int]] = []
        for index in np.argsort(bounds, kind="stable").tolist():
            if len(found) == most and (bounds[index] > found[-1][0] or found[-1][0] <= self.floor):
                break
            seconds = max(self.floor, self.schedule(candidates[index], CUT_BUDGET // limit).makespan)
            found = sorted([*found, (seconds, index)])[:most]
        return [(seconds, candidates[index]) for seconds, index in found]

    def schedule(self, borders: NDArray[np.bool_], budget: int = CUT_BUDGET) -> Schedule:
        """The best schedule of a grouping, for which `budget` jobs may be simulated."""
        ready, seconds, tail = _fuse(self.ready, self.seconds, self.tail, borders)
        trials = budget // max(1, len(ready))
        served = best_served(ready, seconds, tail, self.overhead, self.overhead, self.floor, True, trials)
        return schedule_of(served, tail, _runs(borders, self.order))


def _runs(borders: NDArray[np.bool_], order: NDArray[np.int64]) -> list[list[int]]:
    starts = np.flatnonzero(borders)
    return [part.tolist() for part in np.split(order, starts[1:])] if len(starts) else []


def _prefix(sizes: Floats) -> Floats:
    return np.concatenate((np.zeros(1), np.cumsum(sizes)))


@njit(cache=True)
def _max_min_sizes(edges: Any, most: int) -> Any:
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


@njit(cache=True)
def _balanced_borders(edges: Any, best: Any, groups: int) -> Any:
    """Where groups begin: each ends as soon as it holds what the largest smallest group must hold."""
    count = len(edges) - 1
    borders = np.zeros(count, np.bool_)
    start = 0
    for row in range(groups - 1, 0, -1):
        borders[start] = True
        end = start + 1
        while edges[end] - edges[start] < best[row, start]:
            end += 1
        start = end
    borders[start] = True
    return borders


@njit(cache=True)
def _fuse(ready: Any, seconds: Any, tail: Any, borders: Any) -> Any:
    """Ready time, seconds and tail of each group."""
    groups = 0
    for index in range(len(borders)):
        groups += borders[index]
    fused = np.zeros((3, groups))
    group = -1
    for index in range(len(borders)):
        group += borders[index]
        fused[0, group] = max(fused[0, group], ready[index])
        fused[1, group] += seconds[index]
        fused[2, group] = max(fused[2, group], tail[index])
    return fused[0], fused[1], fused[2]


@njit(cache=True)
def _move_borders(
    ready: Any, seconds: Any, tail: Any, overhead: float, borders: Any, floor: float, budget: int
) -> None:
    """Local search in place, until no single border can be set, removed or moved to advantage.

    A border is also removed if the step stays as long: fewer collectives stand up better to what was not foreseen.
    """
    count = len(borders)
    shortest, spent = _quick_makespan(ready, seconds, tail, overhead, borders, floor, np.inf)
    changed = True
    while changed and spent < budget:
        changed = False
        for index in range(1, count):
            if spent >= budget or (shortest <= floor and not borders[index]):
                continue
            borders[index] = not borders[index]
            limit = shortest * (1.0 - ROUNDING) if borders[index] else max(shortest * (1.0 + ROUNDING), floor)
            length, used = _quick_makespan(ready, seconds, tail, overhead, borders, floor, limit)
            spent += used
            if length <= limit:
                shortest = length
                changed = True
                continue
            borders[index] = not borders[index]
            if borders[index] and shortest > floor:
                length, used = _shift_border(ready, seconds, tail, overhead, borders, floor, index, shortest)
                spent += used
                if length < shortest:
                    shortest = length
                    changed = True


@njit(cache=True)
def _shift_border(
    ready: Any, seconds: Any, tail: Any, overhead: float, borders: Any, floor: float, index: int, shortest: float
) -> Any:
    """Moves one border to the first place between its neighbours that shortens the step, if there is one."""
    limit = shortest * (1.0 - ROUNDING)
    spent = 0
    borders[index] = False
    for step in (-1, 1):
        place = index + step
        while 0 < place < len(borders) and not borders[place]:
            borders[place] = True
            length, used = _quick_makespan(ready, seconds, tail, overhead, borders, floor, limit)
            spent += used
            if length <= limit:
                return length, spent
            borders[place] = False
            place += step
    borders[index] = True
    return shortest, spent


@njit(cache=True)
def _quick_makespan(
    ready: Any, seconds: Any, tail: Any, overhead: float, borders: Any, enough: float, limit: float
) -> Any:
    """The makespan of a grouping, or its bound where that exceeds `limit`; and the jobs simulated for it."""
    fused_ready, fused_seconds, fused_tail = _fuse(ready, seconds, tail, borders)
    groups = len(fused_ready)
    bound = lower_bound(fused_ready, fused_seconds, fused_tail, overhead)
    if bound > limit:
        return bound, groups
    trials = max(4, _QUICK_BUDGET // groups)
    served = best_served(fused_ready, fused_seconds, fused_tail, overhead, overhead, enough, False, trials)
    return makespan_of(served[2], fused_tail), groups * (1 + served[3])
