"""Build a strategy from PACE's fusion and preemptive schedule.

A gradient is ready when backward completes it. Its tail is everything from its update on in the next step, on a device
that computes one operator after another, as Offbeat's runtime does; with more `streams`, the longest path from there on
(`paths.py`). `search_fusion` chooses the groups, `preemptive_schedule` the order and the uneven slices; seconds on the
link become ranges of elements.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.graph.model import divided
from offbeat.plan import Plan, lower
from offbeat.search.arrange import explicit
from offbeat.search.pace.fusion import search_fusion
from offbeat.search.pace.paths import gradient_paths
from offbeat.search.pace.schedule import Floats, preemptive_schedule
from offbeat.simulate.fast.gradients import Gradients, gradients_of
from offbeat.strategy import Schedule, Strategy, build_strategy


def pace_strategy(
    graph: ModelGraph,
    cluster: ClusterSpec,
    costs: Costs | None = None,
    *,
    coarsen: bool = True,
    slack_seconds: float = 0.0,
    streams: int | None = 1,
) -> Strategy:
    """PACE's strategy for a model on a cluster, which all-reduces everything and gathers sparse rows.

    Gradients are taken to be ready `slack_seconds` late, so that an order that is fixed before the step does not wait
    for one that really is late. `streams` is how many operators a device runs at once, None as many as can: the paper's
    DAG. Offbeat's runtime and replay use one stream, on which the order for one stream is the better one.
    """
    costs = costs or Costs()
    start = build_strategy("wfbp", graph, cluster)
    # Two messages in flight would share the link, and the urgent one would come late.
    start = start.model_copy(update={"name": "pace", "schedule": Schedule(in_flight=1)})
    plan = lower(graph, cluster, start)
    gradients = gradients_of(plan, costs, coarsen=coarsen, slack_seconds=slack_seconds)
    if gradients is None:
        return start
    tail = None
    if streams != 1:
        seconds = operator_seconds(plan, gradients.slots)
        ready, tail, _ = gradient_paths(graph, seconds, gradients.names, gradients.update, streams)
        gradients = replace(gradients, ready=ready + slack_seconds)
    return explicit(gradients, *pace_schedule(gradients, tail=tail), start)


def operator_seconds(plan: Plan, slots: Floats) -> dict[str, float]:
    """Seconds of each operator of a step: those of its slot, divided as the operators' own estimates are."""
    device = plan.cluster.device_of(plan.replicas[0])
    found: dict[str, float] = {}
    for slot, seconds in zip(plan.program.slots, slots.tolist(), strict=True):
        operators = map(plan.graph.operator, plan.segments[slot.segment].operators)
        own = {op.name: op.estimate(device.peak_flops, device.memory_bandwidth) for op in operators}
        # Of several micro-batches the first forward waits for variables, and the last backward completes gradients.
        later = slot.phase == "backward"
        found |= {name: part for name, part in divided(seconds, own).items() if later or name not in found}
    return found


def pace_schedule(
    gradients: Gradients, groups: list[tuple[int, ...]] | None = None, tail: Floats | None = None
) -> tuple[list[tuple[int, ...]], list[tuple[int, int, int]]]:
    """Groups of units, and (group, first element, end) in issue order.

    Unless groups are given, they are PACE's fusion of each run of units that may share a message. Tails are those on
    one stream unless given.
    """
    tails = gradients.tail if tail is None else tail
    if groups is None:
        groups = []
        for run in gradients.groups(gradients.forced):
            units = list(run)
            jobs = gradients.ready[units], gradients.wire[units], tails[units]
            per_byte, overhead = float(gradients.per_byte[run[0]]), float(gradients.overhead[run[0]])
            fused = search_fusion(*jobs, per_byte, overhead).groups
            groups += [tuple(sorted(run[place] for place in places)) for places in fused]
    ready = np.array([gradients.ready[list(units)].max() for units in groups])
    heads = np.array([units[0] for units in groups])
    duration = np.array([(gradients.per_byte[list(units)] * gradients.wire[list(units)]).sum() for units in groups])
    after = np.array([tails[list(units)].max() for units in groups]) + gradients.lag[heads]
    overhead = float(gradients.overhead.max())
    schedule = preemptive_schedule(ready, duration, after, overhead)
    pieces = [(job, end - start - overhead) for job, start, end in schedule.slices]
    # Jobs without seconds have no slice; they go when they are ready, in order.
    carried = {job for job, _ in pieces}
    pieces += [(job, 1.0) for job in np.argsort(ready, kind="stable").tolist() if job not in carried]
    return groups, _element_ranges(gradients, groups, pieces)


def _element_ranges(
    gradients: Gradients, groups: Sequence[tuple[int, ...]], pieces: Sequence[tuple[int, float]]
) -> list[tuple[int, int, int]]:
    """Seconds of each slice → ranges of whole elements that cover every group once.

    The last slice of a group that is applied as it arrives is cut so that little is left to update at the end."""
    jobs, seconds_of = zip(*pieces, strict=True)
    totals = np.bincount(jobs, seconds_of).tolist()
    elements = [int(gradients.elements[list(units)].sum()) for units in groups]
    sent = [0.0] * len(groups)
    reached = [0] * len(groups)
    order: list[tuple[int, int, int]] = []
    for job, seconds in pieces:
        sent[job] += seconds
        head = groups[job][0]
        cut = gradients.sliceable[head] and sent[job] < totals[job]
        stop = round(elements[job] * sent[job] / totals[job]) if cut else elements[job]
        if stop > reached[job]:
            parts = [(reached[job], stop)]
            if stop == elements[job] and gradients.as_it_arrives[head]:
                parts = _short_ends(gradients, list(groups[job]), *parts[0])
            order += [(job, *part) for part in parts]
            reached[job] = stop
    return order


def _short_ends(gradients: Gradients, units: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """A slice cut so that the update of what came before is over when the end arrives.

    And the end likewise, as long as a cut hides at least twice what it costs.
    """
    elements = float(gradients.elements[units].sum())
    update = float(gradients.update[units].sum()) / elements
    sent = float((gradients.wire * gradients.per_byte)[units].sum()) / elements
    price = float(gradients.overhead[units[0]]) + gradients.update_call
    parts: list[tuple[int, int]] = []
    begin = start
    while sent > 0:
        cut = stop - int((stop - begin) * update / (update + sent))
        if cut == stop or (cut - begin) * update < 2 * price:
            break
        parts.append((begin, cut))
        begin = cut
    return [*parts, (begin, stop)]
