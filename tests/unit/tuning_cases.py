"""A model, a cluster and trials by replay, for tests of searches. Needs no torch, so that processes start fast."""

from collections.abc import Iterator, Sequence

from strategies import Layer, Weight, make_graph

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.plan import lower
from offbeat.search.auto.store import Trial
from offbeat.simulate.predict import simulate
from offbeat.strategy import Strategy

GRAPH = make_graph(
    [
        Layer((Weight(f"l{i}.weight", (64 * (1 + i % 3), 128)), Weight(f"l{i}.bias", (64 * (1 + i % 3),))), 10**7, 2e-3)
        for i in range(8)
    ]
)
CLUSTER = ClusterSpec.homogeneous(nodes=4, bandwidth="200Mbit/s", latency="150us", memory="1GiB")
# What the simulators do not know of the job they are trained on.
HIDDEN = Costs(update_call_seconds=4e-4, interference=0.4, gap_seconds=2e-3)


def run(strategies: Sequence[Strategy], best: float | None) -> Iterator[Trial]:
    """Trials by replay with costs the search does not know."""
    for strategy in strategies:
        seconds = simulate(lower(GRAPH, CLUSTER, strategy), HIDDEN, memory=False).iteration_time
        stopped = best is not None and seconds > 1.5 * best
        yield Trial(strategy, "stopped" if stopped else "done", seconds, source="replayed", steps=(seconds,))
