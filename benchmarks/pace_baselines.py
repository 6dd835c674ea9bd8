"""Ready times, durations and tails → the schedules of the systems PACE is compared with.

All pay `overhead` seconds for each collective and use one link, as `preemptive_schedule` does, so that the makespans
compare. All times are seconds.
"""

import math
from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np

from offbeat.search.pace.schedule import Floats, LinkSchedule, Values, link_jobs, schedule_of, serve

# Horovod's defaults when PACE was published; release 0.21 changed them to 128 MiB and 1 ms.
HOROVOD_THRESHOLD_BYTES = 64 * 2**20
HOROVOD_CYCLE_SECONDS = 5e-3


def fifo_schedule(ready: Values, duration: Values, tail: Values, overhead: float = 0.0) -> LinkSchedule:
    """Wait-free backward propagation: gradients go whole, in the order they become ready."""
    return _uncut(ready, duration, tail, overhead, by_tail=False)


def tictac_schedule(ready: Values, duration: Values, tail: Values, overhead: float = 0.0) -> LinkSchedule:
    """TicTac's idea: gradients go whole; of those that are ready, the one with the longest tail goes next."""
    return _uncut(ready, duration, tail, overhead, by_tail=True)


def horovod_fusion(
    ready: Values,
    sizes: Values,
    tail: Values,
    seconds_per_byte: float,
    overhead: float = 0.0,
    *,
    threshold_bytes: float = HOROVOD_THRESHOLD_BYTES,
    cycle_seconds: float = HOROVOD_CYCLE_SECONDS,
) -> LinkSchedule:
    """Horovod: each cycle fuses what has become ready since the last one, up to a threshold, and sends it in order.

    A cycle begins `cycle_seconds` after the one before, or when that one's collectives have ended, if that is later. A
    tensor above the threshold goes alone; a threshold of 0 fuses nothing. A tensor that does not fit closes the group.
    """
    readiness, amounts, tails = _arrays(ready, sizes, tail)
    order = np.argsort(readiness, kind="stable").tolist()
    groups: list[list[int]] = []
    slices: list[tuple[int, float, float]] = []
    completion: list[float] = []
    tick = 0.0
    position = 0
    while position < len(order):
        first = readiness[order[position]]
        if first > tick:
            # The ticks of the cycles in which nothing was ready.
            tick = tick + math.ceil((first - tick) / cycle_seconds) * cycle_seconds if cycle_seconds else float(first)
            tick = max(tick, float(first))
        due = []
        while position < len(order) and readiness[order[position]] <= tick:
            due.append(order[position])
            position += 1
        now = tick
        for group in _filled(due, amounts, threshold_bytes):
            seconds = float(amounts[group].sum()) * seconds_per_byte
            if seconds > 0:
                slices.append((len(groups), now, now + overhead + seconds))
                now += overhead + seconds
            groups.append(group)
            completion.append(now)
        tick = max(tick + cycle_seconds, now)
    longest = max((end + float(tails[group].max()) for group, end in zip(groups, completion, strict=True)), default=0.0)
    return LinkSchedule(longest, tuple(slices), tuple(completion), tuple(map(tuple, groups)))


def bytescheduler_schedule(
    ready: Values,
    duration: Values,
    tail: Values,
    overhead: float = 0.0,
    *,
    partition_seconds: float,
    credit_seconds: float,
) -> LinkSchedule:
    """ByteScheduler: tensors are cut into equal parts of at most `partition_seconds`, most urgent first.

    Parts worth up to `credit_seconds` are handed over at once and then go in that order, so a more urgent tensor waits
    for what was handed over before it; one part is always allowed. Each part is a collective and pays the overhead.
    """
    readiness, seconds, tails = _arrays(ready, duration, tail)
    parts = np.maximum(np.ceil(seconds / partition_seconds), 1).astype(int).tolist()
    arrivals = [(float(readiness[job]), job) for job in range(len(seconds)) if seconds[job] > 0]
    heapify(arrivals)
    waiting: list[tuple[float, float, int]] = []
    handed_over: deque[tuple[float, float]] = deque()
    slices: list[tuple[int, float, float]] = []
    completion = readiness.copy()
    now = free = 0.0
    while arrivals or waiting:
        while arrivals and arrivals[0][0] <= now:
            moment, job = heappop(arrivals)
            heappush(waiting, (-float(tails[job]), moment, job))
        while handed_over and handed_over[0][0] <= now:
            handed_over.popleft()
        job = waiting[0][2] if waiting else -1
        size = float(seconds[job]) / parts[job] if waiting else 0.0
        if waiting and (not handed_over or sum(length for _, length in handed_over) + size <= credit_seconds):
            start = max(now, free)
            free = start + overhead + size
            handed_over.append((free, size))
            _append(slices, job, start, free, joined=overhead == 0)
            completion[job] = free
            seconds[job] -= size
            parts[job] -= 1
            if not parts[job]:
                heappop(waiting)
        else:
            moments = [arrivals[0][0]] if arrivals else []
            now = min([*moments, handed_over[0][0]]) if handed_over else moments[0]
    longest = float((completion + tails).max()) if len(tails) else 0.0
    return LinkSchedule(longest, tuple(slices), tuple(completion.tolist()))


def _uncut(ready: Values, duration: Values, tail: Values, overhead: float, *, by_tail: bool) -> LinkSchedule:
    readiness, seconds, tails = _arrays(ready, duration, tail)
    urgency = tails if by_tail else np.zeros(len(tails))
    nobody = np.zeros(len(tails), np.bool_)
    return schedule_of(serve(link_jobs(readiness, seconds, urgency, float(overhead)), nobody), tails)


def _arrays(ready: Values, amounts: Values, tail: Values) -> tuple[Floats, Floats, Floats]:
    # A copy, because the caller's array is not ours to change.
    return np.asarray(ready, np.float64), np.array(amounts, np.float64), np.asarray(tail, np.float64)


def _filled(due: list[int], sizes: Floats, threshold: float) -> list[list[int]]:
    groups: list[list[int]] = []
    room = 0.0
    for tensor in due:
        if groups and sizes[tensor] <= room:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
            room = threshold
        room -= float(sizes[tensor])
    return groups


def _append(slices: list[tuple[int, float, float]], job: int, start: float, end: float, *, joined: bool) -> None:
    """A part that follows one of its own job without overhead makes one slice with it."""
    if joined and slices and slices[-1][0] == job and slices[-1][2] == start:
        slices[-1] = (job, slices[-1][1], end)
    else:
        slices.append((job, start, end))
