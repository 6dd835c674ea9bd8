"""Step times measured on one accelerator + ModelGraph + device → the graph with the seconds of its operators there.

`benchmarks/accelerator.py` writes the file: for a model and a precision the seconds T of forward, backward and update;
of each also the seconds B for which the accelerator was busy and the seconds H which the host needs to launch it all;
and, for forward and backward, the seconds of parts. A part of forward begins where a variable is first used, a part of
backward ends where a variable's gradient is complete, so parts end where communication begins or is waited for.

A part that took T_i, whose operators have the roofline W_i on the accelerator and R on the device asked for, takes

    T_i * max(s * R / W_i, h) / max(s, h)        with s = B / T and h = H / T of its phase        (`part_seconds`)

there: what is computed scales with the device's published throughput and with the batch, what is only launched does
not. Its operators share that by their rooflines. On the accelerator itself and at the measured batch all add up to T.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbeat import files
from offbeat.cluster import ClusterSpec, Node, find_device
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, Operator
from offbeat.graph.model import Phase
from offbeat.units import quote

Precision = Literal["bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
Seconds = Annotated[float, Field(ge=0, lt=1e6)]


class Part(BaseModel):
    """A stretch of forward or backward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variable: str
    """Forward: whose first use begins it (the first one begins with the phase). Backward: whose gradient ends it."""
    seconds: Seconds
    roofline_seconds: Seconds
    """Of its operators on the accelerator."""


class PhaseTimes(BaseModel):
    """Forward, backward or update of one step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Seconds
    roofline_seconds: Seconds
    busy_seconds: Seconds | None = None
    """For which kernels ran; None takes them to have run all the time."""
    host_seconds: Seconds | None = None
    """Which the host needs to launch them on an idle accelerator; None takes launching to cost nothing."""
    parts: tuple[Part, ...] = ()


class StepTimes(BaseModel):
    """One model in one precision."""

    # What else was measured of the step stands beside in the file.
    model_config = ConfigDict(frozen=True, extra="ignore")

    batch: int
    step_seconds: Seconds
    phases: dict[Phase, PhaseTimes]


@dataclass(frozen=True)
class AcceleratorTimes:
    """All that was measured on one accelerator."""

    device: str
    steps: Mapping[tuple[str, str], StepTimes] = field(default_factory=dict)
    """By model and precision."""
    origin: str = "accelerator times"

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "AcceleratorTimes":
        """Reads what benchmarks/accelerator.py wrote of models at full size."""
        raw = files.read_json(path, "file of accelerator times")
        if isinstance(raw, dict) and raw.get("scale", 1.0) != 1.0:
            raise OffbeatError(f"{path}: its models were measured at scale {quote(raw['scale'])}, not at full size")
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: Any, origin: str = "accelerator times") -> "AcceleratorTimes":
        models = raw.get("models") if isinstance(raw, dict) else None
        if not isinstance(models, dict) or not isinstance(raw.get("device"), str):
            raise OffbeatError(f"{origin}: not a file of accelerator times: it has no 'device' and 'models'")
        steps: dict[tuple[str, str], StepTimes] = {}
        for name, row in models.items():
            for precision in PRECISIONS:
                if isinstance(row, dict) and precision in row:
                    steps[name, precision] = _step(row[precision], f"{origin}: models.{name}.{precision}")
        return cls(raw["device"], steps, origin)

    def step(self, model: str, precision: Precision) -> StepTimes:
        """The times of a model; the error lists what was measured."""
        if (model, precision) not in self.steps:
            known = ", ".join(f"{name} in {kind}" for name, kind in self.steps) or "nothing"
            raise OffbeatError(f"{self.origin}: {quote(model)} was not measured in {precision}; measured were {known}")
        return self.steps[model, precision]


def precision_of(node: Node) -> Precision:
    """What a node's peak is given for: fp32 if it does not exceed what its device does without tensor cores."""
    kind = find_device(node.device)
    return "fp32" if kind is None or node.peak_flops <= kind.fp32_flops else "bf16"


def on_cluster(
    graph: ModelGraph,
    cluster: ClusterSpec,
    times: AcceleratorTimes,
    *,
    model: str | None = None,
    precision: Precision | None = None,
) -> tuple[ModelGraph, dict[int, float]]:
    """The graph with the seconds of rank 0's device, and the factors of ranks on other devices (for
    `Costs.compute_scale`).

    `model` is the graph's name unless given; `precision` that of the node's peak.
    """
    first = cluster.device_of(0)
    step = times.step(model or graph.name, precision or precision_of(first))
    timed = on_device(graph, first, step)
    total = _computed(timed)
    factors: dict[tuple[float, float], float] = {}
    scale: dict[int, float] = {}
    for rank in range(cluster.world_size):
        node = cluster.device_of(rank)
        speed = (node.peak_flops, node.memory_bandwidth)
        if speed not in factors:
            other = times.step(model or graph.name, precision or precision_of(node))
            factors[speed] = _computed(on_device(graph, node, other)) / total if total else 1.0
        if factors[speed] != 1.0:
            scale[rank] = factors[speed]
    return timed, scale


def on_device(graph: ModelGraph, node: Node, step: StepTimes) -> ModelGraph:
    """The graph, of any batch and optimizer, with the seconds that its operators take on a node's device."""
    bare = {operator.name: _roofline(operator, node.peak_flops, node.memory_bandwidth) for operator in graph.operators}
    seconds: dict[str, float] = {}
    for phase, times in step.phases.items():
        whole = Part(variable="", seconds=times.seconds, roofline_seconds=times.roofline_seconds)
        parts = times.parts or (whole,)
        runs = split(graph, phase, [part.variable for part in parts]) if times.parts else [graph.phase(phase)]
        measured = sum(part.seconds for part in parts)
        for part, run in zip(parts, runs, strict=True):
            target = sum(bare[operator.name] for operator in run)
            # Marking the parts takes some time itself: together they are as long as the phase was without marks.
            took = part.seconds * times.seconds / measured if measured else 0.0
            taken = part_seconds(took, part.roofline_seconds, target, *_shares(times))
            for operator in run:
                share = bare[operator.name] / target if target else 1 / len(run)
                seconds[operator.name] = taken * share
    return graph.with_seconds(seconds)


def part_seconds(seconds: float, roofline: float, target: float, busy_share: float, host_share: float) -> float:
    """What a part takes whose roofline is `target` instead of `roofline`."""
    ratio = target / roofline if roofline else 1.0
    slower = max(busy_share, host_share)
    return seconds * max(busy_share * ratio, host_share) / slower if slower else seconds * ratio


def split(graph: ModelGraph, phase: Phase, variables: Sequence[str]) -> list[tuple[Operator, ...]]:
    """A phase's operators in one run for each of the variables, which come in the order of the phase."""
    operators = graph.phase(phase)
    position = {operator.name: index for index, operator in enumerate(operators)}
    borders = []
    for name in variables:
        if name not in graph.variable_index:
            raise OffbeatError(f"graph {quote(graph.name)} is not of the measured model: it has no {quote(name)}")
        variable = graph.variable(name)
        mark = variable.first_use if phase == "forward" else variable.gradient_from
        if mark not in position:
            raise OffbeatError(f"graph {quote(graph.name)} does not use {quote(name)} in {phase}")
        borders.append(position[mark] + (phase == "backward"))
    if phase == "forward":
        borders = [0, *borders[1:], len(operators)]
    else:
        borders = [0, *borders[:-1], len(operators)]
    # Two batches of one model can differ in the order of parallel branches; a part is then empty, not negative.
    for index in range(1, len(borders)):
        borders[index] = max(borders[index], borders[index - 1])
    return [operators[begin:end] for begin, end in pairwise(borders)]


def choose_marks(graph: ModelGraph, phase: Phase, node: Node, most: int) -> list[str]:
    """At most so many variables that cut a phase into parts of about the same roofline."""
    weight = {op.name: _roofline(op, node.peak_flops, node.memory_bandwidth) for op in graph.phase(phase)}
    owners: dict[str, str] = {}
    if phase == "forward":
        for variable in graph.variables:
            if variable.first_use is not None:
                owners.setdefault(variable.name.rpartition(".")[0], variable.name)
        marks = {graph.variable(name).first_use or "": name for name in reversed(owners.values())}
    else:
        marks = {variable.gradient_from or "": variable.name for variable in graph.gradient_order}
    order = [(operator.name, weight[operator.name]) for operator in graph.phase(phase)]
    if phase == "forward":
        order.reverse()
    chosen: list[str] = []
    wanted, gathered = sum(weight.values()) / most, 0.0
    for name, seconds in order:
        gathered += seconds
        if name in marks and gathered >= wanted and len(chosen) < most - 1:
            chosen.append(marks[name])
            gathered = 0.0
    final = next((marks[name] for name, _ in reversed(order) if name in marks), None)
    if final is not None and final not in chosen:
        chosen.append(final)
    return chosen[::-1] if phase == "forward" else chosen


def roofline_seconds(operators: Iterable[Operator], node: Node) -> float:
    """Of operators on a node's device, measured or not."""
    return sum(_roofline(operator, node.peak_flops, node.memory_bandwidth) for operator in operators)


def _roofline(operator: Operator, flops_per_second: float, bytes_per_second: float) -> float:
    if operator.kind == "view":
        return 0.0
    return max(operator.flops / flops_per_second, (operator.bytes_read + operator.bytes_written) / bytes_per_second)


def _shares(times: PhaseTimes) -> tuple[float, float]:
    """(share of the phase in which the accelerator was busy, share that launching takes)."""
    if not times.seconds or times.busy_seconds is None:
        return 1.0, 0.0
    return min(1.0, times.busy_seconds / times.seconds), min(1.0, (times.host_seconds or 0.0) / times.seconds)


def _computed(graph: ModelGraph) -> float:
    return sum(operator.seconds or 0.0 for operator in graph.operators if operator.phase != "optimizer")


def _step(raw: Any, origin: str) -> StepTimes:
    try:
        step = StepTimes.model_validate(raw)
    except ValidationError as error:
        raise OffbeatError(f"{origin}: {files.first_problem(error)}") from None
    missing = [phase for phase in PHASES if phase not in step.phases]
    if missing:
        raise OffbeatError(f"{origin}: phases: {missing[0]} is missing")
    return step
