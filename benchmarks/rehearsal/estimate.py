"""A rehearsed step and what operators and collectives take on a cluster → the step's seconds and bytes.

FT adds up costs of configurations that know nothing of each other, which is what makes the search possible.
For a strategy that is at hand there is more to know: what the executor will call on each part, with which shapes, and
what it holds at any moment (`rehearse`). This module prices that, operator by operator with
times measured at each split, and exchange by exchange with what each was measured to prolong a step by, or else with
the cluster's tables of collectives. What remains is interpreter and autograd, which is the same for every strategy of a
model and measured once, with the strategy that splits nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rehearsal.rehearse import LocalCall, Rehearsal, Shift

from offbeat.errors import OffbeatError
from offbeat.sharding.rescheduling import FineMesh


@dataclass(frozen=True)
class Timings:
    """What was measured on a device of the cluster."""

    calls: Mapping[LocalCall, float]
    """Seconds of each operator on its parts."""
    step_seconds: float = 0.0
    """Of interpreter and autograd in forward and backward, whatever the strategy."""
    update_seconds_per_variable: float = 0.0
    update_seconds_per_byte: float = 0.0
    """Of the optimizer, by bytes of a variable's part."""
    shifts: Mapping[Shift, float] = field(default_factory=dict)
    """Seconds by which an exchange prolongs a step; those not measured are priced by the cluster's tables."""


@dataclass(frozen=True)
class Estimate:
    """Of one step, of each device."""

    compute_seconds: float
    network_seconds: float
    memory_bytes: float

    @property
    def time_seconds(self) -> float:
        return self.compute_seconds + self.network_seconds


def estimate(rehearsal: Rehearsal, timings: Timings, mesh: FineMesh, slots: int) -> Estimate:
    """The costs of a rehearsed step; `slots` are the optimizer's tensors for each variable."""
    lacking = [call for call in rehearsal.calls if call not in timings.calls]
    if lacking:
        raise OffbeatError(
            f"timings.calls: {lacking[0].target} was not measured on {[*lacking[0].args]}, "
            f"nor {len(lacking) - 1} other calls of this strategy"
        )
    operators = sum(timings.calls[call] * count for call, count in rehearsal.calls.items())
    updates = timings.update_seconds_per_variable * len(rehearsal.variable_bytes)
    updates += timings.update_seconds_per_byte * sum(rehearsal.variable_bytes)
    network = sum(_shift_seconds(shift, timings, mesh) * count for shift, count in rehearsal.shifts.items())
    return Estimate(timings.step_seconds + operators + updates, network, rehearsal.peak_bytes(slots))


def _shift_seconds(shift: Shift, timings: Timings, mesh: FineMesh) -> float:
    if shift in timings.shifts:
        return timings.shifts[shift]
    return sum(mesh.seconds(move.kind, move.axes, move.bytes) for move in shift.moves)
