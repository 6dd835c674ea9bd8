"""PACE's schedule: the order and slices in which one link carries the gradients.

A step runs from the start of backward to the end of the next forward. All-reduce i is ready when backward has made its
gradient (PACE's z_{u_i}), holds the link for g_i seconds (its equation 1), and once it is complete, `tail` seconds
of computation remain: the longest path L_i from its first reader to the end (its theorem 1). The step then takes

    makespan = max_i (completion_i + tail_i)                                             (PACE's equation 10)

PACE cuts time into slots and solves a linear programme (`benchmarks/pace_lp.py`, the reference of the tests). The
problem is the classic one machine, preemption, release times and tails: 1 | pmtn, r_i | L_max with due dates -tail_i.
Always running the ready job with the longest tail (Jackson's preemptive rule) is optimal for it, in continuous time and
in O(N log N), so that is what `preemptive_schedule` does. Cuts fall where a more urgent gradient becomes ready, which
makes PACE's uneven slices.

With an overhead for each slice the problem contains the non-preemptive one, which is strongly NP-hard. There the
schedule is a heuristic: a search over which jobs may cut a running slice, never worse than cutting nothing.

All times are seconds. A job of zero seconds needs no collective: it ends when it is ready and has no slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.compiled import compiled

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = Sequence[float] | NDArray[Any]

# Times within this share of each other differ by rounding only; a link is not cut for less.
ROUNDING = 1e-12
# Jobs that the choice of cuts may simulate, summed over its trials, each taking about 0.05 µs: no limit in practice for
# a thousand jobs, and a second for any number.
CUT_BUDGET = 20_000_000


@dataclass(frozen=True, slots=True)
class LinkSchedule:
    """Which job uses the link when, and the resulting step time."""

    makespan: float
    """Seconds: the largest completion + tail."""
    slices: tuple[tuple[int, float, float], ...]
    """(job, start, end) in seconds and in time order; a slice begins with its overhead, where there is one."""
    completion: tuple[float, ...]
    """Seconds at which each job is done."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The tensors each job carries, where tensors were fused."""


class Jobs(NamedTuple):
    """Jobs as the kernels take them."""

    ready: Any
    duration: Any
    tail: Any
    overhead: float
    """Of each slice; one that was cut carries at least as much, so that no slice is mostly overhead."""
    by_ready: Any
    by_tail: Any
    """Longest first; of equal ones the one that is ready first, then the lower index."""
    place: Any
    """Of each job in `by_tail`."""


def preemptive_schedule(ready: Values, duration: Values, tail: Values, overhead: float = 0.0) -> LinkSchedule:
    """The schedule of least makespan for jobs that may be cut; all arguments in seconds.

    Exact, up to rounding, if `overhead` is 0. Otherwise a heuristic whose makespan is at most that of the
    longest-tail-first and the first-in-first-out schedules without cuts. No single cut can be taken back without a
    longer step or another cut (up to some thousand jobs; beyond, the search is cut short).
    """
    times = [np.ascontiguousarray(values, np.float64) for values in (ready, duration, tail)]
    trials = CUT_BUDGET // max(1, len(times[0]))
    return schedule_of(best_served(*times, float(overhead), 0.0, True, trials), times[2])


def schedule_of(served: tuple[Floats, Floats, Any], tail: Floats, groups: Sequence[Sequence[int]] = ()) -> LinkSchedule:
    """The kernels' result as a LinkSchedule."""
    slices, completion, _ = served
    jobs, starts, ends = slices.T.tolist()
    return LinkSchedule(
        makespan=makespan_of(completion, tail),
        slices=tuple(zip(map(int, jobs), starts, ends, strict=True)),
        completion=tuple(completion.tolist()),
        groups=tuple(map(tuple, groups)),
    )


@compiled
def link_jobs(ready: Any, duration: Any, tail: Any, overhead: float) -> Any:
    by_ready = np.argsort(ready, kind="mergesort")
    by_tail = by_ready[np.argsort(-tail[by_ready], kind="mergesort")]
    place = np.empty(len(ready), np.int64)
    place[by_tail] = np.arange(len(ready))
    return Jobs(ready, duration, tail, overhead, by_ready, by_tail, place)


@compiled
def serve(jobs: Any, may_cut: Any) -> Any:
    """One link that, when free, takes the ready job with the longest tail → slices, completions, who cut.

    A job with `may_cut` that becomes ready ends the running slice of a job with a shorter tail, once that slice has
    carried as many seconds as its overhead and if at least as much remains for a later one.
    """
    ready, duration, tail, overhead, by_ready, by_tail, place = jobs
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
        size -= 1
        job = by_tail[waiting[size]]
        payload = now + overhead
        finish = payload + remaining[job]
        margin = ROUNDING * finish
        end = finish
        while arrived < count and ready[by_ready[arrived]] < finish:
            other = by_ready[arrived]
            if may_cut[other] and duration[other] > 0.0 and tail[other] > tail[job]:
                cut = max(ready[other], payload + overhead)
                if cut - payload > margin and finish - cut > max(margin, overhead - margin):
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
    return slices[:made], completion, has_cut


@compiled
def makespan_of(completion: Any, tail: Any) -> float:
    longest = 0.0
    for job in range(len(tail)):
        longest = max(longest, completion[job] + tail[job])
    return longest


@compiled
def lower_bound(ready: Any, duration: Any, tail: Any, overhead: float) -> float:
    """A lower bound of any schedule: every job pays the overhead once, and cuts are free."""
    longer = np.where(duration > 0.0, duration + overhead, 0.0)
    return makespan_of(serve(link_jobs(ready, longer, tail, 0.0), np.ones(len(ready), np.bool_))[1], tail)


@compiled
def best_served(
    ready: Any, duration: Any, tail: Any, overhead: float, enough: float, thrifty: bool, trials: int
) -> Any:
    """Slices, completions and the trials spent: optimal without overhead, else the best cuts found.

    Climbs from no cut and from every cut by flipping one job's right to cut at a time, while the makespan falls and is
    more than `enough`, for at most `trials` schedules. If `thrifty`, cuts that do not shorten the step are then taken
    back. FIFO, which may win where little may be cut, is tried last.
    """
    jobs = link_jobs(ready, duration, tail, overhead)
    nobody = np.zeros(len(ready), np.bool_)
    everyone = np.ones(len(ready), np.bool_)
    if overhead == 0.0:
        best = serve(jobs, everyone)
        return best[0], best[1], 1
    floor = max(enough, lower_bound(ready, duration, tail, overhead) * (1.0 + ROUNDING))
    best = serve(jobs, nobody)
    shortest = makespan_of(best[1], tail)
    if shortest <= floor:
        return best[0], best[1], 2
    spent = 3
    for permitted in (everyone, nobody):
        if shortest <= floor:
            break
        trial, used = _climb(jobs, serve(jobs, permitted), floor, trials - spent)
        spent += used
        if makespan_of(trial[1], tail) < shortest:
            best = trial
            shortest = makespan_of(best[1], tail)
    if thrifty:
        best = _without_idle_cuts(jobs, best, trials)
    trial = serve(link_jobs(ready, duration, np.zeros(len(ready)), overhead), nobody)
    if makespan_of(trial[1], tail) < makespan_of(best[1], tail):
        best = trial
    return best[0], best[1], spent


@compiled
def _climb(jobs: Any, best: Any, floor: float, trials: int) -> Any:
    """Flips single rights to cut while that shortens the step → the best that `serve` gave, and the trials spent."""
    shortest = makespan_of(best[1], jobs.tail)
    spent = 0
    last = 0
    # One full round without success ends the climb.
    while spent - last < len(jobs.ready) and spent < trials and shortest > floor:
        permitted = best[2].copy()
        job = spent % len(jobs.ready)
        permitted[job] = not permitted[job]
        trial = serve(jobs, permitted)
        length = makespan_of(trial[1], jobs.tail)
        spent += 1
        if length < shortest * (1.0 - ROUNDING):
            best, shortest, last = trial, length, spent
    return best, spent


@compiled
def _without_idle_cuts(jobs: Any, best: Any, trials: int) -> Any:
    """Removes single cuts until each remaining one shortens the step or saves another one."""
    changed = True
    while changed:
        changed = False
        for job in range(len(jobs.ready)):
            if best[2][job] and trials > 0:
                trials -= 1
                permitted = best[2].copy()
                permitted[job] = False
                trial = serve(jobs, permitted)
                longer = makespan_of(trial[1], jobs.tail) > makespan_of(best[1], jobs.tail)
                if len(trial[0]) < len(best[0]) and not longer:
                    best = trial
                    changed = True
    return best


@compiled
def _push(waiting: Any, size: int, item: int) -> int:
    """Adds a place in `by_tail` so that the lowest stays last. What becomes ready late mostly has a long tail, so this
    moves few others, and is faster than a heap."""
    position = size
    while position > 0 and waiting[position - 1] < item:
        waiting[position] = waiting[position - 1]
        position -= 1
    waiting[position] = item
    return size + 1
