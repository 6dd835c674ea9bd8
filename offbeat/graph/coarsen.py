"""ModelGraph → segments: runs of operators between two points where a variable matters.

Communication can only wait for, or be waited for by, a step's use of a variable. Operators between two such points
always run back to back, so the plan, the runtime and the replay work with whole segments (the Coarsened View of
dPRO, figure 6). Every operator lies in exactly one segment and the order is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbeat.graph.model import ModelGraph, Operator, Phase


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
    for index, run in enumerate(_cut_before(graph.phase("forward"), reads)):
        cut.append(_segment(f"forward.{index}", "forward", run, reads=_named(run, reads)))
    for index, run in enumerate(_cut_after(graph.phase("backward"), completes)):
        cut.append(_segment(f"backward.{index}", "backward", run, completes=_named(run, completes)))
    cut.extend(_segment(operator.name, "optimizer", [operator]) for operator in graph.phase("optimizer"))
    return tuple(cut)


def _grouped(pairs: Iterable[tuple[str | None, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for operator, variable in pairs:
        if operator is not None:
            groups.setdefault(operator, []).append(variable)
    return groups


def _cut_before(operators: Sequence[Operator], marks: dict[str, list[str]]) -> list[list[Operator]]:
    runs: list[list[Operator]] = []
    for operator in operators:
        if not runs or operator.name in marks:
            runs.append([])
        runs[-1].append(operator)
    return runs


def _cut_after(operators: Sequence[Operator], marks: dict[str, list[str]]) -> list[list[Operator]]:
    runs: list[list[Operator]] = []
    closed = True
    for operator in operators:
        if closed:
            runs.append([])
        runs[-1].append(operator)
        closed = operator.name in marks
    return runs


def _named(run: Sequence[Operator], marks: dict[str, list[str]]) -> tuple[str, ...]:
    return tuple(variable for operator in run for variable in marks.get(operator.name, ()))


def _segment(
    name: str, phase: Phase, run: Sequence[Operator], reads: tuple[str, ...] = (), completes: tuple[str, ...] = ()
) -> Segment:
    measured = [0.0 if op.seconds is None and op.kind == "view" else op.seconds for op in run]
    known = [seconds for seconds in measured if seconds is not None]
    return Segment(
        name=name,
        phase=phase,
        operators=tuple(operator.name for operator in run),
        flops=sum(operator.flops for operator in run),
        bytes_moved=sum(operator.bytes_read + operator.bytes_written for operator in run),
        activation_bytes=sum(operator.activation_bytes for operator in run),
        seconds=sum(known) if len(known) == len(measured) else None,
        reads=reads,
        completes=completes,
    )
