"""Task → seconds on the network, from what a job or a calibration measured, else from the cluster's tables and links.

A collective takes the link for `overhead + seconds_per_byte * bytes`; its result is there `latency` later, while the
next one may already be on the wire. With one collective at a time the two constants add up to the latency of PACE's
linear fit. With several in flight the overhead is what each of a row of small ones adds; next to large ones it passes
while their bytes are on the wire (`in_a_row`).
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.cost.tables import Collectives
from offbeat.errors import OffbeatError
from offbeat.plan import Plan, Task

SERVED = ("reduce", "broadcast")
"""What servers use: gradients come, parameters go."""
OVERLAPPED_SHARE = 0.5
"""Part of a collective's constant cost that a second one in flight hides, where no job has been measured."""
CALIBRATED_IN_FLIGHT = 2
"""Collectives under way while the overhead of a row was measured (`offbeat.profile.calibrate`)."""


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """What one collective costs, as a function of the bytes each participant puts in."""

    overhead_seconds: float
    latency_seconds: float
    seconds_per_byte: float

    def occupied(self, wire_bytes: float) -> float:
        """Seconds for which the link is taken."""
        return self.overhead_seconds + self.seconds_per_byte * wire_bytes


@dataclass(frozen=True)
class Costs:
    """What replay must know beside a plan. Times are seconds; everything has a default that needs no measurement."""

    collectives: Mapping[tuple[str, int], CollectiveFit] = field(default_factory=dict)
    """By kind and number of participants."""
    update_call_seconds: float = 0.0
    """Fixed cost of one optimizer call."""
    update_seconds_per_byte: float | None = None
    """Of a variable's bytes; None takes the plan's own estimate."""
    gap_seconds: float = 0.0
    """Between the end of a step and the next forward: loading data, clearing gradients."""
    straight: bool = False
    """Reduces go straight to their root and broadcasts straight from it: its link carries the bytes of all the others,
    in one direction, and each other's link only its own. Else all links carry the same, as in a chain."""
    portions: bool = False
    """A message's update is applied slice by slice, as slices arrive, where its variables and the optimizer allow it.
    Else it is applied at once when the last one is there."""
    interference: float = 0.0
    """By how much computing slows down while the link is busy: 0.2 means a second takes 1.2."""
    compute_scale: Mapping[int, float] = field(default_factory=dict)
    """Factor on the compute of single ranks, for stragglers."""

    def scaled(self, bandwidth: float = 1.0, latency: float = 1.0) -> "Costs":
        """The same on links with so many times the bandwidth and the latency."""
        if not (bandwidth > 0 and latency >= 0):
            raise OffbeatError(f"bandwidth {bandwidth} and latency {latency} must be positive factors")
        fits = {
            key: CollectiveFit(
                fit.overhead_seconds * latency, fit.latency_seconds * latency, fit.seconds_per_byte / bandwidth
            )
            for key, fit in self.collectives.items()
        }
        return replace(self, collectives=fits)

    def collective(self, task: Task, links: Collectives, in_flight: int = 2) -> tuple[float, float]:
        """(seconds for which a task among equals takes the link, seconds until its result is there after that)."""
        if len(task.ranks) < 2 or task.kind == "update":
            return 0.0, 0.0
        factor, more = self.dearer(task.kind, in_flight)
        fit = self.collectives.get((task.kind, len(task.ranks)))
        if fit is not None:
            taken, hidden = fit.occupied(task.wire_bytes) + fit.latency_seconds, fit.latency_seconds
        else:
            constant = links.constant(task.kind, task.ranks, task.root)
            taken, hidden = max(constant, links.task_seconds(task)), constant * OVERLAPPED_SHARE
        if not taken:
            return 0.0, 0.0
        return ((taken - hidden) * factor + more, hidden) if in_flight > 1 else (taken * factor + more, 0.0)

    def goes_straight(self, task: Task) -> bool:
        """Whether ranks' links are taken for different times, each in one direction (`straight_seconds`)."""
        return self.straight and task.kind in SERVED and len(task.ranks) > 1

    def straight_seconds(self, task: Task, rank: int, links: Collectives, in_flight: int = 2) -> tuple[float, float]:
        """(seconds before the first byte, seconds for which a participant's link is taken) where tasks go straight."""
        factor, more = self.dearer(task.kind, in_flight)
        fit = self.collectives.get((task.kind, len(task.ranks)))
        assert task.root is not None
        if fit is None:
            link = links.straight(task.ranks, task.root, rank)
            return link.latency_seconds + more, link.seconds_per_byte * task.wire_bytes * factor
        share = 1.0 if rank == task.root else 1.0 / (len(task.ranks) - 1)
        taken = fit.seconds_per_byte * task.wire_bytes * share * factor
        return fit.overhead_seconds + fit.latency_seconds + more, taken

    def dearer(self, kind: str, in_flight: int) -> tuple[float, float]:
        """(factor on the time of such a collective, seconds more for each): nothing unless trials said so."""
        return 1.0, 0.0

    def overhead(self, task: Task, links: Collectives) -> float:
        """The part of the seconds for which a task in a row takes the link that passes without a byte of its own."""
        if len(task.ranks) < 2 or task.kind == "update":
            return 0.0
        fit = self.collectives.get((task.kind, len(task.ranks)))
        if fit is not None:
            return fit.overhead_seconds
        return links.constant(task.kind, task.ranks, task.root) * (1 - OVERLAPPED_SHARE)

    def update(self, bytes_updated: float, estimate: float) -> float:
        """Seconds of one optimizer call on so many bytes of variables."""
        if self.update_seconds_per_byte is None:
            return self.update_call_seconds + estimate
        return self.update_call_seconds + self.update_seconds_per_byte * bytes_updated

    def to_dict(self) -> dict[str, Any]:
        return {
            "collectives": [
                {
                    "kind": kind,
                    "participants": participants,
                    "overhead_seconds": fit.overhead_seconds,
                    "latency_seconds": fit.latency_seconds,
                    "seconds_per_byte": fit.seconds_per_byte,
                }
                for (kind, participants), fit in sorted(self.collectives.items())
            ],
            "update_call_seconds": self.update_call_seconds,
            "update_seconds_per_byte": self.update_seconds_per_byte,
            "gap_seconds": self.gap_seconds,
            "straight": self.straight,
            "portions": self.portions,
            "interference": self.interference,
            "compute_scale": {str(rank): scale for rank, scale in self.compute_scale.items()},
        }

    @classmethod
    def from_dict(cls, raw: Any, origin: str = "costs") -> "Costs":
        """Reads what `to_dict` made; anything else is one sentence that names the field."""
        try:
            fits = {
                (str(entry["kind"]), int(entry["participants"])): CollectiveFit(
                    *(_duration(entry[name]) for name in ("overhead_seconds", "latency_seconds", "seconds_per_byte"))
                )
                for entry in raw["collectives"]
            }
            per_byte = raw["update_seconds_per_byte"]
            return cls(
                collectives=fits,
                update_call_seconds=float(raw["update_call_seconds"]),
                update_seconds_per_byte=None if per_byte is None else float(per_byte),
                gap_seconds=float(raw["gap_seconds"]),
                straight=_truth(raw.get("straight", False)),
                portions=_truth(raw.get("portions", False)),
                interference=float(raw["interference"]),
                compute_scale={int(rank): float(scale) for rank, scale in raw["compute_scale"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            said = " ".join(str(error).split())[:160]
            raise OffbeatError(f"{origin}: not a costs file: {type(error).__name__} at {said}") from None


def _duration(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{seconds} is not a duration")
    return seconds


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def in_a_row(taken: Sequence[float], overhead: Sequence[float], in_flight: int) -> list[float]:
    """Seconds for which each of some collectives, issued one behind another, keeps the link from the next.

    `taken` are their seconds among equals and `overhead` the part without bytes, in which the backend's threads wake
    and the ranks learn that the others are there. That begins when one of the `in_flight` before has ended, and delays
    the wire only as far as it outlasts what the others have there. Where two small ones are under way and one ends
    every `overhead`, each is at it for twice as long.
    """
    if in_flight < 2:
        return list(taken)
    found: list[float] = []
    others: deque[float] = deque(maxlen=in_flight - 1)
    for seconds, fixed in zip(taken, overhead, strict=True):
        ahead = max(0.0, CALIBRATED_IN_FLIGHT * fixed - sum(others)) if others else fixed
        found.append(seconds - fixed + ahead)
        others.append(found[-1])
    return found


def network_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds for which the busiest rank's link is taken in one step at the least: nothing else holds it up, and what
    precedes a message's bytes passes behind others' where several may be under way."""
    busy: dict[tuple[int, bool], float] = defaultdict(float)
    """By rank and direction."""
    everyone = 0.0
    in_flight, links = plan.strategy.schedule.in_flight, Collectives(plan.cluster)
    for task in plan.communication:
        if costs.goes_straight(task):
            for rank in task.ranks:
                incoming = (rank == task.root) == (task.kind == "reduce")
                busy[rank, incoming] += costs.straight_seconds(task, rank, links, in_flight)[1]
            continue
        seconds, _ = costs.collective(task, links, in_flight)
        if in_flight > 1:
            seconds = max(0.0, seconds - costs.overhead(task, links))
        if len(task.ranks) == len(plan.replicas):
            everyone += seconds
        else:
            for rank in task.ranks:
                busy[rank, False] += seconds
                busy[rank, True] += seconds
    return everyone + max(busy.values(), default=0.0)


def daydream(plan: Plan, bandwidth: float, costs: Costs) -> Costs:
    """Costs in the manner of Daydream (Zhu et al., ATC 2020), for comparison: a tensor takes its bytes over the nominal
    bandwidth and nothing else."""
    world = len(plan.replicas)
    per_byte = 2 * (world - 1) / world / bandwidth
    kinds = {(task.kind, len(task.ranks)) for task in plan.communication}
    return replace(costs, collectives={key: CollectiveFit(0.0, 0.0, per_byte) for key in kinds})
