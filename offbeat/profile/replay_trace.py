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

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.tables import LinkFit, fit_linear
from offbeat.errors import OffbeatError
from offbeat.simulate import TaskGraph, replay
from offbeat.timeline import NETWORK, Timeline
from offbeat.timeline.critical import COMMUNICATION, WAIT
from offbeat.timeline.model import collective_kind

LEAST_WAIT_SECONDS = 5e-5
"""Shorter gaps between pieces of work are the interpreter's, not waits."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Chain(NamedTuple):
    """One rank's pieces: piece i lies between cuts i and i + 1, in measured time, and is task `first` + i."""

    rank: int
    first: int
    cuts: Floats
    seconds: Floats
    """Of each piece, beside waiting."""
    waits: Ints
    """Rows of (collective's place in `spans`, piece that waits for it)."""


def replay_trace(
    timeline: Timeline,
    *,
    bandwidth: float = 1.0,
    latency: float = 1.0,
    compute: float = 1.0,
    stragglers: Mapping[int, float] | None = None,
) -> Timeline:
    """The timeline with so many times the bandwidth, the latency and the speed of computing.

    `stragglers` gives by rank how many times as long its computing takes.
    """
    if not len(timeline):
        raise OffbeatError("timeline: it has no spans, so there is nothing to replay")
    for rank in stragglers or ():
        if rank not in timeline.ranks:
            raise OffbeatError(f"straggler: there is no rank {rank}, the trace has ranks {list(timeline.ranks)}")
    if not timeline.marks.size:
        # A timeline without steps counts as one step.
        own = [timeline.rank == rank for rank in timeline.ranks]
        marks = np.array([[timeline.start[mine].min(), timeline.end[mine].max()] for mine in own])
        timeline = replace(timeline, marks=marks)
    marked = timeline.mark_rows >= 0
    zero = float(np.nanmin(np.concatenate([timeline.marks.ravel(), timeline.start[marked], timeline.queued[marked]])))
    # Spans of communication of ranks with steps, in the order in which they ended.
    spans = np.flatnonzero((timeline.kind == COMMUNICATION) & marked)
    issued = np.fmin(timeline.queued, timeline.start)
    spans = spans[np.lexsort((issued[spans], timeline.start[spans], timeline.end[spans]))]
    issued = issued[spans]
    chains: list[_Chain] = []
    for row, rank in enumerate(timeline.marked_ranks):
        first = chains[-1].first + len(chains[-1].seconds) if chains else 0
        factor = (stragglers or {}).get(rank, 1.0) / compute
        chains.append(_chain(timeline, rank, first, timeline.marks[row], spans, issued, zero, factor))
    graph, first_span = _task_graph(timeline, chains, spans, issued, bandwidth, latency)
    result = replay(graph)
    times = {name: getattr(timeline, name).copy() for name in ("start", "end", "queued")}
    marks = timeline.marks.copy()
    for row, chain in enumerate(chains):
        # A wait begins where the piece before it ends, though its task starts only when it is over.
        ends = result.end[chain.first : chain.first + len(chain.seconds)]
        moved = zero + np.concatenate([[0.0], ends])
        mine = timeline.rank == chain.rank
        for column in times.values():
            column[mine] = np.interp(column[mine], chain.cuts, moved)
        marks[row] = np.interp(marks[row], chain.cuts, moved)
    times["start"][spans] = zero + result.start[first_span:]
    times["end"][spans] = zero + result.end[first_span:]
    return replace(timeline, **times, marks=marks, critical=None, source="predicted", peak_memory=())


def _task_graph(
    timeline: Timeline, chains: list[_Chain], spans: Ints, issued: Floats, bandwidth: float, latency: float
) -> tuple[TaskGraph, int]:
    """The tasks of all ranks: the pieces of each rank in order, then the collectives, and the first of those."""
    first_span = chains[-1].first + len(chains[-1].seconds)
    group = _groups(timeline, spans)
    left, right = _waited_for(group, issued, timeline.end[spans])
    # The link of a rank carries one collective after another, and each begins when all have issued it.
    end, before, source = timeline.end[spans], np.full(len(spans), -1), np.full(len(spans), -1)
    edges = []
    for chain in chains:
        ids = chain.first + np.arange(len(chain.seconds))
        edges.append(np.stack([ids[:-1], ids[1:]], axis=1))
        edges.append(chain.waits + np.array([first_span, chain.first]))
        mine = np.flatnonzero(timeline.rank[spans] == chain.rank)
        before[mine[1:]] = mine[:-1]
        piece = np.searchsorted(chain.cuts, issued[mine], side="left") - 1
        source[mine] = np.where(piece >= 0, chain.first + piece, -1)
    known = source[right] >= 0
    edges.append(np.stack([source[right[known]], first_span + left[known]], axis=1))
    chained = np.flatnonzero(before >= 0)
    edges.append(first_span + np.stack([before[chained], chained], axis=1))
    free = np.where(before >= 0, end[before], -np.inf)
    np.maximum.at(free, left, issued[right])
    service = np.maximum(end - free, 0.0)
    if not bandwidth == latency == 1.0:
        service *= _link_factors(timeline, spans, group, service, bandwidth, latency)
    total = np.concatenate([*(chain.seconds for chain in chains), service])
    return TaskGraph.from_arrays(total, np.full(len(total), -1), np.concatenate(edges)), first_span


def _chain(
    timeline: Timeline, rank: int, first: int, marks: Floats, spans: Ints, issued: Floats, zero: float, factor: float
) -> _Chain:
    own = timeline.rank == rank
    networks = [number for number, track in enumerate(timeline.tracks) if track.startswith(NETWORK)]
    wait = own & (timeline.kind == WAIT)
    work = own & (timeline.kind != WAIT) & (timeline.kind != COMMUNICATION) & ~np.isin(timeline.track, networks)
    busy = work | wait
    mine = np.flatnonzero(timeline.rank[spans] == rank)
    last = max(float(timeline.end[own].max(initial=zero)), float(marks[-1]))
    # All ranks get a first cut at the same moment, so that the time before a rank's first span is a gap too.
    edges = [timeline.start[busy], timeline.end[busy], marks, issued[mine], [zero, last]]
    cuts = np.unique(np.concatenate(edges))
    if len(cuts) == 1:
        cuts = np.append(cuts, cuts[0])
    middle = (cuts[:-1] + cuts[1:]) / 2
    stood = _covered(middle, timeline.start[wait], timeline.end[wait])
    working = _covered(middle, timeline.start[work], timeline.end[work]) & ~stood
    seconds = np.diff(cuts)
    # What each wait waits for: collectives issued before it that ended in it.
    ends = timeline.end[spans[mine]]
    piece = np.clip(np.searchsorted(cuts, ends, side="left") - 1, 0, len(seconds) - 1)
    waited = ~working[piece] & (stood[piece] | (seconds[piece] >= LEAST_WAIT_SECONDS))
    waited &= (issued[mine] <= cuts[piece]) & (ends > cuts[piece])
    last_end = np.full(len(seconds), -np.inf)
    np.maximum.at(last_end, piece[waited], ends[waited])
    seconds = np.where(np.isfinite(last_end), np.maximum(cuts[1:] - last_end, 0.0), seconds)
    seconds[working] *= factor
    return _Chain(rank, first, cuts, seconds, np.stack([mine[waited], piece[waited]], axis=1))


def _covered(at: Floats, start: Floats, end: Floats) -> NDArray[np.bool_]:
    """Whether any of the intervals is open at each moment."""
    return np.searchsorted(np.sort(start), at, side="right") > np.searchsorted(np.sort(end), at, side="right")


def _groups(timeline: Timeline, spans: Ints) -> Ints:
    """Equal for the spans of one collective; one of unknown task stands alone."""
    step, task = timeline.step[spans].astype(np.int64), timeline.task[spans].astype(np.int64)
    alone = np.where(task < 0, np.arange(len(spans)), -1)
    keys = np.stack([np.where(task < 0, -2, step), task, alone])
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1) if len(spans) else np.empty(0, np.int64)


def _waited_for(group: Ints, issued: Floats, end: Floats) -> tuple[Ints, Ints]:
    """Pairs (span, span of a participant that it could have waited for) of places in `spans`, each with itself too."""
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    size = counts[group]
    left = np.repeat(np.arange(len(group)), size)
    offset = np.arange(len(left)) - np.repeat(np.cumsum(size) - size, size)
    right = order[np.repeat((np.cumsum(counts) - counts)[group], size) + offset]
    # One that was issued as the span ended may itself have waited for that end.
    before = (issued[right] < end[left]) | (left == right)
    return left[before], right[before]


def _link_factors(
    timeline: Timeline, spans: Ints, group: Ints, service: Floats, bandwidth: float, latency: float
) -> Floats:
    """The factor by which each collective's time changes with the links, from a linear fit for each kind of collective.

    Latency and bytes are scaled separately. With a single size all time counts as bytes, and without bytes as latency.
    """
    factors = np.ones(len(spans))
    families: dict[tuple[str, int], list[int]] = {}
    for place, (name, participants) in enumerate(zip(timeline.name[spans], np.bincount(group)[group], strict=True)):
        families.setdefault((collective_kind(timeline.names[name]), participants), []).append(place)
    for places in map(np.array, families.values()):
        size = timeline.bytes[spans[places]].astype(np.float64)
        usable = (size > 0) & (service[places] > 0)
        fit = LinkFit(1.0, 0.0)
        if usable.any():
            # Medians per size, because collectives that share a link distort each other's times.
            sizes = np.unique(size[usable]).tolist()
            fit = fit_linear(sizes, [float(np.median(service[places][usable & (size == one)])) for one in sizes])
        new = fit.latency_seconds * latency + fit.seconds_per_byte * size / bandwidth
        old = fit.latency_seconds + fit.seconds_per_byte * size
        factors[places] = np.where(old > 0, new / np.where(old > 0, old, 1.0), latency)
    return factors
