"""Choose the few strategies worth a trial by their predicted times (AutoDist §2.4, AutoSync supplement §7).

Fidelity: a simulator that was trained to rank can be trusted on strategies that differ much, which are the slow ones
first. Its level is the best score below which it still orders recent trials well; what scores worse than that level
is rejected with confidence (`fidelity_level`, `elite`).

Diversity: among the rest, K strategies minimise

    Σ_i f(S_i) + α Σ_i Σ_j sim(S_i, S_j)                                                   (Eq. 11)  `diverse_pick`

greedily. Here f is the predicted time over the best predicted one, and sim lies in 0 to 1 and is averaged over the
strategies already picked, so that one α serves for all models. sim compares two strategies field by field
(`expression_similarity`) or two hidden vectors of a learned simulator (`embedding_similarity`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.simulate.learned.features import rank_pairs
from offbeat.strategy import Schedule, Strategy

ACCURACY = 0.8
"""The paper's 'desired ranking accuracy (say 80%)'."""
RECENT = 40
"""Trials against which the level is tested."""
TIE = 0.01
"""Measured times closer than this share are not ranked by any trial."""
Values = Sequence[float] | NDArray[np.float64]


def ranking_accuracy(predicted: Values, measured: Values, tie: float = TIE) -> float:
    """Share of the pairs that differ in measured time which the prediction puts in the same order; nan without any."""
    guess, truth = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    if guess.shape != truth.shape:
        raise OffbeatError(f"ranking: {len(guess)} predictions are given for {len(truth)} measurements")
    faster, slower = rank_pairs(truth, tie)
    # An undecided prediction is right half of the time.
    return float(np.mean((np.sign(guess[slower] - guess[faster]) + 1) / 2)) if len(faster) else math.nan


def fidelity_level(predicted: Values, measured: Values, accuracy: float = ACCURACY, recent: int = RECENT) -> float:
    """The shortest predicted time such that trials predicted to take at least as long are ranked well enough.

    Infinite where no two trials are, so that nothing is rejected.
    """
    guess = np.asarray(predicted, dtype=np.float64)[-recent:]
    truth = np.asarray(measured, dtype=np.float64)[-recent:]
    for level in np.unique(guess):
        slower = guess >= level
        # nan, where there is no pair to test, compares as false.
        if ranking_accuracy(guess[slower], truth[slower]) >= accuracy:
            return float(level)
    return math.inf


def elite(predicted: Values, level: float, least: int) -> list[int]:
    """Positions of the candidates that are not rejected at this level, best first; at least `least` of them."""
    guess = np.asarray(predicted, dtype=np.float64)
    return np.argsort(guess, kind="stable")[: max(least, int(np.sum(guess <= level)))].tolist()


def diverse_pick(
    predicted: Values, similarity: Callable[[int, int], float], count: int, alpha: float = 0.1
) -> list[int]:
    """Positions of `count` candidates by the greedy solution of Eq. 11, in the order in which they were picked."""
    guess = np.asarray(predicted, dtype=np.float64)
    score = guess / max(float(guess.min(initial=np.inf)), 1e-12)
    picked: list[int] = []
    likeness = np.zeros(len(guess))
    left = list(range(len(guess)))
    while left and len(picked) < count:
        cost = score + alpha * (likeness / max(1, len(picked)))
        best = min(left, key=lambda position: cost[position])
        picked.append(best)
        left.remove(best)
        for position in left:
            likeness[position] += similarity(best, position)
    return picked


def expression_similarity(first: Strategy, second: Strategy) -> float:
    """Share of the synchronisation-affecting factors that are the same, over all variables and the schedule."""
    names = dict.fromkeys((*first.variables, *second.variables))
    pairs = [pair for name in names for pair in zip(_factors(first, name), _factors(second, name), strict=True)]
    same = sum(a == b for a, b in pairs)
    fields = [field for field in Schedule.model_fields if field != "order"]
    # The schedule affects every variable, so it weighs as much as all of one factor.
    weight = max(1, len(names)) / len(fields)
    alike = sum(getattr(first.schedule, field) == getattr(second.schedule, field) for field in fields)
    return float((same + weight * alike) / (len(pairs) + weight * len(fields)))


def embedding_similarity(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Cosine of two hidden vectors; 0 where one is zero."""
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / length if length else 0.0


def _factors(strategy: Strategy, variable: str) -> tuple[Any, ...]:
    config = strategy.config(variable)
    fields = ("synchronizer", "placement", "stations", "group", "encoder")
    return (config.partition, *(tuple(getattr(shard, field) for shard in config.shards) for field in fields))
