"""Find the chain of spans that determines the length of one step, from times alone.

The chain is walked back from the span that ends the step on the rank that ends last. What a span had to wait for:

- A collective waits for its last participant, so the chain goes on with that participant's span of it. That one waited
  for the span before it on its own track, if it stood in a queue, or else for the computation that made it ready.
- A computation waited for the span before it on its track, unless a collective of its rank, or work on another of its
  tracks, ended later than that.

'wait' spans only say that a rank stood still, not what for, and are never part of the chain. Each link of the chain
starts before the next; times that differ by less than the tolerance count as equal. All candidates are looked up for
all spans at once in sorted columns, so a million spans take a second.
"""

import numpy as np
from numpy.typing import NDArray

from offbeat.timeline.model import KINDS, Timeline

COMMUNICATION = KINDS.index("communication")
WAIT = KINDS.index("wait")

Positions = NDArray[np.int64]
Seconds = NDArray[np.float64]

_NONE = -1


def critical_positions(timeline: Timeline, tolerance_seconds: float | None = None) -> Positions:
    """Positions of the spans on the critical path of the last step, in time order.

    A timeline without marks counts as one step. The tolerance, for the noise of clocks, is 20 us unless given, and less
    where steps are shorter than 20 ms.
    """
    if timeline.marks.size > len(timeline.marks):
        begin, finish = timeline.marks[:, -2], float(timeline.marks[:, -1].max())
        first_begin, last_rank = float(begin.min()), timeline.marked_ranks[int(timeline.marks[:, -1].argmax())]
        own_begin = np.where(timeline.mark_rows >= 0, begin[timeline.mark_rows], first_begin)
    else:
        finish = float(timeline.end.max()) if len(timeline) else 0.0
        first_begin, last_rank = float(timeline.start.min(initial=finish)), None
        own_begin = np.full(len(timeline), -np.inf)
    if tolerance_seconds is None:
        tolerance_seconds = min(20e-6, 1e-3 * (finish - first_begin))
    inside = (timeline.end > own_begin) & (timeline.start < finish) & (timeline.kind != WAIT)
    chosen = np.flatnonzero(inside)
    if not len(chosen):
        return np.empty(0, "i8")
    part = timeline.select(inside)
    last = _last_span(part, last_rank, finish + tolerance_seconds, tolerance_seconds)
    return chosen[_walk(part, last, tolerance_seconds)]


def last_to_start(timeline: Timeline) -> Positions:
    """For each span the position of the participant of the same collective that started last, before the span ended.

    A participant that starts after a span has ended cannot have delayed it. Spans that are no collective, or whose
    `task` is unknown, stand alone.
    """
    result = np.arange(len(timeline))
    members = np.flatnonzero((timeline.kind == COMMUNICATION) & (timeline.task >= 0))
    if len(members):
        step, task = timeline.step[members].astype("i8"), timeline.task[members].astype("i8")
        collective = (step - step.min()) * (task.max() + 1) + task
        found = _Latest(collective, timeline.start[members]).until(collective, timeline.end[members], strictly=True)
        # A span without length has not started before its own end.
        result[members] = np.where(found == _NONE, members, members[found])
    return result


class _Latest:
    """Finds, within a group, the member with the greatest time up to a given one."""

    def __init__(self, group: Positions, time: Seconds) -> None:
        order = np.argsort(time, kind="stable")
        self.times = time[order]
        self.stride = len(time) + 1
        # One number per member sorts by group, then by place in time.
        keys = group[order].astype("i8") * self.stride + np.arange(len(order))
        by_key = np.argsort(keys, kind="stable")
        self.keys, self.members, self.groups = keys[by_key], order[by_key], group[order][by_key]

    def until(self, group: Positions, time: Seconds, strictly: bool = False) -> Positions:
        """Number of the member, or -1."""
        if not len(self.keys):
            return np.full(len(group), _NONE)
        earlier = np.searchsorted(self.times, time, side="left" if strictly else "right")
        place = np.searchsorted(self.keys, group.astype("i8") * self.stride + earlier, side="left") - 1
        found = (place >= 0) & (self.groups[place] == group)
        return np.where(found, self.members[place], _NONE)


def _last_span(part: Timeline, rank: int | None, finish: float, tolerance: float) -> int:
    """The span that ends the step: the last of the rank (of all, without one) to end by `finish`; a computation if that
    is not much earlier."""
    candidates = np.arange(len(part))
    for wanted in (part.rank == rank, part.end <= finish):
        candidates = candidates[wanted[candidates]] if wanted[candidates].any() else candidates
    last = candidates[part.end[candidates].argmax()]
    computing = candidates[part.kind[candidates] != COMMUNICATION]
    if len(computing):
        computed = computing[part.end[computing].argmax()]
        if part.end[last] - part.end[computed] <= tolerance:
            return int(computed)
    return int(last)


def _walk(part: Timeline, last: int, tolerance: float) -> Positions:
    """The chain that ends with `last`; it is finite, because `age` falls with every link."""
    age = np.empty(len(part), "i8")
    age[np.lexsort((np.arange(len(part)), part.end, part.start))] = np.arange(len(part))
    late = last_to_start(part)
    late = np.where(part.start[late] > part.start + tolerance, late, np.arange(len(part)))
    before, ages, lates = _predecessors(part, age, tolerance).tolist(), age.tolist(), late.tolist()
    chain = [lates[last]]
    while (found := before[chain[-1]]) != _NONE:
        blamed = lates[found]
        chain.append(blamed if ages[blamed] < ages[chain[-1]] else found)
    return np.array(chain[::-1], "i8")


def _predecessors(part: Timeline, age: Positions, tolerance: float) -> Positions:
    """For each span the one it waited for, or -1."""
    everything = np.arange(len(part))
    communicating = part.kind == COMMUNICATION
    rank = part.rank.astype("i8")
    queue: Positions = rank * len(part.tracks) + part.track.astype("i8")
    ready = np.where(np.isnan(part.queued), part.start, np.minimum(part.queued, part.start))

    same_track = _earlier(part, age, everything, queue, part.start, tolerance)
    computed = _earlier(part, age, np.flatnonzero(~communicating), rank, ready, tolerance)
    received = _earlier(part, age, np.flatnonzero(communicating), rank, part.start, tolerance)

    track_end, computed_end = _ends(part, same_track), _ends(part, computed)
    stood_in_queue = np.where(
        np.isnan(part.queued),
        (track_end >= part.start - tolerance) | (track_end >= computed_end),
        track_end > part.queued + tolerance,
    )
    for_collective = np.where(stood_in_queue | (computed == _NONE), same_track, computed)

    for_compute = np.where(_ends(part, received) > track_end + tolerance, received, same_track)
    for_compute = np.where(computed_end > _ends(part, for_compute) + tolerance, computed, for_compute)
    return np.where(communicating, for_collective, for_compute)


def _ends(part: Timeline, positions: Positions) -> Seconds:
    return np.where(positions == _NONE, -np.inf, part.end[positions])


def _earlier(
    part: Timeline, age: Positions, members: Positions, group: Positions, time: Seconds, tolerance: float
) -> Positions:
    """For each span the member of its group that ended last by `time`, and is earlier than the span itself.

    Within the tolerance this may find a younger member or the span itself; then it is tried without tolerance, and last
    without members that end in the same instant.
    """
    latest = _Latest(group[members], part.end[members])
    result = np.full(len(part), _NONE)
    for until, strictly in ((time + tolerance, False), (time, False), (time, True)):
        found = latest.until(group, until, strictly)
        found = np.where(found == _NONE, _NONE, members[found]) if len(members) else found
        usable = (result == _NONE) & (found != _NONE) & (age[found] < age)
        result[usable] = found[usable]
    return result
