"""Scene → packed bytes that the page's `Timeline.decode` reads: columns, and runs that merge spans for each zoom level.

The content, gzipped: a 32-bit length, a header in JSON of that length, then the columns that it names. A column of
width w is stored as w planes of bytes, the lowest first; starts are differences within their row. Level number k has
runs: how many consecutive spans of a row are drawn as one block, because they are shorter than the level's resolution
and lie in the same cell of that width. So a row never has more than about two blocks for each cell that is visible.

Where all spans are more than `most_bytes` hold, neighbouring short ones are merged for good, which the header tells.
"""

import gzip
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import orjson
from numpy.typing import NDArray

from offbeat.report.scene import Scene, make_scene
from offbeat.timeline import KINDS, Timeline

MOST_BYTES = 12 * 2**20
"""Of a packed scene: in base64 a third more, so that a report stays below 20 MB."""
MOST_SPANS = 1_500_000
"""More take a browser seconds to unpack."""
LONGEST_NAME = 300
_WORTHWHILE = 0.6
"""A level is kept if it has at most this share of the blocks of the finer one."""
_COARSEST_CELLS = 128
_GZIP_LEVEL = 6

Runs = NDArray[np.int64]


def pack_timeline(timeline: Timeline, nodes: Mapping[int, str] | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """The timeline as the page draws it; `nodes` groups ranks by node."""
    return pack_scene(make_scene(timeline, nodes), most_bytes)


def pack_scene(scene: Scene, most_bytes: int = MOST_BYTES) -> bytes:
    """At most `most_bytes` long, by merging short neighbours where needed."""
    total, limit = len(scene), MOST_SPANS
    while True:
        if len(scene) > limit:
            scene = _merged(scene, limit)
        packed = _packed(scene, total)
        if len(packed) <= most_bytes or len(scene) <= len(scene.rows):
            return packed
        limit = int(0.9 * len(scene) * most_bytes / len(packed))


def levels(scene: Scene) -> list[tuple[int, Runs]]:
    """(resolution in ticks, runs) of the levels worth having, from fine to coarse."""
    found: list[tuple[int, Runs]] = []
    resolution, last = 1, len(scene)
    while resolution * _COARSEST_CELLS * scene.tick_seconds < scene.seconds and last > len(scene.rows):
        runs = _runs(scene, resolution)
        if len(runs) <= _WORTHWHILE * last:
            found.append((resolution, runs))
            last = len(runs)
        resolution *= 2
    return found


def _runs(scene: Scene, resolution: int) -> Runs:
    first = _first_of_runs(scene, resolution)
    return np.diff(np.append(first, len(scene)))


def _first_of_runs(scene: Scene, resolution: int) -> Runs:
    return _first_of(scene.row, scene.start, scene.end, resolution)


def _first_of(row: Runs, start: Runs, end: Runs, resolution: int) -> Runs:
    """Where runs of neighbours begin that are short, in one row and in one cell."""
    if not len(start):
        return np.empty(0, "i8")
    short = end - start < resolution
    cell = start // resolution
    joins = short[1:] & short[:-1] & (cell[1:] == cell[:-1]) & (row[1:] == row[:-1])
    return np.flatnonzero(np.append(True, ~joins))


def _merged(scene: Scene, limit: int) -> Scene:
    """At most `limit` blocks, or one for each row where even that is more."""
    resolution = 1
    first = _first_of_runs(scene, resolution)
    while len(first) > max(limit, len(scene.rows)) and resolution * scene.tick_seconds <= scene.seconds:
        resolution *= 2
        first = _first_of_runs(scene, resolution)
    run = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(scene))))
    longest = np.lexsort((-scene.busy, run))[first]
    return replace(
        scene,
        row=scene.row[first],
        start=scene.start[first],
        end=np.maximum.reduceat(scene.end, first),
        busy=np.add.reduceat(scene.busy, first),
        count=np.add.reduceat(scene.count, first),
        bytes=np.add.reduceat(scene.bytes, first),
        kind=scene.kind[longest],
        name=scene.name[longest],
        queue=np.where(np.add.reduceat(scene.count, first) == 1, scene.queue[first], 0),
        critical=_merged_path(scene.critical, resolution),
    )


def _merged_path(critical: Runs, resolution: int) -> Runs:
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
    resolutions = []
    for number, (resolution, runs) in enumerate(levels(scene)):
        columns[f"level{number}"] = (runs, 4)
        resolutions.append(resolution * scene.tick_seconds)
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
        "resolutions": resolutions,
        "columns": [[key, width, len(column)] for key, (column, width) in columns.items()],
    }
    text = orjson.dumps(header)
    parts = [len(text).to_bytes(4, "little"), text, *(_planes(column, width) for column, width in columns.values())]
    return gzip.compress(b"".join(parts), compresslevel=_GZIP_LEVEL, mtime=0)


def _shown(name: str) -> str:
    # A lone surrogate, which a trace may hold, cannot be written as UTF-8.
    name = name.encode("utf-8", "replace").decode()
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _planes(column: NDArray, width: int) -> bytes:
    little = np.ascontiguousarray(column.astype(f"<u{width}"))
    return little.view("u1").reshape(-1, width).T.tobytes()
