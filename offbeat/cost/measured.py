"""Task → seconds on the network, from what a job or a calibration measured, else from the cluster's tables and links.

A collective takes the link for `overhead + seconds_per_byte * bytes`; its result is there `latency` later, while the
next one may already be on the wire. With one collective at a time the two constants add up to the latency of PACE's
linear fit; with several in flight only the overhead delays the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.cost.tables import Collectives
from offbeat.errors import OffbeatError
from offbeat.plan import Plan, Task

OVERLAPPED_SHARE = 0.5
"""Part of a collective's constant cost that a second one in flight hides, where no job has been measured."""


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
        """(seconds for which a task takes the link, seconds until its result is there after that)."""
        if len(task.ranks) < 2 or task.kind == "update":
            return 0.0, 0.0
        fit = self.collectives.get((task.kind, len(task.ranks)))
        if fit is not None:
            taken, hidden = fit.occupied(task.wire_bytes) + fit.latency_seconds, fit.latency_seconds
        else:
            constant = links.constant(task.kind, task.ranks, task.root)
            taken, hidden = max(constant, links.task_seconds(task)), constant * OVERLAPPED_SHARE
        return (taken - hidden, hidden) if in_flight > 1 else (taken, 0.0)

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


def network_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds for which the busiest rank's link is taken in one step, if nothing else held it up."""
    busy: dict[int, float] = {}
    everyone = 0.0
    in_flight, links = plan.strategy.schedule.in_flight, Collectives(plan.cluster)
    for task in plan.communication:
        seconds, _ = costs.collective(task, links, in_flight)
        if len(task.ranks) == len(plan.replicas):
            everyone += seconds
        else:
            for rank in task.ranks:
                busy[rank] = busy.get(rank, 0.0) + seconds
    return everyone + max(busy.values(), default=0.0)


def daydream(plan: Plan, bandwidth: float, costs: Costs) -> Costs:
    """Costs in the manner of Daydream (Zhu et al., ATC 2020), for comparison: a tensor takes its bytes over the nominal
    bandwidth and nothing else."""
    world = len(plan.replicas)
    per_byte = 2 * (world - 1) / world / bandwidth
    kinds = {(task.kind, len(task.ranks)) for task in plan.communication}
    return replace(costs, collectives={key: CollectiveFit(0.0, 0.0, per_byte) for key in kinds})
