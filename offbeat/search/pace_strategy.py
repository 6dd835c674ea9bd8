"""ModelGraph + ClusterSpec + Costs → Strategy: PACE's fusion and preemptive schedule, ready to be lowered and run.

A gradient is ready when backward completes it. Its tail is everything from its update on in the next step, on a device
that computes one operator after another. `search_fusion` chooses the groups, `preemptive_schedule` the order and the
uneven slices; seconds on the link become ranges of elements.
"""

from collections.abc import Sequence

import numpy as np

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.search.chain import Chain, chain_of
from offbeat.search.pace import preemptive_schedule, search_fusion
from offbeat.strategy import Schedule, Strategy, build_strategy


def pace_strategy(
    graph: ModelGraph,
    cluster: ClusterSpec,
    costs: Costs | None = None,
    *,
    base: Strategy | None = None,
    coarsen: bool = True,
    slack_seconds: float = 0.0,
) -> Strategy:
    """PACE's strategy for a model on a cluster.

    `base` says how each variable is synchronised and what the step computes (recomputation, micro-batches); the default
    all-reduces everything and gathers sparse rows. Gradients are taken to be ready `slack_seconds` late, so that an
    order that is fixed before the step does not wait for one that really is late.
    """
    costs = costs or Costs()
    start = base or build_strategy("wfbp", graph, cluster)
    # Two messages under way would share the link, and the urgent one would come late.
    start = start.model_copy(update={"schedule": Schedule(mode="deferred", in_flight=1)})
    if not graph.gradient_order:
        return start.model_copy(update={"name": "pace"})
    chain = chain_of(lower(graph, cluster, start), costs, coarsen=coarsen, slack_seconds=slack_seconds)
    if chain is None:
        raise OffbeatError(
            f"pace: strategy {start.name!r} cuts variables into shards or updates them on servers; "
            f"its schedule needs whole variables that every replica updates"
        )
    groups, order = pace_schedule(chain)
    return chain.explicit(groups, order, start).model_copy(update={"name": "pace"})


def pace_schedule(
    chain: Chain, groups: list[tuple[int, ...]] | None = None
) -> tuple[list[tuple[int, ...]], list[tuple[int, int, int]]]:
    """Groups of units (PACE's fusion, unless given), and (group, first element, end) in issue order."""
    groups = groups or _fused(chain)
    ready = np.array([chain.ready[list(units)].max() for units in groups])
    heads = np.array([units[0] for units in groups])
    duration = np.array([(chain.per_byte[list(units)] * chain.wire[list(units)]).sum() for units in groups])
    tail = np.array([chain.tail[list(units)].max() for units in groups]) + chain.lag[heads]
    overhead = float(chain.overhead.max())
    schedule = preemptive_schedule(ready, duration, tail, overhead)
    pieces = [(job, end - start - overhead) for job, start, end in schedule.slices]
    # Jobs without seconds have no slice; they go when they are ready, in order.
    carried = {job for job, _ in pieces}
    pieces += [(job, 1.0) for job in np.argsort(ready, kind="stable").tolist() if job not in carried]
    return groups, chain.with_short_ends(groups, _element_ranges(chain, groups, pieces))


def _fused(chain: Chain) -> list[tuple[int, ...]]:
    """PACE's fusion on each run of units that may share a message; others travel alone."""
    groups: list[tuple[int, ...]] = []
    for run in chain.groups(chain.forced):
        if len(run) == 1:
            groups.append(run)
            continue
        members = np.array(run)
        found = search_fusion(
            chain.ready[members],
            chain.wire[members],
            chain.tail[members],
            float(chain.per_byte[run[0]]),
            float(chain.overhead[run[0]]),
        )
        groups += [tuple(sorted(members[list(units)].tolist())) for units in found.groups]
    return groups


def _element_ranges(
    chain: Chain, groups: Sequence[tuple[int, ...]], pieces: Sequence[tuple[int, float]]
) -> list[tuple[int, int, int]]:
    """Seconds of each slice → ranges of whole elements that cover every group once."""
    totals = [0.0] * len(groups)
    for job, seconds in pieces:
        totals[job] += seconds
    elements = [int(chain.elements[list(units)].sum()) for units in groups]
    sent = [0.0] * len(groups)
    reached = [0] * len(groups)
    left = [sum(1 for job, _ in pieces if job == number) for number in range(len(groups))]
    order: list[tuple[int, int, int]] = []
    for job, seconds in pieces:
        sent[job] += seconds
        left[job] -= 1
        stop = elements[job] if not left[job] else round(elements[job] * sent[job] / totals[job])
        if not chain.sliceable[groups[job][0]]:
            stop = elements[job]
        if stop > reached[job]:
            order.append((job, reached[job], stop))
            reached[job] = stop
    return order
