"""Read and write Chrome trace JSON for chrome://tracing and Perfetto: a process is a rank, a thread a track.

Spans are complete ('X') events in the timeline's order, times in microseconds as the format demands, rounded to whole
nanoseconds: start and end separately, so that spans which met still meet. `args.queued` is in microseconds too. What
the format has no place for (marks, peak memory, critical path, notes) is in the top-level object 'offbeat'.

Viewers show events of one thread only if they are nested or disjoint. Where spans of a track cross, the later one moves
to a further thread of that track: thread number = lane * number of tracks + track.
"""

import gzip
from collections.abc import Iterator
from os import PathLike
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.timeline.model import COLUMNS, KINDS, Kind, Timeline
from offbeat.timeline.stream import EventStream
from offbeat.units import quote

_SPANS_AT_ONCE = 2_000
_MAX_LANES = 64
# Thirty years: far from the limits of 64-bit nanoseconds.
_MAX_SECONDS = 1e9

Times = NDArray[np.int64]
Microseconds = Annotated[FiniteFloat, Field(ge=-_MAX_SECONDS * 1e6, le=_MAX_SECONDS * 1e6)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Index32 = Annotated[Int32, Field(ge=-1)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class _Header(BaseModel):
    """The object 'offbeat' of a trace file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: Literal[1]
    source: Literal["predicted", "measured"]
    tracks: list[str]
    marks: list[list[Microseconds]]
    peak_memory: list[Bytes]
    critical: list[NonNegativeInt] | None
    notes: list[str]


class _Args(TypedDict):
    kind: Kind
    step: Index32
    bytes: Bytes
    task: Index32
    queued: NotRequired[Microseconds]


class _Span(TypedDict):
    """A complete event; other fields do not matter."""

    name: str
    pid: Int32
    tid: Annotated[Int32, Field(ge=0)]
    ts: Microseconds
    dur: Annotated[Microseconds, Field(ge=0)]
    args: _Args


_SPANS = TypeAdapter(list[_Span], config=ConfigDict(strict=True))


def write(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Writes the whole file or none of it; compressed if the name ends in '.gz'."""
    _check(timeline)
    start, end = _nanoseconds(timeline.start), _nanoseconds(timeline.end)
    thread = timeline.track + len(timeline.tracks) * _lanes(timeline, start, end)
    header = {
        "format": 1,
        "source": timeline.source,
        "tracks": timeline.tracks,
        "marks": (_nanoseconds(timeline.marks) / 1000).tolist(),
        "peak_memory": timeline.peak_memory,
        "critical": None if timeline.critical is None else timeline.critical.tolist(),
        "notes": timeline.notes,
    }
    events = [*_names(timeline, thread), *_step_marks(timeline)]
    try:
        parts = [b'{"displayTimeUnit":"ms","offbeat":', orjson.dumps(header), b',"traceEvents":[']
        parts.append(orjson.dumps(events)[1:-1])
        for chunk in _span_events(timeline, start, end, thread):
            parts += [b",\n" if len(parts[-1]) > 1 else b"", orjson.dumps(chunk)[1:-1]]
    except TypeError as error:
        raise OffbeatError(f"timeline: cannot be written as JSON ({error})") from None
    content = b"".join([*parts, b"]}\n"])
    if str(path).endswith(".gz"):
        # Level 1 is several times faster than the default and a trace grows by only a third.
        content = gzip.compress(content, compresslevel=1, mtime=0)
    files.write_atomic(path, content, "trace")


def read(path: str | PathLike[str]) -> Timeline:
    """The timeline that `write` wrote; compression is recognised by content."""
    origin = str(path)
    stream = EventStream(path, ("offbeat",))
    names: dict[str, int] = {}
    parts, count = [_columns([], names)], 0
    for batch in stream:
        parts.append(_columns(_spans(batch, count, origin), names))
        count += len(batch)
    if "offbeat" not in stream.header:
        raise OffbeatError(f"{origin}: not a timeline written by Offbeat: offbeat: it is required but not given")
    try:
        header = _Header.model_validate(stream.header["offbeat"])
    except ValidationError as error:
        raise OffbeatError(f"{origin}: offbeat.{files.first_problem(error)}") from None
    columns = {name: np.concatenate([part[name] for part in parts]).astype(kind) for name, kind in COLUMNS.items()}
    columns["track"] %= max(1, len(header.tracks))
    spans, widths = len(columns["start"]), {len(row) for row in header.marks}
    if spans and not header.tracks:
        raise OffbeatError(f"{origin}: offbeat.tracks: it has too few items, got []")
    if len(widths) > 1:
        raise OffbeatError(f"{origin}: offbeat.marks: every rank must have equally many, got {sorted(widths)[:8]}")
    if max(header.critical or (), default=-1) >= spans:
        raise OffbeatError(
            f"{origin}: offbeat.critical: no span {max(header.critical or ())}, the trace has {spans} spans"
        )
    return Timeline(
        names=tuple(names),
        tracks=tuple(header.tracks),
        marks=np.rint(np.array(header.marks, "f8") * 1000) / 1e9 if header.marks else np.empty((0, 0)),
        peak_memory=tuple(header.peak_memory),
        critical=None if header.critical is None else np.array(header.critical, "i8"),
        source=header.source,
        notes=tuple(header.notes),
        **columns,
    )


def _spans(batch: list[Any], first: int, origin: str) -> list[_Span]:
    """The spans among some events, the first of which is number `first`; an error names the event and the field."""
    places = [place for place, event in enumerate(batch) if isinstance(event, dict) and event.get("ph") == "X"]
    try:
        return _SPANS.validate_python([batch[place] for place in places])
    except ValidationError as error:
        place = first + places[int(error.errors()[0]["loc"][0])]
        raise OffbeatError(f"{origin}: traceEvents[{place}]{files.first_problem(error).partition(']')[2]}") from None


def _columns(spans: list[_Span], names: dict[str, int]) -> dict[str, NDArray[Any]]:
    """The columns of some spans, with thread numbers as tracks; `names` gains theirs."""
    args = [span["args"] for span in spans]
    start = np.rint(np.array([span["ts"] for span in spans], "f8") * 1000)
    length = np.rint(np.array([span["dur"] for span in spans], "f8") * 1000)
    queued = np.array([each.get("queued", np.nan) for each in args], "f8")
    kinds: dict[str, int] = {kind: position for position, kind in enumerate(KINDS)}
    return {
        "start": start / 1e9,
        "end": (start + length) / 1e9,
        "rank": np.array([span["pid"] for span in spans], "i8"),
        "track": np.array([span["tid"] for span in spans], "i8"),
        "kind": np.array([kinds[each["kind"]] for each in args], "i8"),
        "name": np.array([names.setdefault(span["name"], len(names)) for span in spans], "i8"),
        "step": np.array([each["step"] for each in args], "i8"),
        "queued": np.rint(queued * 1000) / 1e9,
        "bytes": np.array([each["bytes"] for each in args], "i8"),
        "task": np.array([each["task"] for each in args], "i8"),
    }


def _check(timeline: Timeline) -> None:
    """Refuses what a viewer or `read` would not accept."""
    times = {"start": timeline.start, "end": timeline.end, "marks": timeline.marks}
    times["queued"] = timeline.queued[~np.isnan(timeline.queued)]
    for field, values in times.items():
        wrong = ~(np.abs(values) <= _MAX_SECONDS)
        if wrong.any():
            raise OffbeatError(f"timeline: {field}: {values[wrong].flat[0]} is not a time in seconds")
    backwards = np.flatnonzero(timeline.end < timeline.start)
    if len(backwards):
        raise OffbeatError(
            f"timeline: span {backwards[0]} ({quote(timeline[int(backwards[0])].name)}) ends before it starts"
        )
    limits = {"name": (0, len(timeline.names)), "track": (0, len(timeline.tracks)), "kind": (0, len(KINDS))}
    limits |= {"step": (-1, 2**31), "task": (-1, 2**31), "bytes": (0, 2**63)}
    for field, (least, limit) in limits.items():
        values = getattr(timeline, field)
        if len(values) and not least <= int(values.min()) <= int(values.max()) < limit:
            raise OffbeatError(f"timeline: {field}: the column must hold numbers from {least} to {limit - 1}")


def _nanoseconds(seconds: NDArray[np.float64]) -> Times:
    return np.rint(seconds * 1e9).astype("i8")


def _lanes(timeline: Timeline, start: Times, end: Times) -> NDArray[np.int32]:
    """For each span a lane of its track on which it crosses no other; the last of `_MAX_LANES` takes what is left."""
    lanes = np.zeros(len(timeline), "i4")
    order = np.lexsort((-end, start, timeline.track, timeline.rank))
    group = timeline.rank[order].astype("i8") * len(timeline.tracks) + timeline.track[order]
    for members in np.split(order, np.flatnonzero(np.diff(group)) + 1):
        latest = np.maximum.accumulate(end[members])
        if (start[members][1:] >= latest[:-1]).all():
            continue
        stacks: list[list[int]] = []
        for position in members.tolist():
            lanes[position] = _place(stacks, int(start[position]), int(end[position]))
    return lanes


def _place(stacks: list[list[int]], start: int, end: int) -> int:
    """The first lane whose open spans all contain this one; `stacks` holds the ends of each lane's open spans."""
    for lane, stack in enumerate(stacks):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or end <= stack[-1]:
            stack.append(end)
            return lane
    if len(stacks) == _MAX_LANES:
        return _MAX_LANES - 1
    stacks.append([end])
    return len(stacks) - 1


def _names(timeline: Timeline, thread: NDArray[np.int32]) -> Iterator[dict[str, Any]]:
    """Metadata events that name and order the processes and threads."""
    ranks = sorted({*timeline.ranks, *timeline.marked_ranks})
    for rank in ranks:
        yield _metadata("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
    if not len(timeline):
        return
    for rank, number in np.unique(np.stack([timeline.rank, thread], axis=1), axis=0).tolist():
        lane, track = divmod(number, len(timeline.tracks))
        name = timeline.tracks[track] + (f" ({lane + 1})" if lane else "")
        yield _metadata("thread_name", rank, number, {"name": name})
        yield _metadata("thread_sort_index", rank, number, {"sort_index": track * _MAX_LANES + lane})


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": args}


def _step_marks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Instant events that show where each rank's steps begin; `read` takes them from the header."""
    times = (_nanoseconds(timeline.marks) / 1000).tolist()
    for rank, row in zip(timeline.marked_ranks, times, strict=True):
        for step, at in enumerate(row):
            name = "end" if step == len(row) - 1 else f"step {step}"
            yield {"ph": "i", "s": "p", "name": name, "pid": rank, "tid": 0, "ts": at}


def _span_events(
    timeline: Timeline, start: Times, end: Times, thread: NDArray[np.int32]
) -> Iterator[list[dict[str, Any]]]:
    """The spans as events, in chunks: as Python objects they take ten times as much memory as in the file."""
    names, unknown = timeline.names, np.isnan(timeline.queued)
    queued = _nanoseconds(np.where(unknown, 0.0, timeline.queued)) / 1000
    columns: list[NDArray[Any]] = [start / 1000, (end - start) / 1000, timeline.rank, thread, timeline.kind]
    columns += [timeline.name, timeline.step, timeline.bytes, timeline.task]
    for first in range(0, len(timeline), _SPANS_AT_ONCE):
        part = slice(first, first + _SPANS_AT_ONCE)
        events = [
            {
                "ph": "X",
                "name": names[name],
                "cat": KINDS[kind],
                "pid": rank,
                "tid": tid,
                "ts": ts,
                "dur": duration,
                "args": {"kind": KINDS[kind], "step": step, "bytes": size, "task": task},
            }
            for ts, duration, rank, tid, kind, name, step, size, task in zip(
                *(column[part].tolist() for column in columns), strict=True
            )
        ]
        for position in np.flatnonzero(~unknown[part]).tolist():
            events[position]["args"]["queued"] = float(queued[first + position])
        yield events
