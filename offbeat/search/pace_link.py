"""Jobs with ready times, durations and tails on one link → which job holds the link when (Numba kernels).

The kernels work on float64 arrays that are already checked; `checked` makes them from what a caller gives. All times
are seconds. A job of zero seconds needs no collective: it ends when it is ready and has no slice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from offbeat.errors import OffbeatError

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = Sequence[float] | NDArray[Any]

# Times within this share of each other differ by rounding only; a link is not cut for less.
ROUNDING = 1e-12
# Jobs that the choice of cuts may simulate, summed over its trials, each taking about 0.05 µs: no limit in practice for
# a thousand jobs, and a second for any number.
CUT_BUDGET = 20_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who holds the link when, and how long the step takes with it."""

    makespan: float
    """Seconds: the largest completion + tail."""
    slices: tuple[tuple[int, float, float], ...]
    """(job, start, end) in seconds and in time order; a slice begins with its overhead, where there is one."""
    completion: tuple[float, ...]
    """Seconds at which each job is done."""
    groups: tuple[tuple[int, ...], ...]
    """The tensors each job carries: one each, unless they were fused."""


def checked(name: str, values: Values, count: int | None = None) -> Floats:
    """A float64 array of finite numbers that are not negative, as many as `count`."""
    try:
        array = np.ascontiguousarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise OffbeatError(f"{name} must be a list of numbers") from None
    if array.ndim != 1:
        raise OffbeatError(f"{name} must be a list of numbers, not an array of {array.ndim} axes")
    if count is not None and len(array) != count:
        raise OffbeatError(f"{name} has {len(array)} values, ready has {count}")
    index = _first_wrong(array)
    if index >= 0:
        raise OffbeatError(f"{name}[{index}] must be finite and not negative, got {array[index]}")
    return array


@njit(cache=True)
def _first_wrong(values: Any) -> int:
    """Index of the first value that is negative or not finite, or -1."""
    for index in range(len(values)):
        # A comparison with NaN is false.
        if not 0.0 <= values[index] < np.inf:
            return index
    return -1


def checked_seconds(name: str, value: float) -> float:
    """One finite number that is not negative."""
    if not (isinstance(value, (int, float, np.number)) and 0 <= value < math.inf):
        raise OffbeatError(f"{name} must be finite and not negative, got {value}")
    return float(value)


def schedule_of(
    served: tuple[Floats, int, Floats, Any], tail: Floats, groups: Sequence[Sequence[int]] | None
) -> Schedule:
    """What the kernels return, as a Schedule."""
    slices, count, completion, _ = served
    jobs, starts, ends = slices[:count].T.tolist()
    return Schedule(
        makespan=makespan_of(completion, tail) if len(tail) else 0.0,
        slices=tuple(zip(map(int, jobs), starts, ends, strict=True)),
        completion=tuple(completion.tolist()),
        groups=_alone(len(tail)) if groups is None else tuple(map(tuple, groups)),
    )


@lru_cache
def _alone(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((job,) for job in range(count))


@njit(cache=True)
def priorities(ready: Any, urgency: Any) -> Any:
    """Jobs by ready time, jobs by urgency (ties: ready first, then the lower index), and each job's place there."""
    by_ready = np.argsort(ready, kind="mergesort")
    by_urgency = by_ready[np.argsort(-urgency[by_ready], kind="mergesort")]
    place = np.empty(len(ready), np.int64)
    for position in range(len(ready)):
        place[by_urgency[position]] = position
    return by_ready, by_urgency, place


@njit(cache=True)
def serve(ready: Any, duration: Any, urgency: Any, orders: Any, may_cut: Any, overhead: float, minimum: float) -> Any:
    """One link that, when free, takes the most urgent ready job → slices, their number, completions, who cut.

    A job with `may_cut` that becomes ready ends the running slice of a less urgent job, once that slice has carried
    `minimum` seconds and if at least as much remains for a later one. Every slice begins with `overhead` seconds.
    """
    by_ready, by_urgency, place = orders
    count = len(ready)
    slices = np.empty((2 * count, 3))
    made = 0
    completion = ready.copy()
    has_cut = np.zeros(count, np.bool_)
    remaining = duration.copy()
    waiting = np.empty(count + 1, np.int64)
    size = 0
    arrived = 0
    now = 0.0
    while True:
        while arrived < count and ready[by_ready[arrived]] <= now:
            if duration[by_ready[arrived]] > 0.0:
                size = _push(waiting, size, place[by_ready[arrived]])
            arrived += 1
        if size == 0:
            if arrived == count:
                break
            now = ready[by_ready[arrived]]
            continue
        job = by_urgency[waiting[0]]
        size = _pop(waiting, size)
        payload = now + overhead
        finish = payload + remaining[job]
        margin = ROUNDING * finish
        end = finish
        while arrived < count and ready[by_ready[arrived]] < finish:
            other = by_ready[arrived]
            if may_cut[other] and duration[other] > 0.0 and urgency[other] > urgency[job]:
                cut = max(ready[other], payload + minimum)
                if cut - payload > margin and finish - cut > max(margin, minimum - margin):
                    end = cut
                    has_cut[other] = True
                    break
            if duration[other] > 0.0:
                size = _push(waiting, size, place[other])
            arrived += 1
        if end < finish:
            remaining[job] -= end - payload
            size = _push(waiting, size, place[job])
        else:
            completion[job] = finish
        slices[made, 0] = job
        slices[made, 1] = now
        slices[made, 2] = end
        made += 1
        now = end
    return slices, made, completion, has_cut


@njit(cache=True)
def makespan_of(completion: Any, tail: Any) -> float:
    longest = 0.0
    for job in range(len(tail)):
        longest = max(longest, completion[job] + tail[job])
    return longest


@njit(cache=True)
def lower_bound(ready: Any, duration: Any, tail: Any, overhead: float) -> float:
    """No schedule ends earlier: every job pays the overhead once, and cuts are free."""
    longer = np.where(duration > 0.0, duration + overhead, 0.0)
    everyone = np.ones(len(ready), np.bool_)
    completion = serve(ready, longer, tail, priorities(ready, tail), everyone, 0.0, 0.0)[2]
    return makespan_of(completion, tail)


@njit(cache=True)
def best_served(
    ready: Any, duration: Any, tail: Any, overhead: float, minimum: float, enough: float, thrifty: bool, trials: int
) -> Any:
    """Slices, their number, completions and the trials spent: optimal without overhead and minimum, else the best
    set of cuts found.

    Climbs from no cut and from every cut by flipping one job's right to cut at a time, while the makespan falls and is
    more than `enough`, for at most `trials` schedules. If `thrifty`, cuts that do not shorten the step are then taken
    back. FIFO, which may win where little may be cut, is tried last.
    """
    count = len(ready)
    orders = priorities(ready, tail)
    nobody = np.zeros(count, np.bool_)
    everyone = np.ones(count, np.bool_)
    if overhead == 0.0 and minimum == 0.0:
        slices, made, completion, _ = serve(ready, duration, tail, orders, everyone, 0.0, 0.0)
        return slices, made, completion, 1
    floor = max(enough, lower_bound(ready, duration, tail, overhead) * (1.0 + ROUNDING))
    best = serve(ready, duration, tail, orders, nobody, overhead, minimum)
    shortest = makespan_of(best[2], tail)
    if shortest <= floor:
        return best[0], best[1], best[2], 2
    spent = 3
    for permitted in (everyone, nobody):
        if shortest <= floor:
            break
        trial = serve(ready, duration, tail, orders, permitted, overhead, minimum)
        trial, used = _climb(ready, duration, tail, orders, overhead, minimum, trial, floor, trials - spent)
        spent += used
        if makespan_of(trial[2], tail) < shortest:
            best = trial
            shortest = makespan_of(best[2], tail)
    if thrifty:
        best = _without_idle_cuts(ready, duration, tail, orders, overhead, minimum, best, trials)
        shortest = makespan_of(best[2], tail)
    still = np.zeros(count)
    trial = serve(ready, duration, still, priorities(ready, still), nobody, overhead, minimum)
    if makespan_of(trial[2], tail) < shortest:
        best = trial
    return best[0], best[1], best[2], spent


@njit(cache=True)
def _climb(
    ready: Any,
    duration: Any,
    tail: Any,
    orders: Any,
    overhead: float,
    minimum: float,
    best: Any,
    floor: float,
    trials: int,
) -> Any:
    """Flips single rights to cut while that shortens the step → the best that `serve` gave, and the trials spent."""
    shortest = makespan_of(best[2], tail)
    spent = 0
    last = 0
    # One full round without success ends the climb.
    while spent - last < len(ready) and spent < trials and shortest > floor:
        permitted = best[3].copy()
        job = spent % len(ready)
        permitted[job] = not permitted[job]
        trial = serve(ready, duration, tail, orders, permitted, overhead, minimum)
        spent += 1
        if makespan_of(trial[2], tail) < shortest * (1.0 - ROUNDING):
            best = trial
            shortest = makespan_of(trial[2], tail)
            last = spent
    return best, spent


@njit(cache=True)
def _without_idle_cuts(
    ready: Any, duration: Any, tail: Any, orders: Any, overhead: float, minimum: float, best: Any, trials: int
) -> Any:
    """Takes back single cuts until each that is left shortens the step or saves another one."""
    shortest = makespan_of(best[2], tail)
    changed = True
    while changed:
        changed = False
        for job in range(len(ready)):
            if best[3][job] and trials > 0:
                trials -= 1
                permitted = best[3].copy()
                permitted[job] = False
                trial = serve(ready, duration, tail, orders, permitted, overhead, minimum)
                if trial[1] < best[1] and makespan_of(trial[2], tail) <= shortest:
                    best = trial
                    shortest = makespan_of(trial[2], tail)
                    changed = True
    return best


@njit(cache=True)
def _push(heap: Any, size: int, item: int) -> int:
    position = size
    while position > 0:
        above = (position - 1) >> 1
        if heap[above] <= item:
            break
        heap[position] = heap[above]
        position = above
    heap[position] = item
    return size + 1


@njit(cache=True)
def _pop(heap: Any, size: int) -> int:
    size -= 1
    item = heap[size]
    position = 0
    while True:
        below = 2 * position + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= item:
            break
        heap[position] = heap[below]
        position = below
    heap[position] = item
    return size
