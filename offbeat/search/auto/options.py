"""What a search is told, what it says after every trial, and what it returns."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from offbeat.errors import OffbeatError
from offbeat.search.auto.guide import GuideName
from offbeat.search.auto.sampler import Space
from offbeat.search.auto.store import Trial
from offbeat.simulate.learned.samples import Schedule
from offbeat.strategy import Strategy

if TYPE_CHECKING:
    from offbeat.simulate.learned.ranking import Simulator


@dataclass(frozen=True)
class Options:
    """How to search."""

    trials: int = 20
    guide: GuideName = "combined"
    seed: int = 0
    candidates: int = 120
    """Strategies that are predicted in each round (Algorithm 1's N)."""
    generations: int = 3
    """Times the best predicted candidates are replaced by neighbours of theirs before a trial, where the guide may."""
    per_round: int = 4
    """Trials of each round (its K)."""
    finalists: int = 3
    """At the end so many of the fastest, and the fastest builder's, are run once more beyond `trials`, and the best of
    these second runs is returned (see `tune.MARGIN`): of many trials the fastest is one that had luck. 0 returns the
    fastest trial."""
    alpha: float = 0.1
    """Weight of similarity against time."""
    similarity: str = "expression"
    """'expression', or 'embedding' once a learned model has a hidden vector to compare."""
    search: str = "search"
    """Name under which trials are stored."""
    resume: bool = False
    """Continue the search of that name; otherwise it must be new."""
    use_earlier: bool = True
    """Start from what other searches stored for this model or this cluster."""
    time_limit_seconds: float | None = None
    baseline_seconds: float | None = None
    """What the hit rate is counted against; None takes the best builder's trial so far."""
    space: Space = field(default_factory=Space)
    schedule: Schedule = field(default_factory=Schedule)
    """How learned models are trained the first time."""

    def __post_init__(self) -> None:
        for name in ("trials", "candidates", "generations", "per_round"):
            if getattr(self, name) < 1:
                raise OffbeatError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.guide not in get_args(GuideName):
            raise OffbeatError(f"guide: {self.guide!r} is not one of {', '.join(get_args(GuideName))}")
        if self.similarity not in ("expression", "embedding"):
            raise OffbeatError(f"similarity: {self.similarity!r} is neither 'expression' nor 'embedding'")


@dataclass(frozen=True)
class Progress:
    """What a search knows after a trial."""

    number: int
    """Trials so far, this one included."""
    trials: int
    trial: Trial
    best: Trial | None
    hit_rate: float
    """Share of the trials that beat the baseline; nan as long as there is none."""
    accuracy: float
    """Share of the pairs of trials that were predicted in the right order; nan without predictions."""
    seconds_left: float


@dataclass(frozen=True)
class TuneResult:
    """What a search found."""

    search: str
    """The name under which its trials are stored."""
    best: Trial | None
    """None if no trial came to its end."""
    trials: tuple[Trial, ...]
    """All trials of the search in their order, also those of earlier runs that were resumed."""
    baseline_seconds: float | None
    hit_rate: float
    accuracy: float
    interrupted: bool
    simulator: "Simulator | None"

    @property
    def strategy(self) -> Strategy:
        if self.best is None:
            raise OffbeatError(f"none of the {len(self.trials)} trials came to its end, so there is no best strategy")
        return self.best.strategy
