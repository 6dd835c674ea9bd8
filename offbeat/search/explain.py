"""Strategy + ModelGraph + ClusterSpec + Costs → Explanation: what it gains, and which of its decisions matter.

Each decision is undone on its own and the rest replayed; what the step loses is what the decision is worth.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs, network_seconds
from offbeat.cost.updates import variable_updates
from offbeat.graph import ModelGraph
from offbeat.plan import Plan
from offbeat.search.chain import chain_of
from offbeat.search.oracle import Oracle
from offbeat.simulate.roles import find_roles
from offbeat.simulate.step import segment_seconds
from offbeat.strategy import Encoder, Schedule, Shard, Slice, Strategy, VariableConfig, build_strategy
from offbeat.units import format_seconds

BUILDERS = ("overlap", "horovod", "all_reduce", "wfbp", "tictac", "sharded")
"""What a strategy is compared with, beside DDP."""
_MATTERS = 1e-3
"""Share of the step below which a decision is not named in the text."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing the strategy does, and the step without it."""

    name: str
    what: str
    without_seconds: float
    worth_seconds: float
    """By how much the step would be longer; negative if the decision does harm."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Predicted facts about a strategy. Times are seconds per step."""

    strategy: str
    step_seconds: float
    ddp_seconds: float
    next_builder: str
    next_builder_seconds: float
    compute_seconds: float
    network_seconds: float
    """For which the busiest link is taken."""
    decisions: tuple[Decision, ...]
    """The one that is worth most comes first."""

    @property
    def bound_seconds(self) -> float:
        """The longer of compute and network: no order of the same work is faster."""
        return max(self.compute_seconds, self.network_seconds)

    @property
    def gain_over_ddp(self) -> float:
        """0.25 means that DDP's step is 1.25 times as long."""
        return self.ddp_seconds / self.step_seconds - 1 if self.step_seconds else 0.0

    @property
    def gain_over_next(self) -> float:
        return self.next_builder_seconds / self.step_seconds - 1 if self.step_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {
            "bound_seconds": self.bound_seconds,
            "gain_over_ddp": self.gain_over_ddp,
            "gain_over_next": self.gain_over_next,
        }

    def text(self) -> str:
        """A few sentences for people."""
        limit = "the network" if self.network_seconds >= self.compute_seconds else "compute"
        above = max(0.0, self.step_seconds / self.bound_seconds - 1) if self.bound_seconds else 0.0
        lines = [
            f"A step of {self.strategy!r} is predicted to take {format_seconds(self.step_seconds)}: "
            f"{_percent(self.gain_over_ddp)} than DDP ({format_seconds(self.ddp_seconds)}), "
            f"{_percent(self.gain_over_next)} than the next best builder, {self.next_builder!r} "
            f"({format_seconds(self.next_builder_seconds)}).",
            f"It is limited by {limit}, at {format_seconds(self.bound_seconds)}, and stays {above:.1%} above that.",
        ]
        telling = [d for d in self.decisions if abs(d.worth_seconds) >= _MATTERS * self.step_seconds]
        lines += [f"- {each.what}: without it {format_seconds(each.without_seconds)}." for each in telling]
        if not telling:
            lines.append("- No single decision changes the step by more than 0.1%.")
        return "\n".join(lines)


def explain(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec, costs: Costs | None = None) -> Explanation:
    """Replays the strategy, the builders, and the strategy with one decision undone at a time."""
    oracle = Oracle(graph, cluster, costs or Costs())
    plan = oracle.plan(strategy)
    seconds = oracle.plan_seconds(plan)
    others = {name: oracle.seconds(build_strategy(name, graph, cluster)) for name in ("ddp", *BUILDERS)}
    nearest = min((name for name in others if name != strategy.name), key=lambda name: others[name])
    decisions = [
        Decision(name, what, without, without - seconds)
        for name, what, changed in _undone(strategy, plan, oracle.costs)
        for without in (oracle.seconds(changed),)
    ]
    return Explanation(
        strategy=strategy.name,
        step_seconds=seconds,
        ddp_seconds=others["ddp"],
        next_builder=nearest,
        next_builder_seconds=others[nearest],
        compute_seconds=_compute_seconds(plan, oracle.costs),
        network_seconds=network_seconds(plan, oracle.costs),
        decisions=tuple(sorted(decisions, key=lambda each: -each.worth_seconds)),
    )


def _compute_seconds(plan: Plan, costs: Costs) -> float:
    """The slowest rank's step if nothing had to be sent."""
    roles = find_roles(plan, costs.compute_scale)
    updates = sum(variable_updates(plan).values())
    size = sum(variable.bytes for variable in plan.graph.gradient_order)
    own = 1.0 if any(m.owner is None and m.synchronizer != "sharded" for m in plan.messages) else 0.0
    slowest = float(segment_seconds(plan, costs, roles).sum(axis=1).max(initial=0.0))
    return slowest + costs.gap_seconds + own * costs.update(size, updates)


def _undone(strategy: Strategy, plan: Plan, costs: Costs) -> Iterator[tuple[str, str, Strategy]]:
    """(name, what is done, the strategy without it) for each decision the strategy has taken."""
    schedule = strategy.schedule
    if schedule.mode != "barrier":
        yield "mode", "updates reach into the next forward", _scheduled(strategy, mode="barrier")
    groups = {m.group for m in plan.messages if len(m.variables) > 1}
    if groups:
        alone = _alone(strategy, plan, costs)
        if alone is not None:
            yield "fusion", f"{len(plan.graph.gradient_order)} gradients share {len(plan.messages)} messages", alone
    cuts = len(plan.communication) - len(plan.messages)
    if schedule.order or schedule.slice_bytes is not None:
        uncut = _uncut(strategy)
        if uncut.schedule != schedule:
            yield "slicing", f"messages are cut {cuts} times so that urgent ones can pass", uncut
    if schedule.policy != "fifo":
        yield "order", "what the next forward needs first goes first", _first_come(strategy)
    yield from _undone_computing(strategy)
    yield from _undone_synchronisers(strategy, plan)


def _undone_computing(strategy: Strategy) -> Iterator[tuple[str, str, Strategy]]:
    if strategy.accumulation > 1:
        what = f"the batch is computed in {strategy.accumulation} micro-batches"
        yield "accumulation", what, strategy.model_copy(update={"accumulation": 1})
    if strategy.recompute:
        what = f"{len(strategy.recompute)} modules are computed again in backward"
        yield "recompute", what, strategy.model_copy(update={"recompute": ()})
    if strategy.fusion:
        what = f"{len(strategy.fusion)} regions are compiled"
        yield "op_fusion", what, strategy.model_copy(update={"fusion": ()})


def _undone_synchronisers(strategy: Strategy, plan: Plan) -> Iterator[tuple[str, str, Strategy]]:
    for kind in sorted({m.synchronizer for m in plan.messages} - {"all_reduce"}):
        what = f"{sum(m.synchronizer == kind for m in plan.messages)} messages travel by {kind}"
        yield f"synchronizer {kind}", what, _changed(strategy, partial(_travels_by, kind), _plain)
    encoded = [m for m in plan.messages if m.encoder.name != "none"]
    if encoded:

        def decoded(shard: Shard) -> Shard:
            return shard.model_copy(update={"encoder": Encoder()})

        what = f"{len(encoded)} messages are encoded as {encoded[0].encoder.name}"
        yield "encoder", what, _changed(strategy, lambda shard: shard.encoder.name != "none", decoded)


def _travels_by(kind: str, shard: Shard) -> bool:
    return shard.synchronizer == kind


def _plain(shard: Shard) -> Shard:
    return Shard(group=shard.group)


def _changed(strategy: Strategy, chosen: Callable[[Shard], bool], change: Callable[[Shard], Shard]) -> Strategy:
    variables = {
        name: VariableConfig(
            partition=config.partition,
            cuts=config.cuts,
            shards=tuple(change(shard) if chosen(shard) else shard for shard in config.shards),
        )
        for name, config in strategy.variables.items()
    }
    return strategy.model_copy(update={"variables": variables})


def _scheduled(strategy: Strategy, **changes: Any) -> Strategy:
    schedule = Schedule(**(strategy.schedule.model_dump() | changes))
    return strategy.model_copy(update={"schedule": schedule})


def _alone(strategy: Strategy, plan: Plan, costs: Costs) -> Strategy | None:
    """Every gradient in a message of its own, most urgent first."""
    chain = chain_of(plan, costs, coarsen=False)
    if chain is None:
        return None
    return chain.strategy(chain.state(barrier=strategy.schedule.mode == "barrier"), strategy)


def _uncut(strategy: Strategy) -> Strategy:
    """Each message whole, where its first slice went."""
    schedule = strategy.schedule
    if not schedule.order:
        return _scheduled(strategy, slice_bytes=None)
    ends: dict[int, int] = {}
    for item in schedule.order:
        ends[item.group] = max(ends.get(item.group, 0), item.stop)
    whole = tuple(Slice(group=group, start=0, stop=stop) for group, stop in ends.items())
    return strategy.model_copy(update={"schedule": schedule.model_copy(update={"order": whole})})


def _first_come(strategy: Strategy) -> Strategy:
    return _scheduled(strategy, policy="fifo", order=())


def _percent(gain: float) -> str:
    return f"{abs(gain):.1%} {'faster' if gain >= 0 else 'slower'}"
