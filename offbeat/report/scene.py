"""Arrange a timeline's spans in rows without overlap, and pack them for the page's `Timeline.decode`.

A row is one lane of one track of one rank. Spans of a track that overlap go to further lanes, the first that is free;
a track with more than `MOST_LANES` at once draws the rest over each other in the last lane. Ranks stand in groups, one
for each node where nodes are known.

The packed bytes, gzipped: a 32-bit length, a header in JSON of that length, then the columns that it names. A column of
width w is stored as w planes of bytes, the lowest first; starts are differences within their row. Level number k has
runs: how many consecutive spans of a row are drawn as one block, because they are shorter than the level's resolution
and lie in the same cell of that width. So a row never has more than about two blocks for each cell that is visible.
Spans that do not fit in `most_bytes` are merged with their neighbours, the short ones first; the header has the total.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import orjson
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.report.steps import TimelineSteps, step_windows
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Timeline
from offbeat.timeline.critical import critical_positions

MOST_LANES = 6
MOST_BYTES = 12 * 2**20
"""Limit for a packed scene; base64 adds a third, so that a report stays below 20 MB."""
MOST_SPANS = 1_500_000
"""More take a browser seconds to unpack."""
LONGEST_NAME = 300
_KIND_NAMES = {"update": "update of one message", "wait": "standing still"}
_WORTHWHILE = 0.6
"""A level is kept if it has at most this share of the blocks of the finer one."""
_COARSEST_CELLS = 128
_GZIP_LEVEL = 6
_NANOSECOND = 1e-9
_MOST_TICKS = 2**31
"""A trace longer than two seconds has coarser ticks than nanoseconds, so that every time fits in 32 bits."""

Ints = NDArray[np.int64]


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
    row: Ints
    start: Ints
    end: Ints
    busy: Ints
    """Ticks in which a span runs; less than its length if it represents several."""
    count: Ints
    """Spans of the timeline that each one represents."""
    kind: NDArray[np.int8]
    name: Ints
    bytes: Ints
    queue: Ints
    """One more than the ticks between being ready and starting; 0 where unknown."""
    critical: Ints
    """A line (step, row, start, end) for each span of the critical paths, those of one step in time order."""

    def __len__(self) -> int:
        return len(self.start)


def make_scene(timeline: Timeline, nodes: Mapping[int, str] | None = None) -> Scene:
    """`nodes` has the node of each rank; ranks without one stand in a group without a name."""
    for field, times in {"start": timeline.start, "end": timeline.end, "marks": timeline.marks}.items():
        if not np.isfinite(times).all():
            raise OffbeatError(f"timeline: {field}: a span has a time that is not finite")
    times = np.concatenate([timeline.start, timeline.end, timeline.marks.ravel()])
    origin, last = (float(times.min()), float(times.max())) if len(times) else (0.0, 0.0)
    seconds = last - origin
    tick = max(_NANOSECOND, seconds / _MOST_TICKS)
    start = np.rint((timeline.start - origin) / tick).astype("i8")
    end = np.maximum(np.rint((timeline.end - origin) / tick).astype("i8"), start)
    queued = np.maximum(timeline.start - timeline.queued, 0.0)
    queue = np.where(np.isnan(queued), 0, 1 + np.rint(np.nan_to_num(queued) / tick)).astype("i8")
    place = _rank_places(timeline, nodes or {})
    order, lane = _in_lanes(place, timeline.track, start, end)
    row, rows = _rows(timeline, nodes or {}, order, lane)
    row_of = np.empty(len(timeline), "i8")
    row_of[order] = row
    paths = [
        np.column_stack([np.full(len(found), step), row_of[found], start[found], end[found]])
        for step, found in critical_by_step(timeline)
    ]
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
        critical=np.concatenate([np.empty((0, 4), "i8"), *paths]),
    )


def kinds_of(timeline: Timeline) -> list[dict[str, str]]:
    """The kinds of span that a timeline has, for its legend."""
    present = (KINDS[number] for number in sorted(set(timeline.kind.tolist())))
    return [{"key": kind, "label": _KIND_NAMES.get(kind, kind)} for kind in present]


def critical_by_step(timeline: Timeline) -> list[tuple[int, Ints]]:
    """(step, positions of its critical path) for each step; one entry where replay has found the path already."""
    if timeline.critical is not None:
        return [(0, timeline.critical)]
    steps = TimelineSteps(timeline)
    if not len(steps):
        return [(0, critical_positions(timeline))] if len(timeline) else []
    parts = ((step, steps.part(step, step)) for step in range(len(steps)))
    return [(step, steps.positions(step, step)[critical_positions(part)]) for step, part in parts if part is not None]


def _rank_places(timeline: Timeline, nodes: Mapping[int, str]) -> Ints:
    """For each span the place of its rank from top to bottom: nodes in the order of their first rank."""
    ranks, number = np.unique(timeline.rank, return_inverse=True)
    node_of = [nodes.get(rank, "") for rank in ranks.tolist()]
    first = {node: place for place, node in reversed([*enumerate(node_of)])}
    return np.argsort(np.lexsort((ranks, np.array([first[node] for node in node_of], "i8"))))[number]


def _in_lanes(place: Ints, track: NDArray[np.int32], start: Ints, end: Ints) -> tuple[Ints, Ints]:
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


def _rows(timeline: Timeline, nodes: Mapping[int, str], order: Ints, lane: Ints) -> tuple[Ints, tuple[Row, ...]]:
    """Row of each span in `order`, and the rows from top to bottom."""
    rank, track = timeline.rank[order], timeline.track[order]
    new = np.ones(len(order), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (track[1:] != track[:-1]) | (lane[1:] != lane[:-1])
    rows = []
    for at, number in zip(np.flatnonzero(new).tolist(), rank[new].tolist(), strict=True):
        name = timeline.tracks[track[at]]
        kind = "network" if name.startswith(NETWORK) else "compute" if name == COMPUTE else "other"
        shown = f"link{name[len(NETWORK) :]}" if kind == "network" else name
        rows.append(Row(f"rank {number} {shown}", nodes.get(number, ""), int(lane[at]), kind, number))
    return np.cumsum(new) - 1, tuple(rows)


def pack_timeline(timeline: Timeline, nodes: Mapping[int, str] | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """The timeline as the page draws it, in at most `most_bytes`: short neighbours are merged where needed."""
    scene = make_scene(timeline, nodes)
    total, limit = len(scene), MOST_SPANS
    while True:
        if len(scene) > limit:
            scene = _merged(scene, limit)
        packed = _packed(scene, total)
        if len(packed) <= most_bytes or len(scene) <= len(scene.rows):
            return packed
        limit = int(0.9 * len(scene) * most_bytes / len(packed))


def levels(scene: Scene) -> list[tuple[int, Ints]]:
    """(resolution in ticks, runs) of the levels worth having, from fine to coarse."""
    found: list[tuple[int, Ints]] = []
    resolution, last = 1, len(scene)
    while resolution * _COARSEST_CELLS * scene.tick_seconds < scene.seconds and last > len(scene.rows):
        first = _first_of(scene.row, scene.start, scene.end, resolution)
        if len(first) <= _WORTHWHILE * last:
            found.append((resolution, np.diff(first, append=len(scene))))
            last = len(first)
        resolution *= 2
    return found


def _first_of(row: Ints, start: Ints, end: Ints, resolution: int) -> Ints:
    """Positions at which runs of short spans in the same row and cell begin."""
    short = end - start < resolution
    cell = start // resolution
    joins = short[1:] & short[:-1] & (cell[1:] == cell[:-1]) & (row[1:] == row[:-1])
    return np.flatnonzero(np.append(True, ~joins)[: len(start)])


def _merged(scene: Scene, limit: int) -> Scene:
    """At most `limit` blocks, or one for each row where even that is more."""
    resolution = 1
    first = _first_of(scene.row, scene.start, scene.end, resolution)
    while len(first) > max(limit, len(scene.rows)) and resolution * scene.tick_seconds <= scene.seconds:
        resolution *= 2
        first = _first_of(scene.row, scene.start, scene.end, resolution)
    run = np.repeat(first, np.diff(first, append=len(scene)))
    longest = np.lexsort((-scene.busy, run))[first]
    count = np.add.reduceat(scene.count, first)
    return replace(
        scene,
        row=scene.row[first],
        start=scene.start[first],
        end=np.maximum.reduceat(scene.end, first),
        busy=np.add.reduceat(scene.busy, first),
        count=count,
        bytes=np.add.reduceat(scene.bytes, first),
        kind=scene.kind[longest],
        name=scene.name[longest],
        queue=np.where(count == 1, scene.queue[first], 0),
        critical=_merged_path(scene.critical, resolution),
    )


def _merged_path(critical: Ints, resolution: int) -> Ints:
    step, row, start, end = critical.T
    first = _first_of(row * (int(step.max(initial=0)) + 1) + step, start, end, resolution)
    if not len(first):
        return critical
    return np.column_stack([step[first], row[first], start[first], np.maximum.reduceat(end, first)])


def _packed(scene: Scene, total: int) -> bytes:
    used, name = np.unique(scene.name, return_inverse=True)
    begins_row = np.append(True, scene.row[1:] != scene.row[:-1])[: len(scene)]
    columns: dict[str, tuple[NDArray, int]] = {
        "rows": (np.bincount(scene.row, minlength=len(scene.rows)), 4),
        "start": (np.where(begins_row, scene.start, np.diff(scene.start, prepend=0)), 4),
        "length": (scene.end - scene.start, 4),
        "idle": (np.maximum(scene.end - scene.start - scene.busy, 0), 4),
        "kind": (scene.kind, 1),
        "name": (name, 4),
        "count": (scene.count, 4),
        "bytes": (scene.bytes, 8),
        "queue": (np.minimum(scene.queue, 2**32 - 1), 4),
        "critical_step": (scene.critical[:, 0], 4),
        "critical_row": (scene.critical[:, 1], 4),
        "critical_start": (scene.critical[:, 2], 4),
        "critical_length": (scene.critical[:, 3] - scene.critical[:, 2], 4),
    }
    zoomed = levels(scene)
    columns |= {f"level{number}": (runs, 4) for number, (_, runs) in enumerate(zoomed)}
    header = {
        "format": 1,
        "source": scene.source,
        "seconds": scene.seconds,
        "tick": scene.tick_seconds,
        "total": total,
        "kinds": KINDS,
        "names": [_shown(scene.names[number]) for number in used.tolist()],
        "rows": [[_shown(row.label), _shown(row.group), row.lane, row.kind, row.rank] for row in scene.rows],
        "steps": scene.steps,
        "resolutions": [resolution * scene.tick_seconds for resolution, _ in zoomed],
        "columns": [[key, width, len(column)] for key, (column, width) in columns.items()],
    }
    text = orjson.dumps(header)
    parts = [len(text).to_bytes(4, "little"), text]
    for column, width in columns.values():
        little = np.ascontiguousarray(column.astype(f"<u{width}"))
        parts.append(little.view("u1").reshape(-1, width).T.tobytes())
    return gzip.compress(b"".join(parts), compresslevel=_GZIP_LEVEL, mtime=0)


def _shown(name: str) -> str:
    # A lone surrogate, which a trace may hold, cannot be written as UTF-8.
    name = name.encode("utf-8", "replace").decode()
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
