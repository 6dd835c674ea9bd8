"""Model + cluster + a way to run trials → the best strategy measured within a budget (AutoDist's Algorithm 1).

Each round draws candidates, predicts them, rejects those below the simulator's fidelity level, picks a few that are
fast and different, measures them, and lets the simulator learn from what they took. Every trial is stored as soon as
it is handed over, so that an interrupted search is continued without repeating one, and the simulator's state after
each round. Ctrl-C ends the search with the best so far.

The guides `replay` and `combined` also consider the hand-made builders, the best strategies of earlier searches and
neighbours of the best so far; `random` and `autosync` draw from the constrained space alone, as the papers do.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.search.auto.guide import Guide
from offbeat.search.auto.neighbours import vary
from offbeat.search.auto.options import Options, Progress, TuneResult
from offbeat.search.auto.sampler import Sampler
from offbeat.search.auto.select import (
    diverse_pick,
    elite,
    embedding_similarity,
    expression_similarity,
    fidelity_level,
)
from offbeat.search.auto.starts import starting_strategies
from offbeat.search.auto.store import Domain, Trial, TrialStore
from offbeat.strategy import Strategy, transfer

if TYPE_CHECKING:
    from offbeat.simulate.learned.ranking import Simulator

__all__ = ["Options", "Progress", "Run", "TuneResult", "tune"]

Run = Callable[[Sequence[Strategy], float | None], Iterable[Trial]]
"""Strategies and the best seconds so far → one trial for each, as they end."""
MARGIN = 0.02
"""Two runs of one strategy differ by as much: a drawn strategy that is ahead by less is not known to be faster than a
builder's, which is then returned."""
_TRANSFERRED = 3
_PARENTS = 5


def tune(
    graph: ModelGraph,
    cluster: ClusterSpec,
    run: Run,
    options: Options | None = None,
    *,
    store: TrialStore | None = None,
    costs: Costs | None = None,
    simulator: "Simulator | None" = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Searches for the fastest strategy with real trials.

    `graph` should carry measured compute times; `costs` what is known of the network. `simulator` is a learned model
    to start from.
    """
    search = _Search(graph, cluster, run, options or Options(), store, costs, simulator, on_progress)
    interrupted = False
    try:
        search.start()
        while search.wants_more():
            search.round()
        search.final()
    except KeyboardInterrupt:
        interrupted = True
    return TuneResult(
        search=search.options.search,
        best=search.winner or search.best,
        trials=tuple(search.trials),
        baseline_seconds=search.baseline,
        hit_rate=search.hit_rate,
        accuracy=search.guide.accuracy(search.trials),
        interrupted=interrupted,
        simulator=search.guide.simulator,
    )


class _Search:
    """The state of one search."""

    def __init__(
        self,
        graph: ModelGraph,
        cluster: ClusterSpec,
        run: Run,
        options: Options,
        store: TrialStore | None,
        costs: Costs | None,
        simulator: "Simulator | None",
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.graph, self.cluster, self.run, self.options = graph, cluster, run, options
        self.store, self.on_progress = store, on_progress
        self.guide = Guide(
            options.guide,
            graph,
            cluster,
            costs=costs,
            schedule=options.schedule,
            simulator=simulator,
            seed=options.seed,
        )
        self.trials = self._stored()
        # A resumed search must not draw the strategies again that it drew before.
        self.sampler = Sampler(graph, cluster, options.seed + 1_000_003 * len(self.trials), options.space)
        self.starts: list[Strategy] = []
        self.began = time.monotonic()
        self.tried_before = len(self.trials)
        self.winner: Trial | None = None
        """The best of the finalists, once they have been run again."""

    @property
    def uses_neighbours(self) -> bool:
        """Beyond the papers: builders, earlier strategies and neighbours are candidates too."""
        return self.options.guide in ("replay", "combined")

    @property
    def best(self) -> Trial | None:
        return _fastest(self.trials)

    @property
    def baseline(self) -> float | None:
        if self.options.baseline_seconds is not None:
            return self.options.baseline_seconds
        built = _fastest([trial for trial in self.trials if trial.strategy.name != "auto"])
        return None if built is None else built.seconds

    @property
    def hit_rate(self) -> float:
        baseline = self.baseline
        if baseline is None or not self.trials:
            return math.nan
        hits = sum(trial.status == "done" and (trial.seconds or math.inf) < baseline for trial in self.trials)
        return hits / len(self.trials)

    def start(self) -> None:
        """Builders and earlier trials, where the guide makes use of them."""
        if self.uses_neighbours:
            self.starts = starting_strategies(self.graph, self.cluster)
        if self.store is not None and self.options.use_earlier:
            domains = [domain for domain in self.store.domains() if self._is_similar(domain)]
            self._load_state(self.store, domains)
            for domain in domains:
                self._use_earlier(self.store, domain)
        self.guide.learn(self.trials)

    def wants_more(self) -> bool:
        return len(self.trials) < self.options.trials and not self._late()

    def _late(self) -> bool:
        limit = self.options.time_limit_seconds
        return limit is not None and time.monotonic() - self.began >= limit

    def round(self) -> None:
        """Lines 2 to 9 of Algorithm 1."""
        count = min(self.options.per_round, self.options.trials - len(self.trials))
        chosen = self._choose(count)
        if self.starts and not self.trials:
            # Hand-made strategies are always measured: what is returned is no worse, and hits are counted.
            first = self._best_starts()[: max(1, 3 * count // 4)]
            known = {strategy.digest for strategy in first}
            chosen = [*first, *(strategy for strategy in chosen if strategy.digest not in known)][:count]
        if not chosen:
            raise OffbeatError(f"the space of strategies for {self.graph.name!r} holds no more than were tried")
        predicted = self.guide.predict(chosen).tolist()
        best = self.best
        for trial, seconds in zip(self.run(chosen, None if best is None else best.seconds), predicted, strict=False):
            self._record(replace(trial, predicted_seconds=None if math.isnan(seconds) else seconds))
            if not self.wants_more():
                break
        self.guide.learn(self.trials)
        self._save_state()

    def final(self) -> None:
        """Runs the fastest strategies and the fastest builder's again."""
        done = sorted((t for t in self.trials if t.status == "done"), key=lambda trial: trial.seconds or 0.0)
        built = [trial for trial in done if trial.strategy.name != "auto"][:1]
        again = list({t.strategy.digest: t for t in (*done[: self.options.finalists], *built)}.values())
        if self.options.finalists < 1 or len(again) < 2 or self._late():
            return
        for trial, repeated in zip(again, self.run([t.strategy for t in again], None), strict=False):
            if repeated.status == "done":
                # The first run was chosen for being fast; the second says what is usual.
                second = replace(trial, seconds=repeated.seconds, steps=repeated.steps)
                self.trials[self.trials.index(trial)] = second
                if self.store is not None:
                    self.store.update(self.graph, self.cluster, second)
        finalists = {trial.strategy.digest for trial in again}
        best = _fastest([trial for trial in self.trials if trial.strategy.digest in finalists])
        hand_made = _fastest([t for t in self.trials if t.strategy.digest in finalists and t.strategy.name != "auto"])
        slower = math.inf if best is None or hand_made is None else (hand_made.seconds or 0.0) / (best.seconds or 1.0)
        self.winner = hand_made if slower < 1 + MARGIN else best

    def _best_starts(self) -> list[Strategy]:
        """The best predicted hand-made strategy of each builder, best first."""
        order = np.argsort(self.guide.predict(self.starts), kind="stable")
        families: dict[str, Strategy] = {}
        for position in order:
            families.setdefault(self.starts[position].name, self.starts[position])
        return list(families.values())

    def _choose(self, count: int) -> list[Strategy]:
        candidates = self._candidates()
        if not self.guide.predicts:
            return candidates[:count]
        if self.uses_neighbours:
            candidates = self._unlike(self._evolve(candidates), 2 * count)
        predicted = self.guide.predict(candidates)
        recent = [trial for trial in self.trials if trial.usable]
        level = math.inf
        if recent:
            again = self.guide.predict([trial.strategy for trial in recent])
            level = fidelity_level(again, [trial.seconds or 0.0 for trial in recent])
        kept = elite(predicted, level, least=2 * count)
        similar = self._similarity([candidates[position] for position in kept])
        return [candidates[kept[p]] for p in diverse_pick(predicted[kept], similar, count, self.options.alpha)]

    def _candidates(self) -> list[Strategy]:
        """New strategies, each once."""
        total = self.options.candidates
        if self.uses_neighbours:
            total //= self.options.generations
        found = list(self.starts)
        best = sorted((t for t in self.trials if t.status == "done"), key=lambda trial: trial.seconds or 0.0)[:3]
        if self.uses_neighbours:
            for near in [trial.strategy for trial in best] or self.starts[:3]:
                found += vary(self.sampler, near, max(1, total // 6))
        found += self.sampler.sample(max(1, total // 3, total - len(found)))
        return self._untried(found)

    def _evolve(self, candidates: list[Strategy]) -> list[Strategy]:
        """The candidates and, generation by generation, neighbours of the best predicted among them."""
        each = max(1, self.options.candidates // self.options.generations // _PARENTS)
        for _ in range(self.options.generations - 1):
            order = np.argsort(self.guide.predict(candidates), kind="stable")[:_PARENTS]
            near = [s for parent in order for s in vary(self.sampler, candidates[parent], each)]
            candidates = self._untried([*candidates, *near])
        return candidates

    def _unlike(self, candidates: list[Strategy], least: int) -> list[Strategy]:
        """Without those that replay cannot tell from one that was tried or from a better one; at least so many."""
        seen = {f"{seconds:.6g}" for seconds in self.guide.predict([trial.strategy for trial in self.trials])}
        fresh: list[Strategy] = []
        like: list[Strategy] = []
        several = list({strategy.digest: strategy for strategy in candidates}.values())
        for strategy, seconds in zip(several, self.guide.predict(several), strict=True):
            (like if f"{seconds:.6g}" in seen else fresh).append(strategy)
            seen.add(f"{seconds:.6g}")
        return fresh + like[: max(0, least - len(fresh))]

    def _untried(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        tried = {trial.strategy.digest for trial in self.trials}
        return list({s.digest: s for s in strategies if s.digest not in tried}.values())

    def _similarity(self, candidates: Sequence[Strategy]) -> Callable[[int, int], float]:
        vectors = self.guide.embed(candidates) if self.options.similarity == "embedding" else None
        if vectors is None:
            return lambda a, b: expression_similarity(candidates[a], candidates[b])
        return lambda a, b: embedding_similarity(vectors[a], vectors[b])

    def _record(self, trial: Trial) -> None:
        stored = replace(trial, search=self.options.search)
        if self.store is not None:
            self.store.add(self.graph, self.cluster, stored)
        self.trials.append(stored)
        if self.on_progress is None:
            return
        made = len(self.trials) - self.tried_before
        each = (time.monotonic() - self.began) / made
        left = each * (self.options.trials - len(self.trials))
        limit = self.options.time_limit_seconds
        if limit is not None:
            left = min(left, max(0.0, limit - (time.monotonic() - self.began)))
        accuracy = self.guide.accuracy(self.trials)
        progress = Progress(len(self.trials), self.options.trials, stored, self.best, self.hit_rate, accuracy, left)
        self.on_progress(progress)

    def _stored(self) -> list[Trial]:
        """The trials of the search that is resumed."""
        if self.store is None:
            if self.options.resume:
                raise OffbeatError(f"resume: search {self.options.search!r} needs the trial store it was stored in")
            return []
        known = self.store.trials(self.graph.digest, self.cluster.digest, search=self.options.search)
        if known and not self.options.resume:
            raise OffbeatError(
                f"search {self.options.search!r} has {len(known)} trials already: resume it, or give another name"
            )
        return known

    def _is_similar(self, domain: Domain) -> bool:
        """The same model elsewhere, or another model here."""
        return (
            domain.graph_digest == self.graph.digest
            or domain.model == self.graph.name
            or domain.cluster_digest == self.cluster.digest
        )

    def _load_state(self, store: TrialStore, domains: Sequence[Domain]) -> None:
        """Begins with a model that an earlier search trained: for this very domain, or for one that has most trials."""
        simulator = self.guide.simulator
        if simulator is None or simulator.trained_on:
            return
        mine = (self.graph.digest, self.cluster.digest)
        for domain in sorted(
            domains, key=lambda each: ((each.graph_digest, each.cluster_digest) != mine, -each.trials)
        ):
            state = store.load_state(domain.graph_digest, domain.cluster_digest, simulator.kind)
            if state is not None and self.guide.restore(state):
                return

    def _save_state(self) -> None:
        simulator = self.guide.simulator
        if self.store is not None and simulator is not None and simulator.trained_on:
            self.store.save_state(self.graph, self.cluster, simulator.kind, simulator.to_bytes())

    def _use_earlier(self, store: TrialStore, domain: Domain) -> None:
        """Trials of other searches: data for the simulator, and strategies to begin with."""
        same_graph = domain.graph_digest == self.graph.digest
        trials = [
            trial
            for trial in store.trials(domain.graph_digest, domain.cluster_digest)
            if trial.search != self.options.search or not (same_graph and domain.cluster_digest == self.cluster.digest)
        ]
        if not trials:
            return
        graph, cluster = store.load_domain(domain)
        self.guide.add_domain(graph, cluster, trials)
        if not self.uses_neighbours:
            return
        fastest = sorted((t for t in trials if t.status == "done"), key=lambda trial: trial.seconds or 0.0)
        for trial in fastest[:_TRANSFERRED]:
            moved = transfer(trial.strategy, self.graph, self.cluster)
            if moved.variables:
                self.starts.append(moved)


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    done = [trial for trial in trials if trial.status == "done" and trial.seconds is not None]
    return min(done, key=lambda trial: trial.seconds or math.inf, default=None)
