"""PACE's linear programme in slotted time → its optimum: the reference that `preemptive_schedule` is tested against.

x_i(t) is 1 if job i holds the link in slot t (which ends at time t). With the λ of the paper's equation 14 substituted
(λ¹ = x, λ⁰ = 1 - x) what remains is

    lexicographically minimise  the sorted vector of t + tail_i over all x_i(t) = 1    (equations 10 and 11)
    Σ_t x_i(t) >= duration_i                                                           (3)
    Σ_i x_i(t) <= 1                                                                    (6)
    x_i(t) = 0 for t <= ready_i                                                        (7)

and the matrix is totally unimodular (theorem 2), so the vertices the simplex method ends in are integral. The paper
puts the lexicographic order into one objective with the weights (T N)^(t + tail), which no floating-point number holds
for more than a few slots. `solve` gets the same optimum with programmes that only have small numbers: it searches for
the least largest entry, then minimises how many entries have each value, from the largest down. Each of those optima
is kept by complementary slackness, by fixing variables at 0 and making rows equalities, so the matrix stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from offbeat.errors import OffbeatError

_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class SlottedSchedule:
    """Which job holds the link in each slot."""

    makespan: int
    """Slots: the largest completion + tail."""
    slots: tuple[int, ...]
    """The job in each slot, -1 where the link is idle; slot k is the time from k to k + 1."""
    programmes: int
    """Linear programmes that were solved."""


def solve(
    ready_slots: Sequence[int], duration_slots: Sequence[int], tail_slots: Sequence[int], *, lexicographic: bool = True
) -> SlottedSchedule:
    """The optimum of the programme; without `lexicographic`, any schedule of least makespan."""
    programme = _Programme(ready_slots, duration_slots, tail_slots)
    if not len(programme.job):
        return SlottedSchedule(programme.least, (), 0)
    programme.minimise_makespan()
    if lexicographic:
        programme.minimise_counts()
    return programme.schedule()


def solve_weighted(
    ready_slots: Sequence[int], duration_slots: Sequence[int], tail_slots: Sequence[int]
) -> SlottedSchedule:
    """Equation 14 as the paper states it, one programme with weights (T N)^(t + tail), scaled to a largest of 1.

    Weights below 1e-300 are 0, and the solver's tolerance makes the small ones indistinct, so that the result may be
    longer than the optimum.
    """
    programme = _Programme(ready_slots, duration_slots, tail_slots)
    if not len(programme.job):
        return SlottedSchedule(programme.least, (), 0)
    base = float(max(2, programme.horizon * len(programme.tail)))
    exponent = (programme.entry - programme.entry.max()) * np.log10(base)
    programme.minimise(np.where(exponent > -300, 10.0 ** np.maximum(exponent, -300), 0.0))
    return programme.schedule()


class _Programme:
    """The variables x_i(t) with t > ready_i, the rows (3) and (6), and what earlier optima have fixed."""

    def __init__(self, ready: Sequence[int], duration: Sequence[int], tail: Sequence[int]) -> None:
        releases = _whole("ready_slots", ready, len(ready))
        self.duration = _whole("duration_slots", duration, len(releases))
        self.tail = _whole("tail_slots", tail, len(releases))
        self.programmes = 0
        busy = self.duration > 0
        self.horizon = int(releases[busy].max() + self.duration.sum()) if busy.any() else 0
        # A job without slots is complete when it is ready; all jobs together are a bound too.
        self.least = int((releases + self.duration + self.tail).max()) if len(releases) else 0
        if busy.any():
            together = releases[busy].min() + self.duration.sum() + self.tail[busy].min()
            self.least = max(self.least, int(together))
        choices = np.where(busy, self.horizon - releases, 0)
        self.job = np.repeat(np.arange(len(releases)), choices)
        first = np.cumsum(choices) - choices
        self.slot = np.arange(len(self.job)) - first[self.job] + releases[self.job] + 1
        self.entry = self.slot + self.tail[self.job]
        self.free = np.ones(len(self.job), bool)
        columns = np.arange(len(self.job))
        count = len(releases)
        rows = np.concatenate((self.job, count + self.slot - 1))
        signs = np.repeat([-1.0, 1.0], len(columns))
        shape = (count + self.horizon, len(columns))
        self.matrix = csr_array((signs, (rows, np.concatenate((columns, columns)))), shape=shape)
        self.right = np.concatenate((-self.duration, np.ones(self.horizon)))
        self.tight = np.zeros(shape[0], bool)
        self.values: NDArray[np.float64] = np.zeros(len(columns))

    def minimise_makespan(self) -> None:
        """Leaves free only what does not exceed the least largest entry: steps up from a bound, then bisects."""
        low = high = self.least
        step = 1
        while not self._fits(high):
            low, high, step = high + 1, high + step, 2 * step
        while low < high:
            middle = (low + high) // 2
            if self._fits(middle):
                high = middle
            else:
                low = middle + 1
        self.free = self.entry <= high

    def _fits(self, makespan: int) -> bool:
        self.free = self.entry <= makespan
        # (3) asks for at least a job's slots; this cost gives it no more.
        return self.minimise(np.ones(len(self.free))) is not None

    def minimise_counts(self) -> None:
        """Minimises the number of entries of each value, from the largest down, and keeps each optimum."""
        for value in sorted(set(self.entry[self.free].tolist()), reverse=True):
            result = self.minimise((self.entry == value).astype(float))
            assert result is not None, "the optimum of the step before is a solution"
            self.free &= result.lower.marginals <= _TOLERANCE
            loose = np.flatnonzero(~self.tight)
            held = np.abs(result.ineqlin.marginals) > _TOLERANCE
            self.tight[loose[held]] = True

    def minimise(self, cost: NDArray[np.float64]) -> Any:
        """Solves the programme with this cost; None if it has no solution."""
        self.programmes += 1
        loose = ~self.tight
        result = linprog(
            cost,
            A_ub=self.matrix[loose],
            b_ub=self.right[loose],
            A_eq=self.matrix[self.tight] if self.tight.any() else None,
            b_eq=self.right[self.tight] if self.tight.any() else None,
            bounds=np.column_stack((np.zeros(len(cost)), np.where(self.free, np.inf, 0.0))),
            method="highs-ds",
        )
        if result.status == 2:
            return None
        assert result.status == 0, result.message
        self.values = result.x
        return result

    def schedule(self) -> SlottedSchedule:
        rounded = np.rint(self.values)
        assert np.abs(self.values - rounded).max() < _TOLERANCE, "a vertex of a totally unimodular system is integral"
        chosen = rounded > 0
        slots = np.full(self.horizon, -1)
        slots[self.slot[chosen] - 1] = self.job[chosen]
        makespan = max(self.least, int(self.entry[chosen].max()))
        used = int(self.slot[chosen].max())
        return SlottedSchedule(makespan, tuple(slots[:used].tolist()), self.programmes)


def _whole(name: str, values: Sequence[int], count: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or len(array) != count:
        raise OffbeatError(f"{name} has {array.size} values, ready_slots has {count}")
    for index, value in enumerate(array.tolist()):
        if not (isinstance(value, (int, float)) and value >= 0 and value == int(value)):
            raise OffbeatError(f"{name}[{index}] must be a whole number of slots that is not negative, got {value}")
    return array.astype(np.int64)
