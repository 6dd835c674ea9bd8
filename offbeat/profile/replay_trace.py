"""A measured Timeline alone → the same steps replayed, as measured or on other links and devices.

For traces of jobs whose plan is unknown (torch.profiler's, FSDP2's). Each rank is a chain of pieces between the moments
that matter: work begins or ends, a collective is issued, a step begins. A piece is one of

* work, which takes as long as it did, times the rank's factor;
* a wait: the rank did nothing, and collectives it had issued before ended meanwhile. It ends when the last of them has,
  plus what passed between that end and the next work;
* any other gap (loading data, the interpreter), which takes as long as it did.

A collective moves data once every participant that it waited for has issued it and the rank's link is done with those
that ended before it. Every dependency points forward in measured time, so the graph has no cycle, and replaying it
unchanged gives the measured times back.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.link import LinkFit, fit_linear
from offbeat.errors import OffbeatError
from offbeat.simulate import TaskGraph, replay
from offbeat.timeline import NETWORK, Timeline
from offbeat.timeline.critical import COMMUNICATION, WAIT

LEAST_WAIT_SECONDS = 5e-5
"""In shorter gaps between pieces of work a rank waits for nobody; the interpreter has them too."""
_VERBS = re.compile(
    r"all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|broadcast|reduce|gather|scatter|send|recv|barrier",
    re.IGNORECASE,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """What is different from the measured job; all of them factors."""

    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    """Speed of computing: 2 takes half as long."""
    stragglers: Mapping[int, float] | None = None
    """By rank, how many times as long its computing takes."""

    def work_factor(self, rank: int) -> float:
        return (self.stragglers or {}).get(rank, 1.0) / self.compute


@dataclass(frozen=True)
class TraceGraph:
    """The tasks of a timeline, and where its ranks' moments and collectives are among them."""

    graph: TaskGraph
    cuts: dict[int, Floats]
    """Per rank the moments that part its pieces, in measured time; piece i lies between cuts i and i + 1."""
    first_task: dict[int, int]
    """Per rank the task of its first piece; the others follow."""
    spans: Ints
    """Positions of the collectives' spans in the timeline."""
    first_span_task: int


def replay_trace(timeline: Timeline, scenario: Scenario | None = None) -> Timeline:
    """The timeline as it would have been."""
    scenario = scenario or Scenario()
    _check(timeline, scenario)
    timeline = _with_marks(timeline)
    built = build_trace_graph(timeline, scenario)
    result = replay(built.graph)
    start, end = timeline.start.copy(), timeline.end.copy()
    queued, marks = timeline.queued.copy(), timeline.marks.copy()
    zero = min(float(cuts[0]) for cuts in built.cuts.values())
    for rank, cuts in built.cuts.items():
        first = built.first_task[rank]
        last = first + len(cuts) - 1
        # A wait begins where the piece before it ends, though its task starts only when it is over.
        moved = zero + np.concatenate([[0.0], result.end[first:last]])
        mine = timeline.rank == rank
        for column in (start, end, queued):
            column[mine] = np.interp(column[mine], cuts, moved)
        row = timeline.marked_ranks.index(rank)
        marks[row] = np.interp(marks[row], cuts, moved)
    tasks = built.first_span_task + np.arange(len(built.spans))
    start[built.spans] = zero + result.start[tasks]
    end[built.spans] = zero + result.end[tasks]
    return replace(
        timeline, start=start, end=end, queued=queued, marks=marks, critical=None, source="predicted", peak_memory=()
    )


def build_trace_graph(timeline: Timeline, scenario: Scenario) -> TraceGraph:
    """The tasks of all ranks: first the pieces of each rank in order, then the collectives in the order of `spans`."""
    spans = _collectives(timeline)
    issued = _issued(timeline, spans)
    cuts: dict[int, Floats] = {}
    first_task: dict[int, int] = {}
    durations, edges, count = [], [], 0
    waiting: list[tuple[int, int]] = []
    zero = min(_earliest(timeline, rank) for rank in timeline.marked_ranks)
    for row, rank in enumerate(timeline.marked_ranks):
        pieces = _pieces(timeline, rank, timeline.marks[row], issued[timeline.rank[spans] == rank], zero)
        seconds, waits = _piece_seconds(timeline, rank, pieces, spans, issued)
        seconds[pieces.work] *= scenario.work_factor(rank)
        cuts[rank], first_task[rank] = pieces.cuts, count
        ids = count + np.arange(len(seconds))
        durations.append(seconds)
        edges.append(np.stack([ids[:-1], ids[1:]], axis=1))
        waiting += [(span, count + piece) for span, piece in waits]
        count += len(seconds)
    service, after = _services(timeline, spans, issued)
    service *= _link_factors(timeline, spans, service, scenario)
    span_task = count + np.arange(len(spans))
    edges.append(_issue_edges(timeline, spans, issued, cuts, first_task, span_task))
    chained = np.flatnonzero(after >= 0)
    edges.append(np.stack([span_task[after[chained]], span_task[chained]], axis=1))
    if waiting:
        pairs = np.array(waiting, np.int64)
        edges.append(np.stack([span_task[pairs[:, 0]], pairs[:, 1]], axis=1))
    total = np.concatenate([*durations, service])
    graph = TaskGraph.from_arrays(total, np.full(len(total), -1), np.concatenate(edges))
    return TraceGraph(graph, cuts, first_task, spans, count)


@dataclass(frozen=True)
class _Pieces:
    cuts: Floats
    work: NDArray[np.bool_]
    stood: NDArray[np.bool_]
    """The trace says that the rank waited."""


def _check(timeline: Timeline, scenario: Scenario) -> None:
    if not len(timeline):
        raise OffbeatError("timeline: it has no spans, so there is nothing to replay")
    for field in ("bandwidth", "compute"):
        if not 0 < getattr(scenario, field) < np.inf:
            raise OffbeatError(f"{field}: {getattr(scenario, field)} is not a factor above 0")
    if not 0 <= scenario.latency < np.inf:
        raise OffbeatError(f"latency: {scenario.latency} is not a factor of at least 0")
    for rank, factor in (scenario.stragglers or {}).items():
        if rank not in timeline.ranks:
            raise OffbeatError(f"straggler: there is no rank {rank}, the trace has ranks {list(timeline.ranks)}")
        if not 0 < factor < np.inf:
            raise OffbeatError(f"straggler: {factor} is not a factor above 0")


def _with_marks(timeline: Timeline) -> Timeline:
    """A timeline without steps counts as one step."""
    if timeline.marks.size:
        return timeline
    ranks = timeline.ranks
    marks = [[timeline.start[timeline.rank == rank].min(), timeline.end[timeline.rank == rank].max()] for rank in ranks]
    return replace(timeline, marks=np.array(marks))


def _collectives(timeline: Timeline) -> Ints:
    """Spans of communication of ranks with steps, in the order in which they ended."""
    found = np.flatnonzero((timeline.kind == COMMUNICATION) & (timeline.mark_rows >= 0))
    return found[np.lexsort((timeline.start[found], timeline.end[found]))]


def _issued(timeline: Timeline, spans: Ints) -> Floats:
    queued, start = timeline.queued[spans], timeline.start[spans]
    return np.where(np.isnan(queued), start, np.minimum(queued, start))


def _earliest(timeline: Timeline, rank: int) -> float:
    mine = timeline.rank == rank
    row = timeline.marked_ranks.index(rank)
    times = np.concatenate([timeline.marks[row], timeline.start[mine], timeline.queued[mine]])
    return float(times[~np.isnan(times)].min())


def _pieces(timeline: Timeline, rank: int, marks: Floats, issued: Floats, zero: float) -> _Pieces:
    mine = (timeline.rank == rank) & (timeline.kind != COMMUNICATION)
    networks = [number for number, track in enumerate(timeline.tracks) if track.startswith(NETWORK)]
    work = mine & (timeline.kind != WAIT) & ~np.isin(timeline.track, networks)
    wait = mine & (timeline.kind == WAIT)
    edges = [timeline.start[work], timeline.end[work], timeline.start[wait], timeline.end[wait]]
    last = max(float(timeline.end[timeline.rank == rank].max(initial=zero)), float(marks[-1]))
    # A first cut for all ranks at one moment, so that what lies before a rank's first span is a gap like any other.
    cuts = np.unique(np.concatenate([*edges, marks, issued, [zero, last]]))
    if len(cuts) == 1:
        cuts = np.append(cuts, cuts[0])
    middle = (cuts[:-1] + cuts[1:]) / 2
    stood = _covered(middle, timeline.start[wait], timeline.end[wait])
    return _Pieces(cuts, _covered(middle, timeline.start[work], timeline.end[work]) & ~stood, stood)


def _covered(at: Floats, start: Floats, end: Floats) -> NDArray[np.bool_]:
    """Whether some interval is open at each moment."""
    return np.searchsorted(np.sort(start), at, side="right") > np.searchsorted(np.sort(end), at, side="right")


def _piece_seconds(
    timeline: Timeline, rank: int, pieces: _Pieces, spans: Ints, issued: Floats
) -> tuple[Floats, list[tuple[int, int]]]:
    """Seconds of each piece beside waiting, and (place in `spans`, piece) for what each wait waits for."""
    seconds = np.diff(pieces.cuts)
    mine = np.flatnonzero(timeline.rank[spans] == rank)
    ends = timeline.end[spans[mine]]
    piece = np.clip(np.searchsorted(pieces.cuts, ends, side="left") - 1, 0, len(seconds) - 1)
    waited = ~pieces.work[piece] & (pieces.stood[piece] | (seconds[piece] >= LEAST_WAIT_SECONDS))
    waited &= (issued[mine] <= pieces.cuts[piece]) & (ends > pieces.cuts[piece])
    last_end = np.full(len(seconds), -np.inf)
    np.maximum.at(last_end, piece[waited], ends[waited])
    held = np.isfinite(last_end)
    seconds = seconds.copy()
    seconds[held] = pieces.cuts[1:][held] - last_end[held]
    return np.maximum(seconds, 0.0), list(zip(mine[waited].tolist(), piece[waited].tolist(), strict=True))


def _groups(timeline: Timeline, spans: Ints) -> Ints:
    """Equal for the spans of one collective; one of unknown task stands alone."""
    step, task = timeline.step[spans].astype(np.int64), timeline.task[spans].astype(np.int64)
    alone = np.where(task < 0, np.arange(len(spans)), -1)
    keys = np.stack([np.where(task < 0, -2, step), task, alone])
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1) if len(spans) else np.empty(0, np.int64)


def _participants(timeline: Timeline, spans: Ints) -> tuple[Ints, Ints]:
    """Pairs (span, participant's span) of places in `spans`, each with itself too."""
    group = _groups(timeline, spans)
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group) if len(group) else np.empty(0, np.int64)
    first = np.concatenate([[0], np.cumsum(counts)])
    size = counts[group] if len(group) else group
    left = np.repeat(np.arange(len(spans)), size)
    offset = np.arange(len(left)) - np.repeat(np.cumsum(size) - size, size)
    return left, order[first[group[left]] + offset] if len(left) else left


def _services(timeline: Timeline, spans: Ints, issued: Floats) -> tuple[Floats, Ints]:
    """Seconds by which each span kept its rank's link busy, and the place of the one before it on that link, or -1."""
    end = timeline.end[spans]
    left, right = _participants(timeline, spans)
    counts = issued[right] <= end[left]
    ready = np.full(len(spans), -np.inf)
    np.maximum.at(ready, left[counts], issued[right[counts]])
    after = np.full(len(spans), -1, np.int64)
    for rank in np.unique(timeline.rank[spans]):
        mine = np.flatnonzero(timeline.rank[spans] == rank)
        after[mine[1:]] = mine[:-1]
    before = np.where(after >= 0, end[after], -np.inf)
    return np.maximum(end - np.maximum(ready, before), 0.0), after


def _issue_edges(
    timeline: Timeline,
    spans: Ints,
    issued: Floats,
    cuts: dict[int, Floats],
    first_task: dict[int, int],
    span_task: Ints,
) -> Ints:
    """Each collective after the piece that issued it, on every participant that it could have waited for."""
    left, right = _participants(timeline, spans)
    counts = issued[right] <= timeline.end[spans[left]]
    left, right = left[counts], right[counts]
    ranks = timeline.rank[spans]
    source = np.full(len(spans), -1, np.int64)
    for rank, mine in cuts.items():
        chosen = ranks == rank
        piece = np.searchsorted(mine, issued[chosen], side="left") - 1
        source[chosen] = np.where(piece >= 0, first_task[rank] + piece, -1)
    known = source[right] >= 0
    return np.stack([source[right[known]], span_task[left[known]]], axis=1)


def _link_factors(timeline: Timeline, spans: Ints, service: Floats, scenario: Scenario) -> Floats:
    """How many times as long each collective takes on the other links: its latency and its bytes change apart."""
    factors = np.ones(len(spans))
    if scenario.bandwidth == scenario.latency == 1.0:
        return factors
    group = _groups(timeline, spans)
    participants = np.bincount(group)[group] if len(group) else group
    verb = [verb_of(timeline.names[name]) for name in timeline.name[spans]]
    families: dict[tuple[str, int], list[int]] = {}
    for place, key in enumerate(zip(verb, participants.tolist(), strict=True)):
        families.setdefault(key, []).append(place)
    for members in families.values():
        places = np.array(members)
        size = timeline.bytes[spans[places]].astype(np.float64)
        fit = _fit(size, service[places])
        new = fit.latency_seconds * scenario.latency + fit.seconds_per_byte * size / scenario.bandwidth
        old = fit.latency_seconds + fit.seconds_per_byte * size
        factors[places] = np.where(old > 0, new / np.where(old > 0, old, 1.0), scenario.latency)
    return factors


def _fit(size: Floats, service: Floats) -> LinkFit:
    """What one size alone cannot tell apart counts as bytes; what has no bytes, as latency."""
    usable = (size > 0) & (service > 0)
    if not usable.any():
        return LinkFit(1.0, 0.0)
    # Medians per size, because a collective that met others on its link shows too little or too much.
    sizes = np.unique(size[usable])
    return fit_linear(sizes.tolist(), [float(np.median(service[usable & (size == one)])) for one in sizes])


def verb_of(name: str) -> str:
    """'all_reduce' of 'm3.all_reduce[0:64]', 'gloo:all_reduce' or 'ncclDevKernel_AllReduce'."""
    found = _VERBS.search(name)
    return found[0].lower().replace("_", "") if found else "collective"
