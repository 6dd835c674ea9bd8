"""Fit the replayer's costs to the trials of a job.

The replayer knows a job's compute and what the cluster's description says of its links. What it does not know is a
handful of numbers θ: the fixed cost of a collective, by which factor those to or from one rank, all others, and
several at a time are slower than described, how much communication slows computing down, the fixed cost of an update,
and the gap between steps. They are what a few trials can tell:

    minimise  Σ_i (log replay(S_i; θ) − log t_i)² / σ²  +  Σ_k ((θ_k − m_k) / s_k)²

by Gauss-Newton steps with derivatives from replays at the prior's mean (`fit_costs`). The prior (m, s) is about what
gloo was seen to do on emulated links, and wide: no number moves far before a trial has said something of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs
from offbeat.plan import Plan
from offbeat.simulate import step_seconds

NOISE = 0.03
"""σ: about as much as two trials of one strategy differ."""
STEPS = 3
"""Of Gauss-Newton, which settle although derivatives are taken once: replay is nearly linear in so small a range."""


# Mean, spread, least and most of each unknown of θ, in a unit in which 1 is a large change.
_MEAN, _SPREAD, _LEAST, _MOST = np.array(
    [
        # Fixed cost of a collective in milliseconds; gloo's smallest took 0.5 to 1.5, a part of which is latency.
        (0.2, 0.5, 0.0, 5.0),
        # Logarithms of factors on the time of collectives with a root, without one, and of more than one in flight.
        (0.15, 0.4, -0.5, 1.5),
        (0.05, 0.15, -0.5, 1.0),
        (0.05, 0.15, -0.3, 1.0),
        # Interference.
        (0.1, 0.2, 0.0, 2.0),
        # Fixed cost of an update in milliseconds.
        (0.1, 0.2, 0.0, 5.0),
        # The gap between steps in units of 10 ms.
        (0.1, 0.5, 0.0, 10.0),
    ]
).T


@dataclass(frozen=True)
class Evidence:
    """A tried plan and the seconds of its step."""

    plan: Plan
    seconds: float
    weight: float = 1.0
    """Below 1 for trials of another model or cluster, which are less informative."""


def fit_costs(evidence: Sequence[Evidence], known: Costs | None = None) -> Costs:
    """The most probable costs; `known` are measured costs, to which the unknowns are added."""
    known = known or Costs()
    theta = _MEAN.copy()
    logs = np.log([each.seconds for each in evidence])
    precision = np.sqrt([each.weight for each in evidence]) / NOISE
    if not evidence:
        return costs_at(theta, known)
    plans = [each.plan for each in evidence]
    predicted = _replayed(plans, known, theta)
    steps = np.diag(_SPREAD)
    slopes = np.stack([_replayed(plans, known, _MEAN + step) - predicted for step in steps], axis=1) / _SPREAD
    for step in range(STEPS):
        if step:
            predicted = _replayed(plans, known, theta)
        residuals = logs - predicted
        # Huber's weights: a trial that was disturbed, or that replay cannot explain, does not bend the rest.
        apart = np.abs(residuals - np.median(residuals))
        usual = max(NOISE, 1.5 * float(np.median(apart)))
        trust = precision * np.minimum(1.0, 3 * usual / np.maximum(apart, 1e-12))
        rows = np.vstack((slopes * trust[:, None], np.diag(1 / _SPREAD)))
        wanted = np.concatenate((residuals * trust, (_MEAN - theta) / _SPREAD))
        change, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
        theta = np.clip(theta + change, _LEAST, _MOST)
    return costs_at(theta, known)


def costs_at(theta: NDArray[np.float64], known: Costs) -> Costs:
    call, rooted, ring, shared, interference, update, gap = (float(value) for value in theta)
    return replace(
        known,
        interference=known.interference + interference,
        update_call_seconds=known.update_call_seconds + update * 1e-3,
        gap_seconds=known.gap_seconds + gap * 1e-2,
        factors={"rooted": math.exp(rooted), "ring": math.exp(ring), "shared": math.exp(shared)},
        call_seconds=call * 1e-3,
    )


def _replayed(plans: Sequence[Plan], known: Costs, theta: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of the seconds of each plan."""
    costs = costs_at(theta, known)
    return np.log([step_seconds(plan, costs) for plan in plans])
