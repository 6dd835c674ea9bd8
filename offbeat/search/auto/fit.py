"""Trials of a job → costs at which the replayer agrees with them.

The replayer knows a job's compute and what the cluster's description says of its links. What it does not know is a
handful of numbers θ: the fixed cost of a collective, how much dearer than described those to or from one rank, all
others, and several at a time are, how much communication slows computing down, the fixed cost of an update, and the gap
between steps. They are what a few trials can tell:

    minimise  Σ_i (log replay(S_i; θ) − log t_i)² / σ²  +  Σ_k ((θ_k − m_k) / s_k)²

by Gauss-Newton steps with derivatives from replays at the prior's mean (`fit_costs`). The prior (m, s) is about what
gloo was seen to do on emulated links, and wide: no number moves far before a trial has said something of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs
from offbeat.plan import Plan
from offbeat.simulate.predict import simulate

NOISE = 0.03
"""σ: about as much as two trials of one strategy differ."""
STEPS = 3
"""Of Gauss-Newton, which settle although derivatives are taken once: replay is nearly linear in so small a range."""
_ROOTED = ("reduce", "broadcast", "gather")


@dataclass(frozen=True)
class _Number:
    """One unknown, in a unit in which 1 is a large change."""

    name: str
    mean: float
    spread: float
    least: float
    most: float


UNKNOWNS = (
    # In milliseconds; gloo's smallest collectives took 0.5 to 1.5 ms, a part of which is the links' latency.
    _Number("call", 0.2, 0.5, 0.0, 5.0),
    # Logarithms of factors on the time of collectives with and without a root.
    _Number("rooted", 0.15, 0.4, -0.5, 1.5),
    _Number("ring", 0.05, 0.15, -0.5, 1.0),
    # The same for more than one collective in flight, which share the link and disturb each other's rounds.
    _Number("shared", 0.05, 0.15, -0.3, 1.0),
    _Number("interference", 0.1, 0.2, 0.0, 2.0),
    # In milliseconds.
    _Number("update", 0.1, 0.2, 0.0, 5.0),
    # In units of 10 ms.
    _Number("gap", 0.1, 0.5, 0.0, 10.0),
)
_MEAN = np.array([each.mean for each in UNKNOWNS])
_SPREAD = np.array([each.spread for each in UNKNOWNS])
_LEAST = np.array([each.least for each in UNKNOWNS])
_MOST = np.array([each.most for each in UNKNOWNS])


@dataclass(frozen=True)
class FittedCosts(Costs):
    """Costs whose collectives take longer or shorter than described."""

    factors: Mapping[str, float] = field(default_factory=dict)
    """On the seconds of collectives: 'rooted' of those to or from one rank, 'ring' of the others, and 'shared' of all
    where several are in flight."""
    call_seconds: float = 0.0
    """More for each collective."""

    def dearer(self, kind: str, in_flight: int) -> tuple[float, float]:
        factor = self.factors.get("rooted" if kind in _ROOTED else "ring", 1.0)
        if in_flight > 1:
            factor *= self.factors.get("shared", 1.0)
        return factor, self.call_seconds


@dataclass(frozen=True)
class Evidence:
    """A plan that was tried, and the seconds of its step."""

    plan: Plan
    seconds: float
    weight: float = 1.0
    """Below 1 for trials of another model or cluster, which say less about this one."""


def fit_costs(evidence: Sequence[Evidence], known: Costs | None = None) -> FittedCosts:
    """The most probable costs; `known` are those measured otherwise, which the unknowns add to."""
    known = known or Costs()
    theta = _MEAN.copy()
    logs = np.log([each.seconds for each in evidence])
    precision = np.sqrt([each.weight for each in evidence]) / NOISE
    if not evidence:
        return costs_at(theta, known)
    plans = [each.plan for each in evidence]
    predicted = _replayed(plans, known, theta)
    slopes = _slopes(plans, known, predicted)
    for step in range(STEPS):
        if step:
            predicted = _replayed(plans, known, theta)
        residuals = logs - predicted
        trust = precision * _credible(residuals)
        rows = np.vstack((slopes * trust[:, None], np.diag(1 / _SPREAD)))
        wanted = np.concatenate((residuals * trust, (_MEAN - theta) / _SPREAD))
        change, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
        theta = np.clip(theta + change, _LEAST, _MOST)
    return costs_at(theta, known)


def costs_at(theta: NDArray[np.float64], known: Costs) -> FittedCosts:
    call, rooted, ring, shared, interference, update, gap = (float(value) for value in theta)
    plain = {each.name: getattr(known, each.name) for each in fields(Costs)}
    plain["interference"] = known.interference + interference
    plain["update_call_seconds"] = known.update_call_seconds + update * 1e-3
    plain["gap_seconds"] = known.gap_seconds + gap * 1e-2
    factors = {name: math.exp(value) for name, value in (("rooted", rooted), ("ring", ring), ("shared", shared))}
    return FittedCosts(**plain, factors=factors, call_seconds=call * 1e-3)


def _replayed(plans: Sequence[Plan], known: Costs, theta: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of the seconds of each plan."""
    costs = costs_at(theta, known)
    return np.log([simulate(plan, costs, memory=False).iteration_time for plan in plans])


def _slopes(plans: Sequence[Plan], known: Costs, at_mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Derivatives by θ of what `_replayed` gives at the prior's mean."""
    slopes = np.empty((len(plans), len(UNKNOWNS)))
    for column, width in enumerate(_SPREAD):
        there = _MEAN.copy()
        there[column] += width
        slopes[:, column] = (_replayed(plans, known, there) - at_mean) / width
    return slopes


def _credible(residuals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights (Huber's), so that a trial which was disturbed or which replay cannot explain does not bend the rest."""
    apart = np.abs(residuals - np.median(residuals))
    usual = max(NOISE, 1.5 * float(np.median(apart)))
    return np.minimum(1.0, 3 * usual / np.maximum(apart, 1e-12))
