"""Explain a strategy: its predicted gain, and which of its decisions matter.

Each decision is undone on its own and the rest replayed; what the step loses is what the decision is worth.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from offbeat.cluster import ClusterSpec
from offbeat.cost.interval import GAIN_INSIDE, UNMEASURED, Interval, Trust, hardest, kind_of_strategy
from offbeat.cost.measured import Costs, network_seconds, variable_updates
from offbeat.cost.outcomes import Kind
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.search.arrange import arranged, rescheduled
from offbeat.search.optimize import predict
from offbeat.simulate import step_seconds
from offbeat.simulate.fast.gradients import gradients_of
from offbeat.simulate.roles import find_roles
from offbeat.simulate.step import segment_seconds
from offbeat.strategy import Encoder, FullyShard, Shard, Slice, Strategy, build_strategy
from offbeat.units import format_bytes, format_seconds, format_speedup

BUILDERS = ("overlap", "horovod", "all_reduce", "wfbp", "tictac", "sharded")
"""Builders that a strategy is compared with, besides DDP."""
_NAMES = {"ddp": "DDP"}
_UNTIMED = " (an estimate: its time was not measured)"
_MATTERS = 1e-3
"""Decisions that change the step by a smaller share are left out of the text."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a strategy, and the step without it."""

    name: str
    what: str
    without_seconds: float
    worth_seconds: float
    """How much longer the step would be; negative if the decision makes it slower."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Predicted facts about a strategy. Times are seconds per step."""

    strategy: str
    step_seconds: float
    interval: Interval | None
    """Of the step, where it is predicted."""
    ddp_seconds: float
    next_builder: str
    next_builder_seconds: float
    compute_seconds: float
    network_seconds: float
    """Busy time of the busiest link."""
    measured: bool
    """Whether `step_seconds` was measured, because this strategy ran."""
    recorded: bool
    """Whether times are relative to a step that was measured."""
    kind: Kind
    """What kind of prediction it is."""
    gain_inside_interval: bool
    """Whether the gain over what ran, or else over DDP, is smaller than the prediction's error may be."""
    decisions: tuple[Decision, ...]
    """Most valuable first."""

    @property
    def bound_seconds(self) -> float:
        """The longer of compute and network: no order of the same work is faster."""
        return max(self.compute_seconds, self.network_seconds)

    @property
    def speedup_over_ddp(self) -> float:
        """1.25: DDP's step is 1.25 times as long."""
        return self.ddp_seconds / self.step_seconds if self.step_seconds else 1.0

    @property
    def speedup_over_next(self) -> float:
        return self.next_builder_seconds / self.step_seconds if self.step_seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        # Of a recorded job there is one bound, the measured one, which the diagnosis has.
        derived = ("speedup_over_ddp", "speedup_over_next", *(() if self.recorded else ("bound_seconds",)))
        bounds = {} if self.interval is None else self.interval.fields("step")
        plain = {name: value for name, value in asdict(self).items() if name != "interval"}
        return plain | bounds | {name: getattr(self, name) for name in derived}

    def text(self) -> str:
        """A few readable sentences."""
        limit = "the network" if self.network_seconds >= self.compute_seconds else "compute"
        above = max(1.0, self.step_seconds / self.bound_seconds) if self.bound_seconds else 1.0
        others = {self.next_builder: self.next_builder_seconds, "ddp": self.ddp_seconds}
        compared = [
            f"{format_speedup(seconds, self.step_seconds)} as {_NAMES.get(name, name)} ({format_seconds(seconds)})"
            for name, seconds in reversed(others.items())
            if name != self.strategy
        ]
        lines = [
            f"A step of {self.strategy!r} is {'measured at' if self.measured else 'predicted to take'} "
            f"{self.interval or format_seconds(self.step_seconds)}: {', '.join(compared)}"
            f"{GAIN_INSIDE if self.gain_inside_interval else ''}."
        ]
        if self.kind == "model":
            lines.append(UNMEASURED)
        # Of a recorded job, the bound that was measured is shown elsewhere.
        if not self.recorded:
            busy = format_seconds(self.bound_seconds)
            lines.append(f"Its limit is {limit}, which is busy for {busy}; the step takes {above:.2f}× that.")
        telling = [d for d in self.decisions if abs(d.worth_seconds) >= _MATTERS * self.step_seconds]
        lines += [f"- {each.what}: without it {format_seconds(each.without_seconds)}." for each in telling]
        if not telling:
            lines.append("- No single decision changes the step by more than 0.1%.")
        return "\n".join(lines)


def explain(
    strategy: Strategy,
    graph: ModelGraph,
    cluster: ClusterSpec,
    costs: Costs | None = None,
    *,
    ran: tuple[Strategy, float] | None = None,
    scale: float = 1.0,
    trust: Trust | None = None,
    changed: Kind = "same",
) -> Explanation:
    """Replays the strategy, the builders, and the strategy with one decision undone at a time.

    `ran` is the strategy of a recorded job and its measured step; `scale` is that step over its replay, with which
    every predicted time is multiplied. `trust` is what the recording says about predictions, `changed` what differs
    from it beside the strategy; without `trust` nothing was measured.
    """
    costs = costs or Costs()

    def predicted(other: Strategy) -> float:
        return scale * predict(graph, cluster, costs, other)

    plan = lower(graph, cluster, strategy)
    measured = ran is not None and strategy == ran[0]
    seconds = ran[1] if ran is not None and measured else scale * step_seconds(plan, costs)
    others = {name: predicted(build_strategy(name, graph, cluster)) for name in ("ddp", *BUILDERS)}
    if ran is not None and ran[0].name == "ddp":
        others["ddp"] = ran[1]
    nearest = min((name for name in others if name != strategy.name), key=lambda name: others[name])
    undone = [(name, what, predicted(other)) for name, what, other in _undone(strategy, plan, costs)]
    kind = hardest(changed, kind_of_strategy(strategy, graph, ran and ran[0])) if trust else "model"
    trust = trust or Trust.here(cluster.device_of(cluster.workers[0]).device)
    interval = None if measured else trust.interval(seconds, kind)
    before = others["ddp"] if ran is None else ran[1]
    decisions = [Decision(name, what, without, without - seconds) for name, what, without in undone]
    return Explanation(
        strategy=strategy.name,
        step_seconds=seconds,
        interval=interval,
        ddp_seconds=others["ddp"],
        next_builder=nearest,
        next_builder_seconds=others[nearest],
        compute_seconds=scale * _compute_seconds(plan, costs),
        network_seconds=scale * network_seconds(plan, costs),
        measured=measured,
        recorded=ran is not None,
        kind=kind,
        gain_inside_interval=interval is not None and kind != "model" and interval.may_gain_nothing(before),
        decisions=tuple(sorted(decisions, key=lambda each: -each.worth_seconds)),
    )


def _compute_seconds(plan: Plan, costs: Costs) -> float:
    """The slowest rank's step without communication."""
    roles = find_roles(plan, costs.compute_scale)
    updates = sum(variable_updates(plan).values())
    size = sum(variable.bytes for variable in plan.graph.gradient_order)
    own = 1.0 if any(message.replicated for message in plan.messages) else 0.0
    slowest = float(segment_seconds(plan, costs, roles).sum(axis=1).max(initial=0.0))
    return slowest + costs.gap_seconds + own * costs.update(size, updates)


def _undone(strategy: Strategy, plan: Plan, costs: Costs) -> Iterator[tuple[str, str, Strategy]]:
    """(name, description, the strategy without it) for each decision of the strategy."""
    schedule = strategy.schedule
    if strategy.fsdp is not None:
        yield from _undone_choices(strategy, strategy.fsdp, plan.graph)
        return
    if schedule.mode != "barrier":
        yield "mode", "updates overlap the next forward", rescheduled(strategy, mode="barrier")
    gradients = gradients_of(plan, costs, coarsen=False)
    if gradients is not None and any(len(message.variables) > 1 for message in plan.messages):
        what = f"{len(plan.graph.gradient_order)} gradients share {len(plan.messages)} messages"
        yield "fusion", what, arranged(gradients, gradients.arrangement(barrier=schedule.mode == "barrier"), strategy)
    ends: dict[int, int] = {}
    for item in schedule.order:
        ends[item.group] = max(ends.get(item.group, 0), item.stop)
    # Each message whole, where its first slice went.
    whole = tuple(Slice(group=group, start=0, stop=stop) for group, stop in ends.items())
    uncut = rescheduled(strategy, slice_bytes=None, order=whole)
    if uncut.schedule != schedule:
        cuts = len(plan.communication) - len(plan.messages)
        yield "slicing", f"messages are cut {cuts} times so that urgent ones can overtake", uncut
    if schedule.policy != "fifo":
        what = "messages needed first by the next forward go first"
        yield "order", what, rescheduled(strategy, policy="fifo", order=(), pinned=False)
    if schedule.credit_bytes is not None:
        what = f"up to {format_bytes(schedule.credit_bytes)} of messages are in flight at once"
        yield "credit", what, rescheduled(strategy, in_flight=1, credit_bytes=None)
    yield from _undone_modules(strategy, plan.graph)
    for kind in sorted({m.synchronizer for m in plan.messages} - {"all_reduce"}):
        what = f"{sum(m.synchronizer == kind for m in plan.messages)} messages use {kind}"
        reduced = _changed(strategy, lambda shard: shard.synchronizer, kind, lambda shard: Shard(group=shard.group))
        yield f"synchronizer {kind}", what, reduced
    encoded = Counter(m.encoder.name for m in plan.messages if m.encoder.name != "none")
    plain = {"encoder": Encoder()}
    for encoder, count in sorted(encoded.items()):
        names = {v for m in plan.messages if m.encoder.name == encoder for v in m.variables}
        what = f"the gradients of {len(names)} variables are encoded as {encoder} ({count} messages)"
        exact = _changed(strategy, lambda shard: shard.encoder.name, encoder, lambda s: s.model_copy(update=plain))
        yield f"encoder {encoder}", what, exact


def _undone_modules(strategy: Strategy, graph: ModelGraph) -> Iterator[tuple[str, str, Strategy]]:
    timed = {
        way: {block.modules for block in graph.blocks if way in block.seconds} for way in ("recomputed", "compiled")
    }
    again = _UNTIMED if {(path,) for path in strategy.recompute} - timed["recomputed"] else ""
    fused = _UNTIMED if {*strategy.fusion} - timed["compiled"] else ""
    for name, what, none in (
        ("accumulation", f"the batch is computed in {strategy.accumulation} micro-batches", 1),
        ("recompute", f"{len(strategy.recompute)} modules are recomputed in backward{again}", ()),
        ("fusion", f"{len(strategy.fusion)} regions are compiled{fused}", ()),
        ("precision", f"forward runs under autocast to {strategy.precision}", None),
    ):
        if getattr(strategy, name) != none:
            yield "op_fusion" if name == "fusion" else name, what, strategy.model_copy(update={name: none})


def _undone_choices(strategy: Strategy, fsdp: FullyShard, graph: ModelGraph) -> Iterator[tuple[str, str, Strategy]]:
    """The same for the choices of `fully_shard`."""
    kept = sum(reshard is False for path, reshard in fsdp.units.items() if path)
    freed = dict.fromkeys(fsdp.wrapped, True)
    for name, made, what, undone in (
        ("units", fsdp.wrapped, f"{len(fsdp.wrapped)} modules are gathered and reduced separately", {"units": {}}),
        ("reshard", kept, f"{kept} of them stay gathered until backward", {"units": freed}),
        ("prefetch", fsdp.prefetch, f"modules are gathered {fsdp.prefetch} ahead", {"prefetch": 0}),
        ("replicas", fsdp.replicas > 1, f"{fsdp.replicas} groups of ranks each hold all shards", {"replicas": 1}),
    ):
        if made:
            yield name, what, strategy.model_copy(update={"fsdp": fsdp.model_copy(update=undone)})
    yield from _undone_modules(strategy, graph)


def _changed(
    strategy: Strategy, decided: Callable[[Shard], str], value: str, change: Callable[[Shard], Shard]
) -> Strategy:
    """The strategy with those shards changed for which this was decided."""
    variables = {
        name: config.model_copy(
            update={"shards": tuple(change(shard) if decided(shard) == value else shard for shard in config.shards)}
        )
        for name, config in strategy.variables.items()
    }
    return strategy.model_copy(update={"variables": variables})
