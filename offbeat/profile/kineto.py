"""Read torch.profiler traces, one file per rank, as a Timeline with each rank on its own clock.

The n-th collective of one kind, group and size in a step gets the same task number on every rank and in every step. It
is counted in the order of issue, which all ranks share, or by the sequence numbers that `offbeat.profile.flight` adds.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.profile.flight import Entry, is_dump, join, read_dump
from offbeat.profile.tracefile import Collective, Trace, load, rank_in_name
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Builder, Timeline
from offbeat.timeline.model import COLUMNS

_SIZED = ("all_reduce", "broadcast", "reduce", "send", "recv")
"""Kinds in which every participant gives equally many elements."""


def read_trace(path: str | os.PathLike[str], rank: int | None = None) -> Timeline:
    """The timeline of one rank; `rank` counts where neither the file nor its name says which."""
    return combine([load(path, rank)])


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
