"""Communication events of ranks with their own clocks → an offset and a drift per rank; Timeline → one clock.

The clock of a machine shows local = reference + (true - reference) * (1 + drift) + offset, where rank 0's clock is the
true one. Two observations determine the clocks:

* All participants of a barrier-like collective (all-reduce, all-gather, barrier, ...) leave it nearly together
  (`offbeat.profile.clockfit`).
* dPRO section 4.2: RECVs of the same tensor take equally long (`offbeat.profile.recvfit`).

The paper's second objective O2 (ranks of a machine have equal offsets) holds exactly here: one clock per machine. Its
dependency constraints hold too: nobody leaves a collective, and no RECV ends, before the last has joined or the SEND
has begun.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.profile.clockfit import (
    Ends,
    Floats,
    Ints,
    Window,
    changes,
    end_bounds,
    fit_ends,
    median_edges,
    respect,
    walk,
)
from offbeat.profile.recvfit import Transfers, fit_pairs
from offbeat.timeline import KINDS, Timeline
from offbeat.units import format_seconds

TOGETHER, ROOTED, SEND, RECEIVE = range(4)
"""Roles of an event: of a barrier-like collective, of one with a root, and the two sides of a transfer."""

_VERB = re.compile(r"(?:[a-z_0-9]+:+)?(?:c10d::|_)*([a-z_]*)", re.IGNORECASE)
_ROLES = {"send": SEND, "isend": SEND, "recv": RECEIVE, "irecv": RECEIVE, "receive": RECEIVE, "recvanysource": RECEIVE}
_ROLES |= dict.fromkeys(("broadcast", "reduce", "gather", "scatter", "push", "pull"), ROOTED)

_SHARED_CLOCK_SECONDS = 5e-3
"""Ranks said to share a machine whose clocks differ by more than this do not share a clock."""


@dataclass(frozen=True, eq=False)
class CommunicationEvents:
    """One row per participant of each occurrence of a collective or transfer, as columns of equal length."""

    occurrence: Ints
    rank: Ints
    start: Floats
    """Seconds on the rank's own clock, as is `end`."""
    end: Floats
    role: Ints
    family: Ints
    """Equal for transfers of the same tensor between the same ranks in different steps; of meaning for RECEIVE only."""
    ranks: tuple[int, ...]
    """All ranks of the job, also those without communication."""

    def __post_init__(self) -> None:
        for column in ("rank", "start", "end", "role", "family"):
            if len(getattr(self, column)) != len(self.occurrence):
                raise OffbeatError(
                    f"communication events: column {column!r} has {len(getattr(self, column))} entries, "
                    f"'occurrence' has {len(self.occurrence)}"
                )
        unknown = np.setdiff1d(self.rank, self.ranks)
        if len(unknown):
            raise OffbeatError(f"communication events: rank {unknown[0]} is not one of the ranks {list(self.ranks)}")


@dataclass(frozen=True, eq=False)
class Alignment:
    """How far each rank's clock is ahead of rank 0's."""

    ranks: tuple[int, ...]
    reference_seconds: float
    """Time on rank 0's clock at which `offset_seconds` holds."""
    offset_seconds: Floats
    drift_ppm: Floats
    """Microseconds that the rank's clock gains on rank 0's per second."""
    residual_seconds: float
    """Typical disagreement (1.48 x median) that remains between ends that should coincide; NaN without such ends."""
    notes: tuple[str, ...] = ()

    def correct(self, rank: NDArray[np.integer], seconds: Floats) -> Floats:
        """Times on the ranks' own clocks as times on rank 0's."""
        position = np.searchsorted(self.ranks, rank)
        if len(position) and (position.max() >= len(self.ranks) or (np.array(self.ranks)[position] != rank).any()):
            raise OffbeatError(f"alignment: it knows ranks {list(self.ranks)} only")
        local = seconds - self.reference_seconds - self.offset_seconds[position]
        return self.reference_seconds + local / (1 + 1e-6 * self.drift_ppm[position])


def communication_events(timeline: Timeline) -> CommunicationEvents:
    """The collectives and transfers of a timeline that at least two ranks took part in."""
    chosen = np.flatnonzero((timeline.kind == KINDS.index("communication")) & (timeline.task >= 0))
    order = chosen[np.lexsort((timeline.rank[chosen], timeline.task[chosen], timeline.step[chosen]))]
    step, task, rank = (column[order].astype(np.int64) for column in (timeline.step, timeline.task, timeline.rank))
    fresh = changes(step, task)
    # A collective cut into slices has several spans on one rank; together they are one event.
    begins = np.flatnonzero(fresh | changes(rank))
    start, end = timeline.start[order], timeline.end[order]
    if len(order):
        start, end = np.minimum.reduceat(start, begins), np.maximum.reduceat(end, begins)
    occurrence = np.cumsum(fresh)[begins] - 1
    roles = np.array([_role(name) for name in timeline.names], np.int64)
    role = roles[timeline.name[order[begins]]] if len(order) else np.empty(0, np.int64)
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
    events = replace(events, rank=np.searchsorted(ranks, events.rank))
    ends, transfers = _ends(events, notes), _transfers(events)
    clock = _clocks(ranks, machine, median_edges(ends), notes)
    ends, transfers = ends.on(clock), transfers.on(clock)
    count = int(clock.max(initial=-1)) + 1
    coarse, component = walk(count, median_edges(ends) + median_edges(transfers.as_ends()))
    _note_unreached(ranks, clock, component, notes)

    ends, transfers = ends.shifted(coarse), transfers.shifted(coarse)
    times = np.concatenate([ends.end, transfers.send_start])
    first, last = (float(times.min()), float(times.max())) if len(times) else (0.0, 0.0)
    window = Window(middle=(first + last) / 2, half=max((last - first) / 2, 1e-3))
    free = np.flatnonzero(component != np.arange(count))
    pairs = fit_pairs(transfers, window)
    fit = fit_ends(ends, pairs, count, free, window)
    bounds = end_bounds(ends, fit, window, count) + [bound for pair in pairs for bound in pair.bounds]
    offset = respect(fit, free, bounds, notes)
    if fit.rejected > 0.3:
        notes.append(f"clock alignment: {fit.rejected:.0%} of the collectives' ends are outliers and were left out")
    return Alignment(
        ranks=tuple(ranks.tolist()),
        reference_seconds=window.middle,
        offset_seconds=(coarse + offset)[clock],
        drift_ppm=(1e6 * fit.drift / window.half)[clock],
        residual_seconds=fit.scale,
        notes=tuple(notes),
    )


def apply(timeline: Timeline, alignment: Alignment) -> Timeline:
    """The timeline with every time moved to rank 0's clock, and the alignment's notes added."""
    rank, ranks = timeline.rank, np.array(alignment.ranks)
    marks = timeline.marks
    if marks.size:
        if len(marks) != len(ranks):
            raise OffbeatError(f"alignment: it has {len(ranks)} ranks, the timeline has step marks of {len(marks)}")
        rows = np.broadcast_to(ranks[:, None], marks.shape)
        marks = alignment.correct(rows.reshape(-1), marks.reshape(-1)).reshape(marks.shape)
    return replace(
        timeline,
        start=alignment.correct(rank, timeline.start),
        end=alignment.correct(rank, timeline.end),
        queued=alignment.correct(rank, timeline.queued),
        marks=marks,
        critical=None,
        notes=(*timeline.notes, *alignment.notes),
    )


def without_waiting(timeline: Timeline) -> Timeline:
    """The aligned timeline with each communication span cut to the time in which data could move.

    A barrier-like collective moves data once its last participant has joined, a RECV once the SEND has begun
    (dPRO 4.2). `queued` keeps the time at which the rank itself was ready.
    """
    roles = np.array([_role(name) for name in timeline.names], np.int64)
    chosen = np.flatnonzero((timeline.kind == KINDS.index("communication")) & (timeline.task >= 0))
    role = roles[timeline.name[chosen]] if len(chosen) else np.empty(0, np.int64)
    keys = np.stack([timeline.step[chosen], timeline.task[chosen]])
    group = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1) if len(chosen) else np.empty(0, np.int64)
    sets_pace = (role == TOGETHER) | (role == SEND)
    begin = np.full(int(group.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(begin, group[sets_pace], timeline.start[chosen[sets_pace]])
    held = (role == TOGETHER) | (role == RECEIVE)
    rows, earliest = chosen[held], begin[group[held]]
    start, queued = timeline.start.copy(), timeline.queued.copy()
    queued[rows] = np.where(np.isnan(queued[rows]), start[rows], queued[rows])
    start[rows] = np.minimum(np.maximum(start[rows], earliest), timeline.end[rows])
    return replace(timeline, start=start, queued=queued, critical=None)


def _role(name: str) -> int:
    match = _VERB.match(name)
    verb = match[1].strip("_").lower() if match else ""
    return _ROLES.get(verb, TOGETHER)


def _ends(events: CommunicationEvents, notes: list[str]) -> Ends:
    chosen = events.role == TOGETHER
    strict = True
    informed = np.unique(events.rank[events.role != ROOTED])
    lacking = np.setdiff1d(events.rank[events.role == ROOTED], informed)
    if len(lacking):
        # Better than nothing: all but the root of a broadcast, and the root of a reduction, end late.
        chosen, strict = chosen | (events.role == ROOTED), False
        notes.append(
            f"clock alignment: rank {sorted(events.ranks)[lacking[0]]} took part only in collectives with a root, "
            "whose participants need not end together, so its clock is less certain"
        )
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(events.occurrence[rows], kind="stable")]
    occurrence = np.unique(events.occurrence[rows], return_inverse=True)[1].reshape(-1)
    return Ends(occurrence, events.rank[rows], events.start[rows], events.end[rows], strict)


def _transfers(events: CommunicationEvents) -> Transfers:
    sends, receives = (np.flatnonzero(events.role == role) for role in (SEND, RECEIVE))
    _, first, second = np.intersect1d(events.occurrence[sends], events.occurrence[receives], return_indices=True)
    sends, receives = sends[first], receives[second]
    ends = (events.start[sends], events.start[receives], events.end[receives])
    return Transfers(events.rank[sends], events.rank[receives], *ends, events.family[receives])


def _clocks(
    ranks: Ints, machine: Mapping[int, Hashable] | None, edges: list[tuple[int, int, float]], notes: list[str]
) -> Ints:
    """The number of each rank's clock, in the order of the lowest rank that reads it."""
    names: list[Hashable] = [("rank", int(rank)) for rank in ranks]
    members: dict[Hashable, list[int]] = {}
    for position, rank in enumerate(ranks.tolist()):
        if machine is not None and rank in machine:
            members.setdefault(machine[rank], []).append(position)
    offset, component = walk(len(ranks), edges)
    for name, positions in members.items():
        spread = 0.0
        for root in np.unique(component[positions]):
            inside = offset[[position for position in positions if component[position] == root]]
            spread = max(spread, float(np.ptp(inside)))
        if spread > _SHARED_CLOCK_SECONDS:
            notes.append(
                f"clock alignment: the ranks of machine {name!r} differ by {format_seconds(spread)}, "
                "so each of them is aligned by itself"
            )
            continue
        for position in positions:
            names[position] = ("machine", name)
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


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
