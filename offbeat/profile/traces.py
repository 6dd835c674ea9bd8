"""Read a folder of recorded traces, and put all ranks on one clock.

Files of other programs (Kineto's) are read by `offbeat.profile.kineto`. A file that cannot be read is named in the
notes and the other ranks are still analysed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.cpu_steal import ProcessorTime
from offbeat.errors import OffbeatError
from offbeat.profile.align import Alignment, clock_offsets, communication_events
from offbeat.profile.lines import MOST_TASKS, MOST_TURNS, Collective, Pass, RankTrace, Step, Transaction, read_rank
from offbeat.timeline import COMPUTE, NETWORK, Builder, Kind, Timeline
from offbeat.units import format_seconds

MOST_DRIFT_PPM = 1e5
CLOCK_READING_SECONDS = 1e-4
"""By which two readings of clocks within an exchange may be off."""
FIRST_TRANSACTION = MOST_TASKS * MOST_TURNS
"""In a timeline, the numbers from here on stand for messages from rank to rank."""


def read_traces(folder: str | PathLike[str]) -> tuple[list[RankTrace], list[str]]:
    """Every rank's trace in a folder, and what could not be read."""
    found = sorted(Path(folder).glob("rank*.jsonl"))
    if not found:
        raise OffbeatError(f"{folder}: contains no traces (rank0.jsonl, …)")
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
        raise OffbeatError(f"{folder}: two traces belong to rank {max(ranks, key=ranks.count)}")
    missing = sorted(set(range(traces[0].world)) - {*ranks, *traces[0].servers})
    if missing:
        shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
        notes.append(f"{folder}: ranks without a readable trace, of {traces[0].world}: {shown}")
    notes += [note for trace in traces for note in trace.notes]
    return sorted(traces, key=lambda trace: trace.rank), notes


def to_timeline(traces: list[RankTrace], notes: list[str]) -> Timeline:
    """The steps that all ranks have; time zero is the beginning of the first."""
    common = set.intersection(*({step.number for step in trace.steps} for trace in traces))
    if not common:
        raise OffbeatError(f"{traces[0].path.parent}: no step is complete on all ranks")
    builder = Builder()
    places = _places(traces)
    zero = min(step.begin for trace in traces for step in trace.steps if step.number in common)
    marks = []
    for trace in traces:
        steps = [step for step in trace.steps if step.number in common]
        for step in steps:
            _add_step(builder, trace, step, zero)
            for row in step.transactions:
                number, of_step = places[_way(trace, row)]
                if of_step not in common:
                    continue
                source, to = _way(trace, row)[:2]
                more = {"step": of_step, "bytes": row.bytes, "task": FIRST_TRANSACTION + number}
                span = row.queued - zero, row.finished - zero
                # A message has no queue of its own before it is issued.
                builder.add(
                    trace.rank, NETWORK, "communication", f"{row.kind} {source}>{to}", *span, queued=span[0], **more
                )
        marks.append([step.begin - zero for step in steps] + [steps[-1].end - zero])
    return builder.build(np.array(marks), notes=tuple(notes))


def _way(trace: RankTrace, row: Transaction) -> tuple[int, int, int, int]:
    """From which rank to which, the tag, and which of these messages it is."""
    ends = (trace.rank, row.peer) if row.kind == "send" else (row.peer, trace.rank)
    return (*ends, row.tag, row.number)


def _places(traces: list[RankTrace]) -> dict[tuple[int, int, int, int], tuple[int, int]]:
    """By message: its number, equal in every step that sends it again, and its step, which is the sender's.

    The receiver counts where the sender left no trace."""
    steps: dict[tuple[int, int, int, int], int] = {}
    for kind in ("send", "recv"):
        for trace in traces:
            for step in trace.steps:
                for row in step.transactions:
                    if row.kind == kind:
                        steps.setdefault(_way(trace, row), step.number)
    numbers: dict[tuple[int, int, int, int], int] = {}
    before: Counter[tuple[int, int, int, int]] = Counter()
    places = {}
    for (source, to, tag, number), step_number in sorted(steps.items()):
        turn = before[source, to, tag, step_number]
        before[source, to, tag, step_number] += 1
        place = numbers.setdefault((source, to, tag, turn), len(numbers))
        places[source, to, tag, number] = place, step_number
    return places


def align(traces: list[RankTrace]) -> tuple[list[RankTrace], Alignment | None]:
    """The traces on the first rank's clock, and the alignment; None if all ranks share one machine."""
    machines = {trace.rank: trace.machine for trace in traces}
    if len(set(machines.values())) == 1:
        return traces, None
    zero = traces[0].steps[0].begin
    shifted = [_moved(trace, lambda at: at - zero) for trace in traces]
    compared = shifted[0].rank == 0 and all(trace.ticks and all(trace.ticks) for trace in shifted)
    alignment, notes = _compared_clocks(shifted) if compared else (None, ())
    if alignment is None:
        found = clock_offsets(communication_events(to_timeline(shifted, [])), machines)
        alignment = replace(found, notes=(*notes, *found.notes))
    return [_moved(trace, alignment.clock(trace.rank)) for trace in shifted], alignment


def _compared_clocks(traces: list[RankTrace]) -> tuple[Alignment | None, tuple[str, ...]]:
    """Each machine's clock against rank 0's, from the fastest round trips, whose two ways took about the same time.

    None, and why, where round trips contradict each other: a clock that jumped, or one that gains more than any does.
    """
    first, last = (np.median([begin for _, begin, _ in part]) for part in traces[0].ticks)
    reference, span = float(first + last) / 2, max(float(last - first), 1e-6)
    fastest: dict[str, list[tuple[float, float]]] = {}
    """By machine, of the first and the last exchange: the shortest round trip, and how far its clock was ahead."""
    for trace in traces[1:]:
        found = []
        for there, here in zip(traces[0].ticks, trace.ticks, strict=True):
            mine = [(begin, end) for peer, begin, end in there if peer == trace.rank]
            pairs = list(zip(mine, here, strict=False))
            if not pairs:
                raise OffbeatError(
                    f"{trace.path}: rank 0 exchanged no message with rank {trace.rank} to compare clocks"
                )
            # A message is received between its sending and the answer.
            least = max(at - end for (_, end), (_, at, _) in pairs)
            most = min(at - begin for (begin, _), (_, at, _) in pairs)
            if least > most + CLOCK_READING_SECONDS and trace.machine != traces[0].machine:
                return None, (_contradiction(trace, f"round trips differ by {format_seconds(least - most)}"),)
            found.append(min((end - begin, at - (begin + end) / 2) for (begin, end), (_, at, _) in pairs))
        known = fastest.get(trace.machine, found)
        fastest[trace.machine] = [min(pair) for pair in zip(known, found, strict=True)]
    fastest[traces[0].machine] = [(0.0, 0.0)] * 2
    ahead = np.array([[seconds for _, seconds in fastest[trace.machine]] for trace in traces])
    drift = (ahead[:, 1] - ahead[:, 0]) / span * 1e6
    for trace, gained in zip(traces, drift.tolist(), strict=True):
        if not abs(gained) < MOST_DRIFT_PPM:
            return None, (_contradiction(trace, f"its clock would gain {gained:g} us a second on rank 0's"),)
    return Alignment(tuple(trace.rank for trace in traces), reference, ahead.mean(axis=1), drift), ()


def _contradiction(trace: RankTrace, what: str) -> str:
    return (
        f"clock alignment: the comparisons of rank {trace.rank}'s clock with rank 0's contradict each other ({what}), "
        "so clocks are aligned by the job's own communication"
    )


def _moved(value: Any, clock: Callable[[float], float]) -> Any:
    """The value with `clock` applied to all floats in it, which are times, but for durations."""
    if isinstance(value, ProcessorTime):
        return value
    if isinstance(value, float):
        return clock(value)
    if isinstance(value, tuple):
        moved = (_moved(each, clock) for each in value)
        return type(value)(*moved) if isinstance(value, Collective | Transaction) else tuple(moved)
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
