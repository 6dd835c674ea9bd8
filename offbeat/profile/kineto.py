"""Read torch.profiler traces, one file per rank, as a Timeline with each rank on its own clock.

The n-th collective of one kind, group and size in a step gets the same task number on every rank and in every step. It
is counted in the order of issue, which all ranks share, or by the sequence numbers of Flight Recorder dumps in JSON.

Kineto's gloo ranges know when a collective ran but not its group or sequence number; the Flight Recorder knows those
but, on gloo, not when it ran. Both note when it was issued, on the same clock, by which a dump is joined with a trace.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, StrictBool, StrictStr, ValidationError

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.profile.tracefile import Collective, Trace, load, product, rank_in_name
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Builder, Timeline
from offbeat.timeline.model import COLUMNS, collective_kind

_SIZED = ("all_reduce", "broadcast", "reduce", "send", "recv")
"""Kinds in which every participant gives equally many elements."""
_WHAT = "Flight Recorder dump"
_HOW = "torch._C._distributed_c10d._dump_fr_trace_json()"
_PICKLE = re.compile(rb"\x80[\x01-\x08]|\(dp|\(lp|\}q|\]q")
_NEAR_SECONDS = 0.05
"""Kineto's clock and the Flight Recorder's differ by less, as both follow the system's clock."""

Issued = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class Entry(BaseModel):
    """One collective or transfer that a rank issued."""

    profiling_name: StrictStr
    process_group: Any = None
    """A list that begins with the group's name."""
    collective_seq_id: Issued
    """Its number among its group's collectives; the same on all participants."""
    is_p2p: StrictBool = False
    p2p_seq_id: Issued = 0
    """Its number among the transfers between two ranks."""
    input_sizes: Any = None
    time_created_ns: Issued
    """When it was issued, on the rank's clock."""

    @property
    def key(self) -> tuple[str, int]:
        """Its kind and its number of elements."""
        kind = collective_kind(self.profiling_name)
        sizes = self.input_sizes if isinstance(self.input_sizes, list) and kind != "barrier" else []
        return kind, sum(product(size) for size in sizes)

    @property
    def group(self) -> str:
        return str(self.process_group[0]) if isinstance(self.process_group, list) and self.process_group else ""


class _Dump(BaseModel):
    entries: list[Entry]


def is_dump(path: Path) -> bool:
    """Flight Recorder dumps begin with their groups and have no events."""
    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError:
        return False
    return b'"pg_config"' in head and b'"traceEvents"' not in head


def read_dump(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries in the order of their issue; pickles are refused, because opening one runs what it holds."""
    content = files.read_bytes(path, _WHAT)
    if _PICKLE.match(content):
        raise OffbeatError(
            f"{path}: this {_WHAT} is a pickle, which is not opened because it may run code; "
            f"write it as JSON with {_HOW}"
        )
    try:
        entries = _Dump.model_validate(files.parse_json(content, str(path), _WHAT)).entries
    except ValidationError as error:
        raise OffbeatError(f"{path}: not a {_WHAT}: {files.first_problem(error)}; write one with {_HOW}") from None
    return sorted(entries, key=lambda entry: entry.time_created_ns)


def join(trace: Trace, dump: list[Entry]) -> Trace:
    """The trace with the sequence number, and the group where unknown, of each collective that the dump names too."""
    entries, events = defaultdict(list), defaultdict(list)
    for entry in dump:
        entries[entry.key].append(entry)
    for place, event in enumerate(trace.collectives):
        if not np.isnan(event.queued):
            events[event.kind, event.elements].append(place)
    joined = list(trace.collectives)
    for key in events.keys() & entries.keys():
        places, known = events[key], entries[key]
        issued = np.array([trace.origin_ns * 1e-9 + joined[place].queued for place in places])
        created = np.array([entry.time_created_ns * 1e-9 for entry in known])
        for place, number in zip(places, _matches(issued, created), strict=True):
            if number >= 0:
                event, entry = joined[place], known[number]
                sequence = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
                joined[place] = replace(event, sequence=sequence, group=event.group or entry.group)
    missing = sum(event.sequence < 0 for event in joined)
    note = f"{trace.path}: {missing} of {len(joined)} communications are not in the {_WHAT}"
    return replace(trace, collectives=joined, notes=[*trace.notes, note] if missing else trace.notes)


def _matches(issued: np.ndarray, created: np.ndarray) -> list[int]:
    """For each time in `issued` the position of its entry, or -1.

    Both lists hold the same collectives in the same order but begin at different ones: the shift between them is the
    one with the least median distance.
    """
    middle = len(issued) // 2
    guess = int(np.searchsorted(created, issued[middle])) - middle
    best, shift = np.inf, guess
    for candidate in range(guess - 32, guess + 33):
        first, last = max(0, -candidate), min(len(issued), len(created) - candidate)
        if last - first < max(1, min(len(issued), len(created)) // 2):
            continue
        distance = float(np.median(np.abs(created[first + candidate : last + candidate] - issued[first:last])))
        if distance < best:
            best, shift = distance, candidate
    places = np.arange(len(issued)) + shift
    inside = (places >= 0) & (places < len(created))
    near = np.abs(created[np.clip(places, 0, len(created) - 1)] - issued) < _NEAR_SECONDS
    return np.where(inside & near, places, -1).tolist()


def load_folder(folder: Path) -> tuple[list[Trace], list[str]]:
    """The traces in a folder by rank, joined with Flight Recorder dumps, and one sentence for each file left out."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    if not paths:
        raise OffbeatError(f"{folder}: contains no traces: neither rank0.jsonl, … nor JSON files")
    traces: dict[int, Trace] = {}
    dumps: dict[int | None, list[Entry]] = {}
    notes = []
    for path in paths:
        try:
            if is_dump(path):
                dumps[rank_in_name(path.name)] = read_dump(path)
                continue
            trace = load(path, 0 if len(paths) == 1 else None)
            first = traces.setdefault(trace.rank, trace)
            if first is not trace:
                notes.append(f"{path}: left out, because {first.path.name} is also a trace of rank {trace.rank}")
        except OffbeatError as error:
            notes.append(str(error))
    if not traces:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        raise OffbeatError(f"{folder}: contains no usable trace: {notes[0] if notes else 'there are none'}{more}")
    for rank, dump in dumps.items():
        if rank in traces:
            traces[rank] = join(traces[rank], dump)
        else:
            notes.append(f"{folder}: the Flight Recorder dump of rank {rank} has no matching trace")
    return [traces[rank] for rank in sorted(traces)], notes


def combine(traces: Iterable[Trace]) -> Timeline:
    """One timeline of traces of different ranks, its zero the earliest origin; the clocks stay as they are."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    notes = [note for trace in traces for note in trace.notes]
    zero = min(trace.origin_ns for trace in traces)
    shifts = [(trace.origin_ns - zero) * 1e-9 for trace in traces]
    steps = _common_steps(traces, notes)
    marks = np.empty((0, 0))
    if steps:
        begins = [[trace.steps[step][0] for step in steps] + [trace.steps[steps[-1]][1]] for trace in traces]
        marks = np.array(begins) + np.array(shifts)[:, None]
    if not any(trace.collectives for trace in traces) and max(len(traces), *(trace.world for trace in traces)) > 1:
        notes.append(
            "the job has several ranks but its traces show no communication; "
            "record CPU activity for gloo and CUDA activity for NCCL"
        )
    names: dict[str, int] = {}
    tracks: dict[str, int] = {COMPUTE: 0, NETWORK: 1}
    collectives: list[tuple[int, Collective, int]] = []
    parts = []
    for place, (trace, shift) in enumerate(zip(traces, shifts, strict=True)):
        builder = Builder()
        for event in trace.collectives:
            lane, queued, size = str(event.lane), event.queued, event.bytes
            builder.add(
                trace.rank, lane, "communication", event.kind, event.start, event.end, queued=queued, bytes=size
            )
        for label, spans in ((COMPUTE, trace.work), (NETWORK, builder.build())):
            parts.append(_columns(label, spans, shift, marks[place : place + 1].ravel(), names, tracks))
        step = parts[-1]["step"].tolist()
        collectives += [(trace.rank, event, number) for event, number in zip(trace.collectives, step, strict=True)]
    columns = {name: np.concatenate([part[name] for part in parts]).astype(dtype) for name, dtype in COLUMNS.items()}
    columns["task"][columns["kind"] == KINDS.index("communication")] = _tasks(collectives, bool(steps))
    return Timeline(names=tuple(names), tracks=tuple(tracks), marks=marks, notes=tuple(notes), **columns)  # type: ignore[arg-type]


def _common_steps(traces: list[Trace], notes: list[str]) -> list[int]:
    for trace in traces:
        if not trace.steps:
            if any(other.steps for other in traces):
                notes.append(f"{trace.path}: no ProfilerStep ranges, so the steps of all ranks are unknown")
            return []
    common = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    if not common:
        notes.append("the traces have no ProfilerStep in common, so the steps are unknown")
    # A gap would make one step look longer than it was.
    run = [step for place, step in enumerate(common) if step - common[0] == place]
    left = len(set().union(*(trace.steps for trace in traces))) - len(run)
    if common and left:
        notes.append(f"{left} steps were left out, because not all ranks recorded them consecutively")
    return run


def _columns(
    label: str, spans: Timeline, shift: float, marks: NDArray[np.float64], names: dict[str, int], tracks: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """The columns of a rank's computation or communication, whose busiest stream or thread is the track `label`."""
    present, lane = np.unique(spans.track, return_inverse=True)
    place = np.argsort(np.argsort(-np.bincount(lane, spans.end - spans.start), kind="stable")) if len(lane) else lane
    track = [tracks.setdefault(f"{label} {n + 1}" if n else label, len(tracks)) for n in range(len(present))]
    used, name = np.unique(spans.name, return_inverse=True)
    known = [names.setdefault(spans.names[number], len(names)) for number in used]
    columns = {column: getattr(spans, column) for column in COLUMNS}
    columns |= {column: columns[column] + shift for column in ("start", "end", "queued")}
    columns |= {"track": np.array(track, np.int64)[place[lane]], "name": np.array(known, np.int64)[name]}
    if len(marks):
        moment = np.where(np.isnan(columns["queued"]), columns["start"], columns["queued"])
        step = np.searchsorted(marks, moment, side="right") - 1
        columns["step"] = np.where(step < len(marks) - 1, step, -1)
    return columns


def _tasks(collectives: list[tuple[int, Collective, int]], stepped: bool) -> NDArray[np.int64]:
    """Task numbers of (rank, collective, step), equal on all participants; -1 for what cannot be matched."""
    found: list[tuple[int, tuple[object, ...], int]] = []
    """Position of each collective, what it is in which step, and its place or sequence number among those."""
    numbers: defaultdict[tuple[object, ...], set[int]] = defaultdict(set)
    seen: Counter[tuple[object, ...]] = Counter()
    for position, (rank, event, step) in enumerate(collectives):
        transfer = event.kind in ("send", "recv")
        if (stepped and step < 0) or (transfer and event.peer < 0):
            continue
        ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank) if transfer else ()
        size = event.elements if event.kind in _SIZED else -1
        kind = "transfer" if transfer else event.kind
        what = (step, event.sequence >= 0, event.group, kind, ends, size)
        number = event.sequence if event.sequence >= 0 else seen[rank, what]
        seen[rank, what] += 1
        numbers[what].add(number)
        found.append((position, what, number))
    places = {what: {number: place for place, number in enumerate(sorted(all_))} for what, all_ in numbers.items()}
    known: dict[tuple[object, ...], int] = {}
    result = np.full(len(collectives), -1, np.int64)
    for position, same, number in found:
        result[position] = known.setdefault((*same[1:], places[same][number]), len(known))
    return result
