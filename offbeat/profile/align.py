"""Align the clocks of all ranks by their communication: an offset and a drift per rank.

The clock of a machine shows local = reference + (true - reference) * (1 + drift) + offset, where rank 0's clock is the
true one. It follows from the ends of barrier-like collectives (all-reduce, all-gather, barrier, ...), which all
participants leave nearly together, and, by dPRO section 4.2, from RECVs of the same tensor, which take equally long
(`clockfit`).

dPRO's second objective O2 (ranks of a machine have equal offsets) holds exactly here: one clock per machine. Its
dependency constraints hold too: nobody leaves a collective, and no RECV ends, before the last has joined or the SEND
has begun.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.profile import clockfit
from offbeat.profile.clockfit import RECEIVE, ROOTED, SEND, TOGETHER, CommunicationEvents, Floats, Ints
from offbeat.timeline import KINDS, Timeline
from offbeat.units import format_seconds

# Anchored, because a bucket of DDP is named after its parameters, which may be called anything.
_VERB = re.compile(r"(?:[a-z_0-9]+:+)?(?:c10d::|_)*([a-z_]*)", re.IGNORECASE)
_ROLES = {"send": SEND, "isend": SEND, "recv": RECEIVE, "irecv": RECEIVE, "receive": RECEIVE, "recvanysource": RECEIVE}
_ROLES |= dict.fromkeys(("broadcast", "reduce", "gather", "scatter", "push", "pull"), ROOTED)

_SHARED_CLOCK_SECONDS = 5e-3
"""Ranks of one machine whose clocks differ by more than this are aligned one by one."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """How far each rank's clock is ahead of rank 0's."""

    ranks: tuple[int, ...]
    reference_seconds: float
    """Time on rank 0's clock at which `offset_seconds` holds."""
    offset_seconds: Floats
    drift_ppm: Floats
    """Microseconds that the rank's clock gains on rank 0's per second."""
    notes: tuple[str, ...] = ()

    def clock(self, rank: int) -> Callable[[Any], Any]:
        """From a time, or an array of them, on this rank's own clock to the same on rank 0's."""
        place = self.ranks.index(rank)
        offset, drift = float(self.offset_seconds[place]), float(self.drift_ppm[place]) * 1e-6
        return lambda at: self.reference_seconds + (at - self.reference_seconds - offset) / (1 + drift)


def communication_events(timeline: Timeline) -> CommunicationEvents:
    """The collectives and transfers of a timeline that at least two ranks took part in."""
    chosen = np.flatnonzero((timeline.kind == KINDS.index("communication")) & (timeline.task >= 0))
    order = chosen[np.lexsort((timeline.rank[chosen], timeline.task[chosen], timeline.step[chosen]))]
    step, task, rank = (column[order].astype(np.int64) for column in (timeline.step, timeline.task, timeline.rank))
    fresh = clockfit.changes(step, task)
    # A collective cut into slices has several spans on one rank; together they are one event.
    begins = np.flatnonzero(fresh | clockfit.changes(rank))
    start, end = timeline.start[order], timeline.end[order]
    start, end = np.minimum.reduceat(start, begins), np.maximum.reduceat(end, begins)
    occurrence = np.cumsum(fresh)[begins] - 1
    verbs = [_VERB.findall(name)[0].strip("_").lower() for name in timeline.names]
    role = np.array([_ROLES.get(verb, TOGETHER) for verb in verbs], np.int64)[timeline.name[order[begins]]]
    step, task, rank, size = step[begins], task[begins], rank[begins], timeline.bytes[order[begins]]

    keep = np.isfinite(start) & np.isfinite(end) & (np.bincount(occurrence)[occurrence] >= 2)
    sides = [np.bincount(occurrence, weights=role == side, minlength=1) for side in (SEND, RECEIVE)]
    point_to_point = role >= SEND
    keep &= ~point_to_point | ((sides[0] == 1) & (sides[1] == 1))[occurrence]
    sender = np.zeros(len(sides[0]), np.int64)
    sender[occurrence[role == SEND]] = rank[role == SEND]
    # Without steps every task number is new, and only the size tells which transfers repeat.
    keys = np.stack([np.where(step >= 0, task, -1), size, rank, sender[occurrence]])[:, keep]
    family = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1) if keys.size else np.empty(0, np.int64)
    occurrence, rank, start, end, role = (column[keep] for column in (occurrence, rank, start, end, role))
    return CommunicationEvents(occurrence, rank, start, end, role, family.astype(np.int64), timeline.ranks)


def clock_offsets(events: CommunicationEvents, machine: Mapping[int, Hashable] | None = None) -> Alignment:
    """Each rank's clock against rank 0's (or the lowest rank's); ranks of one `machine` share theirs."""
    notes: list[str] = []
    ranks = np.array(sorted(events.ranks), np.int64)
    events = replace(events, rank=np.searchsorted(ranks, events.rank), role=events.role.copy())
    lacking = np.setdiff1d(events.rank[events.role == ROOTED], events.rank[events.role != ROOTED])
    if len(lacking):
        # Their ends are biased: all but the root of a broadcast, and the root of a reduction, end late.
        events.role[events.role == ROOTED] = TOGETHER
        notes.append(
            f"clock alignment: rank {ranks[lacking[0]]} took part only in collectives with a root, "
            "whose participants need not end together, so its clock is less certain"
        )
    clock = _clocks(ranks, machine or {}, events, notes)
    events = replace(events, rank=clock[events.rank])
    count = int(clock.max(initial=-1)) + 1
    edges = clockfit.median_edges(events.ends(TOGETHER)) + clockfit.median_edges(events.ends(SEND, RECEIVE))
    coarse, component = clockfit.walk(count, edges)
    _note_unreached(ranks, clock, component, notes)
    shift = coarse[events.rank]
    events = replace(events, start=events.start - shift, end=events.end - shift)
    ends, transfers = events.ends(TOGETHER), events.ends(SEND, RECEIVE)
    sends = [rows[transfers.role[rows] == SEND] for _, _, *sides in transfers.pairs() for rows in sides]
    times = np.concatenate([ends.end, *(transfers.start[rows] for rows in sends)])
    first, last = (float(times.min()), float(times.max())) if len(times) else (0.0, 0.0)
    window = clockfit.Window(middle=(first + last) / 2, half=max((last - first) / 2, 1e-3))
    free = np.flatnonzero(component != np.arange(count))
    pairs, kept = clockfit.compare_ends(ends, window)
    pairs += clockfit.compare_transfers(transfers, window)
    offset, drift, hessian = clockfit.solve(pairs, count, free, window)
    bounds = np.full((count, count), np.inf) if len(lacking) else clockfit.end_bounds(ends, drift, kept, window)
    for pair in pairs:
        for ends_of, most in zip(((pair.low, pair.high), (pair.high, pair.low)), pair.most, strict=True):
            bounds[ends_of] = min(bounds[ends_of], most)
    offset = clockfit.respect(offset, hessian, free, bounds, notes)
    if len(kept) and (rejected := float(np.mean(~kept))) > 0.3:
        notes.append(f"clock alignment: {rejected:.0%} of the collectives' ends are outliers and were left out")
    return Alignment(
        ranks=tuple(ranks.tolist()),
        reference_seconds=window.middle,
        offset_seconds=(coarse + offset)[clock],
        drift_ppm=(1e6 * drift / window.half)[clock],
        notes=tuple(notes),
    )


def apply(timeline: Timeline, alignment: Alignment) -> Timeline:
    """The timeline with every time moved to rank 0's clock, and the alignment's notes added."""
    count, marks = len(alignment.ranks), timeline.marks.copy()
    if marks.size and len(marks) != count:
        raise OffbeatError(f"alignment: {count} ranks, but the timeline has step marks of {len(marks)}")
    times = {name: getattr(timeline, name).copy() for name in ("start", "end", "queued")}
    for row, rank in enumerate(alignment.ranks):
        clock, own = alignment.clock(rank), timeline.rank == rank
        for column in times.values():
            column[own] = clock(column[own])
        marks[row : row + 1] = clock(marks[row : row + 1])
    return replace(timeline, **times, marks=marks, critical=None, notes=(*timeline.notes, *alignment.notes))


def _clocks(ranks: Ints, machine: Mapping[int, Hashable], events: CommunicationEvents, notes: list[str]) -> Ints:
    """The number of each rank's clock, in the order of the lowest rank that reads it."""
    members: dict[Hashable, list[int]] = {}
    for position, rank in enumerate(ranks.tolist()):
        members.setdefault(machine.get(rank, ("rank", rank)), []).append(position)
    offset, component = clockfit.walk(len(ranks), clockfit.median_edges(events.ends(TOGETHER)))
    lowest = np.arange(len(ranks))
    for name, positions in members.items():
        apart = [np.ptp(offset[positions][component[positions] == root]) for root in np.unique(component[positions])]
        if max(apart) > _SHARED_CLOCK_SECONDS:
            notes.append(
                f"clock alignment: the ranks of machine {name!r} differ by {format_seconds(float(max(apart)))}, "
                "so each of them is aligned by itself"
            )
        else:
            lowest[positions] = positions[0]
    return np.unique(lowest, return_inverse=True)[1].reshape(-1)


def _note_unreached(ranks: Ints, clock: Ints, component: Ints, notes: list[str]) -> None:
    alone = component[clock] if len(ranks) else component
    for root in np.unique(alone)[1:]:
        members = [str(rank) for rank in ranks[alone == root]]
        if len(members) == 1:
            notes.append(f"clock alignment: rank {members[0]} shares no communication with others; its offset is 0")
        else:
            shown = ", ".join(members[:8]) + (", ..." if len(members) > 8 else "")
            notes.append(
                f"clock alignment: ranks {shown} share no communication with rank {ranks[0]}; "
                f"they are aligned to rank {members[0]}"
            )
