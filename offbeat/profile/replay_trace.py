"""Replay a measured Timeline without a plan, unchanged or on other links and devices.

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

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

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
        raise OffbeatError("timeline: no spans, so there is nothing to replay")
    for rank in stragglers or ():
        if rank not in timeline.ranks:
            raise OffbeatError(f"straggler: rank {rank} is not among the trace's ranks {list(timeline.ranks)}")
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
    factors = {rank: (stragglers or {}).get(rank, 1.0) / compute for rank in timeline.marked_ranks}
    graph, chains = _task_graph(timeline, spans, issued[spans], zero, bandwidth, latency, factors)
    result = replay(graph)
    times = {name: getattr(timeline, name).copy() for name in ("start", "end", "queued")}
    marks = timeline.marks.copy()
    for row, (rank, (pieces, cuts)) in enumerate(chains.items()):
        # A wait begins where the piece before it ends, though its task starts only when it is over.
        moved = zero + np.concatenate([[0.0], result.end[pieces]])
        mine = timeline.rank == rank
        for column in times.values():
            column[mine] = np.interp(column[mine], cuts, moved)
        marks[row] = np.interp(marks[row], cuts, moved)
    times["start"][spans] = zero + result.start[: len(spans)]
    times["end"][spans] = zero + result.end[: len(spans)]
    return replace(timeline, **times, marks=marks, critical=None, source="predicted", peak_memory=())


def _task_graph(
    timeline: Timeline,
    spans: Ints,
    issued: Floats,
    zero: float,
    bandwidth: float,
    latency: float,
    factors: Mapping[int, float],
) -> tuple[TaskGraph, dict[int, tuple[Ints, Floats]]]:
    """The tasks: the collectives, then each rank's pieces in order; and by rank its pieces' tasks and the cuts.

    Piece i lies between cuts i and i + 1, in measured time. `factors` says how much longer each rank computes.
    """
    chains: dict[int, tuple[Ints, Floats]] = {}
    seconds, edges, first = [], [], len(spans)
    # The link of a rank carries one collective after another, and each begins when all have issued it.
    end, before, source = timeline.end[spans], np.full(len(spans), -1), np.full(len(spans), -1)
    for row, (rank, factor) in enumerate(factors.items()):
        own = np.flatnonzero(timeline.rank[spans] == rank)
        cuts, lengths, waits = _pieces(timeline, rank, timeline.marks[row], end[own], issued[own], zero, factor)
        pieces = first + np.arange(len(lengths))
        first += len(lengths)
        seconds.append(lengths)
        chains[rank] = pieces, cuts
        edges.append(np.stack([pieces[:-1], pieces[1:]], axis=1))
        edges.append(np.stack([own[waits >= 0], pieces[waits[waits >= 0]]], axis=1))
        before[own[1:]] = own[:-1]
        piece = np.searchsorted(cuts, issued[own], side="left") - 1
        source[own] = np.where(piece >= 0, pieces[piece], -1)
    group = _groups(timeline, spans)
    member = csr_array((np.ones(len(spans), bool), group, np.arange(len(spans) + 1)), shape=(len(spans), len(spans)))
    span, other = (member @ member.T).nonzero()
    # A span waits for participants that were issued before it ended, of whom one issued as it ended may wait for it.
    waited = (issued[other] < end[span]) | (span == other)
    span, other = span[waited], other[waited]
    known = source[other] >= 0
    edges.append(np.stack([source[other[known]], span[known]], axis=1))
    chained = np.flatnonzero(before >= 0)
    edges.append(np.stack([before[chained], chained], axis=1))
    free = np.where(before >= 0, end[before], -np.inf)
    np.maximum.at(free, span, issued[other])
    service = np.maximum(end - free, 0.0)
    if not bandwidth == latency == 1.0:
        service *= _link_factors(timeline, spans, group, service, bandwidth, latency)
    total = np.concatenate([service, *seconds])
    return TaskGraph.from_arrays(total, np.full(len(total), -1), np.concatenate(edges)), chains


def _pieces(
    timeline: Timeline, rank: int, marks: Floats, ends: Floats, issued: Floats, zero: float, factor: float
) -> tuple[Floats, Floats, Ints]:
    """A rank's cuts, the seconds of each piece beside waiting, and the piece that waits for each collective, or -1."""
    own = timeline.rank == rank
    networks = [number for number, track in enumerate(timeline.tracks) if track.startswith(NETWORK)]
    wait = own & (timeline.kind == WAIT)
    work = own & (timeline.kind != WAIT) & (timeline.kind != COMMUNICATION) & ~np.isin(timeline.track, networks)
    busy = work | wait
    last = max(float(timeline.end[own].max(initial=zero)), float(marks[-1]))
    # All ranks get a first cut at the same moment, so that the time before a rank's first span is a gap too.
    cuts = np.unique(np.concatenate([timeline.start[busy], timeline.end[busy], marks, issued, [zero, last]]))
    if len(cuts) == 1:
        cuts = np.append(cuts, cuts[0])
    middle = (cuts[:-1] + cuts[1:]) / 2
    stood = _covered(middle, timeline.start[wait], timeline.end[wait])
    working = _covered(middle, timeline.start[work], timeline.end[work]) & ~stood
    seconds = np.diff(cuts)
    # What each wait waits for: collectives issued before it that ended in it.
    piece = np.clip(np.searchsorted(cuts, ends, side="left") - 1, 0, len(seconds) - 1)
    waited = ~working[piece] & (stood[piece] | (seconds[piece] >= LEAST_WAIT_SECONDS))
    waited &= (issued <= cuts[piece]) & (ends > cuts[piece])
    last_end = np.full(len(seconds), -np.inf)
    np.maximum.at(last_end, piece[waited], ends[waited])
    seconds = np.where(np.isfinite(last_end), np.maximum(cuts[1:] - last_end, 0.0), seconds)
    seconds[working] *= factor
    return cuts, seconds, np.where(waited, piece, -1)


def _covered(at: Floats, start: Floats, end: Floats) -> NDArray[np.bool_]:
    """Whether any of the intervals is open at each moment."""
    return np.searchsorted(np.sort(start), at, side="right") > np.searchsorted(np.sort(end), at, side="right")


def _groups(timeline: Timeline, spans: Ints) -> Ints:
    """Equal for the spans of one collective; one of unknown task stands alone."""
    step, task = timeline.step[spans].astype(np.int64), timeline.task[spans].astype(np.int64)
    alone = -1 - np.arange(len(spans))
    return np.unique(np.where(task < 0, alone, (step + 1) * (task.max(initial=0) + 1) + task), return_inverse=True)[1]


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
