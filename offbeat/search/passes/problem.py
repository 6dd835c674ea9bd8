"""What a search is given → how its candidates are judged: step seconds and peak bytes of a strategy."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.memory import peak_memory
from offbeat.graph import ModelGraph
from offbeat.plan import Plan
from offbeat.search.chain import Chain, State, chain_of
from offbeat.search.oracle import Oracle
from offbeat.simulate.roles import find_roles
from offbeat.strategy import Strategy

Mode = Literal["auto", "deferred", "barrier"]


@dataclass(frozen=True)
class Candidate:
    """A strategy that was replayed, and the one it was derived from."""

    strategy: Strategy
    seconds: float
    """Step time."""
    peak_bytes: int
    """Of the rank that holds most; 0 where memory is not limited."""
    plan: Plan = field(repr=False)
    decision: str = ""
    """What made it: a builder's or a pass's name."""
    origin: "Candidate | None" = field(default=None, repr=False)

    @property
    def decisions(self) -> tuple[str, ...]:
        """From the first to this one."""
        return (*(self.origin.decisions if self.origin else ()), self.decision)


@dataclass
class Problem:
    """A model, a cluster, their costs, and what the search may do."""

    oracle: Oracle
    mode: Mode = "auto"
    memory_limit: int | None = None
    """Bytes per rank."""
    allow_lossy: bool = False
    coarsen: bool = True
    fused_seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Forward and backward seconds of compiled modules, by path, where they were measured."""
    deadline: float | None = None
    """On time.monotonic()'s clock."""
    replays: int = 0
    """Strategies that were lowered and evaluated."""
    _chains: dict[int, tuple[Plan, Chain | None]] = field(default_factory=dict, repr=False)

    @property
    def graph(self) -> ModelGraph:
        return self.oracle.graph

    @property
    def cluster(self) -> ClusterSpec:
        return self.oracle.cluster

    @property
    def costs(self) -> Costs:
        return self.oracle.costs

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def evaluate(self, strategy: Strategy, decision: str, origin: Candidate | None = None) -> Candidate:
        """Replays a strategy, in the mode that was asked for."""
        if self.mode not in ("auto", strategy.schedule.mode):
            schedule = strategy.schedule.model_copy(update={"mode": self.mode})
            strategy = strategy.model_copy(update={"schedule": schedule})
        plan = self.with_fused_seconds(self.oracle.plan(strategy))
        self.replays += 1
        peak = self.peak_bytes(plan) if self.memory_limit is not None else 0
        return Candidate(strategy, self.oracle.plan_seconds(plan), peak, plan, decision, origin)

    def fits(self, candidate: Candidate) -> bool:
        return self.memory_limit is None or candidate.peak_bytes <= self.memory_limit

    def peak_bytes(self, plan: Plan) -> int:
        """Of the rank that holds most."""
        ranks = find_roles(plan, self.costs.compute_scale).representatives
        return max(peak_memory(plan, rank).total for rank in ranks)

    def chain(self, candidate: Candidate) -> Chain | None:
        """The candidate's gradients as units; None where it cuts them or updates them on servers."""
        known = self._chains.get(id(candidate.plan))
        if known is None:
            known = (candidate.plan, chain_of(candidate.plan, self.costs, coarsen=self.coarsen))
            # The plan is kept with its chain, so that no other plan can get its identity.
            self._chains = {id(candidate.plan): known}
        return known[1]

    def state_seconds(self, chain: Chain, state: State, base: Candidate) -> float:
        """Step time of a state; without partial replay, by lowering and replaying all of it."""
        if self.oracle.partial_replay:
            return chain.seconds(state)
        return self.evaluate(chain.strategy(state, base.strategy), "trial").seconds

    def with_fused_seconds(self, plan: Plan) -> Plan:
        """The plan with measured times of compiled regions in place of predicted ones."""
        regions = plan.strategy.fusion
        measured = {n: self.fused_seconds[r[0]] for n, r in enumerate(regions) if r and r[0] in self.fused_seconds}
        if not measured:
            return plan
        node = plan.cluster.device_of(plan.replicas[0])
        segments = list(plan.segments)
        for number, pair in measured.items():
            for phase, seconds in zip(("forward", "backward"), pair, strict=True):
                mine = [i for i, s in enumerate(segments) if s.phase == phase and s.name.startswith(f"fused{number}.")]
                guess = [segments[i].estimate(node.peak_flops, node.memory_bandwidth) for i in mine]
                for i, share in zip(mine, guess, strict=True):
                    part = share / sum(guess) if sum(guess) else 1 / len(mine)
                    segments[i] = replace(segments[i], seconds=seconds * part)
        return replace(plan, segments=tuple(segments))
