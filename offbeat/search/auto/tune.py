"""Find the best measured strategy within a budget of trials (AutoDist's Algorithm 1).

Each round draws candidates, predicts them, rejects those below the simulator's fidelity level, picks a few that are
fast and different, measures them, and lets the simulator learn from what they took. Every trial is stored as soon as
it is handed over, so that an interrupted search is continued without repeating one, and the simulator's state after
each round. Ctrl-C ends the search with the best so far.

The guides `replay` and `combined` also consider the hand-made builders, the best strategies of earlier searches and
neighbours of the best so far; the others draw from the constrained space alone, as the papers do.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from offbeat.cluster import ClusterSpec
from offbeat.cost.interval import Interval, Trust
from offbeat.cost.measured import Costs
from offbeat.cost.outcomes import job_of
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.search.auto.guide import Guide, GuideName
from offbeat.search.auto.neighbours import starting_strategies, vary
from offbeat.search.auto.sampler import Sampler, Space
from offbeat.search.auto.select import diverse_pick, elite, embedding_similarity, expression_similarity, fidelity_level
from offbeat.search.auto.store import Trial, TrialStore
from offbeat.simulate.learned.features import TrainingSchedule
from offbeat.strategy import Strategy, transfer

if TYPE_CHECKING:
    from offbeat.simulate.learned.ranking import Simulator

Run = Callable[[Sequence[Strategy], float | None], Iterable[Trial]]
"""Strategies and the best seconds so far → one trial for each, as they end."""
MARGIN = 0.02
"""Two runs of one strategy differ by as much: a drawn strategy that is ahead by less is not known to be faster than a
builder's, which is then returned."""
_TRANSFERRED = 3
_PARENTS = 5


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
    """How many of the fastest strategies, beside the fastest builder's, are run again at the end, beyond `trials`. The
    best of these second runs is returned (see `MARGIN`), because the fastest trial may be an outlier. 0 returns the
    fastest trial."""
    alpha: float = 0.1
    """Weight of similarity against time."""
    similarity: str = "expression"
    """'expression', or 'embedding' once a learned model has a hidden vector to compare."""
    search: str = "search"
    """Name under which trials are stored."""
    resume: bool = False
    """Continue the search of that name; otherwise it must be new."""
    time_limit_seconds: float | None = None
    baseline_seconds: float | None = None
    """What the hit rate is counted against; None takes the best builder's trial so far."""
    space: Space = field(default_factory=Space)
    schedule: TrainingSchedule = field(default_factory=TrainingSchedule)
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
    interval: Interval | None = None
    """Around what had been predicted for this trial."""


@dataclass(frozen=True)
class TuneResult:
    """The result of a search."""

    search: str
    """The name under which its trials are stored."""
    best: Trial | None
    """None if no trial completed."""
    trials: tuple[Trial, ...]
    """All trials of the search in order, including those of resumed runs."""
    baseline_seconds: float | None
    hit_rate: float
    accuracy: float
    interrupted: bool
    simulator: "Simulator | None"

    @property
    def strategy(self) -> Strategy:
        if self.best is None:
            raise OffbeatError(f"none of the {len(self.trials)} trials completed, so there is no best strategy")
        return self.best.strategy


def tune(
    graph: ModelGraph,
    cluster: ClusterSpec,
    run: Run,
    options: Options | None = None,
    *,
    store: TrialStore | None = None,
    costs: Costs | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Searches for the fastest strategy with real trials.

    `graph` should carry measured compute times; `costs` what is known of the network.
    """
    options = options or Options()
    guide = Guide(options.guide, graph, cluster, costs=costs, schedule=options.schedule, seed=options.seed)
    search = _Search(graph, cluster, run, options, store, guide, on_progress)
    interrupted = False
    try:
        search.start()
        while search.wants_more():
            search.round()
        search.final()
    except KeyboardInterrupt:
        interrupted = True
    return TuneResult(
        search=options.search,
        best=search.winner or search.best,
        trials=tuple(search.trials),
        baseline_seconds=search.baseline,
        hit_rate=search.hit_rate,
        accuracy=guide.accuracy(search.trials),
        interrupted=interrupted,
        simulator=guide.simulator,
    )


@dataclass
class _Search:
    """The state of one search."""

    graph: ModelGraph
    cluster: ClusterSpec
    run: Run
    options: Options
    store: TrialStore | None
    guide: Guide
    on_progress: Callable[[Progress], None] | None
    starts: list[Strategy] = field(default_factory=list)
    winner: Trial | None = None
    """The best of the finalists, once they have been run again."""

    def __post_init__(self) -> None:
        self.trials = self._stored()
        self.tried_before = len(self.trials)
        # A resumed search must not draw the strategies again that it drew before.
        seed = self.options.seed + 1_000_003 * self.tried_before
        self.sampler = Sampler(self.graph, self.cluster, seed, self.options.space)
        self.trust = Trust.here(self.cluster.device_of(self.cluster.workers[0]).device, job_of(self.graph))
        self.began = time.monotonic()
        limit = self.options.time_limit_seconds
        self.ends = math.inf if limit is None else self.began + limit

    @property
    def uses_neighbours(self) -> bool:
        """Beyond the papers: builders, earlier strategies and neighbours are candidates too."""
        return self.options.guide in ("replay", "combined")

    @property
    def best(self) -> Trial | None:
        return next(iter(_fastest(self.trials)), None)

    @property
    def baseline(self) -> float | None:
        if self.options.baseline_seconds is not None:
            return self.options.baseline_seconds
        return next((trial.seconds for trial in _fastest(self.trials, built=True)), None)

    @property
    def hit_rate(self) -> float:
        baseline = self.baseline
        if baseline is None or not self.trials:
            return math.nan
        return sum(trial.took < baseline for trial in _fastest(self.trials)) / len(self.trials)

    def start(self) -> None:
        """Builders and earlier trials, where the guide makes use of them."""
        if self.uses_neighbours:
            self.starts = starting_strategies(self.graph, self.cluster)
        if self.store is not None:
            self._use_earlier(self.store)
        self.guide.learn(self.trials)

    def wants_more(self) -> bool:
        return len(self.trials) < self.options.trials and time.monotonic() < self.ends

    def round(self) -> None:
        """Lines 2 to 9 of Algorithm 1."""
        count = min(self.options.per_round, self.options.trials - len(self.trials))
        chosen = self._choose(count)
        if self.starts and not self.trials:
            # Hand-made strategies are always measured: what is returned is no worse, and hits are counted.
            best_of: dict[str, Strategy] = {}
            for strategy in self._ordered(self.starts):
                best_of.setdefault(strategy.name, strategy)
            chosen = _distinct([*list(best_of.values())[: max(1, 3 * count // 4)], *chosen])[:count]
        if not chosen:
            raise OffbeatError(f"all strategies in the search space of {self.graph.name!r} have been tried")
        predicted = self.guide.predict(chosen).tolist()
        best = self.best
        for trial, seconds in zip(self.run(chosen, None if best is None else best.seconds), predicted, strict=False):
            self._record(replace(trial, predicted_seconds=None if math.isnan(seconds) else seconds))
            if not self.wants_more():
                break
        self.guide.learn(self.trials)
        simulator = self.guide.simulator
        if self.store is not None and simulator is not None and simulator.trained_on:
            self.store.save_state(self.graph, self.cluster, simulator.kind, simulator.to_bytes())

    def final(self) -> None:
        """Runs the fastest strategies and the fastest builder's again."""
        chosen = (*_fastest(self.trials)[: self.options.finalists], *_fastest(self.trials, built=True)[:1])
        again = list({trial.strategy.digest: trial for trial in chosen}.values())
        if self.options.finalists < 1 or len(again) < 2 or time.monotonic() >= self.ends:
            return
        for place, repeated in enumerate(self.run([trial.strategy for trial in again], None)):
            if repeated.status == "done":
                # The first run was chosen for being fast; the second says what is usual.
                second = replace(again[place], seconds=repeated.seconds, steps=repeated.steps)
                self.trials[self.trials.index(again[place])] = second
                again[place] = second
                if self.store is not None:
                    self.store.update(self.graph, self.cluster, second)
        best = _fastest(again)[0]
        hand_made = _fastest(again, built=True)
        self.winner = next((trial for trial in hand_made if trial.took < (1 + MARGIN) * best.took), best)

    def _ordered(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        """Fastest predicted first."""
        return [strategies[position] for position in np.argsort(self.guide.predict(strategies), kind="stable")]

    def _choose(self, count: int) -> list[Strategy]:
        candidates = self._candidates()
        if not self.guide.predicts:
            return candidates[:count]
        if self.uses_neighbours:
            candidates = self._unlike(candidates, 2 * count)
        predicted = self.guide.predict(candidates)
        usable = [trial for trial in self.trials if trial.usable]
        again = self.guide.predict([trial.strategy for trial in usable])
        positions = elite(predicted, fidelity_level(again, [trial.took for trial in usable]), least=2 * count)
        kept = [candidates[position] for position in positions]
        vectors = self.guide.embed(kept) if self.options.similarity == "embedding" else None

        def similarity(a: int, b: int) -> float:
            if vectors is None:
                return expression_similarity(kept[a], kept[b])
            return embedding_similarity(vectors[a], vectors[b])

        return [kept[p] for p in diverse_pick(predicted[positions], similarity, count, self.options.alpha)]

    def _candidates(self) -> list[Strategy]:
        """New strategies, each once; if the guide allows it, with descendants of the best predicted ones."""
        total, generations = self.options.candidates, self.options.generations
        found = list(self.starts)
        if self.uses_neighbours:
            total //= generations
            for near in [trial.strategy for trial in _fastest(self.trials)[:3]] or self.starts[:3]:
                found += vary(self.sampler, near, max(1, total // 6))
        found += self.sampler.sample(max(1, total // 3, total - len(found)))
        found = self._untried(found)
        for _ in range(generations - 1 if self.uses_neighbours else 0):
            for parent in self._ordered(found)[:_PARENTS]:
                found += vary(self.sampler, parent, max(1, total // _PARENTS))
            found = self._untried(found)
        return found

    def _unlike(self, candidates: list[Strategy], least: int) -> list[Strategy]:
        """Without strategies that replay cannot distinguish from a tried or better one; at least `least`."""
        seen = {f"{seconds:.6g}" for seconds in self.guide.predict([trial.strategy for trial in self.trials])}
        fresh: list[Strategy] = []
        like: list[Strategy] = []
        for strategy, seconds in zip(candidates, self.guide.predict(candidates), strict=True):
            (like if f"{seconds:.6g}" in seen else fresh).append(strategy)
            seen.add(f"{seconds:.6g}")
        return fresh + like[: max(0, least - len(fresh))]

    def _untried(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        tried = {trial.strategy.digest for trial in self.trials}
        return [strategy for strategy in _distinct(strategies) if strategy.digest not in tried]

    def _record(self, trial: Trial) -> None:
        stored = replace(trial, search=self.options.search)
        if self.store is not None:
            self.store.add(self.graph, self.cluster, stored)
        interval = None
        # The papers' learned guides rank strategies; their seconds are not meant to be believed.
        if trial.predicted_seconds and self.uses_neighbours:
            interval = self.trust.interval(trial.predicted_seconds, "trial")
            if trial.status == "done" and trial.source == "measured" and trial.seconds:
                self.trust.remember("trial", trial.predicted_seconds, trial.seconds)
        self.trials.append(stored)
        if self.on_progress is None:
            return
        done, wanted, now = len(self.trials), self.options.trials, time.monotonic()
        left = (now - self.began) / (done - self.tried_before) * (wanted - done)
        left = min(left, max(0.0, self.ends - now))
        accuracy = self.guide.accuracy(self.trials)
        self.on_progress(Progress(done, wanted, stored, self.best, self.hit_rate, accuracy, left, interval))

    def _stored(self) -> list[Trial]:
        """The trials of the resumed search."""
        name, resume = self.options.search, self.options.resume
        if self.store is None:
            if resume:
                raise OffbeatError(f"resume: search {name!r} needs its trial store")
            return []
        known = self.store.trials(self.graph.digest, self.cluster.digest, search=name)
        if known and not resume:
            raise OffbeatError(f"search {name!r} already has {len(known)} trials: resume it, or choose another name")
        return known

    def _use_earlier(self, store: TrialStore) -> None:
        """Starts from other searches for the same model elsewhere, or for another model here.

        These are a trained simulator (of this very domain, or of the one with most trials), trials to learn from, and
        strategies to begin with.
        """
        here = (self.graph.digest, self.cluster.digest)
        known = {self.graph.digest, self.graph.name, self.cluster.digest}
        domains = [d for d in store.domains() if {d.graph_digest, d.model, d.cluster_digest} & known]
        for domain in sorted(domains, key=lambda each: (each.digests != here, -each.trials)):
            state = self.guide.simulator and store.load_state(*domain.digests, self.guide.simulator.kind)
            if state and self.guide.restore(state):
                break
        for domain in domains:
            trials = store.trials(*domain.digests)
            if domain.digests == here:
                trials = [trial for trial in trials if trial.search != self.options.search]
            if trials:
                self.guide.add_domain(*store.load_domain(domain), trials)
            if self.uses_neighbours:
                moved = (transfer(t.strategy, self.graph, self.cluster) for t in _fastest(trials)[:_TRANSFERRED])
                self.starts += [strategy for strategy in moved if strategy.variables]


def _distinct(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Each strategy once, at its first position."""
    return list({strategy.digest: strategy for strategy in strategies}.values())


def _fastest(trials: Sequence[Trial], built: bool = False) -> list[Trial]:
    """Completed trials, fastest first; with `built`, only those of builders."""
    done = (trial for trial in trials if trial.status == "done" and not (built and trial.strategy.name == "auto"))
    return sorted(done, key=lambda trial: trial.took)
