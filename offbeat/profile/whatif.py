"""Predict how a recorded job would run with changes such as 'bandwidth=2x' or 'workers=64'.

Where the plan of the job is known (Offbeat's jobs and DDP's), the changed plan is simulated with what was measured. Of
other jobs only the trace is known: it is replayed on other links and devices (`offbeat.profile.replay_trace`), and what
asks for another plan needs a `strategy`. So is a trace with messages from rank to rank, which no plan foresees: an
asynchronous server answers when it comes to it.

More or fewer workers change what a collective costs as a ring would: the bytes that a participant sends for each byte
it puts in (`sent_per_byte`, 2(w−1)/w for all-reduce) and the messages that follow each other (`latency_steps`).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from offbeat.cluster import ClusterSpec
from offbeat.cost.interval import Trust, error_of_median, hardest
from offbeat.cost.measured import SERVED, CollectiveFit, Costs
from offbeat.cost.outcomes import Kind as OutcomeKind
from offbeat.cost.outcomes import job_of
from offbeat.cost.tables import latency_steps
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan
from offbeat.plan.model import sent_per_byte
from offbeat.profile.measure import Profile
from offbeat.profile.plans import ANYWHERE
from offbeat.profile.replay_trace import replay_trace
from offbeat.runtime.comm import goes_straight
from offbeat.simulate.predict import simulate
from offbeat.strategy import Encoder, Shard, Strategy, VariableConfig, strategy_for, transfer
from offbeat.timeline import Timeline
from offbeat.units import quote

Level = Literal["inter_bandwidth", "inter_latency", "intra_bandwidth", "intra_latency"]
Kind = Literal["bandwidth", "latency", Level, "compute", "workers", "strategy", "straggler", "wire"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXAMPLES = (
    "bandwidth=2x, latency=0.5x, inter_bandwidth=2x, intra_latency=0.5x, compute=1.5x, workers=64, strategy=overlap, "
    "straggler=3:2x, wire=fp16"
)
PLANNED_JOBS = ("offbeat", "ddp")
"""Jobs whose plan is known from their trace."""
WIRES = ("fp16", "bf16", "none")
_WORDS = {
    "workers": "{0.number} workers",
    "straggler": "rank {0.number} computes {0.factor:g}x as long",
    "inter_bandwidth": "{0.factor:g}x bandwidth between nodes",
    "inter_latency": "{0.factor:g}x latency between nodes",
    "intra_bandwidth": "{0.factor:g}x bandwidth within nodes",
    "intra_latency": "{0.factor:g}x latency within nodes",
    "strategy": "strategy {0.name}",
    "wire": "{0.name} on the wire",
    "compute": "{0.factor:g}x as fast computing",
}
MOST_WORKERS = 100_000
_OUTCOMES: dict[str, OutcomeKind] = {"workers": "ranks", "strategy": "strategy", "wire": "strategy"}
"""Of the changes that are no other links or devices."""
_MESSAGE = re.compile(r"(?:update )?m(\d+)(?:\.(\w+\[.*\]))?")


@dataclass(frozen=True, slots=True)
class Change:
    """One difference from the job that was measured."""

    kind: Kind
    factor: float = 1.0
    """Of bandwidth, latency or the speed of computing; of a straggler, how many times as long it computes."""
    number: int = 0
    """Of workers, or the straggler's rank."""
    name: str = ""
    """Of a strategy's builder or file, or of what goes on the wire."""

    def __str__(self) -> str:
        if self.kind == "wire" and self.name == "none":
            return "nothing encoded on the wire"
        return _WORDS.get(self.kind, "{0.factor:g}x {0.kind}").format(self)


def parse_what_if(text: str) -> Change:
    """Parses one change, such as 'bandwidth=2x'."""
    kind, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value or kind not in KINDS:
        raise OffbeatError(f"what-if {quote(text)}: not one of {EXAMPLES}")
    match kind:
        case "workers":
            if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:12]) <= MOST_WORKERS:
                raise OffbeatError(f"what-if {quote(text)}: workers must be a number from 1 to {MOST_WORKERS}")
            return Change(kind, number=int(value))
        case "straggler":
            rank, colon, factor = value.partition(":")
            if not colon or not rank.isascii() or not rank.isdecimal():
                raise OffbeatError(f"what-if {quote(text)}: a straggler is written RANK:FACTOR, such as 3:2x")
            return Change(kind, factor=_factor(text, factor), number=int(rank[:12]))
        case "strategy":
            return Change(kind, name=value)
        case "wire":
            if value not in WIRES:
                raise OffbeatError(f"what-if {quote(text)}: wire must be {', '.join(WIRES)}, not {quote(value)}")
            return Change(kind, name=value)
        case _:
            return Change(kind, factor=_factor(text, value))


def what_if(profile: Profile | Timeline, changes: Iterable[Change | str]) -> tuple[Timeline, str]:
    """The predicted timeline with all of these changes at once, and the changes in words. Without changes, a replay."""
    parsed = [parse_what_if(change) if isinstance(change, str) else change for change in changes]
    given = Counter((change.kind, change.number if change.kind == "straggler" else 0) for change in parsed)
    for (kind, _), times in given.items():
        if times > 1:
            raise OffbeatError(f"what-if: {kind} is given twice")
    words = ", ".join(map(str, parsed)) or "as measured"
    if isinstance(profile, Timeline):
        return _replayed(profile, parsed, "the trace does not tell the job's plan"), words
    if not plan_known(profile) and not any(change.kind == "strategy" for change in parsed):
        why = f"the plan of a job of kind {profile.job!r} is unknown"
        if profile.synchronisations > 1:
            why = f"the job synchronises {profile.synchronisations} times a step, which no plan does"
        elif profile.messages_recorded:
            why = "the recording has messages from rank to rank, which are replayed as they were sent"
        return _replayed(profile.timeline, parsed, f"{why}; add strategy=BUILDER"), words
    plan, costs = changed(profile, parsed)
    return with_tensor_names(simulate(plan, costs, memory=False), plan), words


def with_tensor_names(timeline: Timeline, plan: Plan) -> Timeline:
    """The timeline with the variables of each message in the place of its number."""

    def named(name: str) -> str:
        found = _MESSAGE.fullmatch(name)
        if found is None or int(found[1]) >= len(plan.messages):
            return name
        held = plan.messages[int(found[1])].variables
        more = f" to {held[-1]} ({len(held)} tensors)" if len(held) > 1 else ""
        return f"{found[2] or 'update'} of {held[0]}{more}"

    return replace(timeline, names=tuple(map(named, timeline.names)))


def replay_scale(recording: Profile | Timeline) -> float:
    """The measured step over its replay: predicted seconds are multiplied by it, so that gains are relative to the step
    that was measured."""
    timeline = recording if isinstance(recording, Timeline) else recording.timeline
    if not timeline.marks.size or timeline.source == "predicted":
        return 1.0
    replayed = what_if(recording, ())[0].iteration_time
    return timeline.iteration_time / replayed if replayed else 1.0


def trust_in(recording: Profile | Timeline) -> Trust:
    """How far predictions from a recording can be trusted: by the scatter of its steps and collectives, and by what
    earlier predictions turned out to be."""
    if isinstance(recording, Timeline):
        return Trust.here("", noise=error_of_median(recording.step_seconds.tolist()))
    noise = math.hypot(error_of_median(recording.timeline.step_seconds.tolist()), recording.fit_error)
    return Trust.here(recording.cluster.device_of(0).device, job_of(recording.graph), noise)


def kind_of(changes: Iterable[Change]) -> OutcomeKind:
    """What kind of prediction these changes make."""
    return hardest(*(_OUTCOMES.get(change.kind, "link") for change in changes))


def plan_known(profile: Profile) -> bool:
    """Whether the job's own plan tells all that it did: it is Offbeat's or DDP's, or there is nothing to send."""
    planned = profile.job in PLANNED_JOBS and profile.synchronisations == 1 and not profile.messages_recorded
    return planned or profile.cluster.world_size == 1


def changed(profile: Profile, changes: Sequence[Change]) -> tuple[Plan, Costs]:
    """The plan and the costs of the changed job."""
    wanted = {change.kind: change for change in changes}
    profile = _with_links(profile, {change.kind: change.factor for change in changes})
    graph, cluster, costs, strategy = profile.graph, profile.cluster, profile.costs, profile.strategy
    if "workers" in wanted:
        cluster, costs = resized(cluster, costs, wanted["workers"].number)
        if "strategy" not in wanted and cluster is not profile.cluster:
            strategy = transfer(strategy, graph, cluster)
    if "strategy" in wanted:
        strategy = strategy_for(wanted["strategy"].name, graph, cluster, "what-if strategy")
    if "wire" in wanted:
        strategy = with_wire(strategy, graph, wanted["wire"].name)
    if "compute" in wanted:
        # Updates become faster too.
        factor, per_byte = wanted["compute"].factor, costs.update_seconds_per_byte
        costs = replace(
            costs,
            compute_scale={rank: costs.compute_scale.get(rank, 1.0) / factor for rank in range(cluster.world_size)},
            update_call_seconds=costs.update_call_seconds / factor,
            update_seconds_per_byte=None if per_byte is None else per_byte / factor,
        )
    for change in changes:
        if change.kind == "straggler":
            if change.number >= cluster.world_size:
                last = cluster.world_size - 1
                raise OffbeatError(f"what-if straggler: rank {change.number} is outside the job's ranks 0 to {last}")
            scale = costs.compute_scale.get(change.number, 1.0) * change.factor
            costs = replace(costs, compute_scale={**costs.compute_scale, change.number: scale})
    # The strategy was made for the cluster as it was.
    strategy = strategy.model_copy(update=ANYWHERE)
    return replace(profile, cluster=cluster, strategy=strategy).plan, costs


def _with_links(profile: Profile, factors: Mapping[str, float]) -> Profile:
    """The profile on other links; OffbeatError where none of its links are of the level that changes."""
    nodes = profile.cluster.nodes
    missing = {"inter": len(nodes) == 1, "intra": len(nodes) == profile.cluster.world_size}
    why = {"inter": "all ranks share one node", "intra": "no two ranks share a node"}
    for kind in get_args(Level):
        if kind in factors and missing[kind[:5]]:
            raise OffbeatError(f"what-if {kind}: {why[kind[:5]]}")

    def level(name: str) -> tuple[float, float]:
        bandwidth, latency = factors.get("bandwidth", 1.0), factors.get("latency", 1.0)
        return bandwidth * factors.get(f"{name}_bandwidth", 1.0), latency * factors.get(f"{name}_latency", 1.0)

    between, within = level("inter"), level("intra")
    return profile if between == within == (1.0, 1.0) else profile.with_links(*between, within)


def resized(cluster: ClusterSpec, costs: Costs, workers: int) -> tuple[ClusterSpec, Costs]:
    """The cluster with that many ranks, and the costs of its collectives."""
    after = with_workers(cluster, workers)
    before = cluster.world_size
    if len(after.nodes) == 1 < len(cluster.nodes):
        # What spans nodes now says nothing of the ranks that are left, which share one.
        costs, before = replace(costs, collectives=costs.within, within={}), max(node.devices for node in cluster.nodes)
    return after, costs_of_workers(costs, before, workers)


def scaled_fit(kind: str, fit: CollectiveFit, before: int, after: int) -> CollectiveFit:
    """The fit for another number of participants, by a ring's formulas; both numbers are at least 2."""
    sent = sent_per_byte(kind, before)
    share = sent_per_byte(kind, after) / sent if sent else 1.0
    return fit.scaled(latency_steps(kind, after) / latency_steps(kind, before), share)


def costs_of_workers(costs: Costs, before: int, after: int) -> Costs:
    """The costs of a job of `after` ranks: the collectives of all ranks scaled, those of fewer ranks kept."""
    fits = {key: fit for key, fit in costs.collectives.items() if key[1] <= after}
    straight = costs.straight and goes_straight("gloo", after)
    for (kind, participants), fit in costs.collectives.items():
        if participants == before > 1 and after > 1:
            served = costs.straight and kind in SERVED
            scaled = _scaled_straight(fit, before, after, straight) if served else scaled_fit(kind, fit, before, after)
            fits.setdefault((kind, after), scaled)
    scale = {rank: factor for rank, factor in costs.compute_scale.items() if rank < after}
    return replace(costs, collectives=fits, straight=straight, compute_scale=scale)


def _scaled_straight(fit: CollectiveFit, before: int, after: int, straight: bool) -> CollectiveFit:
    """A root's link carries the bytes of all others, unless there are so many ranks that bytes go along a chain."""
    one = fit.seconds_per_byte / (before - 1)
    if straight:
        return replace(fit, seconds_per_byte=one * (after - 1))
    return CollectiveFit(fit.overhead_seconds * (after - 1), fit.latency_seconds * (after - 1), one)


def with_workers(cluster: ClusterSpec, workers: int) -> ClusterSpec:
    """The cluster with that many ranks: its first ones, or more nodes of the same kind."""
    if workers == cluster.world_size:
        return cluster
    if cluster.servers:
        raise OffbeatError("workers: a job with servers that hold no replica is predicted with its own ranks only")
    if workers < cluster.world_size:
        return cluster.subset(workers)
    if not cluster.is_homogeneous:
        raise OffbeatError(
            f"workers: {workers} are more than the {cluster.world_size} of cluster {cluster.name!r}, "
            f"whose nodes differ, so additional ones are undefined"
        )
    node = cluster.nodes[0]
    if len(cluster.nodes) == 1 and node.devices > 1:
        return cluster.replace(nodes=(node.model_copy(update={"devices": workers}),), tables=())
    if workers % node.devices:
        raise OffbeatError(f"workers: {workers} is not a multiple of the {node.devices} ranks per node")
    nodes = tuple(node.named(f"node{number}") for number in range(workers // node.devices))
    return cluster.replace(nodes=nodes, tables=())


def with_wire(strategy: Strategy, graph: ModelGraph, name: str) -> Strategy:
    """The strategy with this encoder for every dense gradient that is neither stale nor asynchronous."""

    def encoded(shard: Shard) -> Shard:
        dense = shard.synchronizer in ("all_reduce", "parameter_server", "sharded")
        if not dense or shard.staleness or shard.asynchronous:
            return shard
        return shard.model_copy(update={"encoder": Encoder(name=name)})  # type: ignore[arg-type] # one of WIRES

    configs = {variable.name: strategy.variables.get(variable.name, VariableConfig()) for variable in graph.variables}
    for variable, config in configs.items():
        configs[variable] = config.model_copy(update={"shards": tuple(map(encoded, config.shards))})
    return strategy.model_copy(update={"variables": configs})


def _factor(text: str, value: str) -> float:
    try:
        factor = float(value.strip().removesuffix("x"))
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise OffbeatError(f"what-if {quote(text)}: {quote(value)} is not a factor above 0, such as 2x")
    return factor


def _replayed(timeline: Timeline, changes: Sequence[Change], why: str) -> Timeline:
    for change in changes:
        if change.kind not in ("bandwidth", "latency", "compute", "straggler"):
            raise OffbeatError(f"what-if {change.kind}: {why}")
    factors = {change.kind: change.factor for change in changes if change.kind != "straggler"}
    stragglers = {change.number: change.factor for change in changes if change.kind == "straggler"}
    return replay_trace(timeline, stragglers=stragglers, **factors)
