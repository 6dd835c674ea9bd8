"""Seconds of a step, by compiled code where that is exact.

`arrays` takes a program as it is, `gradients` tells what other groups, cuts and orders of its gradients would take.
"""

from offbeat.cost.measured import Costs
from offbeat.plan import Plan
from offbeat.simulate.fast.arrays import arrays_of
from offbeat.simulate.predict import simulate


def step_seconds(plan: Plan, costs: Costs | None = None, *, fold: bool = True, compiled: bool = True) -> float:
    """Seconds of a step in the steady state: those of `simulate(plan, costs).iteration_time`.

    Plans with servers, sharded updates or staleness are replayed in full, as all are if not `compiled`.
    """
    arrays = arrays_of(plan, costs or Costs(), fold=fold) if compiled else None
    if arrays is not None:
        return arrays.seconds()
    return simulate(plan, costs, fold=fold, memory=False).iteration_time
