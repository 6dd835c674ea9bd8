"""Merge operators into segments between points where a variable is used or completed.

Communication can only wait for, or be waited for by, a step's use of a variable. Operators between two such points
always run back to back, so the plan, the runtime and the replay work with whole segments (the Coarsened View of
dPRO, figure 6). Every operator lies in exactly one segment and the order is kept.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.graph.model import ModelGraph, Operator, Phase


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operators of one phase, which no communication event interrupts."""

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
    microbatch: int = 0
    """Which of a step's micro-batches it computes. Sizes and work are those of one."""
    recomputed: bool = False

    def estimate(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Seconds: measured, or the roofline's."""
        if self.seconds is not None:
            return self.seconds
        return max(self.flops / flops_per_second, self.bytes_moved / bytes_per_second)


def segments(graph: ModelGraph) -> tuple[Segment, ...]:
    """Forward is cut before each operator that first uses a variable, backward after each one that completes a
    gradient; each optimizer operator is a segment of its own."""
    reads, completes = defaultdict(list), defaultdict(list)
    for variable in graph.variables:
        reads[variable.first_use].append(variable.name)
    for variable in graph.gradient_order:
        completes[variable.gradient_from].append(variable.name)
    cut: list[Segment] = []
    phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
    for phase in phases:
        runs: list[list[Operator]] = []
        for operator in graph.phase(phase):
            begins = operator.name in reads if phase == "forward" else phase == "optimizer"
            if begins or not runs or (phase == "backward" and runs[-1][-1].name in completes):
                runs.append([])
            runs[-1].append(operator)
        event, marks = ("reads", reads) if phase == "forward" else ("completes", completes)
        for index, run in enumerate(runs):
            name = run[0].name if phase == "optimizer" else f"{phase}.{index}"
            marked = tuple(variable for operator in run for variable in marks.get(operator.name, ()))
            cut.append(segment_of(name, phase, run, **{event: marked}))
    return tuple(cut)


def segment_of(name: str, phase: Phase, run: Sequence[Operator], **more: Any) -> Segment:
    """The segment that some operators make, with more of its fields given."""
    measured = [0.0 if op.seconds is None and op.kind == "view" else op.seconds for op in run]
    known = [seconds for seconds in measured if seconds is not None]
    return Segment(
        name=name,
        phase=phase,
        operators=tuple(operator.name for operator in run),
        flops=sum(operator.flops for operator in run),
        bytes_moved=sum(operator.bytes_moved for operator in run),
        activation_bytes=sum(operator.activation_bytes for operator in run),
        seconds=sum(known) if len(known) == len(measured) else None,
        **more,
    )
