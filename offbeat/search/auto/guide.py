"""Strategies → predicted seconds, from models that improve with every trial (the simulator of AutoDist's Algorithm 1).

random       nothing is predicted: every draw within the constraints is as good as another
predefined   AutoSync's analytic model
replay       Offbeat's replayer
autosync     the analytic model first; with enough trials the recurrent model on raw ⊕ predefined features
combined     the replayer first; with enough trials the model that learns the replayer's error
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.cluster import ClusterSpec
from offbeat.cost.analytic import fit_coefficients
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.search.auto.select import ranking_accuracy
from offbeat.search.auto.store import Trial
from offbeat.simulate.learned.features import Encoded, encode
from offbeat.simulate.learned.samples import Samples, Schedule
from offbeat.strategy import Strategy

if TYPE_CHECKING:
    from offbeat.simulate.learned.models import Kind
    from offbeat.simulate.learned.ranking import Simulator

GuideName = Literal["random", "predefined", "replay", "autosync", "combined"]
_LEARNS: dict[str, "Kind"] = {"autosync": "rnn", "combined": "combined"}
REFIT = Schedule(epochs=40, decay_epochs=(20, 30))
"""Fine-tuning with a few more trials starts from a trained state."""


class Guide:
    """Predicts for one model on one cluster."""

    def __init__(
        self,
        name: GuideName,
        graph: ModelGraph,
        cluster: ClusterSpec,
        *,
        costs: Costs | None = None,
        least_samples: int = 10,
        schedule: Schedule | None = None,
        hidden: int = 32,
        simulator: "Simulator | None" = None,
        seed: int = 0,
    ) -> None:
        if name not in get_args(GuideName):
            raise OffbeatError(f"guide: {name!r} is not one of {', '.join(get_args(GuideName))}")
        self.name, self.graph, self.cluster, self.costs = name, graph, cluster, costs
        self.least_samples, self.schedule = least_samples, schedule or Schedule()
        # φ and δ from the cluster's measured collectives, if it has any.
        self.coefficients = fit_coefficients(cluster) if _measured(cluster) else None
        self.earlier: list[Samples] = []
        self._known: dict[tuple[str, bool], Encoded] = {}
        kind = _LEARNS.get(name)
        if simulator is not None and simulator.kind != kind:
            raise OffbeatError(f"simulator: a {simulator.kind} model was given, guide {name!r} takes {kind or 'none'}")
        self.simulator = simulator
        if kind and simulator is None:
            # Only learned models need torch; the other guides start without it.
            from offbeat.simulate.learned.ranking import Simulator

            self.simulator = Simulator(kind, hidden=hidden, seed=seed)

    @property
    def predicts(self) -> bool:
        return self.name != "random"

    @property
    def learned(self) -> bool:
        """Predictions come from a trained model by now."""
        return self.simulator is not None and self.simulator.trained_on > 0

    def restore(self, state: bytes) -> bool:
        """Takes over a stored model; False where it was trained on other features than this Offbeat's."""
        from offbeat.simulate.learned.ranking import Simulator

        try:
            stored = Simulator.from_bytes(state, "stored simulator")
        except OffbeatError:
            return False
        if self.simulator is None or stored.kind != self.simulator.kind:
            return False
        self.simulator = stored
        return True

    def encode(self, strategies: Sequence[Strategy]) -> list[Encoded]:
        """What the models see; each strategy is encoded once, with sensitivities only where a model reads them."""
        what_ifs = self.name == "combined" and self.learned
        return self._encode(strategies, what_ifs)

    def _encode(self, strategies: Sequence[Strategy], what_ifs: bool) -> list[Encoded]:
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
        encoded = self.encode(strategies)
        if self.simulator is not None and self.simulator.trained_on:
            return self.simulator.predict(encoded)
        return np.exp([each.base for each in encoded])

    def embed(self, strategies: Sequence[Strategy]) -> NDArray[np.float64] | None:
        """Hidden vectors, once there is a trained model."""
        if self.simulator is None or not self.simulator.trained_on:
            return None
        return self.simulator.embed(self.encode(strategies))

    def add_domain(self, graph: ModelGraph, cluster: ClusterSpec, trials: Sequence[Trial]) -> int:
        """Takes trials of another domain as a start (transfer); how many could be used."""
        usable = [trial for trial in trials if trial.usable]
        if self.simulator is None or len(usable) < 2:
            return 0
        other = Guide(self.name, graph, cluster)
        self.earlier.append(
            Samples(
                other._encode([trial.strategy for trial in usable], self.name == "combined"),
                [trial.seconds or 0.0 for trial in usable],
            )
        )
        return len(usable)

    def learn(self, trials: Sequence[Trial]) -> None:
        """Fits the model to all trials so far: from scratch at first, then on from its state."""
        if self.simulator is None:
            return
        usable = [trial for trial in trials if trial.usable]
        domains = list(self.earlier)
        if len(usable) >= 2:
            encoded = self._encode([trial.strategy for trial in usable], self.name == "combined")
            domains.append(Samples(encoded, [trial.seconds or 0.0 for trial in usable]))
        if sum(len(domain.plans) for domain in domains) < self.least_samples:
            return
        trained = self.simulator.trained_on > 0
        self.simulator.fit(domains, _shorter(REFIT, self.schedule) if trained else self.schedule)

    def accuracy(self, trials: Sequence[Trial]) -> float:
        """Ranking accuracy of what was predicted before each of these trials."""
        shown = [(t.predicted_seconds, t.seconds) for t in trials if t.usable and t.predicted_seconds is not None]
        return ranking_accuracy([p for p, _ in shown if p], [s for _, s in shown if s]) if len(shown) > 1 else np.nan


def _measured(cluster: ClusterSpec) -> bool:
    """It has tables that φ and δ can be fitted to."""
    return any(
        len(table.groups) == 1
        and len(table.groups[0]) > 1
        and table.collective not in ("send", "all_to_all")
        and any(seconds > 0 for seconds in table.seconds)
        for table in cluster.tables
    )


def _shorter(first: Schedule, second: Schedule) -> Schedule:
    return first if first.epochs <= second.epochs else second
