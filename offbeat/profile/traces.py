"""A folder of recorded traces → what each rank noted, and one Timeline on one clock.

Files of other programs (Kineto's) are read by `offbeat.profile.kineto`. A file that cannot be read is named in the
notes and the other ranks are still analysed.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from offbeat.errors import OffbeatError
from offbeat.graph.model import ITEM_BYTES
from offbeat.profile.align import Alignment, clock_offsets, communication_events
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Builder, Kind, Timeline
from offbeat.units import quote

MAX_LINE_BYTES = 64 * 2**20
MOST_RANKS = 16_384
MOST_SECONDS = 1e10
"""No clock has run for longer: three hundred years."""
MOST_DRIFT_PPM = 1e5


Tick = tuple[int, float, float]
"""The other rank; on rank 0 when a message left and its answer came, on the other rank twice the time between."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as one rank saw it; times on that rank's clock."""

    task: int
    kind: str
    name: str
    bytes: int
    ranks: int
    queued: float
    issued: float
    finished: float


@dataclass(frozen=True)
class Step:
    """One step of one rank; times on that rank's clock."""

    number: int
    begin: float
    end: float
    forward: tuple[tuple[int, float, float], ...]
    """(module, reached, begun) for each module with parameters, in the order of the calls."""
    forward_begin: float
    forward_end: float
    backward: tuple[tuple[int, float], ...]
    """(parameter, complete) for each gradient, in order."""
    local: tuple[tuple[Kind, tuple[int, ...], float, float], ...]
    """Waits and updates: (kind, messages, start, end)."""
    communication: tuple[Collective, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class RankTrace:
    """Everything one rank recorded."""

    path: Path
    rank: int
    world: int
    job: str
    machine: str
    backend: str
    modules: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    gradients: tuple[str, ...]
    steps: tuple[Step, ...]
    ticks: tuple[tuple[Tick, ...], ...] = ()
    """Messages to and fro between rank 0 and the others, before and after the steps."""
    notes: tuple[str, ...] = field(default=())


def read_traces(folder: str | PathLike[str]) -> tuple[list[RankTrace], list[str]]:
    """Every rank's trace in a folder, and what could not be read."""
    found = sorted(Path(folder).glob("rank*.jsonl"))
    if not found:
        raise OffbeatError(f"{folder}: there are no traces (rank0.jsonl, …) in this folder")
    traces, notes = [], []
    for path in found:
        try:
            traces.append(read_rank(path))
        except OffbeatError as error:
            notes.append(str(error))
    if not traces:
        raise OffbeatError(f"{folder}: none of the {len(found)} traces can be read: {notes[0]}")
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) != len(ranks):
        raise OffbeatError(f"{folder}: two traces are of the same rank {max(ranks, key=ranks.count)}")
    missing = sorted(set(range(traces[0].world)) - set(ranks))
    if missing:
        shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
        notes.append(f"{folder}: of {traces[0].world} ranks, {shown} left no readable trace")
    notes += [note for trace in traces for note in trace.notes]
    return sorted(traces, key=lambda trace: trace.rank), notes


def read_rank(path: Path) -> RankTrace:
    """One rank's trace. A last line that was cut off by a crash is left out."""
    return parse_rank(_lines(path), path)


def parse_rank(lines: Iterator[Any], path: Path) -> RankTrace:
    """The lines of one rank's trace; `path` is what errors name."""
    header = next(lines, None)
    if not isinstance(header, dict) or header.get("offbeat_trace") != 1:
        raise OffbeatError(f"{path}: not a trace of Offbeat's recorder: its first line says no 'offbeat_trace': 1")
    notes: list[str] = []
    try:
        modules, gradients = tuple(map(str, header["modules"])), tuple(map(str, header["gradients"]))
        parameters = tuple((str(n), _shape(s), str(d)) for n, s, d in header["parameters"])
        _check_gradients(gradients, parameters)
        world = _whole(header["world"], MOST_RANKS)
        steps: list[dict[str, Any]] = []
        collectives: list[Collective] = []
        ticks: list[tuple[Tick, ...]] = []
        for line in lines:
            if line is None:
                notes.append(f"{path}: the last line is cut off; its step is left out")
                break
            if not isinstance(line, dict):
                raise ValueError(f"the line {quote(line)} is not a mapping")
            if "clock" in line:
                ticks.append(tuple((_whole(peer), _time(begin), _time(end)) for peer, begin, end in line["clock"]))
                continue
            rows: Any = line.get("late", line.get("communication", ()))
            collectives += [_collective(*row) for row in rows]
            if "late" not in line and line["complete"]:
                steps.append(line)
        return RankTrace(
            path=path,
            rank=_whole(header["rank"], world),
            world=world,
            job=str(header["job"]),
            machine=str(header["machine"]),
            backend=str(header.get("backend", "")),
            modules=modules,
            parameters=parameters,
            gradients=gradients,
            steps=_steps(steps, collectives, len(modules), len(gradients)),
            # One end of the recording says nothing of how clocks drift.
            ticks=tuple(ticks) if len(ticks) == 2 else (),
            notes=tuple(notes),
        )
    except (KeyError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:160]
        raise OffbeatError(f"{path}: not a trace of Offbeat's recorder: {type(error).__name__}: {said}") from None


def _whole(value: Any, most: int = 2**31) -> int:
    """A number from 0 to below `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
        raise ValueError(f"{quote(value)} is not a whole number from 0 to {most - 1}")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < MOST_SECONDS:
        raise ValueError(f"{quote(value)} is not a time in seconds")
    return float(value)


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(_whole(size, 2**40) for size in value)
    if len(shape) > 64 or math.prod(shape) >= 2**60:
        raise ValueError(f"{quote(value)} is not a tensor's shape")
    return shape


def _check_gradients(gradients: tuple[str, ...], parameters: tuple[tuple[str, tuple[int, ...], str], ...]) -> None:
    dtypes = {name: dtype for name, _, dtype in parameters}
    for name in gradients:
        if name not in dtypes:
            raise ValueError(f"the gradient {quote(name)} is of no parameter")
        if dtypes[name] not in ITEM_BYTES:
            raise ValueError(f"{quote(dtypes[name])} is not a type of a gradient's elements")


def _collective(
    task: Any, kind: Any, name: Any, size: Any, ranks: Any, queued: Any, issued: Any, finished: Any
) -> Collective:
    times = (_time(queued), _time(issued), _time(finished))
    return Collective(_whole(task), str(kind), str(name), _whole(size, 2**60), _whole(ranks), *times)


def _lines(path: Path) -> Iterator[Any]:
    """Parsed lines; None for a last one that is not whole."""
    try:
        with path.open("rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES):
                try:
                    yield orjson.loads(raw)
                except orjson.JSONDecodeError as error:
                    if not raw.endswith(b"\n") and len(raw) < MAX_LINE_BYTES:
                        yield None
                        return
                    raise OffbeatError(f"{path}: not a trace: {error}") from None
    except OSError as error:
        raise OffbeatError(f"{path}: cannot read the trace: {error.strerror}") from None


def _steps(
    lines: list[dict[str, Any]], collectives: list[Collective], modules: int, gradients: int
) -> tuple[Step, ...]:
    collectives.sort(key=lambda collective: collective.queued)
    queued = np.array([collective.queued for collective in collectives])
    steps: list[Step] = []
    for line in lines:
        begin, end = _time(line["begin"]), _time(line["end"])
        low, high = np.searchsorted(queued, (begin, end))
        local = [(kind, tuple(map(_whole, m)), _time(a), _time(b)) for kind, m, a, b in line["local"]]
        unknown = [kind for kind, _, _, _ in local if kind not in KINDS]
        if unknown:
            raise ValueError(f"{quote(unknown[0])} is not a kind of work")
        began = [start for kind, _, start, _ in local if kind == "forward"]
        steps.append(
            Step(
                number=_whole(line["step"]),
                begin=begin,
                end=end,
                forward=tuple((_whole(m, modules), _time(a), _time(b)) for m, a, b in line["forward"]),
                forward_begin=began[0] if began else begin,
                forward_end=_time(line["forward_end"]),
                backward=tuple((_whole(p, gradients), _time(t)) for p, t in line["backward"]),
                local=tuple(span for span in local if span[0] != "forward"),
                communication=tuple(collectives[low:high]),
            )
        )
        if not end >= begin:
            raise ValueError(f"step {line['step']} ends at {end} before it begins at {begin}")
        if len(steps) > 1 and steps[-1].number <= steps[-2].number:
            raise ValueError(f"step {steps[-1].number} comes after step {steps[-2].number}")
    return tuple(steps)


def to_timeline(traces: list[RankTrace], notes: list[str]) -> Timeline:
    """All ranks as they were recorded; zero is the beginning of the first step that all ranks have."""
    common = set.intersection(*({step.number for step in trace.steps} for trace in traces))
    if not common:
        raise OffbeatError(f"{traces[0].path.parent}: the ranks have no complete step in common")
    builder = Builder()
    zero = min(step.begin for trace in traces for step in trace.steps if step.number in common)
    marks = []
    for trace in traces:
        steps = [step for step in trace.steps if step.number in common]
        for step in steps:
            _add_step(builder, trace, step, zero)
        marks.append([step.begin - zero for step in steps] + [steps[-1].end - zero])
    return builder.build(np.array(marks), notes=tuple(notes))


def align(traces: list[RankTrace]) -> tuple[list[RankTrace], Alignment | None]:
    """The traces with all times on the first rank's clock; ranks of one machine share theirs anyway."""
    machines = {trace.rank: trace.machine for trace in traces}
    if len(set(machines.values())) == 1:
        return traces, None
    zero = traces[0].steps[0].begin
    shifted = [_moved(trace, lambda at: at - zero) for trace in traces]
    compared = [trace.ticks and all(trace.ticks) for trace in shifted]
    if shifted[0].rank == 0 and all(compared):
        alignment = _compared_clocks(shifted)
    else:
        alignment = clock_offsets(communication_events(to_timeline(shifted, [])), machines)
    return [_moved(trace, _clock(alignment, trace.rank)) for trace in shifted], alignment


def _compared_clocks(traces: list[RankTrace]) -> Alignment:
    """Each clock against rank 0's by the quickest messages to and fro, whose two ways took about the same time."""
    first, last = (np.median([begin for _, begin, _ in part]) for part in traces[0].ticks)
    reference, span = float(first + last) / 2, max(float(last - first), 1e-6)
    offset, drift, unsure = [0.0], [0.0], 0.0
    for trace in traces[1:]:
        found = []
        for there, here in zip(traces[0].ticks, trace.ticks, strict=True):
            mine = [(begin, end) for peer, begin, end in there if peer == trace.rank]
            pairs = list(zip(mine, here, strict=False))
            if not pairs:
                raise OffbeatError(
                    f"{trace.path}: rank 0 exchanged no message with rank {trace.rank} to compare clocks"
                )
            took, ahead = min((end - begin, at - (begin + end) / 2) for (begin, end), (_, at, _) in pairs)
            found.append(ahead)
            unsure = max(unsure, took / 2)
        same = trace.machine == traces[0].machine
        offset.append(0.0 if same else sum(found) / 2)
        drift.append(0.0 if same else (found[1] - found[0]) / span * 1e6)
        if not abs(drift[-1]) < MOST_DRIFT_PPM:
            raise OffbeatError(f"{trace.path}: its clock gains {drift[-1]:g} us a second on rank 0's, which none does")
    return Alignment(
        ranks=tuple(trace.rank for trace in traces),
        reference_seconds=reference,
        offset_seconds=np.array(offset),
        drift_ppm=np.array(drift),
        residual_seconds=unsure,
    )


def _clock(alignment: Alignment, rank: int) -> Callable[[float], float]:
    place = alignment.ranks.index(rank)
    offset, drift = float(alignment.offset_seconds[place]), float(alignment.drift_ppm[place]) * 1e-6
    reference = alignment.reference_seconds
    return lambda at: reference + (at - reference - offset) / (1 + drift)


def _moved(trace: RankTrace, clock: Callable[[float], float]) -> RankTrace:
    """The trace with every time read off another clock."""
    return replace(
        trace,
        ticks=tuple(tuple((peer, clock(begin), clock(end)) for peer, begin, end in part) for part in trace.ticks),
        steps=tuple(
            Step(
                number=step.number,
                begin=clock(step.begin),
                end=clock(step.end),
                forward=tuple((module, clock(reached), clock(begun)) for module, reached, begun in step.forward),
                forward_begin=clock(step.forward_begin),
                forward_end=clock(step.forward_end),
                backward=tuple((parameter, clock(at)) for parameter, at in step.backward),
                local=tuple((kind, messages, clock(start), clock(end)) for kind, messages, start, end in step.local),
                communication=tuple(
                    replace(row, queued=clock(row.queued), issued=clock(row.issued), finished=clock(row.finished))
                    for row in step.communication
                ),
            )
            for step in trace.steps
        ),
    )


def _add_step(builder: Builder, trace: RankTrace, step: Step, zero: float) -> None:
    number = step.number
    for module, start, end in forward_spans(step):
        builder.add(trace.rank, COMPUTE, "forward", trace.modules[module], start - zero, end - zero, step=number)
    for parameter, start, end in backward_spans(step):
        builder.add(trace.rank, COMPUTE, "backward", trace.gradients[parameter], start - zero, end - zero, step=number)
    for kind, messages, start, end in step.local:
        name = "m" + "+".join(map(str, messages)) if messages else "everything"
        builder.add(trace.rank, COMPUTE, kind, name, start - zero, end - zero, step=number)
    for row in step.communication:
        builder.add(
            trace.rank,
            NETWORK,
            "communication",
            row.name,
            row.issued - zero,
            row.finished - zero,
            step=number,
            queued=row.queued - zero,
            bytes=row.bytes,
            task=row.task,
        )


def forward_spans(step: Step) -> Iterator[tuple[int, float, float]]:
    """(module, start, end): from when a module may begin until the next one is reached."""
    reached = [start for _, start, _ in step.forward[1:]] + [step.forward_end]
    # A step need not call any module.
    for (module, _, begun), end in zip(step.forward, reached, strict=False):
        yield module, begun, max(begun, end)


def backward_spans(step: Step) -> Iterator[tuple[int, float, float]]:
    """(parameter, start, end): what was computed until its gradient was complete."""
    before = step.forward_end
    for parameter, complete in step.backward:
        yield parameter, before, max(before, complete)
        before = max(before, complete)


def skewed_copy(
    source: str | PathLike[str], target: str | PathLike[str], clock: Callable[[int], tuple[float, float]]
) -> None:
    """Copies traces as if each rank had read a clock of its own: `clock(rank)` is its (offset, drift) in seconds.

    For tests and benchmarks of the alignment; calibration and strategy are copied as they are.
    """
    shutil.copytree(source, target)
    for path in Path(target).glob("rank*.jsonl"):
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        header = lines[0]
        offset, drift = clock(int(header["rank"]))
        origin = float(header["clock_seconds"])
        header["machine"] += f" clock {header['rank']}"

        def read(at: float, origin: float = origin, offset: float = offset, drift: float = drift) -> float:
            return at + offset + drift * (at - origin)

        for line in lines[1:]:
            if "clock" in line:
                line["clock"] = [[peer, read(begin), read(end)] for peer, begin, end in line["clock"]]
                continue
            for row in line.get("late", line.get("communication", ())):
                row[5:8] = map(read, row[5:8])
            if "late" in line:
                continue
            for key in ("begin", "end", "forward_end"):
                line[key] = read(line[key])
            line["forward"] = [[module, read(reached), read(begun)] for module, reached, begun in line["forward"]]
            line["backward"] = [[parameter, read(at)] for parameter, at in line["backward"]]
            line["local"] = [[kind, m, read(start), read(end)] for kind, m, start, end in line["local"]]
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
