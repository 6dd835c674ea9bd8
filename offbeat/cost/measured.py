"""Seconds of a task on the network, from measurements or else the cluster's tables and links; seconds of updates.

A collective takes the link for `overhead + seconds_per_byte * bytes`; its result is there `latency` later, while the
next one may already be on the wire. With one collective at a time the two constants add up to the latency of PACE's
linear fit. With several in flight, the overhead is what each of several back-to-back small collectives adds; beside
large ones it is hidden behind their bytes (`in_a_row`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictBool, TypeAdapter

from offbeat.cluster import ClusterSpec
from offbeat.cost.tables import Collectives
from offbeat.errors import OffbeatError
from offbeat.files import problems_named
from offbeat.plan import Plan, Task
from offbeat.strategy import Encoder

SERVED = ("reduce", "broadcast")
"""Collectives of servers: gradients come, parameters go."""
ROOTED = (*SERVED, "gather", "relay")
"""Collectives to or from one rank."""
OVERLAPPED_SHARE = 0.5
"""Share of a collective's constant cost that a second one in flight hides, if no job has been measured."""
CALIBRATED_IN_FLIGHT = 2
"""Collectives in flight while the overhead of a row was measured (`offbeat.profile.calibrate`)."""

ENCODING_PASSES = {"fp16": 2, "bf16": 2, "randomk": 6, "sign": 8, "int8": 8, "topk": 16, "powersgd": 12}
"""Approximate number of times an encoder reads or writes a gradient, without decoding; used if not measured."""


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """The cost of one collective as a function of the bytes each participant contributes."""

    overhead_seconds: float
    latency_seconds: float
    seconds_per_byte: float

    def occupied(self, wire_bytes: float) -> float:
        """Seconds for which the link is occupied."""
        return self.overhead_seconds + self.seconds_per_byte * wire_bytes

    def on_links(self, bandwidth: float, latency: float) -> "CollectiveFit":
        """On links with `bandwidth` and `latency` times the measured ones."""
        if not (bandwidth > 0 and latency >= 0):
            raise OffbeatError(f"bandwidth {bandwidth} and latency {latency} must be positive factors")
        return self.scaled(latency, 1 / bandwidth)

    def scaled(self, constant: float, per_byte: float) -> "CollectiveFit":
        """With overhead and latency `constant` times as long, and bytes `per_byte` times as long."""
        return CollectiveFit(
            self.overhead_seconds * constant, self.latency_seconds * constant, self.seconds_per_byte * per_byte
        )


@dataclass(frozen=True)
class Costs:
    """The costs that replay needs in addition to a plan. Times are seconds; every default needs no measurement."""

    collectives: Mapping[tuple[str, int], CollectiveFit] = field(default_factory=dict)
    """By kind and number of participants."""
    within: Mapping[tuple[str, int], CollectiveFit] = field(default_factory=dict)
    """The same for participants that share one of several nodes; `collectives` then cover those that do not."""
    update_call_seconds: float = 0.0
    """Fixed cost of one optimizer call."""
    update_seconds_per_byte: float | None = None
    """Of a variable's bytes; None takes the plan's own estimate."""
    encoding_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Encoding and decoding time per byte of a gradient, by the encoder's name, if measured."""
    gap_seconds: float = 0.0
    """Between the end of a step and the next forward: loading data, clearing gradients."""
    straight: StrictBool = False
    """Reduces go straight to their root and broadcasts straight from it: its link carries the bytes of all the others,
    in one direction, and each other's link only its own. Else all links carry the same, as in a chain."""
    portions: StrictBool = False
    """A message's update is applied slice by slice, as slices arrive, where its variables and the optimizer allow it.
    Else it is applied at once when the last one is there."""
    interference: float = 0.0
    """Slowdown of compute while the link is busy: 0.2 means that a second takes 1.2."""
    processor_seconds: float = 0.0
    """Seconds that each collective takes from computing on the same processors, while it is under way."""
    processor_seconds_per_byte: float = 0.0
    """The same for each byte that a rank sends."""
    compute_scale: Mapping[int, float] = field(default_factory=dict)
    """Factor on the compute of single ranks, for stragglers."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """On the seconds of collectives, as trials have shown: 'rooted' of those to or from one rank, 'ring' of the others,
    and 'shared' of all where several are in flight. Not kept in files, nor is `call_seconds`."""
    call_seconds: float = 0.0
    """More for each collective."""

    def fit(self, task: Task, cluster: ClusterSpec) -> CollectiveFit | None:
        """The fit of such a collective among ranks that share a node, or that do not, like these."""
        local = len(cluster.nodes) > 1 and cluster.one_node(task.ranks)
        return (self.within if local else self.collectives).get((task.kind, len(task.ranks)))

    def collective(self, task: Task, links: Collectives, in_flight: int = 2) -> tuple[float, float, float]:
        """(seconds for which a task takes the link, seconds from then until its result is there, and the part of the
        first in which no byte of its own is on the wire)."""
        if len(task.ranks) < 2 or task.kind == "update":
            return 0.0, 0.0, 0.0
        fit = self.fit(task, links.cluster)
        if fit is not None:
            taken, hidden = fit.occupied(task.wire_bytes) + fit.latency_seconds, fit.latency_seconds
            overhead = fit.overhead_seconds
        else:
            constant = links.constant(task.kind, task.ranks, task.root)
            alone = links.seconds(task.kind, task.ranks, task.wire_bytes, task.root)
            taken, hidden = max(constant, alone), constant * OVERLAPPED_SHARE
            overhead = constant * (1 - OVERLAPPED_SHARE)
        if not taken:
            return 0.0, 0.0, 0.0
        factor, more = self.slowdown(task.kind, in_flight)
        if in_flight < 2:
            return taken * factor + more, 0.0, overhead
        return (taken - hidden) * factor + more, hidden, overhead

    def taken_from_compute(self, task: Task, seconds: float) -> float:
        """Seconds by which a collective that is under way for so many `seconds` prolongs computing meanwhile."""
        processor = self.processor_seconds + self.processor_seconds_per_byte * task.link_bytes
        return processor + seconds * self.interference / (1 + self.interference)

    @property
    def slows_compute(self) -> bool:
        """Whether communication takes anything from computing."""
        return self.interference > 0 or self.processor_seconds > 0 or self.processor_seconds_per_byte > 0

    def goes_straight(self, task: Task) -> bool:
        """Whether links are occupied for different times, each in one direction (`straight_seconds`)."""
        straight = task.kind == "relay" or (self.straight and task.kind in SERVED)
        return straight and len(task.ranks) > 1

    def straight_seconds(self, task: Task, rank: int, links: Collectives, in_flight: int = 2) -> tuple[float, float]:
        """(seconds before the first byte, seconds a participant's link is occupied) if tasks go straight."""
        factor, more = self.slowdown(task.kind, in_flight)
        fit = self.fit(task, links.cluster)
        assert task.root is not None
        if fit is None:
            link = links.straight(task.ranks, task.root, rank)
            return link.latency_seconds + more, link.seconds_per_byte * task.wire_bytes * factor
        share = 1.0 if rank == task.root else 1.0 / (len(task.ranks) - 1)
        taken = fit.seconds_per_byte * task.wire_bytes * share * factor
        return fit.overhead_seconds + fit.latency_seconds + more, taken

    def slowdown(self, kind: str, in_flight: int) -> tuple[float, float]:
        """(factor on the time of such a collective, additional seconds for each); neutral without trials."""
        factor = self.factors.get("rooted" if kind in ROOTED else "ring", 1.0)
        if in_flight > 1:
            factor *= self.factors.get("shared", 1.0)
        return factor, self.call_seconds

    def update(self, bytes_updated: float, estimate: float) -> float:
        """Seconds of one optimizer call on `bytes_updated` bytes of variables."""
        if self.update_seconds_per_byte is None:
            return self.update_call_seconds + estimate
        return self.update_call_seconds + self.update_seconds_per_byte * bytes_updated

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rows = {
            level: [
                {"kind": kind, "participants": participants, **asdict(fit)}
                for (kind, participants), fit in sorted(getattr(self, level).items())
            ]
            for level in ("collectives", "within")
        }
        return rows | _FORM.dump_python(self, mode="json", exclude=set(_NOT_IN_FORM))

    @classmethod
    def from_dict(cls, raw: Any, origin: str = "costs") -> "Costs":
        """Reads the result of `to_dict`; errors are one sentence that names the field."""
        with problems_named(f"{origin}: not a costs file"):
            fits: dict[str, Any] = {
                level: {
                    (row.kind, row.participants): CollectiveFit(**row.model_dump(exclude={"kind", "participants"}))
                    for row in rows
                }
                for level, rows in _Rows.model_validate(raw)
            }
            return replace(_FORM.validate_python(raw | _NOT_IN_FORM), **fits)


Duration = Annotated[float, Field(ge=0, lt=1e9)]


class _Row(BaseModel):
    kind: str
    participants: int
    overhead_seconds: Duration
    latency_seconds: Duration
    seconds_per_byte: Duration


class _Rows(BaseModel):
    collectives: list[_Row]
    within: list[_Row] = []


_FORM = TypeAdapter(Costs)
_NOT_IN_FORM: dict[str, Any] = {"collectives": {}, "within": {}, "factors": {}, "call_seconds": 0.0}


def in_a_row(
    taken: Sequence[float], overhead: Sequence[float], in_flight: int, beside: Sequence[int] | None = None
) -> list[float]:
    """Seconds for which each of some collectives, issued one behind another, keeps the link from the next.

    `taken` are their seconds among equals and `overhead` the part without bytes, in which the backend's threads wake
    and the ranks learn that the others are there. That begins when one of the `in_flight` before has ended, and delays
    the wire only as far as it outlasts what the others have there. Where two small ones are in flight and one ends
    every `overhead`, each one takes twice as long. `beside` says how many of those before each may be in flight with
    it, where they are fewer.
    """
    if in_flight < 2:
        return list(taken)
    found: list[float] = []
    for place, (seconds, fixed) in enumerate(zip(taken, overhead, strict=True)):
        others = found[max(0, place - (in_flight - 1 if beside is None else beside[place])) :]
        ahead = max(0.0, CALIBRATED_IN_FLIGHT * fixed - sum(others)) if others else fixed
        found.append(seconds - fixed + ahead)
    return found


def network_seconds(plan: Plan, costs: Costs) -> float:
    """The least seconds per step for which the busiest rank's link is taken: it waits for nothing else, and overheads
    are hidden behind the bytes of other messages where several may be in flight."""
    busy: dict[tuple[int, bool], float] = defaultdict(float)
    """By rank and direction."""
    everyone = 0.0
    in_flight, links = plan.strategy.schedule.in_flight, Collectives(plan.cluster)
    for task in plan.communication:
        if costs.goes_straight(task):
            for half in task.halves:
                for rank in task.ranks:
                    busy[rank, half.fills_incoming(rank)] += costs.straight_seconds(half, rank, links, in_flight)[1]
            continue
        seconds, _, overhead = costs.collective(task, links, in_flight)
        if in_flight > 1:
            seconds = max(0.0, seconds - overhead)
        if len(task.ranks) == len(plan.participants):
            everyone += seconds
        else:
            for rank in task.ranks:
                busy[rank, False] += seconds
                busy[rank, True] += seconds
    return everyone + max(busy.values(), default=0.0)


def variable_updates(plan: Plan) -> dict[str, float]:
    """Seconds for each variable, measured or by the bytes moved; with factors, also those of multiplying them."""
    node = plan.cluster.device_of(plan.replicas[0] if plan.rank is None else plan.rank)
    updates: dict[str, float] = {}
    for operator in plan.graph.phase("optimizer"):
        moved = operator.bytes_moved / node.memory_bandwidth
        for name in operator.variables:
            updates[name] = operator.seconds if operator.seconds is not None else moved
    for message in plan.messages:
        if message.synchronizer == "factor_broadcast":
            for variable in map(plan.graph.variable, message.variables):
                rows = variable.factor_rows * len(plan.replicas)
                updates[variable.name] += 2 * rows * variable.elements / node.peak_flops
    return updates


def message_updates(plan: Plan) -> dict[int, float]:
    """Seconds for each message: its pieces' shares of their variables."""
    per_variable = variable_updates(plan)
    elements = {variable.name: variable.elements for variable in plan.graph.variables}
    return {
        message.index: sum(
            per_variable.get(piece.variable, 0.0) * piece.elements / elements[piece.variable]
            for piece in message.pieces
        )
        for message in plan.messages
    }


def update_seconds(
    plan: Plan, costs: Costs, estimates: Mapping[int, float], messages: Sequence[int], share: float = 1.0
) -> float:
    """Seconds of one optimizer call that updates some messages, or a share of them, with what encoding them took;
    `estimates` as `message_updates` gives them."""
    size = sum(plan.messages[index].bytes for index in messages)
    encoding = sum(encoding_seconds(plan, costs, m.encoder, m.bytes) for m in (plan.messages[i] for i in messages))
    return costs.update(size * share, sum(estimates[index] for index in messages) * share) + encoding * share


def encoding_seconds(plan: Plan, costs: Costs, encoder: Encoder, size: int) -> float:
    """Seconds in which a rank encodes a gradient of `size` bytes and decodes the sum, as measured, else a guess.

    They are the computing device's own, so replay adds them to the update.
    """
    if encoder.name == "none":
        return 0.0
    measured = costs.encoding_seconds_per_byte.get(encoder.name)
    if measured is not None:
        return measured * size
    decoded = len(plan.replicas) if encoder.gathered else 1
    return size * (ENCODING_PASSES[encoder.name] + decoded) / plan.cluster.device_of(plan.replicas[0]).memory_bandwidth
