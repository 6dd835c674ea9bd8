"""Traces exported by torch.profiler, one file per rank → Timeline, each rank still on its own clock.

The n-th collective of one kind, group and size in a step gets the same task number on every rank and in every step. It
is counted in the order of issue, which all ranks share, or by the sequence numbers that `offbeat.profile.flight` adds.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.profile.tracefile import Collective, Trace, load
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Timeline

__all__ = ["Collective", "Trace", "combine", "load", "load_folder", "read_folder", "read_trace"]

_SIZED = ("all_reduce", "broadcast", "reduce", "send", "recv")
"""Kinds in which every participant gives equally many elements."""


_COLUMNS = (
    *(("start", "f8"), ("end", "f8"), ("rank", "i4"), ("track", "i4"), ("kind", "i1"), ("name", "i4")),
    *(("step", "i4"), ("queued", "f8"), ("bytes", "i8"), ("task", "i4")),
)


def read_trace(path: str | os.PathLike[str], rank: int | None = None) -> Timeline:
    """The timeline of one rank; `rank` counts where neither the file nor its name says which."""
    return combine([load(path, rank)])


def read_folder(folder: str | os.PathLike[str]) -> tuple[Timeline, tuple[str, ...]]:
    """The timeline of all ranks on their own clocks, and what was left out."""
    traces, notes = load_folder(folder)
    timeline = combine(traces)
    return timeline, (*notes, *timeline.notes)


def load_folder(folder: str | os.PathLike[str]) -> tuple[list[Trace], tuple[str, ...]]:
    """The traces in a folder by rank, and one sentence for each file left out."""
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.name.endswith((".json", ".json.gz")))
    except OSError as error:
        raise OffbeatError(f"{folder}: cannot read the folder of traces: {error.strerror or error}") from None
    if not paths:
        raise OffbeatError(f"{folder}: there is no trace in it; a trace's name ends with .json or .json.gz")
    traces: dict[int, Trace] = {}
    notes: list[str] = []
    for path in paths:
        try:
            trace = load(path, 0 if len(paths) == 1 else None)
        except OffbeatError as error:
            notes.append(str(error))
            continue
        if trace.rank in traces:
            notes.append(
                f"{path}: left out, because {traces[trace.rank].path.name} is a trace of rank {trace.rank} too"
            )
        else:
            traces[trace.rank] = trace
    if not traces:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        raise OffbeatError(f"{folder}: none of its traces can be used: {notes[0]}{more}")
    return [traces[rank] for rank in sorted(traces)], tuple(notes)


def combine(traces: Iterable[Trace]) -> Timeline:
    """One timeline of traces of different ranks, its zero the earliest origin; the clocks stay as they are."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    notes = [note for trace in traces for note in trace.notes]
    zero = min(trace.origin_ns for trace in traces)
    steps = _common_steps(traces, notes)
    marks = np.empty((0, 0))
    if steps:
        begins = [[trace.steps[step][0] for step in steps] + [trace.steps[steps[-1]][1]] for trace in traces]
        marks = np.array(begins) + np.array([[(trace.origin_ns - zero) * 1e-9] for trace in traces])
    if not any(trace.collectives for trace in traces) and max(len(traces), *(trace.world for trace in traces)) > 1:
        notes.append(
            "the job has several ranks but its traces show no communication; "
            "record CPU activity for gloo and CUDA activity for NCCL"
        )
    names: dict[str, int] = {}
    tracks: dict[str, int] = {COMPUTE: 0, NETWORK: 1}
    tasks = _Tasks(stepped=bool(steps))
    parts = []
    rows = [(trace, (trace.origin_ns - zero) * 1e-9, marks[row] if steps else None) for row, trace in enumerate(traces)]
    for trace, shift, row in rows:
        events = sorted(trace.collectives, key=lambda event: event.moment)
        step = _steps_of(np.array([event.moment for event in events], "f8") + shift, row)
        parts.append(_work_columns(trace, shift, row, names, tracks))
        parts.append(_collective_columns(trace.rank, events, step, shift, names, tracks))
        tasks.add(trace.rank, events, step.tolist())
    columns = {column: np.concatenate([part[column] for part in parts]).astype(dtype) for column, dtype in _COLUMNS}
    columns["task"][columns["kind"] == KINDS.index("communication")] = tasks.numbers()
    return Timeline(names=tuple(names), tracks=tuple(tracks), marks=marks, notes=tuple(notes), **columns)  # type: ignore[arg-type]


def _common_steps(traces: list[Trace], notes: list[str]) -> list[int]:
    for trace in traces:
        if not trace.steps:
            if any(other.steps for other in traces):
                notes.append(f"{trace.path}: it has no ProfilerStep ranges, so the steps of all ranks are unknown")
            return []
    common = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    if not common:
        notes.append("the traces have no ProfilerStep in common, so the steps are unknown")
    # A gap would make one step look longer than it was.
    run = [step for place, step in enumerate(common) if step - common[0] == place]
    left = len(set().union(*(trace.steps for trace in traces))) - len(run)
    if common and left:
        notes.append(f"{left} steps that not all ranks recorded one after another were left out")
    return run


def _steps_of(moments: NDArray[np.float64], marks: NDArray[np.float64] | None) -> NDArray[np.int64]:
    if marks is None:
        return np.full(len(moments), -1)
    step = np.searchsorted(marks, moments, side="right") - 1
    return np.where(step < len(marks) - 1, step, -1)


def _work_columns(
    trace: Trace, shift: float, marks: NDArray[np.float64] | None, names: dict[str, int], tracks: dict[str, int]
) -> dict[str, NDArray[Any]]:
    work = trace.work
    count = len(work.start)
    lanes = [COMPUTE if lane == 0 else f"compute {lane + 1}" for lane in range(int(work.lane.max(initial=-1)) + 1)]
    track = np.array([tracks.setdefault(lane, len(tracks)) for lane in lanes], np.int64)
    name = np.array([names.setdefault(name, len(names)) for name in work.names], np.int64)
    return {
        "start": work.start + shift,
        "end": work.end + shift,
        "rank": np.full(count, trace.rank),
        "track": track[work.lane],
        "kind": work.kind,
        "name": name[work.name],
        "step": _steps_of(work.start + shift, marks),
        "queued": np.full(count, np.nan),
        "bytes": np.zeros(count, np.int64),
        "task": np.full(count, -1),
    }


def _collective_columns(
    rank: int,
    events: list[Collective],
    step: NDArray[np.int64],
    shift: float,
    names: dict[str, int],
    tracks: dict[str, int],
) -> dict[str, NDArray[Any]]:
    seconds: dict[int, float] = {}
    for event in events:
        seconds[event.lane] = seconds.get(event.lane, 0) + event.end - event.start
    lanes = {lane: place for place, lane in enumerate(sorted(seconds, key=lambda lane: -seconds[lane]))}
    labels = [NETWORK if lanes[event.lane] == 0 else f"{NETWORK} {lanes[event.lane] + 1}" for event in events]
    return {
        "start": np.array([event.start for event in events], "f8") + shift,
        "end": np.array([event.end for event in events], "f8") + shift,
        "rank": np.full(len(events), rank),
        "track": np.array([tracks.setdefault(label, len(tracks)) for label in labels], np.int64),
        "kind": np.full(len(events), KINDS.index("communication")),
        "name": np.array([names.setdefault(event.kind, len(names)) for event in events], np.int64),
        "step": step,
        "queued": np.array([event.queued for event in events], "f8") + shift,
        "bytes": np.array([event.bytes for event in events], np.int64),
        "task": np.full(len(events), -1),
    }


class _Tasks:
    """Collectives of all ranks → task numbers equal on all participants; -1 for what cannot be matched."""

    def __init__(self, stepped: bool) -> None:
        self.stepped = stepped
        self.keys: list[tuple[int, tuple[object, ...], int] | None] = []
        """Per collective its step, what it is, and its place among those of the step that are the same."""
        self.sequenced: dict[tuple[int, tuple[object, ...]], set[int]] = {}

    def add(self, rank: int, events: list[Collective], steps: list[int]) -> None:
        """Collectives of one rank in the order of issue."""
        seen: dict[tuple[int, tuple[object, ...]], int] = {}
        for event, step in zip(events, steps, strict=True):
            transfer = event.kind in ("send", "recv")
            if (self.stepped and step < 0) or (transfer and event.peer < 0):
                self.keys.append(None)
                continue
            ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank) if transfer else ()
            size = event.elements if event.kind in _SIZED else -1
            what = (event.sequence >= 0, event.group, "transfer" if transfer else event.kind, ends, size)
            if event.sequence >= 0:
                self.sequenced.setdefault((step, what), set()).add(event.sequence)
                self.keys.append((step, what, event.sequence))
            else:
                place = seen.get((step, what), 0)
                seen[(step, what)] = place + 1
                self.keys.append((step, what, place))

    def numbers(self) -> NDArray[np.int64]:
        places = {
            key: {number: place for place, number in enumerate(sorted(all_))} for key, all_ in self.sequenced.items()
        }
        known: dict[tuple[object, ...], int] = {}
        result = np.full(len(self.keys), -1, np.int64)
        for position, key in enumerate(self.keys):
            if key is not None:
                step, what, place = key
                place = places[(step, what)][place] if (step, what) in places else place
                result[position] = known.setdefault((*what, place), len(known))
        return result
