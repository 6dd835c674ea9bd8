"""Predict the seconds of strategies with models that improve with every trial (AutoDist's Algorithm 1).

random       nothing is predicted: every draw within the constraints is as good as another
predefined   AutoSync's analytic model
replay       Offbeat's replayer
linear, rnn, gat    AutoSync: the analytic model first; with enough trials the linear, the recurrent or the graph
             attention model on raw ⊕ predefined features
combined     the replayer first; then at the costs that trials tell (`fit`); with many trials, and where it has ordered
             them better, the model that learns the replayer's error

How many are enough is seen in benchmarks/ranking.py: a model fitted to ten trials ranked worse than what it began with.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.cluster import ClusterSpec
from offbeat.cost.analytic import Coefficients, fit_coefficients
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.search.auto.fit import Evidence, fit_costs
from offbeat.search.auto.select import ranking_accuracy
from offbeat.search.auto.store import Trial
from offbeat.simulate import step_seconds
from offbeat.simulate.learned.features import Encoded, Samples, TrainingSchedule, encode
from offbeat.strategy import Strategy

if TYPE_CHECKING:
    from offbeat.simulate.learned.ranking import Kind, Simulator

GuideName = Literal["random", "predefined", "linear", "rnn", "gat", "replay", "combined"]
_LEARNS: tuple["Kind", ...] = ("linear", "rnn", "gat", "combined")
"""Guides with a learned model, by its name."""
_HIDDEN = 32
LEAST_FITTED = 3
"""Trials needed to fit costs; the prior supplies what so few trials cannot determine."""
LEAST_LEARNED = 16
"""Trials needed to train a model."""
LEAST_SHOWN = 8
"""Trials on which two predictors are compared."""
_EARLIER = 24
"""Trials of another domain used to fit costs; replaying more would cost more time than it helps."""
_EARLIER_WEIGHT = {"cluster": 0.5, "model": 0.25}
"""Weights of trials of another model on this cluster, and of this model elsewhere."""
REFIT = TrainingSchedule(epochs=40, decay_epochs=(20, 30))
"""Fine-tuning with a few more trials starts from a trained state."""


@dataclass(eq=False)
class Guide:
    """Predicts for one model on one cluster."""

    name: GuideName
    graph: ModelGraph
    cluster: ClusterSpec
    costs: Costs | None = None
    schedule: TrainingSchedule = field(default_factory=TrainingSchedule)
    seed: int = 0
    simulator: "Simulator | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.coefficients = _coefficients(self.cluster)
        self.earlier: list[Samples] = []
        self.fitted: Costs | None = None
        """Costs fitted to trials, once there are some."""
        self._evidence: list[Evidence] = []
        self._at_fitted: dict[str, float] = {}
        self._shown: list[tuple[float, float, float]] = []
        """For each trial the seconds by fitted costs and by the learned model before it, and those it took."""
        self._learned_from: set[str] = set()
        self._known: dict[tuple[str, bool], Encoded] = {}
        if self.name in _LEARNS:
            # Only learned models need torch; the other guides start without it.
            from offbeat.simulate.learned.ranking import Simulator

            self.simulator = Simulator(self.name, hidden=_HIDDEN, seed=self.seed)

    @property
    def predicts(self) -> bool:
        return self.name != "random"

    @property
    def learned(self) -> bool:
        """Whether predictions come from a trained model."""
        return self.simulator is not None and self.simulator.trained_on > 0

    @property
    def trusts_learned(self) -> bool:
        """Whether the learned model has ranked trials better than fitted costs, before they were run."""
        if self.fitted is None:
            return self.learned
        fitted, learned, took = np.array(self._shown).reshape(-1, 3).T
        return len(took) >= LEAST_SHOWN and ranking_accuracy(learned, took) > ranking_accuracy(fitted, took)

    def restore(self, state: bytes) -> bool:
        """Restores a stored model; False if it was trained on other features than this Offbeat's."""
        from offbeat.simulate.learned.ranking import Simulator

        try:
            stored = Simulator.from_bytes(state, "stored simulator")
        except OffbeatError:
            return False
        fits = self.simulator is not None and stored.kind == self.simulator.kind
        self.simulator = stored if fits else self.simulator
        return fits

    def _encode(self, strategies: Sequence[Strategy], what_ifs: bool) -> list[Encoded]:
        """The models' input; each strategy is encoded once, with sensitivities only if a model reads them."""
        for strategy in strategies:
            if (strategy.digest, what_ifs) not in self._known:
                self._known[strategy.digest, what_ifs] = encode(
                    lower(self.graph, self.cluster, strategy),
                    replay=self.name in ("replay", "combined"),
                    what_ifs=what_ifs,
                    costs=self.costs,
                    coefficients=self.coefficients,
                )
        return [self._known[strategy.digest, what_ifs] for strategy in strategies]

    def predict(self, strategies: Sequence[Strategy]) -> NDArray[np.float64]:
        """Seconds of each; nan where nothing is predicted."""
        if not self.predicts:
            return np.full(len(strategies), np.nan)
        if self.fitted is not None and not self.trusts_learned:
            return np.array([self._replayed(strategy, self.fitted) for strategy in strategies])
        encoded = self._encode(strategies, self.name == "combined" and self.learned)
        if self.simulator is not None and self.learned:
            return self.simulator.predict(encoded)
        return np.exp([each.base for each in encoded])

    def _replayed(self, strategy: Strategy, costs: Costs) -> float:
        if strategy.digest not in self._at_fitted:
            self._at_fitted[strategy.digest] = step_seconds(lower(self.graph, self.cluster, strategy), costs)
        return self._at_fitted[strategy.digest]

    def embed(self, strategies: Sequence[Strategy]) -> NDArray[np.float64] | None:
        """Hidden vectors, once there is a trained model."""
        if self.simulator is None or not self.learned:
            return None
        return self.simulator.embed(self._encode(strategies, self.name == "combined"))

    def add_domain(self, graph: ModelGraph, cluster: ClusterSpec, trials: Sequence[Trial]) -> None:
        """Uses trials of another domain as a start (transfer)."""
        combined = self.name == "combined"
        weight = _EARLIER_WEIGHT["cluster" if cluster.digest == self.cluster.digest else "model"]
        found: list[Evidence] = []
        for trial in trials:
            # A store may hold trials of an earlier release, which told graphs apart in another way.
            with suppress(StrategyError):
                if trial.usable and self.simulator is not None:
                    found.append(Evidence(lower(graph, cluster, trial.strategy), trial.took, weight))
        if len(found) < 2:
            return
        if combined:
            self._evidence += found[-_EARLIER:]
        known = self.costs or Costs()
        alike = Costs(straight=known.straight, portions=known.portions)
        given: Any = {"replay": combined, "what_ifs": combined, "costs": alike, "coefficients": _coefficients(cluster)}
        self.earlier.append(Samples([encode(each.plan, **given) for each in found], [each.seconds for each in found]))

    def learn(self, trials: Sequence[Trial]) -> None:
        """Fits costs and the model to all trials so far: the model from scratch at first, then on from its state."""
        if self.simulator is None:
            return
        usable = [trial for trial in trials if trial.usable]
        if self.name == "combined":
            fresh = [trial for trial in usable if trial.strategy.digest not in self._learned_from]
            strategies = [trial.strategy for trial in fresh]
            self._learned_from |= {strategy.digest for strategy in strategies}
            if fresh and self.fitted is not None and self.learned:
                # What both predictors say of trials that neither has learned from.
                by_fit = [self._replayed(strategy, self.fitted) for strategy in strategies]
                by_model = self.simulator.predict(self._encode(strategies, True)).tolist()
                self._shown += zip(by_fit, by_model, [trial.took for trial in fresh], strict=True)
            mine = [Evidence(lower(self.graph, self.cluster, trial.strategy), trial.took) for trial in usable]
            if len(mine) + len(self._evidence) >= LEAST_FITTED:
                self.fitted = fit_costs([*self._evidence, *mine], self.costs)
                self._at_fitted.clear()
        domains = list(self.earlier)
        if len(usable) >= 2:
            encoded = self._encode([trial.strategy for trial in usable], self.name == "combined")
            domains.append(Samples(encoded, [trial.took for trial in usable]))
        if sum(len(domain.plans) for domain in domains) >= LEAST_LEARNED:
            again = self.learned and REFIT.epochs <= self.schedule.epochs
            self.simulator.fit(domains, REFIT if again else self.schedule)

    def accuracy(self, trials: Sequence[Trial]) -> float:
        """Ranking accuracy of the predictions made before each of these trials."""
        shown = [(t.predicted_seconds, t.took) for t in trials if t.usable and t.predicted_seconds]
        return ranking_accuracy([p for p, _ in shown], [s for _, s in shown])


def _coefficients(cluster: ClusterSpec) -> Coefficients | None:
    """φ and δ from the cluster's measured collectives, if it has any."""
    with suppress(OffbeatError):
        return fit_coefficients(cluster)
    return None
