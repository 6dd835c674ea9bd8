"""Timeline → Scene: spans in rows that do not overlap, in whole ticks, ready to be packed and drawn.

A row is one lane of one track of one rank. Spans of a track that overlap go to further lanes, the first that is free;
a track with more than `MOST_LANES` at once draws the rest over each other in the last lane. Ranks stand in groups, one
for each node where nodes are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.report.windows import Windows, step_windows
from offbeat.timeline import COMPUTE, NETWORK, Timeline
from offbeat.timeline.critical import critical_positions

MOST_LANES = 6
_NANOSECOND = 1e-9
_MOST_TICKS = 2**31
"""A trace longer than two seconds has coarser ticks than nanoseconds, so that every time fits in 32 bits."""

Ticks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the timeline."""

    label: str
    group: str
    """Name of the node; empty where nodes are unknown."""
    lane: int
    """0, or more for spans that overlap those in the lanes before."""
    kind: str
    """'compute', 'network' or 'other'."""
    rank: int


@dataclass(frozen=True)
class Scene:
    """What there is to draw. Times are whole ticks since the scene's zero; columns are sorted by row, then start."""

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    tick_seconds: float
    seconds: float
    """From the first span or mark to the last."""
    steps: tuple[tuple[float, float], ...]
    """When each step begins on the first rank and ends on the last, in seconds."""
    source: str
    row: NDArray[np.int64]
    start: Ticks
    end: Ticks
    busy: Ticks
    """Ticks in which a span runs; less than its length where it stands for several."""
    count: NDArray[np.int64]
    """Spans of the timeline that each stands for."""
    kind: NDArray[np.int8]
    name: NDArray[np.int64]
    bytes: NDArray[np.int64]
    queue: Ticks
    """One more than the ticks between being ready and starting; 0 where unknown."""
    critical: NDArray[np.int64]
    """A line (step, row, start, end) for each span of the critical paths, those of one step in time order."""

    def __len__(self) -> int:
        return len(self.start)


def make_scene(timeline: Timeline, nodes: Mapping[int, str] | None = None) -> Scene:
    """`nodes` has the node of each rank; ranks without one stand in a group without a name."""
    _check(timeline)
    origin, seconds = _extent(timeline)
    tick = max(_NANOSECOND, seconds / _MOST_TICKS)
    start = np.rint((timeline.start - origin) / tick).astype("i8")
    end = np.maximum(np.rint((timeline.end - origin) / tick).astype("i8"), start)
    queue_seconds = np.maximum(np.nan_to_num(timeline.start - timeline.queued, nan=-1.0), -1.0)
    queue = np.where(np.isnan(timeline.queued), 0, 1 + np.rint(np.maximum(queue_seconds, 0.0) / tick)).astype("i8")
    place = _rank_places(timeline, nodes or {})
    order, lane = _in_lanes(place, timeline.track, start, end)
    row, rows = _rows(timeline, nodes or {}, order, lane)
    row_of = np.empty(len(timeline), "i8")
    row_of[order] = row
    return Scene(
        names=timeline.names,
        rows=rows,
        tick_seconds=tick,
        seconds=seconds,
        steps=tuple((float(a) - origin, float(b) - origin) for a, b in step_windows(timeline)),
        source=timeline.source,
        row=row,
        start=start[order],
        end=end[order],
        busy=(end - start)[order],
        count=np.ones(len(order), "i8"),
        kind=timeline.kind[order],
        name=timeline.name[order].astype("i8"),
        bytes=np.maximum(timeline.bytes[order], 0),
        queue=queue[order],
        critical=np.concatenate(
            [np.empty((0, 4), "i8")]
            + [
                np.column_stack([np.full(len(found), step), row_of[found], start[found], end[found]])
                for step, found in critical_by_step(timeline)
            ]
        ),
    )


def critical_by_step(timeline: Timeline) -> list[tuple[int, NDArray[np.int64]]]:
    """(step, positions of its critical path) for each step; one entry where replay has found the path already."""
    if timeline.critical is not None:
        return [(0, timeline.critical)]
    windows = Windows(timeline)
    if not len(windows):
        return [(0, critical_positions(timeline))] if len(timeline) else []
    found = []
    for step in range(len(windows)):
        part = windows.part(step, step)
        if part is not None:
            found.append((step, windows.positions(step, step)[critical_positions(part)]))
    return found


def _check(timeline: Timeline) -> None:
    for field in ("start", "end"):
        if not np.isfinite(getattr(timeline, field)).all():
            raise OffbeatError(f"timeline: {field}: a span has a time that is not finite")
    if timeline.marks.size and not np.isfinite(timeline.marks).all():
        raise OffbeatError("timeline: marks: a step begins at a time that is not finite")


def _extent(timeline: Timeline) -> tuple[float, float]:
    times = np.concatenate([timeline.start, timeline.end, timeline.marks.ravel()])
    if not len(times):
        return 0.0, 0.0
    return float(times.min()), float(times.max() - times.min())


def _rank_places(timeline: Timeline, nodes: Mapping[int, str]) -> NDArray[np.int64]:
    """For each span the place of its rank from top to bottom: nodes in the order of their first rank."""
    ranks, number = np.unique(timeline.rank, return_inverse=True)
    first: dict[str, int] = {}
    for rank in ranks.tolist():
        first.setdefault(nodes.get(rank, ""), rank)
    places = np.empty(len(ranks), "i8")
    by_node = sorted(range(len(ranks)), key=lambda at: (first[nodes.get(int(ranks[at]), "")], int(ranks[at])))
    places[by_node] = np.arange(len(ranks))
    return places[number]


def _in_lanes(
    place: NDArray[np.int64], track: NDArray[np.int32], start: Ticks, end: Ticks
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order of the spans by place, track, lane and start; and the lane of each, in that order."""
    tracks = int(track.max(initial=0)) + 1
    queue = place * tracks + track
    # A span that encloses others comes before them and so gets the lane above.
    order = np.lexsort((-end, start, queue))
    queue, start, end = queue[order], start[order], end[order]
    lane = np.zeros(len(order), "i8")
    stride = int(end.max(initial=0)) + 1
    reach = np.maximum.accumulate(end + queue * stride) - queue * stride
    crossing = np.flatnonzero((queue[1:] == queue[:-1]) & (start[1:] < reach[:-1])) + 1
    for number in np.unique(queue[crossing]).tolist():
        own = slice(*np.searchsorted(queue, [number, number + 1]).tolist())
        lane[own] = _free_lanes(start[own].tolist(), end[own].tolist())
    again = np.lexsort((start, lane, queue))
    return order[again], lane[again]


def _free_lanes(start: list[int], end: list[int]) -> list[int]:
    """For each span, in order of start, the first lane whose last span has ended."""
    until: list[int] = []
    lanes = []
    for begin, finish in zip(start, end, strict=True):
        lane = next((number for number, ended in enumerate(until) if ended <= begin), len(until))
        if lane == len(until) < MOST_LANES:
            until.append(finish)
        else:
            lane = min(lane, MOST_LANES - 1)
            until[lane] = max(until[lane], finish)
        lanes.append(lane)
    return lanes


def _rows(
    timeline: Timeline, nodes: Mapping[int, str], order: NDArray[np.int64], lane: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[Row, ...]]:
    """Row of each span in `order`, and the rows from top to bottom."""
    if not len(order):
        return np.empty(0, "i8"), ()
    rank, track = timeline.rank[order], timeline.track[order]
    new = np.ones(len(order), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (track[1:] != track[:-1]) | (lane[1:] != lane[:-1])
    rows = tuple(
        _row(int(rank[at]), timeline.tracks[track[at]], int(lane[at]), nodes) for at in np.flatnonzero(new).tolist()
    )
    return np.cumsum(new) - 1, rows


def _row(rank: int, track: str, lane: int, nodes: Mapping[int, str]) -> Row:
    kind = "network" if track.startswith(NETWORK) else "compute" if track == COMPUTE else "other"
    shown = f"link{track[len(NETWORK) :]}" if kind == "network" else track
    return Row(label=f"rank {rank} {shown}", group=nodes.get(rank, ""), lane=lane, kind=kind, rank=rank)
