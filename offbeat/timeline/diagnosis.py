"""Diagnose a timeline: where the time of a step goes on each rank, and what causes the losses.

Every moment of a rank's step is exactly one of: compute; exposed communication (it computes nothing, and a collective
of its all of whose participants have started runs); waiting (it computes nothing, and its collectives all wait for a
participant that has not started); idle (none of these). So the four add up to the step. A 'wait' span is time in which
its own track computes nothing, even where a compute span encloses it. In a prediction the participants of a collective
start together, so that one waits from the moment at which its own part was queued.

One sweep over the sorted starts and ends of all spans yields the segments between them; sums over segments yield the
rest. Times are means over the timeline's steps, in proportion to the median step: that one is the step everywhere, and
one slow step among many does not change it.

Idle time has a reason as far as its neighbours tell (`IDLE`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.timeline.critical import COMMUNICATION, WAIT, critical_positions, last_to_start
from offbeat.timeline.model import KINDS, Timeline
from offbeat.units import format_bytes, format_seconds

IDLE = {
    "steps": "between steps: data loading and the script's own work",
    "collectives": "next to collectives: starting, queueing and finishing them",
    "operators": "between operators: the host is late or does other work",
    "unrecorded": "possibly including communication, which was not recorded",
}
"""Reasons for idle time."""
_COMPUTE, _EXPOSED, _WAITING, _IDLE = range(4)
_MARK = 3
_STRAGGLER_SHARE = 0.02
_MOST_RANKS_SHOWN = 16

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankTime:
    """How one rank spends a step, in seconds."""

    rank: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """Communication not hidden by compute, after all its participants have started."""
    waiting_seconds: float
    """The rank computed nothing, and its collectives only waited for a participant."""
    idle_seconds: float
    overlap_seconds: float
    """Communication hidden by compute, after all its participants have started."""
    network_seconds: float
    """All communication: exposed and hidden."""
    blamed_seconds: float
    """Mean time each other rank waits for collectives that this rank was the last to start."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Cost per step of the collectives with one name: the mean over ranks."""

    name: str
    exposed_seconds: float
    """If several were in flight, the time is divided equally among them."""
    waiting_seconds: float
    bytes: int
    """Sent by one rank in one step."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that delays the others."""

    rank: int
    seconds: float
    """Per step, how much longer it computes, or the others wait for it, than the median of the others."""
    reason: Literal["compute", "lateness"]
    """'compute' if slower compute makes it late."""


@dataclass(frozen=True)
class Diagnosis:
    """Where the time of a step goes, and what causes the losses."""

    source: Literal["predicted", "measured"]
    steps: int
    step_seconds: float
    """Median over these steps of the mean over ranks, as `Timeline.iteration_time`."""
    ideal_seconds: float | None
    """The longest that any rank computes or communicates; None if communication is unknown."""
    ranks: tuple[RankTime, ...]
    idle_by_reason: dict[str, float]
    """Seconds by key of `IDLE`, which add up to the mean idle time of the ranks; most first."""
    straggler: Straggler | None
    blame: tuple[Blame, ...]
    """The collectives with most exposed time, most first."""
    critical_by_kind: dict[str, float]
    """Shares of the critical path by kind of span; 'idle' is time between its spans. They add up to 1."""
    critical_by_rank: dict[int, float]
    """Shares of the critical path by rank; with the idle share they add up to 1."""
    communication_seen: bool
    """False if the timeline has no communication spans, so communication is unknown."""
    notes: tuple[str, ...]

    def mean(self, field: str) -> float:
        """Mean over ranks of a field of `RankTime`, such as 'exposed_seconds'."""
        return float(np.mean([getattr(rank, field) for rank in self.ranks]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        content = asdict(self)
        content["critical_by_rank"] = {str(rank): share for rank, share in self.critical_by_rank.items()}
        return content

    def text(self) -> str:
        """A readable summary of several lines."""
        return "\n".join(_lines(self))


def diagnose(timeline: Timeline, most_blamed: int = 5) -> Diagnosis:
    """Diagnoses a timeline with step marks; ranks without marks are left out, with a note.

    Where communication reaches into the next step, the first step is left out: what reached into it was not recorded.
    """
    marks = timeline.marks
    if marks.ndim != 2 or marks.shape[0] == 0 or marks.shape[1] < 2:
        raise OffbeatError("timeline: no step marks, so there is no step to diagnose")
    if not (np.diff(marks, axis=1) >= 0).all():
        raise OffbeatError("timeline: marks: a step ends before it begins")
    steps, step_seconds, timeline = marks.shape[1] - 1, timeline.iteration_time, _without_cut_step(timeline)
    # When each span could have started for its own rank.
    ready = timeline.start if timeline.source == "measured" else np.fmin(timeline.queued, timeline.start)
    late = last_to_start(replace(timeline, start=ready))
    sweep = _sweep(timeline, ready, late)
    mean = float(sweep.seconds.sum(axis=2).mean())
    scale = step_seconds / mean if mean else 1.0
    ranks = _rank_times(timeline, sweep, late, scale)
    seen = bool((timeline.kind[sweep.communicating] == COMMUNICATION).any())
    known = seen or len(ranks) == 1
    by_kind, by_rank = _critical_shares(timeline)
    return Diagnosis(
        source=timeline.source,
        steps=steps,
        step_seconds=step_seconds,
        ideal_seconds=max(max(r.compute_seconds, r.network_seconds) for r in ranks) if known else None,
        ranks=ranks,
        idle_by_reason=_idle_by_reason(sweep, scale, seen or len(ranks) == 1),
        straggler=_straggler(ranks, step_seconds),
        blame=_blame(timeline, sweep, most_blamed, scale),
        critical_by_kind=by_kind,
        critical_by_rank=by_rank,
        communication_seen=seen,
        notes=timeline.notes + _notes(timeline, sweep),
    )


def _without_cut_step(timeline: Timeline) -> Timeline:
    """Without the first step, if communication of the last one continues after its end."""
    sent = np.flatnonzero((timeline.kind == COMMUNICATION) & (timeline.mark_rows >= 0))
    finish = timeline.marks[timeline.mark_rows[sent], -1]
    if not (timeline.end[sent] > finish + 0.01 * timeline.step_seconds.mean()).any():
        return timeline
    if timeline.marks.shape[1] == 2:
        note = "communication overlaps the next step, and the part that overlapped the only step is not recorded"
        return replace(timeline, notes=(*timeline.notes, note))
    note = "the first step is left out: communication overlaps the next step, and what overlapped the first is missing"
    return replace(timeline, marks=timeline.marks[:, 1:], notes=(*timeline.notes, note))


class _Segments(NamedTuple):
    """The pieces of time between consecutive events of each group, from `_segments`."""

    group: Integers
    start: Floats
    end: Floats
    counts: list[Integers]
    """Per class, the number of active intervals."""
    first: Integers
    """Of each interval, the segment it begins with."""
    past: Integers
    """Of each interval, the segment after its last one."""


def _segments(group: Integers, start: Floats, end: Floats, kind: Integers, classes: int) -> _Segments:
    time = np.concatenate([start, np.maximum(start, end)])
    both, intervals = np.concatenate([group, group]), len(start)
    order = np.lexsort((time, both))
    place = np.empty(2 * intervals, "i8")
    place[order] = np.arange(2 * intervals)
    change = np.repeat(np.array([1, -1]), intervals)[order]
    kinds = np.concatenate([kind, kind])[order]
    time, both = time[order], both[order]
    # From a group's last event to the next group's first, nothing is active.
    until = np.append(np.where(both[1:] == both[:-1], time[1:], time[:-1]), time[-1:])
    counts = [np.cumsum(np.where(kinds == number, change, 0)) for number in range(classes)]
    return _Segments(both, time, until, counts, place[:intervals], place[intervals:])


class _Sweep(NamedTuple):
    """What each moment of the ranks' steps was, and which part of it is due to each communication span."""

    seconds: Floats
    """By row of `marks`, step and _COMPUTE, _EXPOSED, _WAITING or _IDLE."""
    overlap: Floats
    """By row of `marks` and step."""
    idle: Floats
    """Seconds of all ranks and steps: between steps, next to collectives, between operators."""
    communicating: Integers
    """Positions of the communication spans of marked ranks."""
    exposed: Floats
    """Seconds due to each of these."""
    waiting: Floats


def _sweep(timeline: Timeline, ready: Floats, late: Integers) -> _Sweep:
    ranks, steps = timeline.marks.shape[0], timeline.marks.shape[1] - 1
    marked = timeline.mark_rows >= 0
    sent = np.flatnonzero(marked & (timeline.kind == COMMUNICATION))
    gathered = np.clip(ready[late[sent]], ready[sent], timeline.end[sent])
    worker, work_start, work_end = _computing(timeline, marked)
    sender = timeline.mark_rows[sent]
    # A step is an interval too, so that no segment lies across a mark.
    owner = np.repeat(np.arange(ranks), steps)
    parts = [
        (sender, np.maximum(gathered, timeline.start[sent]), timeline.end[sent], _EXPOSED),
        (sender, ready[sent], gathered, _WAITING),
        (worker, work_start, work_end, _COMPUTE),
        (owner, timeline.marks[:, :-1].ravel(), timeline.marks[:, 1:].ravel(), _MARK),
    ]
    group, start, end = (np.concatenate([part[column] for part in parts]) for column in range(3))
    kind = np.repeat([part[3] for part in parts], [len(part[0]) for part in parts])
    segments = _segments(group, start, end, kind, 4)
    computing, transferring, waiting, stepping = (segments.counts[number] > 0 for number in range(4))
    length = np.where(stepping, segments.end - segments.start, 0.0)
    state = np.select([computing, transferring, waiting], [_COMPUTE, _EXPOSED, _WAITING], _IDLE)

    # The step of each segment; the nearest for one outside of all.
    step = np.zeros(len(segments.group), "i8")
    for row, marks in enumerate(timeline.marks):
        own = segments.group == row
        step[own] = np.searchsorted(marks[1:-1], segments.start[own], side="right")
    cell = segments.group * steps + step
    totals: Floats = np.bincount(cell * 4 + state, length, ranks * steps * 4).astype("f8")
    hidden: Floats = np.bincount(cell, np.where(computing & transferring, length, 0.0), ranks * steps).astype("f8")
    idle = _idle_seconds(cell, state, np.where(state == _IDLE, length, 0.0))
    dues = []
    for which, first in ((_EXPOSED, 0), (_WAITING, len(sent))):
        share = np.where(state == which, length / np.maximum(segments.counts[which], 1), 0.0)
        total = np.concatenate([[0.0], np.cumsum(share)])
        mine = slice(first, first + len(sent))
        dues.append(total[segments.past[mine]] - total[segments.first[mine]])
    return _Sweep(totals.reshape(ranks, steps, 4), hidden.reshape(ranks, steps), idle, sent, *dues)


def _idle_seconds(cell: Integers, state: Integers, length: Floats) -> Floats:
    """Idle seconds by what comes before and after: nothing of the same step, a collective, or compute on both sides."""
    place, last = np.arange(len(state)), len(state) - 1
    busy = state != _IDLE
    before = np.maximum.accumulate(np.where(busy, place, -1))
    after = np.minimum.accumulate(np.where(busy, place, len(state))[::-1])[::-1]
    outside = (before < 0) | (after > last)
    before, after = np.maximum(before, 0), np.minimum(after, last)
    outside |= (cell[before] != cell) | (cell[after] != cell)
    computing = (state[before] == _COMPUTE) & (state[after] == _COMPUTE)
    return np.bincount(np.where(outside, 0, np.where(computing, 2, 1)), length, 3).astype("f8")


def _idle_by_reason(sweep: _Sweep, scale: float, seen: bool) -> dict[str, float]:
    seconds = sweep.idle * scale / sweep.overlap.size
    if not seen:
        return {"unrecorded": float(seconds.sum())}
    found = {reason: value for reason, value in zip(IDLE, seconds.tolist(), strict=False) if value > 1e-9}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _computing(timeline: Timeline, marked: NDArray[np.bool_]) -> tuple[Integers, Floats, Floats]:
    """Row of `marks`, start and end of the intervals in which a track of its rank computes and does not stand still."""
    work = np.flatnonzero(marked & (timeline.kind != COMMUNICATION))
    waits = timeline.kind[work] == WAIT
    if not waits.any():
        return timeline.mark_rows[work], timeline.start[work], timeline.end[work]
    tracks = len(timeline.tracks)
    track: Integers = timeline.mark_rows[work] * tracks + timeline.track[work].astype("i8")
    segments = _segments(track, timeline.start[work], timeline.end[work], waits.astype("i8"), 2)
    kept = (segments.counts[0] > 0) & (segments.counts[1] == 0) & (segments.end > segments.start)
    return segments.group[kept] // tracks, segments.start[kept], segments.end[kept]


def _rank_times(timeline: Timeline, sweep: _Sweep, late: Integers, scale: float) -> tuple[RankTime, ...]:
    mean, overlap = scale * sweep.seconds.mean(axis=1), scale * sweep.overlap.mean(axis=1)
    count, steps = sweep.overlap.shape
    last = timeline.mark_rows[late[sweep.communicating]]
    blamed = np.zeros(count)
    counted = (last >= 0) & (last != timeline.mark_rows[sweep.communicating])
    np.add.at(blamed, last[counted], scale * sweep.waiting[counted] / (steps * max(1, count - 1)))
    # The fields of RankTime in their order: _COMPUTE to _IDLE are the second to the fifth.
    rows = np.column_stack([mean.sum(axis=1), mean, overlap, mean[:, _EXPOSED] + overlap, blamed]).tolist()
    return tuple(RankTime(rank, *row) for rank, row in zip(timeline.marked_ranks, rows, strict=True))


def _straggler(ranks: tuple[RankTime, ...], step_seconds: float) -> Straggler | None:
    """The rank that exceeds the others by more than a fiftieth of the step, or None."""
    if len(ranks) < 2:
        return None
    found = []
    for field in ("compute_seconds", "blamed_seconds"):
        values = np.array([getattr(rank, field) for rank in ranks])
        most = int(values.argmax())
        # Every rank is the last now and then, so only the excess over the others counts.
        found.append((float(values[most] - np.median(np.delete(values, most))), most))
    (longer, slowest), (later, last) = found
    least = _STRAGGLER_SHARE * step_seconds
    if longer > least and (slowest == last or longer >= later):
        return Straggler(ranks[slowest].rank, longer, "compute")
    return Straggler(ranks[last].rank, later, "lateness") if later > least else None


def _blame(timeline: Timeline, sweep: _Sweep, most: int, scale: float) -> tuple[Blame, ...]:
    ranks, steps = sweep.overlap.shape
    sent = sweep.communicating
    name, marks = timeline.name[sent], timeline.marks[timeline.mark_rows[sent]]
    inside = (timeline.start[sent] >= marks[:, 0]) & (timeline.start[sent] < marks[:, -1])
    exposed, waiting, size = (
        np.bincount(name, weights, len(timeline.names)) / (ranks * steps)
        for weights in (scale * sweep.exposed, scale * sweep.waiting, np.where(inside, timeline.bytes[sent], 0))
    )
    worst = sorted(np.unique(name).tolist(), key=lambda number: (-exposed[number], -waiting[number], number))
    return tuple(
        Blame(timeline.names[number], float(exposed[number]), float(waiting[number]), round(size[number]))
        for number in worst[:most]
        # Less than that is a rounding error.
        if exposed[number] > 1e-12 or waiting[number] > 1e-12
    )


def _critical_shares(timeline: Timeline) -> tuple[dict[str, float], dict[int, float]]:
    """Each moment of the path belongs to the earliest of its spans that is active."""
    positions = timeline.critical if timeline.critical is not None else critical_positions(timeline)
    if not len(positions):
        return {}, {}
    start, end = timeline.start[positions], np.maximum.accumulate(timeline.end[positions])
    covered = np.append(start[0], end[:-1])
    seconds = np.maximum(0.0, end - np.maximum(start, covered))
    total = float(end[-1] - start[0])
    if total <= 0:
        return {}, {}
    kinds = np.bincount(timeline.kind[positions], seconds, len(KINDS)) / total
    by_kind: dict[str, float] = {kind: share for kind, share in zip(KINDS, kinds.tolist(), strict=True) if share}
    idle = 1.0 - float(kinds.sum())
    if idle > 1e-9:
        by_kind["idle"] = idle
    present, number = np.unique(timeline.rank[positions], return_inverse=True)
    shares = np.bincount(number, seconds) / total
    return by_kind, dict(zip(present.tolist(), shares.tolist(), strict=True))


def _notes(timeline: Timeline, sweep: _Sweep) -> tuple[str, ...]:
    count = len(timeline.marks)
    notes = []
    silent = sorted(set(timeline.marked_ranks) - set(np.unique(timeline.rank[sweep.communicating]).tolist()))
    if count > 1 and len(silent) == count:
        notes.append(
            f"no communication span was recorded on any of the {count} ranks: communication is unknown, not zero, and "
            "counts as idle time"
        )
    elif count > 1 and silent:
        notes.append(f"no communication span was recorded on {name_ranks(silent)}: there it counts as idle time")
    unmatched = int((timeline.task[sweep.communicating] < 0).sum())
    if count > 1 and unmatched:
        notes.append(
            f"{unmatched} communication spans have no task number: waiting for stragglers within them counts as "
            "exposed communication"
        )
    unmarked = sorted(set(timeline.ranks) - set(timeline.marked_ranks))
    if unmarked:
        notes.append(f"{name_ranks(unmarked)} left out: no step marks")
    return tuple(notes)


def name_ranks(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 0–15' or 'ranks 0–2, 5, 9 and 4 more'."""
    ordered = sorted(ranks)
    # Consecutive ranks are equally far from their places.
    groups = groupby(enumerate(ordered), key=lambda placed: placed[1] - placed[0])
    runs = [[rank for _, rank in run] for _, run in groups]
    shown = ", ".join("–".join(map(str, sorted({run[0], run[-1]}))) for run in runs[:3])
    left = sum(map(len, runs[3:]))
    return f"rank{'' if len(ordered) == 1 else 's'} {shown}" + (f" and {left} more" if left else "")


def short_name(name: str) -> str:
    """The name of a bucket, which lists all its tensors, shortened to the first, the last and their number."""
    names = name.split(",")
    return name if len(names) < 3 else f"{names[0]} to {names[-1]}, {len(names)} tensors"


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    count = len(diagnosis.ranks)
    ranks, steps = f"{count} rank{'s' * (count > 1)}", f"{diagnosis.steps} step{'s' * (diagnosis.steps > 1)}"
    yield f"{diagnosis.source} step of {_show(diagnosis.step_seconds)} on {ranks}, median of {steps}"
    if diagnosis.ideal_seconds:
        ratio, ideal = diagnosis.step_seconds / diagnosis.ideal_seconds, _show(diagnosis.ideal_seconds)
        yield f"bound, with compute and network fully overlapped: {ideal}; the step takes {ratio:.2f}× that"
    if count > 1 and not diagnosis.communication_seen:
        yield "communication: NOT RECORDED, so the bound and the exposed time are unknown"
    columns = ("compute", "exposed", "waiting", "idle", "overlap")
    yield f"{'rank':>5}" + "".join(f"{column:>12}" for column in columns)
    slowest = sorted(diagnosis.ranks, key=lambda rank: -rank.compute_seconds)[:_MOST_RANKS_SHOWN]
    for rank in slowest if count > _MOST_RANKS_SHOWN else diagnosis.ranks:
        yield f"{rank.rank:>5}" + "".join(f"{_show(getattr(rank, f'{column}_seconds')):>12}" for column in columns)
    if len(slowest) < count:
        yield f"      and {count - len(slowest)} ranks with less compute"
    for reason, seconds in diagnosis.idle_by_reason.items():
        yield f"idle {_show(seconds)} {IDLE[reason]}"
    found = diagnosis.straggler
    if found is None:
        yield "straggler: none"
    elif found.reason == "compute":
        yield f"straggler: rank {found.rank} computes {_show(found.seconds)} longer than the others"
    else:
        yield f"straggler: the others wait {_show(found.seconds)} per step for rank {found.rank}"
    for blame in diagnosis.blame:
        exposed, waiting = _show(blame.exposed_seconds), _show(blame.waiting_seconds)
        yield f"  {short_name(blame.name)} ({format_bytes(blame.bytes)}): {exposed} exposed, {waiting} waiting"
    if diagnosis.critical_by_kind:
        kinds = sorted(diagnosis.critical_by_kind.items(), key=lambda item: -item[1])
        yield "critical path: " + ", ".join(f"{kind} {share:.0%}" for kind, share in kinds)
    yield from (f"note: {note}" for note in diagnosis.notes)


def to_html(diagnosis: Diagnosis) -> str:
    """A table with a bar for each rank, without script or style sheet."""
    parts = {"compute": "#3f73c9", "exposed": "#d0742b", "waiting": "#b5476b", "idle": "#c9ccd2"}
    piece = '<span style="display:inline-block;height:12px;width:{:.1f}px;background:{}"></span>'
    rows = []
    for rank in diagnosis.ranks[:_MOST_RANKS_SHOWN]:
        seconds = [getattr(rank, f"{part}_seconds") for part in parts]
        width = 300 / (rank.step_seconds or 1.0)
        bar = "".join(piece.format(width * own, colour) for own, colour in zip(seconds, parts.values(), strict=True))
        cells = "".join(f"<td>{_show(own)}</td>" for own in seconds)
        rows.append(f'<tr><td>{rank.rank}</td>{cells}<td style="white-space:nowrap">{bar}</td></tr>')
    left = len(diagnosis.ranks) - len(rows)
    more = f'<tr><td colspan="6">and {left} more ranks</td></tr>' if left else ""
    heads = "".join(f'<th style="border-bottom:3px solid {colour}">{part}</th>' for part, colour in parts.items())
    bound = f", bound {_show(diagnosis.ideal_seconds)}" if diagnosis.ideal_seconds else ""
    table = f"<table><tr><th>rank</th>{heads}<th></th></tr>{''.join(rows)}{more}</table>"
    return f"<p>{diagnosis.source} step {_show(diagnosis.step_seconds)}{bound}</p>{table}"


def _show(seconds: float) -> str:
    """Rounded to nanoseconds, which hides the rounding errors of sums."""
    return format_seconds(round(seconds, 9))
