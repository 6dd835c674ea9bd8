"""Recorded traces → Profile: the graph with measured times, the strategy that ran, and what communication cost.

Compute is what lies between the events that communication cares about: a module that reads variables begins, a
gradient is complete. Time in which a rank waited for messages or applied updates is taken out. Medians over steps,
then over ranks; a rank that is slower than the others keeps its factor (`Costs.compute_scale`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import SERVED, CollectiveFit, Costs, in_a_row
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.graph.model import Operator, Variable, update_operators
from offbeat.plan import lower
from offbeat.profile.interference import fit_interference, shares
from offbeat.profile.traces import (
    RankTrace,
    Step,
    align,
    backward_spans,
    forward_spans,
    parse_rank,
    read_traces,
    to_timeline,
)
from offbeat.runtime.channel import known_costs
from offbeat.simulate.predict import simulate
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig
from offbeat.timeline import KINDS, Timeline
from offbeat.timeline.observer import covered

WARM_UP_STEPS = 3
MOST_CORRECTED = 2.0
"""By which factor a job's own collectives may correct what was calibrated."""
SERVER_CORRECTIONS = 4
"""Times that servers' messages are corrected and replayed; the closest counts."""
ANYWHERE = {"graph": "", "cluster": ""}
"""A strategy that ran fits the graph measured while it did, whatever it was made for."""
STRAGGLER = 0.03
"""A rank counts as slower (or faster) than the others beyond this share."""


@dataclass(frozen=True)
class Profile:
    """A recorded job, ready to be replayed."""

    timeline: Timeline
    graph: ModelGraph
    cluster: ClusterSpec
    strategy: Strategy
    costs: Costs
    job: str
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Median step, as measured."""
        return self.timeline.iteration_time

    def with_links(self, bandwidth: float = 1.0, latency: float = 1.0) -> "Profile":
        """The same job on links with so many times the bandwidth and the latency."""
        cluster = self.cluster.with_links(bandwidth, latency)
        return replace(self, cluster=cluster, costs=self.costs.scaled(bandwidth, latency))


def profile_in_place(
    recorded: Sequence[Sequence[dict[str, Any]]],
    link: tuple[float, float] | None,
    world: int,
    strategy: Strategy,
    graph: ModelGraph,
) -> Profile:
    """What `MemoryRecorder` noted on the first ranks of a running job, as a profile with the variables of its graph.

    `link` is the seconds of an all-reduce among all ranks, and those of each byte, where they were measured.
    """
    traces = [parse_rank(iter(lines), Path(f"rank{rank}")) for rank, lines in enumerate(recorded)]
    fits = {} if link is None else {("all_reduce", world): CollectiveFit(link[0], 0.0, link[1])}
    costs = replace(known_costs(traces[0].backend, world), collectives=fits)
    profile = make_profile(traces, costs, strategy)
    return replace(profile, graph=with_variables_of(profile.graph, graph))


def load_profile(folder: str | PathLike[str], *, aligned: bool = True) -> Profile:
    """Reads a folder that the recorder wrote; with `aligned` off every rank keeps its own clock."""
    traces, notes = read_traces(folder)
    costs, strategy, cluster = Costs(), None, None
    calibration, chosen, described = (
        Path(folder) / name for name in ("calibration.json", "strategy.json", "cluster.yaml")
    )
    if calibration.exists():
        raw = files.read_json(calibration, "calibration")
        costs = Costs.from_dict(raw.get("costs") if isinstance(raw, dict) else None, str(calibration))
    if chosen.exists():
        strategy = Strategy.load(chosen)
    if described.exists():
        cluster = ClusterSpec.load(described)
    return make_profile(traces, costs, strategy, cluster, notes, aligned=aligned)


def make_profile(
    traces: list[RankTrace],
    costs: Costs,
    strategy: Strategy | None = None,
    cluster: ClusterSpec | None = None,
    notes: Sequence[str] = (),
    *,
    aligned: bool = True,
) -> Profile:
    """What traces tell of a job. `costs` are what was calibrated before; without a strategy DDP's buckets are one."""
    said = list(notes)
    steady = [replace(trace, steps=_steady(trace)) for trace in traces]
    if aligned:
        steady, alignment = align(steady)
        said += alignment.notes if alignment else ()
    graph, interference = measured_graph(steady)
    per_call, per_byte = _update_costs(steady, graph)
    costs = replace(
        costs,
        collectives=_fit_collectives(steady, costs, (strategy.schedule if strategy else Schedule()).in_flight),
        interference=interference,
        gap_seconds=_gap_seconds(steady),
        compute_scale=_compute_scale(steady),
        update_call_seconds=per_call,
        update_seconds_per_byte=per_byte,
    )
    world = steady[0].world
    if world > 1 and not any(step.communication for trace in steady for step in trace.steps):
        said.append(f"{world} ranks, but no communication was seen in their traces")
    profile = Profile(
        timeline=to_timeline(steady, said),
        graph=graph,
        cluster=cluster or _cluster(world, costs),
        strategy=_bucket_strategy(steady, graph) if strategy is None else strategy.model_copy(update=ANYWHERE),
        costs=costs,
        job=traces[0].job,
        notes=tuple(said),
    )
    calibrated = costs.straight and any(kind in SERVED for kind, _ in costs.collectives)
    return _with_own_servers(profile) if calibrated and _has_servers(steady) else profile


def _steady(trace: RankTrace) -> tuple[Step, ...]:
    """The steps after the warm-up that made the calls most steps make."""
    steps = trace.steps[WARM_UP_STEPS:] if len(trace.steps) > 2 * WARM_UP_STEPS else trace.steps
    if not steps:
        raise OffbeatError(f"{trace.path}: there is no complete step in this trace")
    return steps


def measured_graph(traces: list[RankTrace]) -> tuple[ModelGraph, float]:
    """One forward operator per call of a module with parameters, one backward operator per gradient, with the seconds
    each takes while nothing is sent; and by how much sending slows them down."""
    first = traces[0]
    calls = _usual([tuple(module for module, _, _ in step.forward) for step in first.steps])
    grads = _usual([tuple(parameter for parameter, _ in step.backward) for step in first.steps])
    factor, (forward, backward) = _alone(traces, calls, grads)
    shapes = {name: (shape, dtype) for name, shape, dtype in first.parameters}
    first_call: dict[str, int] = {}
    for position, module in enumerate(calls):
        first_call.setdefault(first.modules[module], position)
    names = [first.gradients[parameter] for parameter in grads]
    used_at = {name: _first_use(name, first_call) for name in names}
    operators = [_operator(f"forward.{i}", "forward", first.modules[m], forward[i], ()) for i, m in enumerate(calls)]
    operators += [
        _operator(f"backward.{i}", "backward", name.rpartition(".")[0], backward[i], (name,))
        for i, name in enumerate(names)
    ]
    variables = [
        Variable(
            name=name,
            shape=shapes[name][0],
            dtype=shapes[name][1],
            first_use=f"forward.{used_at[name]}" if calls else None,
            gradient_from=f"backward.{position}",
        )
        for position, name in enumerate(names)
    ]
    variables.sort(key=lambda variable: used_at[variable.name])
    graph = ModelGraph(
        name=first.path.parent.name or "job",
        operators=(*operators, *update_operators(variables, "SGD", 1)),
        variables=tuple(variables),
        source="hooks",
        optimizer_slots=1,
    )
    return graph, factor


def with_variables_of(measured: ModelGraph, base: ModelGraph) -> ModelGraph:
    """The measured graph with all that another graph of the same model knows of its variables."""
    seen = {variable.name: variable for variable in measured.variables}
    known = {variable.name: variable for variable in base.variables}
    variables = [
        replace(known.get(name, variable), first_use=variable.first_use, gradient_from=variable.gradient_from)
        for name, variable in seen.items()
    ]
    variables += [replace(v, first_use=None, gradient_from=None) for name, v in known.items() if name not in seen]
    compute = tuple(operator for operator in measured.operators if operator.phase != "optimizer")
    updates = update_operators(variables, base.optimizer, base.optimizer_slots)
    return replace(
        measured,
        operators=compute + updates,
        variables=tuple(variables),
        constants=base.constants,
        optimizer=base.optimizer,
        optimizer_slots=base.optimizer_slots,
    )


def _usual(sequences: list[tuple[int, ...]]) -> tuple[int, ...]:
    return Counter(sequences).most_common(1)[0][0]


def _alone(
    traces: list[RankTrace], calls: tuple[int, ...], grads: tuple[int, ...]
) -> tuple[float, tuple[list[float], list[float]]]:
    """The interference factor, and the median seconds of each forward and backward span without it."""
    found = [
        [shares(trace, spans, wanted) for trace in traces] for spans, wanted in ((_forward, calls), (_backward, grads))
    ]
    factor = fit_interference([samples for phase in found for samples in phase if len(samples[0])])
    seconds = []
    for phase in found:
        ranks = [np.median(s, axis=0) / (1 + factor * share.mean(axis=0)) for s, share in phase if len(s)]
        if not ranks:
            raise OffbeatError(f"{traces[0].path.parent}: no two ranks called the same modules in the same order")
        seconds.append(list(np.median(np.array(ranks), axis=0)))
    return factor, (seconds[0], seconds[1])


def _forward(step: Step) -> list[tuple[int, float, float]]:
    return list(forward_spans(step))


def _backward(step: Step) -> list[tuple[int, float, float]]:
    return list(backward_spans(step))


def _first_use(variable: str, first_call: dict[str, int]) -> int:
    """The call that first reads a variable: its owner's, or where that is never called, the nearest one around it."""
    owner = variable.rpartition(".")[0]
    while owner not in first_call and owner:
        owner = owner.rpartition(".")[0]
    return first_call.get(owner, 0)


def _operator(name: str, phase: str, module: str, seconds: float, variables: tuple[str, ...]) -> Operator:
    return Operator(
        name=name,
        kind="other",
        target="module",
        phase=phase,  # type: ignore[arg-type]
        module=module,
        inputs=(),
        variables=variables,
        outputs=(),
        flops=0,
        bytes_read=0,
        bytes_written=0,
        activation_bytes=0,
        seconds=float(seconds),
    )


def _compute_seconds(step: Step) -> float:
    spans = [*forward_spans(step), *backward_spans(step)]
    return sum(end - start for _, start, end in spans)


def _compute_scale(traces: list[RankTrace]) -> dict[int, float]:
    seconds = {trace.rank: median(map(_compute_seconds, trace.steps)) for trace in traces}
    usual = median(seconds.values())
    return {rank: mine / usual for rank, mine in seconds.items() if usual and abs(mine / usual - 1) > STRAGGLER}


def _gap_seconds(traces: list[RankTrace]) -> float:
    """What is left of a step beside computing, waiting and updating."""
    left = []
    for trace in traces:
        for step in trace.steps:
            busy = _compute_seconds(step) + sum(end - start for _, _, start, end in step.local)
            waited = _end_of_backward_wait(trace, step)
            left.append(step.seconds - busy - waited)
    return max(0.0, median(left))


def _end_of_backward_wait(trace: RankTrace, step: Step) -> float:
    """DDP waits for its buckets inside backward, after the last gradient."""
    if trace.job == "offbeat" or not step.backward:
        return 0.0
    last = step.backward[-1][1]
    updates = [start for kind, _, start, _ in step.local if kind == "optimizer" and start >= last]
    return (updates[0] if updates else step.end) - last


def _update_costs(traces: list[RankTrace], graph: ModelGraph) -> tuple[float, float]:
    """Seconds per optimizer call and per byte updated."""
    total = sum(variable.bytes for variable in graph.variables)
    calls, seconds = [], []
    for trace in traces:
        for step in trace.steps:
            spans = [end - start for kind, _, start, end in step.local if kind in ("optimizer", "update")]
            calls.append(len(spans))
            seconds.append(sum(spans))
    count, spent = median(calls), median(seconds)
    if not count or not total:
        return 0.0, 0.0
    # A call costs tens of microseconds of interpreter whatever it updates; the shortest ones show how much.
    shortest = [
        min((end - start for kind, _, start, end in step.local if kind == "update"), default=0.0)
        for trace in traces
        for step in trace.steps
    ]
    per_call = median(shortest) if count > 1 else 0.0
    return per_call, max(0.0, spent - per_call * count) / total


def _fit_collectives(traces: list[RankTrace], costs: Costs, in_flight: int) -> dict[tuple[str, int], CollectiveFit]:
    """The calibrated fits, each corrected so that the job's own collectives take as long in total as they did.

    Single ones cannot be told apart while several share the link; the time for which the link was busy can.
    """
    fits = dict(costs.collectives)
    for (kind, participants), steps in _services(traces).items():
        known = fits.get((kind, participants))
        if costs.straight and kind in SERVED:
            # How they share links depends on their roots: `_with_own_servers`.
            continue
        if known is None:
            per_byte = median(sum(s for _, s, _ in rows) / max(1, sum(size for size, _, _ in rows)) for rows in steps)
            fits[kind, participants] = CollectiveFit(0.0, 0.0, per_byte)
            continue
        factors = []
        for rows in steps:
            taken = [known.occupied(size) for size, _, _ in rows]
            expected = sum(in_a_row(taken, [known.overhead_seconds] * len(rows), in_flight))
            expected += known.latency_seconds * sum(alone for _, _, alone in rows)
            factors.append(sum(spent for _, spent, _ in rows) / expected if expected else 1.0)
        factor = min(max(median(factors), 1 / MOST_CORRECTED), MOST_CORRECTED)
        fits[kind, participants] = CollectiveFit(
            known.overhead_seconds * factor, known.latency_seconds * factor, known.seconds_per_byte * factor
        )
    return fits


def _has_servers(traces: list[RankTrace]) -> bool:
    return any(row.kind in SERVED for row in traces[0].steps[-1].communication)


def _with_own_servers(profile: Profile) -> Profile:
    """The profile with reduces and broadcasts that, replayed, keep the network busy as long as the job's own did."""
    plan = lower(profile.graph, profile.cluster, profile.strategy)
    wanted, factor = _busy_seconds(profile.timeline, max), 1.0
    tried: list[tuple[float, Costs]] = []
    # How long it is busy is not in proportion to what messages take, which also hold each other up.
    for _ in range(SERVER_CORRECTIONS):
        costs = _with_served(profile.costs, factor)
        busy = _busy_seconds(simulate(plan, costs, memory=False), min)
        if not (busy and wanted):
            return profile
        tried.append((abs(busy / wanted - 1), costs))
        factor = min(max(factor * wanted / busy, 1 / MOST_CORRECTED), MOST_CORRECTED)
    return replace(profile, costs=min(tried, key=lambda found: found[0])[1])


def _with_served(costs: Costs, factor: float) -> Costs:
    """The costs with servers' messages that take so many times as long for each byte."""
    fits = {
        key: replace(fit, seconds_per_byte=fit.seconds_per_byte * factor) if key[0] in SERVED else fit
        for key, fit in costs.collectives.items()
    }
    return replace(costs, collectives=fits)


def _busy_seconds(timeline: Timeline, begins: Callable[[float, float], float]) -> float:
    """Seconds of a step in which collectives were under way: from when `begins` chooses among the ranks' starts, until
    the last rank was done."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for number in np.flatnonzero(timeline.kind == KINDS.index("communication")):
        key = int(timeline.step[number]), int(timeline.task[number])
        start, end = float(timeline.start[number]), float(timeline.end[number])
        known = spans.get(key, (start, end))
        spans[key] = begins(known[0], start), max(known[1], end)
    return covered((start, max(start, end)) for start, end in spans.values()) / (timeline.marks.shape[1] - 1)


def _services(traces: list[RankTrace]) -> dict[tuple[str, int], list[list[tuple[int, float, bool]]]]:
    """Per step, (bytes, seconds, alone) of each collective: the seconds by which it kept the link busy for longer."""
    services: dict[tuple[str, int], list[list[tuple[int, float, bool]]]] = {}
    by_step = [{step.number: step for step in trace.steps} for trace in traces]
    for number in sorted(set.intersection(*(set(steps) for steps in by_step))):
        rows = [{row.task: row for row in steps[number].communication} for steps in by_step]
        found: dict[tuple[str, int], list[tuple[int, float, bool]]] = {}
        spans = []
        for task in set.intersection(*(set(row) for row in rows)):
            issued = max(row[task].issued for row in rows)
            spans.append((issued, max(issued, median(row[task].finished for row in rows)), rows[0][task]))
        covered: list[tuple[float, float]] = []
        for issued, finished, row in sorted(spans, key=lambda span: span[1]):
            alone = not covered or issued >= covered[-1][1]
            found.setdefault((row.kind, row.ranks), []).append((row.bytes, _cover(covered, issued, finished), alone))
        for key, samples in found.items():
            if key[1] == len(traces):
                services.setdefault(key, []).append(samples)
    return services


def _cover(covered: list[tuple[float, float]], start: float, end: float) -> float:
    """Adds an interval that ends after all others to disjoint ones; returns by how much they cover more."""
    gained, edge = 0.0, end
    while covered and covered[-1][1] > start:
        low, high = covered.pop()
        gained += edge - high
        edge = low
    gained += max(0.0, edge - start)
    covered.append((min(start, edge), end))
    return gained


def _bucket_strategy(traces: list[RankTrace], graph: ModelGraph) -> Strategy:
    """DDP's buckets as they were seen."""
    groups: dict[str, int] = {}
    for row in traces[0].steps[-1].communication:
        for name in row.name.split(","):
            groups[name] = row.task
    configs = {
        variable.name: VariableConfig(shards=(Shard(group=groups[variable.name]),))
        for variable in graph.variables
        if variable.name in groups
    }
    return Strategy(name=traces[0].job, variables=configs, schedule=Schedule(mode="barrier"))


def _cluster(world: int, costs: Costs) -> ClusterSpec:
    """Equal nodes behind links as fast as the job's all-reduces found them."""
    fit = costs.collectives.get(("all_reduce", world))
    if fit is None or not fit.seconds_per_byte:
        return ClusterSpec.homogeneous(nodes=world, devices_per_node=1)
    bandwidth = 2 * (world - 1) / world / fit.seconds_per_byte
    return ClusterSpec.homogeneous(
        nodes=world, devices_per_node=1, bandwidth=bandwidth, latency=fit.overhead_seconds + fit.latency_seconds
    )
