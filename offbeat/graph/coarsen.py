"""ModelGraph → segments: runs of operators between two points where a variable matters.

Communication can only wait for, or be waited for by, a step's use of a variable. Operators between two such points
always run back to back, so the plan, the runtime and the replay work with whole segments (the Coarsened View of
dPRO, figure 6). Every operator lies in exactly one segment and the order is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbeat.graph.model import ModelGraph, Operator, Phase

Marks = dict[str, list[str]]
"""Variables by the operator that first uses them, or that completes their gradient."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operators of one phase."""

    name: str
    phase: Phase
    operators: tuple[str, ...]
    flops: float
    bytes_moved: float
    activation_bytes: float
    seconds: float | None
    """Measured time of its operators; None unless every one was measured (views, which cost nothing, need not be)."""
    reads: tuple[str, ...] = ()
    """Variables that forward uses first in this segment: it must wait for their newest values."""
    completes: tuple[str, ...] = ()
    """Variables whose gradient is complete when this segment ends."""


def segments(graph: ModelGraph) -> tuple[Segment, ...]:
    """Forward is cut before each operator that first uses a variable, backward after each one that completes a
    gradient; each optimizer operator is a segment of its own."""
    reads = _grouped((v.first_use, v.name) for v in graph.variables)
    completes = _grouped((v.gradient_from, v.name) for v in graph.gradient_order)
    cut: list[Segment] = []
    phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
    for phase in phases:
        runs: list[list[Operator]] = []
        for operator in graph.phase(phase):
            begins = operator.name in reads if phase == "forward" else phase == "optimizer"
            if begins or not runs or (phase == "backward" and runs[-1][-1].name in completes):
                runs.append([])
            runs[-1].append(operator)
        cut += [_segment(phase, index, run, reads, completes) for index, run in enumerate(runs)]
    return tuple(cut)


def _grouped(pairs: Iterable[tuple[str | None, str]]) -> Marks:
    groups: Marks = {}
    for operator, variable in pairs:
        if operator is not None:
            groups.setdefault(operator, []).append(variable)
    return groups


def _segment(phase: Phase, index: int, run: Sequence[Operator], reads: Marks, completes: Marks) -> Segment:
    measured = [0.0 if op.seconds is None and op.kind == "view" else op.seconds for op in run]
    known = [seconds for seconds in measured if seconds is not None]
    return Segment(
        name=run[0].name if phase == "optimizer" else f"{phase}.{index}",
        phase=phase,
        operators=tuple(operator.name for operator in run),
        flops=sum(operator.flops for operator in run),
        bytes_moved=sum(operator.bytes_read + operator.bytes_written for operator in run),
        activation_bytes=sum(operator.activation_bytes for operator in run),
        seconds=sum(known) if len(known) == len(measured) else None,
        reads=_named(run, reads) if phase == "forward" else (),
        completes=_named(run, completes) if phase == "backward" else (),
    )


def _named(run: Sequence[Operator], marks: Marks) -> tuple[str, ...]:
    return tuple(variable for operator in run for variable in marks.get(operator.name, ()))
