"""A predicted time and what is known about such predictions → the interval that 9 of 10 measurements fall into.

The log-ratio y = log(measured / predicted) is compared with what was to be expected of it beforehand,

    z = (y - CENTRE[kind]) / s,    s² = SPREAD[kind]² + noise²,

where `noise` is the prediction's own: how far the recorded steps scatter, and the collectives around their fit. Past
z of the same kind on the same device are taken for draws of a normal distribution with unknown mean and variance,
whose conjugate prior counts as `PRIOR_MEAN` outcomes with mean 0 and `PRIOR_VARIANCE` with the variance for which
the next z has variance 1 while there is no history. The next z is then Student-t distributed (Gelman et al., Bayesian
Data Analysis, 3rd ed., section 3.3), and the interval is its central 90% (`Trust.interval`). So without history the
interval is that of SPREAD; with some it moves towards what happened here, including a bias; and few outcomes make it
wider than many. Outcomes of one job resemble each other: those of another job count as `MOST_OF_A_JOB` at the most.
Only outcomes of steps of about this length count (`NEAR`).

benchmarks/intervals.py holds back one model after another and counts how many measurements the intervals contain.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import exp, hypot, log, sqrt
from statistics import median
from typing import Any

from offbeat.cost.outcomes import KINDS, Kind, Outcome, past_outcomes, remember
from offbeat.graph import ModelGraph
from offbeat.strategy import Strategy
from offbeat.units import format_seconds

SHARE = 0.9
PROCESSORS = ("cpu", "generic", "")
"""Devices that compute on the processors from which the network's work takes time, or that may."""
SPREAD: dict[Kind, tuple[float, float]] = {
    "same": (0.025, 0.09),
    "strategy": (0.035, 0.14),
    "link": (0.045, 0.15),
    "ranks": (0.07, 0.2),
    "trial": (0.11, 0.2),
    "compute": (0.3, 0.3),
    "model": (0.65, 0.65),
}
"""Root mean square of log(measured / predicted) on accelerators, and where compute and network share processors: of
replay in replay_accuracy.json and gpu_replay_accuracy.json, of trials in tune.json and the history of
gpu_step_time.json and auto_strategy.json, of compute and models in accelerator.json. Another number of ranks has not
been measured: one and a half times another link's."""
CENTRE: dict[Kind, float] = {"model": 1.0}
"""Mean of the log-ratio where it is not 0: in accelerator.json steps take 1.2 to 10 times their operators' sum."""
PRIOR_MEAN, PRIOR_VARIANCE = 4.0, 8.0
MOST_OF_A_JOB = 3.0
NEAR = 30.0
"""Steps more than so many times as long or as short say nothing about this one: in the step of a toy model, what no
replay knows takes most of the time."""
GAIN_INSIDE = "; the gain lies inside the interval"
UNMEASURED = "Nothing was measured: times are estimates from the figures of devices and links."
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted time, and between which times so large a share of such predictions turn out to be. In seconds."""

    seconds: float
    low: float
    high: float
    share: float = SHARE

    def __str__(self) -> str:
        """'375 ms (358–396, 9 of 10)'."""
        return f"{format_seconds(self.seconds)} {self.bounds}"

    @property
    def bounds(self) -> str:
        """'(358–396, 9 of 10)', in the unit of the time itself."""
        unit = _UNITS[format_seconds(self.seconds).split()[-1]]
        low, high = (_three_digits(bound / unit) for bound in (self.low, self.high))
        return f"({low}–{high}, {self.share * 10:.0f} of 10)"

    def fields(self, name: str = "") -> dict[str, float]:
        """The two bounds for JSON, as 'step_low_seconds' and 'step_high_seconds' for the name 'step'."""
        prefix = f"{name}_" if name else ""
        return {f"{prefix}low_seconds": self.low, f"{prefix}high_seconds": self.high}

    def shown(self, before_seconds: float) -> dict[str, Any]:
        """What a page writes: the bounds, and in words where a gain is doubtful."""
        return {**self.fields(), "bounds": self.bounds + self.doubt(before_seconds)}

    def may_gain_nothing(self, before_seconds: float) -> bool:
        """Whether it is shorter than a step of `before_seconds`, by less than the interval allows for."""
        return self.seconds < before_seconds <= self.high

    def doubt(self, before_seconds: float) -> str:
        """A clause to put behind a gain; empty where the gain is larger than the interval."""
        return GAIN_INSIDE if self.may_gain_nothing(before_seconds) else ""


@dataclass(frozen=True)
class Trust:
    """How far predictions for one job can be trusted."""

    device: str = ""
    """Its name, or 'cpu'."""
    job: str = ""
    noise: float = 0.0
    """Relative standard error of what was measured."""
    past: tuple[Outcome, ...] = ()

    @classmethod
    def here(cls, device: str, job: str = "", noise: float = 0.0) -> "Trust":
        """With what this user's history says about such devices."""
        device = "cpu" if device in PROCESSORS else device
        return cls(device, job, min(noise, 1.0), past_outcomes(device))

    def interval(self, seconds: float, kind: Kind) -> Interval:
        """Around a prediction of this kind; the prediction itself always lies inside."""
        # A second of import, which jobs under way need not wait for.
        from scipy.special import stdtrit

        weighted = self._weighted(kind, seconds)
        weight = sum(share for share, _ in weighted)
        mean = sum(share * z for share, z in weighted) / weight if weight else 0.0
        expected = (PRIOR_VARIANCE - 2) / PRIOR_VARIANCE * PRIOR_MEAN / (PRIOR_MEAN + 1)
        counted, freedom = PRIOR_MEAN + weight, PRIOR_VARIANCE + weight
        squares = PRIOR_VARIANCE * expected + sum(share * (z - mean) ** 2 for share, z in weighted)
        squares += PRIOR_MEAN * weight / counted * mean**2
        reach = stdtrit(freedom, (1 + SHARE) / 2) * sqrt(squares / freedom * (1 + 1 / counted))
        centre, scale = CENTRE.get(kind, 0.0), self._scale(kind, self.noise)
        low, high = (exp(centre + scale * (weight * mean / counted + side * reach)) for side in (-1, 1))
        return Interval(seconds, seconds * min(low, 1.0), seconds * max(high, 1.0))

    def remember(self, kind: Kind, predicted: float, measured: float) -> None:
        """Keeps what became of a prediction, for later ones."""
        with suppress(ValueError):
            remember(Outcome(kind, self.device, self.job, predicted, measured, self.noise))

    def _scale(self, kind: Kind, noise: float) -> float:
        return hypot(SPREAD[kind][self.device in PROCESSORS], noise)

    def _weighted(self, kind: Kind, seconds: float) -> list[tuple[float, float]]:
        """(weight, z) of past outcomes that say something about a prediction of so many seconds."""
        found = [
            outcome
            for outcome in self.past
            if outcome.kind == kind and outcome.predicted < NEAR * seconds and seconds < NEAR * outcome.predicted
        ]
        times = Counter(outcome.job for outcome in found if outcome.job != self.job)
        return [
            (
                min(1.0, MOST_OF_A_JOB / times[each.job]) if each.job in times else 1.0,
                (log(each.measured / each.predicted) - CENTRE.get(kind, 0.0)) / self._scale(kind, each.noise),
            )
            for each in found
        ]


def kind_of_strategy(strategy: Strategy, graph: ModelGraph, ran: Strategy | None) -> Kind:
    """What kind of prediction a strategy makes that is not, or is, the one that ran. Blocks that were timed make
    decisions about compute as sure as others."""
    if strategy == ran:
        return "same"
    before = ran or Strategy()
    decided = any(getattr(strategy, name) != getattr(before, name) for name in ("recompute", "fusion", "precision"))
    return "compute" if decided and not any(block.seconds for block in graph.blocks) else "strategy"


def hardest(*kinds: Kind) -> Kind:
    """The one of several changes at once whose outcome is known least."""
    return max(kinds, key=KINDS.index, default="same")


def scatter(samples: Sequence[float]) -> float:
    """Relative standard deviation of positive numbers, by their median absolute deviation, so that outliers do not
    count."""
    logs = [log(sample) for sample in samples if sample > 0]
    if len(logs) < 2:
        return 0.0
    middle = median(logs)
    return 1.4826 * median(abs(each - middle) for each in logs)


def error_of_median(samples: Sequence[float]) -> float:
    """Relative standard error of the median of so many samples, where they are normally distributed."""
    return 1.2533 * scatter(samples) / sqrt(max(1, len(samples)))


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
