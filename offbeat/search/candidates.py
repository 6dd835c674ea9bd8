"""Graph + costs → strategies worth a trial, each with the step time that replay predicts."""

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.search.optimize import optimize
from offbeat.search.pace_strategy import pace_strategy
from offbeat.simulate.predict import simulate
from offbeat.strategy import Strategy, build_strategy

OVERLAP_BUCKETS = tuple(2**power for power in range(17, 24))
FEW_MESSAGES = 8
SEARCH_SECONDS = 2.0
SCHEDULING_PASSES = ("schedule", "tensor_fusion", "tensor_partition")
"""What changes when things are sent, not how: a running job has measured the cost of its all-reduces only."""
SLACK_SECONDS = 1e-3
"""A gradient that is later than planned holds up everything after it in a fixed order."""
BARRIER_BUCKETS = (2**19, 2**20, 2**22, 25 * 2**20)


@dataclass(frozen=True)
class Candidate:
    """A strategy and what replay says of it."""

    name: str
    strategy: Strategy
    seconds: float

    @property
    def kind(self) -> str:
        """What sets it apart on real processors: few or many messages, updates at once or one by one."""
        if self.strategy.schedule.mode == "barrier":
            return "barrier"
        messages = {shard.group for config in self.strategy.variables.values() for shard in config.shards}
        return "few messages" if len(messages) <= FEW_MESSAGES else "many messages"


def candidates(
    graph: ModelGraph, cluster: ClusterSpec, costs: Costs, present: Strategy, barrier: bool = False
) -> list[Candidate]:
    """The present strategy (by the name 'present') and others, the quickest first.

    `barrier` says that the training loop allows no deferred updates, whatever a strategy would like.
    """
    found = []
    for name, strategy in (*_others(graph, cluster, costs), ("present", present)):
        mode = "barrier" if barrier or strategy.schedule.mode == "barrier" else "auto"
        allowed = strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update={"mode": mode})})
        found.append(Candidate(name, allowed, predict(graph, cluster, costs, allowed)))
    return sorted(found, key=lambda candidate: candidate.seconds)


def predict(graph: ModelGraph, cluster: ClusterSpec, costs: Costs, strategy: Strategy) -> float:
    """Seconds of a step, by replay."""
    return simulate(lower(graph, cluster, strategy), costs, memory=False).iteration_time


def _others(graph: ModelGraph, cluster: ClusterSpec, costs: Costs) -> Iterator[tuple[str, Strategy]]:
    for bucket in OVERLAP_BUCKETS:
        if bucket <= graph.parameter_bytes:
            for slice_bytes in (bucket, 2 * bucket):
                options = {"bucket": bucket, "slice_bytes": slice_bytes}
                yield f"overlap {bucket // 1024} KiB", build_strategy("overlap", graph, cluster, **options)
    yield "pace", pace_strategy(graph, cluster, costs, slack_seconds=SLACK_SECONDS)
    searched = optimize(graph, cluster, costs=costs, time_limit=SEARCH_SECONDS, passes=SCHEDULING_PASSES)
    yield "searched", searched
    for bucket in BARRIER_BUCKETS:
        strategy = build_strategy("ddp", graph, cluster, bucket=bucket, first_bucket=min(bucket, 2**20))
        yield f"ddp {bucket // 1024} KiB", strategy
