"""Traces → how much computing slows down while the rank's link is busy (`Costs.interference`).

A span that takes `base` seconds alone takes `base * (1 + factor * share)` if communication is under way for `share` of
it. The same span meets more communication in one step than in another; the slope of its duration over that share, in
relative terms and pooled over all spans of a rank, is the factor (a within-group regression, so that long and short
spans can be told together).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from offbeat.profile.traces import RankTrace, Step
from offbeat.simulate.predict import busy_until

LEAST_SPREAD = 0.02
"""Variance of the shares below which a trace says nothing."""
LEAST_SECONDS = 2e-4
"""Shorter spans are mostly noise."""
MOST = 1.0
Spans = Callable[[Step], list[tuple[int, float, float]]]


def shares(trace: RankTrace, spans: Spans, wanted: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds, and share of communication, of each span (column) in each step (row) that made the wanted calls."""
    seconds, share = [], []
    rows = [row for step in trace.steps for row in step.communication]
    busy = busy_until(np.array([row.issued for row in rows]), np.array([row.finished for row in rows]))
    for step in trace.steps:
        found = spans(step)
        if tuple(key for key, _, _ in found) != wanted:
            continue
        start = np.array([begin for _, begin, _ in found])
        end = np.array([finish for _, _, finish in found])
        length = np.maximum(end - start, 1e-12)
        seconds.append(end - start)
        share.append((busy(end) - busy(start)) / length)
    return np.array(seconds), np.array(share)


def fit_interference(samples: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """The factor, from the samples of all ranks; 0 where they do not show one."""
    above, below, total, count = 0.0, 0.0, 0.0, 0
    for seconds, shared in samples:
        if len(seconds) < 3:
            continue
        usual = np.median(seconds, axis=0)
        long = usual > LEAST_SECONDS
        relative = np.clip(seconds[:, long] / usual[long], 0.0, 3.0)
        share = shared[:, long]
        moved = share - share.mean(axis=0)
        above += float((moved * (relative - relative.mean(axis=0))).sum())
        below += float((moved**2).sum())
        total += float(share.sum())
        count += share.size
    if not count or below / count < LEAST_SPREAD:
        return 0.0
    slope = max(above / below, 0.0)
    # Durations are relative to what they are at the mean share, where they are slowed down already.
    return min(slope / max(1 - slope * total / count, 0.1), MOST)
