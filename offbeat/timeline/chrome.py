"""Timeline ↔ Chrome trace JSON, which chrome://tracing and Perfetto open: a process is a rank, a thread a track.

Spans are complete ('X') events in the timeline's order, times in microseconds as the format demands, rounded to whole
nanoseconds: start and end separately, so that spans which met still meet. `args.queued` is in microseconds too. What
the format has no place for (marks, peak memory, critical path, notes) is in the top-level object 'offbeat'.

Viewers show events of one thread only if they are nested or disjoint. Where spans of a track cross, the later one moves
to a further thread of that track: thread number = lane * number of tracks + track.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.timeline.model import KINDS, Timeline
from offbeat.units import quote

MAX_BYTES = 2**30
"""Of JSON, uncompressed: about six million spans. Parsed, each of these bytes takes several."""
_MAX_RATIO = 400
# Small files may be as regular as they like.
_RATIO_FREE_BYTES = 64 * 2**20
_READ_BYTES = 4 * 2**20
_SPANS_AT_ONCE = 2_000
_MAX_LANES = 64
# Thirty years: far from the limits of 64-bit nanoseconds.
_MAX_SECONDS = 1e9
_MAX_INT32 = 2**31 - 1
_GZIP_MAGIC = b"\x1f\x8b"

Times = NDArray[np.int64]
Microseconds = Annotated[FiniteFloat, Field(ge=-_MAX_SECONDS * 1e6, le=_MAX_SECONDS * 1e6)]


class _Header(BaseModel):
    """The object 'offbeat' of a trace file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: Literal[1]
    source: Literal["predicted", "measured"]
    tracks: list[str]
    marks: list[list[Microseconds]]
    peak_memory: list[Annotated[NonNegativeInt, Field(le=2**63 - 1)]]
    critical: list[NonNegativeInt] | None
    notes: list[str]


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
        raise OffbeatError(f"timeline: it cannot be written as JSON ({error})") from None
    content = b"".join([*parts, b"]}\n"])
    if len(content) > MAX_BYTES:
        raise OffbeatError(
            f"{path}: the timeline's {len(timeline)} spans take {len(content)} bytes, more than the {MAX_BYTES} a "
            "trace may have; save fewer steps"
        )
    if str(path).endswith(".gz"):
        # Level 1 is several times faster than the default and a trace grows by only a third.
        content = gzip.compress(content, compresslevel=1, mtime=0)
    files.write_atomic(path, content, "trace")


def read(path: str | PathLike[str]) -> Timeline:
    """The timeline that `write` wrote; compression is recognised by content."""
    origin = str(path)
    content = _content(path, origin)
    if not content.strip():
        raise OffbeatError(f"{origin}: not a trace: the file is empty")
    try:
        trace = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise OffbeatError(f"{origin}: not a trace: it is not valid JSON ({error})") from None
    del content
    if not isinstance(trace, dict):
        raise OffbeatError(f"{origin}: not a trace: it must be a mapping, got {quote(trace)}")
    for field in ("offbeat", "traceEvents"):
        if field not in trace:
            raise OffbeatError(f"{origin}: not a timeline Offbeat wrote: {field}: it is required but not given")
    try:
        header = _Header.model_validate(trace["offbeat"])
    except ValidationError as error:
        raise OffbeatError(f"{origin}: offbeat.{files.first_problem(error)}") from None
    events = _Events(trace["traceEvents"], origin)
    return _with_header(events.timeline(tuple(header.tracks)), header, origin)


def _with_header(timeline: Timeline, header: _Header, origin: str) -> Timeline:
    widths = {len(row) for row in header.marks}
    if len(widths) > 1:
        raise OffbeatError(f"{origin}: offbeat.marks: every rank must have equally many, got {sorted(widths)[:8]}")
    marks = np.rint(np.array(header.marks, "f8") * 1000) / 1e9 if header.marks else np.empty((0, 0))
    critical = None if header.critical is None else np.array(header.critical, "i8")
    if critical is not None and critical.size and critical.max() >= len(timeline):
        raise OffbeatError(
            f"{origin}: offbeat.critical: there is no span {critical.max()}, the trace has {len(timeline)} spans"
        )
    return replace(
        timeline,
        marks=marks,
        peak_memory=tuple(header.peak_memory),
        critical=critical,
        source=header.source,
        notes=tuple(header.notes),
    )


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
    limits = {"name": len(timeline.names), "track": len(timeline.tracks), "kind": len(KINDS)}
    for field, limit in limits.items():
        values = getattr(timeline, field)
        if len(values) and not 0 <= values.min() <= values.max() < limit:
            raise OffbeatError(f"timeline: {field}: the column must hold numbers from 0 to {limit - 1}")
    for field, least in (("step", -1), ("task", -1), ("bytes", 0)):
        values = getattr(timeline, field)
        if len(values) and values.min() < least:
            raise OffbeatError(f"timeline: {field}: {values.min()} is less than {least}")


def _nanoseconds(seconds: NDArray[np.float64]) -> Times:
    return np.rint(seconds * 1e9).astype("i8")


def _lanes(timeline: Timeline, start: Times, end: Times) -> NDArray[np.int32]:
    """For each span the number of the thread, among those of its track, on which it crosses no other span.

    Beyond `_MAX_LANES` threads of one track the last one takes all.
    """
    lanes = np.zeros(len(timeline), "i4")
    order = np.lexsort((-end, start, timeline.track, timeline.rank))
    group = timeline.rank[order].astype("i8") * len(timeline.tracks) + timeline.track[order]
    for members in np.split(order, np.flatnonzero(np.diff(group)) + 1):
        latest = np.maximum.accumulate(end[members])
        if (start[members][1:] >= latest[:-1]).all():
            continue
        stacks: list[list[int]] = []
        for position, begin, finish in zip(
            members.tolist(), start[members].tolist(), end[members].tolist(), strict=True
        ):
            lanes[position] = _place(stacks, begin, finish)
    return lanes


def _place(stacks: list[list[int]], start: int, end: int) -> int:
    """Number of the first lane whose open spans all contain this one; `stacks` holds the ends of each lane's."""
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
    """The spans as events, some at a time: as Python objects they take ten times their room in the file."""
    names, unknown = timeline.names, np.isnan(timeline.queued)
    queued = _nanoseconds(np.where(unknown, 0.0, timeline.queued)) / 1000
    for first in range(0, len(timeline), _SPANS_AT_ONCE):
        part = slice(first, first + _SPANS_AT_ONCE)
        columns = [
            (start[part] / 1000).tolist(),
            ((end[part] - start[part]) / 1000).tolist(),
            *(column[part].tolist() for column in (timeline.rank, thread, timeline.kind, timeline.name, timeline.step)),
            *(column[part].tolist() for column in (timeline.bytes, timeline.task)),
        ]
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
            for ts, duration, rank, tid, kind, name, step, size, task in zip(*columns, strict=True)
        ]
        for position in np.flatnonzero(~unknown[part]).tolist():
            events[position]["args"]["queued"] = float(queued[first + position])
        yield events


def _content(path: str | PathLike[str], origin: str) -> bytes:
    """The JSON text, uncompressed if need be and never more than `MAX_BYTES` of it."""
    try:
        with open(path, "rb") as file:
            compressed = file.peek(2)[:2] == _GZIP_MAGIC
            stream = gzip.GzipFile(fileobj=file) if compressed else file
            parts, total = [], 0
            while part := stream.read(_READ_BYTES):
                parts.append(part)
                total += len(part)
                if total > MAX_BYTES:
                    raise OffbeatError(f"{origin}: more than the {MAX_BYTES} bytes a trace may have")
                if compressed and total > max(_RATIO_FREE_BYTES, _MAX_RATIO * file.tell()):
                    raise OffbeatError(f"{origin}: not a trace: it unpacks to over {_MAX_RATIO} times its size")
            return b"".join(parts)
    except OffbeatError:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OffbeatError(f"{origin}: not a trace: its gzip data is damaged or cut off ({error})") from None
    except (OSError, ValueError) as error:
        shown = origin if origin.isprintable() else repr(origin)
        reason = getattr(error, "strerror", None) or error
        raise OffbeatError(f"{shown}: cannot read the trace: {reason}") from None


class _Events:
    """The complete events of a trace as checked columns; an error names the file, the event and the field."""

    def __init__(self, events: Any, origin: str) -> None:
        self.origin = origin
        if not isinstance(events, list):
            raise OffbeatError(f"{origin}: traceEvents: it must be a list, got {quote(events)}")
        for position, event in enumerate(events):
            if type(event) is not dict or type(event.get("ph")) is not str:
                raise OffbeatError(
                    f"{origin}: traceEvents[{position}]: it is not an event with 'ph', got {quote(event)}"
                )
        self.places = [place for place, event in enumerate(events) if event["ph"] == "X"]
        self.events = [events[place] for place in self.places]
        self.args = self.values(self.events, "args")
        for position, args in enumerate(self.args):
            if type(args) is not dict:
                self.fail(position, "args", "it must be a mapping", args)

    def timeline(self, tracks: tuple[str, ...]) -> Timeline:
        start = np.rint(self.numbers(self.events, "ts", -_MAX_SECONDS * 1e6, _MAX_SECONDS * 1e6) * 1000)
        end = start + np.rint(self.numbers(self.events, "dur", 0, _MAX_SECONDS * 1e6) * 1000)
        thread = self.integers(self.events, "tid", 0, max(0, _MAX_LANES * len(tracks) - 1))
        if len(start) and not tracks:
            raise OffbeatError(f"{self.origin}: offbeat.tracks: it has too few items, got []")
        names: dict[str, int] = {}
        name = [names.setdefault(text, len(names)) for text in self.texts(self.events, "name")]
        return Timeline(
            names=tuple(names),
            tracks=tracks,
            start=start / 1e9,
            end=end / 1e9,
            rank=self.integers(self.events, "pid", -_MAX_INT32, _MAX_INT32).astype("i4"),
            track=(thread % max(1, len(tracks))).astype("i4"),
            kind=self.kinds(),
            name=np.array(name, "i4"),
            step=self.integers(self.args, "step", -1, _MAX_INT32, "args.").astype("i4"),
            queued=self.queued(),
            bytes=self.integers(self.args, "bytes", 0, 2**63 - 1, "args."),
            task=self.integers(self.args, "task", -1, _MAX_INT32, "args.").astype("i4"),
        )

    def kinds(self) -> NDArray[np.int8]:
        number: dict[str, int] = {kind: position for position, kind in enumerate(KINDS)}
        texts = self.texts(self.args, "kind", "args.")
        for position, text in enumerate(texts):
            if text not in number:
                self.fail(position, "args.kind", f"it must be one of {', '.join(KINDS)}", text)
        return np.array([number[text] for text in texts], "i1")

    def queued(self) -> NDArray[np.float64]:
        known = [position for position, args in enumerate(self.args) if "queued" in args]
        given = [{"queued": self.args[position]["queued"]} for position in known]
        values = np.full(len(self.args), np.nan)
        limit = _MAX_SECONDS * 1e6
        values[known] = np.rint(self.numbers(given, "queued", -limit, limit, "args.", known) * 1000) / 1e9
        return values

    def values(self, records: list[Any], field: str, prefix: str = "") -> list[Any]:
        try:
            return [record[field] for record in records]
        except KeyError:
            position = next(position for position, record in enumerate(records) if field not in record)
            raise OffbeatError(f"{self.where(position, prefix + field)}: it is required but not given") from None

    def texts(self, records: list[Any], field: str, prefix: str = "") -> list[str]:
        values = self.values(records, field, prefix)
        self.check(values, {str}, prefix + field, "it must be a text")
        return values

    def integers(self, records: list[Any], field: str, least: int, most: int, prefix: str = "") -> NDArray[np.int64]:
        values = self.values(records, field, prefix)
        self.check(values, {int}, prefix + field, "it must be a whole number")
        self.check_range(values, least, most, prefix + field)
        return np.array(values, "i8")

    def numbers(
        self,
        records: list[Any],
        field: str,
        least: float,
        most: float,
        prefix: str = "",
        positions: list[int] | None = None,
    ) -> NDArray[np.float64]:
        values = self.values(records, field, prefix)
        self.check(values, {int, float}, prefix + field, "it must be a number", positions)
        self.check_range(values, least, most, prefix + field, positions)
        return np.array(values, "f8")

    def check(
        self, values: list[Any], types: set[type], field: str, rule: str, positions: list[int] | None = None
    ) -> None:
        if not set(map(type, values)) <= types:
            wrong = next(position for position, value in enumerate(values) if type(value) not in types)
            self.fail(positions[wrong] if positions else wrong, field, rule, values[wrong])

    def check_range(
        self, values: list[Any], least: float, most: float, field: str, positions: list[int] | None = None
    ) -> None:
        if values and not least <= min(values) <= max(values) <= most:
            wrong = next(position for position, value in enumerate(values) if not least <= value <= most)
            rule = f"it must be from {least:.16g} to {most:.16g}"
            self.fail(positions[wrong] if positions else wrong, field, rule, values[wrong])

    def fail(self, position: int, field: str, rule: str, value: Any) -> NoReturn:
        raise OffbeatError(f"{self.where(position, field)}: {rule}, got {quote(value)}")

    def where(self, position: int, field: str) -> str:
        return f"{self.origin}: traceEvents[{self.places[position]}].{field}"
