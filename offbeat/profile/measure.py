"""Build a Profile from recorded traces: the graph with measured times, the strategy that ran, and communication costs.

Compute is what lies between the events that communication cares about: a module that reads variables begins, a
gradient is complete. Time in which a rank waited for messages or applied updates is taken out. What counts is the rank
that was last in each step; a rank that is always slower than the others keeps its factor (`Costs.compute_scale`).

Plans synchronise once a step. A job that accumulates gradients and synchronises in each of its passes is replayed as it
was recorded; what is predicted for another strategy is its step with `no_sync()` around all passes but the last.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from os import PathLike
from pathlib import Path
from statistics import median, mode
from typing import Any

import numpy as np

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.cost.interval import scatter
from offbeat.cost.measured import SERVED, CollectiveFit, Costs, in_a_row
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.plan.model import sent_per_byte
from offbeat.profile.compute import (
    compute_scale,
    gap_seconds,
    host_late_share,
    measured_graph,
    update_costs,
    with_variables_of,
)
from offbeat.profile.lines import RankTrace, Step, read_rank
from offbeat.profile.plans import RecordedPlan, of_all_ranks
from offbeat.profile.traces import FIRST_TRANSACTION, align, read_traces, to_timeline
from offbeat.runtime.comm import known_costs
from offbeat.simulate.predict import simulate
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig
from offbeat.timeline import KINDS, Timeline
from offbeat.timeline.observer import covered

WARM_UP_STEPS = 3
LAUNCH_BOUND = 0.1
"""Share of a step in which the GPU waits for the host, from which on it is worth a note."""
MOST_CORRECTED = 4.0
"""The largest factor by which a job's own collectives correct what was calibrated."""
SERVER_CORRECTIONS = 4
"""Rounds of correcting servers' messages and replaying; the closest one counts."""


@dataclass(frozen=True)
class Profile:
    """A recorded job, ready to be replayed."""

    timeline: Timeline
    graph: ModelGraph
    cluster: ClusterSpec
    strategy: Strategy
    costs: Costs
    job: str
    synchronisations: int = 1
    """Times that a step synchronises its gradients; plans do so once."""
    recorded: RecordedPlan | None = None
    """The plan in force while an Offbeat job was recorded."""
    host_late: float = 0.0
    """Share of a step in which the GPU waits for the host to launch its next work."""
    fit_error: float = 0.0
    """How far the collectives of single steps scatter around their fit, as a share of the step."""

    @cached_property
    def plan(self) -> Plan:
        """The strategy's plan; for the recorded strategy, with the issue order that was in force."""
        plan = lower(self.graph, self.cluster, self.strategy)
        if self.recorded is None or self.recorded.strategy != self.strategy:
            return plan
        return self.recorded.applied_to(plan)

    @property
    def messages_recorded(self) -> bool:
        """Whether messages from rank to rank were recorded, such as those of asynchronous servers."""
        return bool((self.timeline.task >= FIRST_TRANSACTION).any())

    @property
    def step_seconds(self) -> float:
        """Median step, as measured."""
        return self.timeline.iteration_time

    def with_links(
        self, bandwidth: float = 1.0, latency: float = 1.0, intra: tuple[float, float] | None = None
    ) -> "Profile":
        """The same job on links with so many times the bandwidth and the latency, within nodes `intra` times if given.

        A ring of all ranks is as fast as its slowest hop.
        """
        between = bandwidth, latency
        within = intra or between
        cluster = self.cluster.with_links(*between, within)
        everyone = within if len(cluster.nodes) == 1 else between
        if between != within and len(cluster.nodes) > 1:
            ring = range(cluster.world_size)
            everyone = cluster.ring_bandwidth(ring) / self.cluster.ring_bandwidth(ring), latency
        costs = replace(
            self.costs,
            collectives={
                key: fit.on_links(*(everyone if key[1] == cluster.world_size else between))
                for key, fit in self.costs.collectives.items()
            },
            within={key: fit.on_links(*within) for key, fit in self.costs.within.items()},
        )
        return replace(self, cluster=cluster, costs=costs)


def profile_in_place(
    recorded: Sequence[Sequence[dict[str, Any]]], link: tuple[float, float] | None, world: int, graph: ModelGraph
) -> Profile:
    """The profile of a running job from what `MemoryRecorder` noted on its first ranks, with the variables of `graph`.

    `link` is (seconds, seconds per byte) of an all-reduce among all ranks, where measured.
    """
    traces = [read_rank(Path("job", f"rank{rank}"), lines) for rank, lines in enumerate(recorded)]
    fits = {} if link is None else {("all_reduce", world): CollectiveFit(link[0], 0.0, link[1])}
    costs = replace(known_costs(traces[0].backend, world), collectives=fits)
    profile = make_profile(traces, costs)
    return replace(profile, graph=with_variables_of(profile.graph, graph))


def load_profile(folder: str | PathLike[str]) -> Profile:
    """Reads a folder that the recorder wrote."""
    traces, notes = read_traces(folder)
    costs = Costs()
    calibration, described = (Path(folder) / name for name in ("calibration.json", "cluster.yaml"))
    if calibration.exists():
        raw = files.read_json(calibration, "calibration")
        costs = Costs.from_dict(raw.get("costs") if isinstance(raw, dict) else None, str(calibration))
    return make_profile(traces, costs, ClusterSpec.load(described) if described.exists() else None, notes)


def make_profile(
    traces: list[RankTrace], costs: Costs, cluster: ClusterSpec | None = None, notes: Sequence[str] = ()
) -> Profile:
    """The profile of a job. `costs` are the calibrated ones; without a recorded plan the strategy is DDP's buckets."""
    said = list(notes)
    steady, recorded = _of_one_plan([replace(trace, steps=_steady(trace)) for trace in traces], said)
    strategy = recorded.strategy if recorded else None
    steady, alignment = align(steady)
    said += alignment.notes if alignment else ()
    # How often most steps issue each collective.
    synchronisations = 1 + mode(max((row.turn for row in step.communication), default=0) for step in steady[0].steps)
    parts = 1 if strategy is None else strategy.accumulation
    graph, costs = measured_graph(steady, costs, parts, synchronisations)
    if synchronisations > 1:
        said.append(
            f"gradients are synchronised {synchronisations} times a step; with model.no_sync() around all backward "
            f"passes but the last they would be once, as in the strategies that are predicted"
        )
    if (late := host_late_share(steady)) > LAUNCH_BOUND:
        said.append(
            f"in {late:.0%} of the step the GPU waits for the host to launch its next work; torch.compile, CUDA graphs "
            f"or fewer and larger operations would help there, a faster network would not"
        )
    per_call, per_byte = update_costs(steady, graph)
    fits, fit_error = _fit_collectives(steady, costs, (strategy.schedule if strategy else Schedule()).in_flight)
    costs = replace(
        costs,
        collectives=fits,
        gap_seconds=gap_seconds(steady),
        compute_scale=compute_scale(steady),
        update_call_seconds=per_call,
        update_seconds_per_byte=per_byte,
    )
    world = steady[0].world
    if world > 1 and not any(step.communication for trace in steady for step in trace.steps):
        said.append(f"{world} ranks, but no communication was seen in their traces")
    timeline = to_timeline(steady, said)
    if fit_error:
        fit_error *= min(1.0, _busy_seconds(timeline, max) / timeline.iteration_time)
    profile = Profile(
        timeline=timeline,
        graph=graph,
        cluster=cluster or _cluster(steady, costs, said),
        strategy=strategy or _bucket_strategy(steady, graph),
        costs=costs,
        job=traces[0].job,
        synchronisations=synchronisations,
        recorded=recorded,
        host_late=late,
        fit_error=fit_error,
    )
    calibrated = costs.straight and any(kind in SERVED for kind, _ in costs.collectives)
    served = any(row.kind in (*SERVED, "relay") for row in steady[0].steps[-1].communication)
    return _with_own_servers(profile) if calibrated and served else profile


def _steady(trace: RankTrace) -> tuple[Step, ...]:
    """The steps after the warm-up."""
    steps = trace.steps[WARM_UP_STEPS:] if len(trace.steps) > 2 * WARM_UP_STEPS else trace.steps
    if not steps:
        raise OffbeatError(f"{trace.path}: contains no complete step")
    return steps


def _of_one_plan(traces: list[RankTrace], notes: list[str]) -> tuple[list[RankTrace], RecordedPlan | None]:
    """The steps under the plan that most of them followed, the later of equals, and that plan if there is one."""
    plans = [step.plan for step in traces[0].steps if step.plan is not None]
    if not plans:
        return traces, None
    followed = max(reversed(plans), key=lambda plan: sum(plan is each for each in plans))
    kept = {step.number for step in traces[0].steps if step.plan is followed}
    of_plan = [replace(trace, steps=tuple(step for step in trace.steps if step.number in kept)) for trace in traces]
    if not all(trace.steps for trace in of_plan):
        raise OffbeatError(f"{traces[0].path.parent}: no step is complete on all ranks")
    left_out = len(traces[0].steps) - len(kept)
    if left_out:
        notes.append(f"{left_out} of {len(traces[0].steps)} steps followed another plan and are left out")
    return of_plan, of_all_ranks([trace.steps[0].plan for trace in of_plan if trace.steps[0].plan is not None])


def _fit_collectives(
    traces: list[RankTrace], costs: Costs, in_flight: int
) -> tuple[dict[tuple[str, int], CollectiveFit], float]:
    """The calibrated fits, each scaled so that the job's own collectives take as long in total as they did, and how far
    single steps scatter around that (the worst of the fits).

    While several share the link, only the time for which it is busy can be measured.
    """
    fits, error = dict(costs.collectives), 0.0
    for (kind, participants), steps in _link_seconds(traces).items():
        known = fits.get((kind, participants))
        if kind == "relay" or (costs.straight and kind in SERVED):
            # How they share links depends on their roots, and a relay is a reduce and a broadcast: `_with_own_servers`.
            continue
        if known is None:
            each = [sum(s for _, s, _ in rows) / max(1, sum(size for size, _, _ in rows)) for rows in steps]
            fits[kind, participants] = CollectiveFit(0.0, 0.0, median(each))
            error = max(error, scatter(each))
            continue
        seconds = []
        for rows in steps:
            taken = [known.occupied(size) for size, _, _ in rows]
            expected = sum(in_a_row(taken, [known.overhead_seconds] * len(rows), in_flight))
            expected += known.latency_seconds * sum(alone for _, _, alone in rows)
            moving = known.seconds_per_byte * sum(size for size, _, _ in rows)
            seconds.append((sum(spent for _, spent, _ in rows), expected, moving))
        constant, per_byte = (median(each) for each in zip(*(corrections(*step) for step in seconds), strict=True))
        fits[kind, participants] = known.scaled(constant, per_byte)
        error = max(error, scatter([spent / expected if expected else 1.0 for spent, expected, _ in seconds]))
    return fits, error


def corrections(spent: float, expected: float, moving: float) -> tuple[float, float]:
    """Factors on a fit's constants and on its seconds per byte: from the seconds for which a step's collectives took
    the link, those that the fit gives, and those of the latter that are due to bytes.

    A collective that was calibrated alone shows a delay that others hide where they queue behind each other. So what is
    too much comes off the constants first.
    """
    if not expected:
        return 1.0, 1.0
    if spent < expected and moving:
        hidden = max(0.0, spent - moving) / (expected - moving) if expected > moving else 1.0
        return hidden, max(min(1.0, spent / moving), 1 / MOST_CORRECTED)
    factor = min(max(spent / expected, 1 / MOST_CORRECTED), MOST_CORRECTED)
    return factor, factor


def _with_own_servers(profile: Profile) -> Profile:
    """The profile with reduces and broadcasts scaled so that replay keeps the network busy as long as the job did.

    What a relay's small slices cost beside their bytes is scaled too, because several are in flight at once.
    """
    plan = profile.plan
    relayed = any(task.kind == "relay" for task in plan.communication)
    wanted, factor = _busy_seconds(profile.timeline, max) / profile.synchronisations, 1.0
    tried: list[tuple[float, Costs]] = []
    # Messages also delay each other, so that the busy time is not proportional to what each one takes.
    for _ in range(SERVER_CORRECTIONS):
        fits = {
            level: {
                key: fit.scaled(factor if relayed else 1.0, factor) if key[0] in SERVED else fit
                for key, fit in known.items()
            }
            for level, known in (("collectives", profile.costs.collectives), ("within", profile.costs.within))
        }
        costs = replace(profile.costs, **fits)  # type: ignore[arg-type] # two of its fields
        busy = _busy_seconds(simulate(plan, costs, memory=False), min)
        if not (busy and wanted):
            return profile
        tried.append((abs(busy / wanted - 1), costs))
        factor = min(max(factor * wanted / busy, 1 / MOST_CORRECTED), MOST_CORRECTED)
    return replace(profile, costs=min(tried, key=lambda found: found[0])[1])


def _busy_seconds(timeline: Timeline, begins: Callable[[float, float], float]) -> float:
    """Seconds of a step in which collectives were in flight, each from the min or max (`begins`) of its starts on."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for number in np.flatnonzero(timeline.kind == KINDS.index("communication")):
        key = int(timeline.step[number]), int(timeline.task[number])
        start, end = float(timeline.start[number]), float(timeline.end[number])
        known = spans.get(key, (start, end))
        spans[key] = begins(known[0], start), max(known[1], end)
    return covered((start, max(start, end)) for start, end in spans.values()) / (timeline.marks.shape[1] - 1)


def _link_seconds(traces: list[RankTrace]) -> dict[tuple[str, int], list[list[tuple[int, float, bool]]]]:
    """By kind and participants, for each step: (bytes, seconds for which it alone kept the link busy, alone or not)."""
    found: dict[tuple[str, int], list[list[tuple[int, float, bool]]]] = {}
    by_step = [{step.number: step for step in trace.steps} for trace in traces]
    for number in sorted(set.intersection(*map(set, by_step))):
        rows = [{(row.turn, row.task): row for row in steps[number].communication} for steps in by_step]
        spans = []
        for task in set.intersection(*map(set, rows)):
            issued = max(row[task].issued for row in rows)
            spans.append((issued, max(issued, median(row[task].finished for row in rows)), rows[0][task]))
        of_step: dict[tuple[str, int], list[tuple[int, float, bool]]] = {}
        before: list[tuple[float, float]] = []
        for issued, finished, row in sorted(spans, key=lambda span: span[1]):
            others = before[bisect_right(before, issued, key=itemgetter(1)) :]
            seconds = finished - issued - covered((max(start, issued), end) for start, end in others)
            alone = not before or issued >= before[-1][1]
            of_step.setdefault((row.kind, row.ranks), []).append((row.bytes, seconds, alone))
            before.append((issued, finished))
        for key, samples in of_step.items():
            # Of one rank alone, nobody knows how long it waited for the others. A server among them is always ready.
            if len(traces) == 1 or key[1] == len(traces) or (traces[0].servers and key[1] == len(traces) + 1):
                found.setdefault(key, []).append(samples)
    return found


def _bucket_strategy(traces: list[RankTrace], graph: ModelGraph) -> Strategy:
    """The recorded DDP buckets as a strategy."""
    groups = {name: row.task for row in traces[0].steps[-1].communication for name in row.name.split(",")}
    configs = {
        variable.name: VariableConfig(
            shards=(Shard(synchronizer="sparse_all_gather") if variable.sparse else Shard(group=groups[variable.name]),)
        )
        for variable in graph.variables
        if variable.name in groups
    }
    return Strategy(name=traces[0].job, variables=configs, schedule=Schedule(mode="barrier"))


def _cluster(traces: list[RankTrace], costs: Costs, notes: list[str]) -> ClusterSpec:
    """Nodes of as many ranks as share one, with the bandwidth that all-reduces between and within them reached."""
    world, names = traces[0].world, _nodes(traces)
    nodes, largest = len(set(names)), max(Counter(names).values())
    levels = {"intra_": (costs.within, largest)}
    if nodes == 1:
        levels = {"intra_": (costs.collectives, world)}
    else:
        levels[""] = costs.collectives, nodes if ("all_reduce", nodes) in costs.collectives else world
    figures: dict[str, Any] = {"device": traces[0].device} if traces[0].device else {}
    for prefix, (fits, participants) in levels.items():
        fit = fits.get(("all_reduce", participants))
        if participants > 1 and fit is not None and fit.seconds_per_byte:
            figures[f"{prefix}bandwidth"] = sent_per_byte("all_reduce", participants) / fit.seconds_per_byte
            figures[f"{prefix}latency"] = fit.overhead_seconds + fit.latency_seconds
    if 1 < nodes < world and not costs.within:
        notes.append("nothing was measured among ranks of one node; their links are assumed")
    found = ClusterSpec.of_ranks(names, **figures)
    if found is None:
        notes.append("ranks that share a node are not consecutive; each is treated as its own node")
        found = ClusterSpec.of_ranks([str(rank) for rank in range(world)], **figures)
    assert found is not None
    return found.with_servers(traces[0].servers)


def _nodes(traces: list[RankTrace]) -> list[str]:
    """The node of every rank. A rank without a trace is on the node whose ranks the launcher numbered so; without any
    such word each rank has a node of its own."""
    size = max(1, traces[-1].local_world)
    names = [f"rank{rank // size * size}" for rank in range(traces[0].world)]
    for trace in traces:
        first = trace.rank - trace.local_rank
        for rank in range(max(0, first), min(first + trace.local_world, len(names))) if trace.local_rank >= 0 else ():
            names[rank] = trace.node
    for trace in traces:
        names[trace.rank] = trace.node or f"rank{trace.rank}"
    return names
