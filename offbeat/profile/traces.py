"""A folder of recorded traces → what each rank noted, and one Timeline on one clock.

Files of other programs (Kineto's) are read by `offbeat.profile.kineto`. A file that cannot be read is named in the
notes and the other ranks are still analysed.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.profile.align import Alignment, clock_offsets, communication_events
from offbeat.profile.lines import MOST_TASKS, Collective, Pass, RankTrace, Step, read_rank
from offbeat.timeline import COMPUTE, NETWORK, Builder, Kind, Timeline

MOST_DRIFT_PPM = 1e5


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


def to_timeline(traces: list[RankTrace], notes: list[str]) -> Timeline:
    """The steps that all ranks have; time zero is the beginning of the first."""
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
    """The traces on the first rank's clock, and the alignment; None if all ranks share one machine."""
    machines = {trace.rank: trace.machine for trace in traces}
    if len(set(machines.values())) == 1:
        return traces, None
    zero = traces[0].steps[0].begin
    shifted = [_moved(trace, lambda at: at - zero) for trace in traces]
    if shifted[0].rank == 0 and all(trace.ticks and all(trace.ticks) for trace in shifted):
        alignment = _compared_clocks(shifted)
    else:
        alignment = clock_offsets(communication_events(to_timeline(shifted, [])), machines)
    return [_moved(trace, alignment.clock(trace.rank)) for trace in shifted], alignment


def _compared_clocks(traces: list[RankTrace]) -> Alignment:
    """Each clock against rank 0's, from the fastest round trips, whose two ways took about the same time."""
    first, last = (np.median([begin for _, begin, _ in part]) for part in traces[0].ticks)
    reference, span = float(first + last) / 2, max(float(last - first), 1e-6)
    offset, drift = [0.0], [0.0]
    for trace in traces[1:]:
        found = []
        for there, here in zip(traces[0].ticks, trace.ticks, strict=True):
            mine = [(begin, end) for peer, begin, end in there if peer == trace.rank]
            pairs = list(zip(mine, here, strict=False))
            if not pairs:
                raise OffbeatError(
                    f"{trace.path}: rank 0 exchanged no message with rank {trace.rank} to compare clocks"
                )
            found.append(min((end - begin, at - (begin + end) / 2) for (begin, end), (_, at, _) in pairs)[1])
        same = trace.machine == traces[0].machine
        offset.append(0.0 if same else sum(found) / 2)
        drift.append(0.0 if same else (found[1] - found[0]) / span * 1e6)
        if not abs(drift[-1]) < MOST_DRIFT_PPM:
            raise OffbeatError(f"{trace.path}: its clock gains {drift[-1]:g} us a second on rank 0's, which none does")
    return Alignment(tuple(trace.rank for trace in traces), reference, np.array(offset), np.array(drift))


def _moved(value: Any, clock: Callable[[float], float]) -> Any:
    """The value with `clock` applied to all floats in it, which are times."""
    if isinstance(value, float):
        return clock(value)
    if isinstance(value, tuple):
        moved = (_moved(each, clock) for each in value)
        return Collective(*moved) if isinstance(value, Collective) else tuple(moved)
    if isinstance(value, RankTrace | Step | Pass):
        return replace(value, **{each.name: _moved(getattr(value, each.name), clock) for each in fields(value)})
    return value


def _add_step(builder: Builder, trace: RankTrace, step: Step, zero: float) -> None:
    computed: list[tuple[Kind, str, float, float]] = []
    for part in step.passes:
        computed += [("forward", trace.modules[module], start, end) for module, start, end in part.forward]
        computed += [("backward", trace.gradients[one], start, end) for one, start, end in part.backward]
    for kind, messages, start, end in step.local:
        computed.append((kind, "m" + "+".join(map(str, messages)) if messages else "everything", start, end))
    for kind, name, start, end in computed:
        builder.add(trace.rank, COMPUTE, kind, name, start - zero, end - zero, step=step.number)
    for row in step.communication:
        # In a timeline a number stands for one collective of a step.
        more = {"step": step.number, "bytes": row.bytes, "task": row.task + MOST_TASKS * row.turn}
        queued, issued, finished = row.queued - zero, row.issued - zero, row.finished - zero
        builder.add(trace.rank, NETWORK, "communication", row.name, issued, finished, queued=queued, **more)
