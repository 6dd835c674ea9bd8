"""Compute when each gradient is ready, and how long the step continues after it has arrived.

PACE's DAG: an operator starts once everything it reads exists (constraint 5), so that a gradient's ready time z_{u_i}
and the tail L_i of its all-reduce (theorem 1) are longest paths. The paper assumes a device that runs any number of
operators at once. Here a device has `streams`: operators are issued in the graph's order, each to a stream that is
free. One stream makes the chain that Offbeat's runtime executes and replay predicts; as many streams as there are
operators (`None`) make the longest paths.

A step runs from the start of backward to the end of the next forward, with each update before the first reader of what
it updates. Tails are the ends of the same list schedule run from the end of forward backwards. If every all-reduce i is
complete `tail_i` before some moment, forward ends at that moment on these streams; with one stream and with `None` no
forward ends earlier.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.search.pace.schedule import Floats

Node = TypeVar("Node")
Step: TypeAlias = str | int
"""An operator's name, or the number of a unit of variables for its update."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """The gradients of one step in the order in which one stream completes them, as arrays of equal length."""

    names: tuple[str, ...]
    sizes: Floats
    """Bytes."""
    ready: Floats
    """Seconds after the start of backward."""
    tail: Floats
    """Seconds of computation that remain once the gradient is synchronised."""
    compute_seconds: float
    """The step without any synchronisation: no schedule makes it shorter."""


def jobs_of(graph: ModelGraph, flops_per_second: float, bytes_per_second: float, *, streams: int | None = 1) -> Jobs:
    """The graph's gradients as jobs for `search_fusion` and `preemptive_schedule`.

    Operator times are measured, or estimated from these speeds. `streams` is how many operators the device runs at
    once; None is no limit, as in the paper.
    """
    seconds = {op.name: op.estimate(flops_per_second, bytes_per_second) for op in graph.operators}
    updates = {op.variables[0]: seconds[op.name] for op in graph.phase("optimizer") if op.variables}
    order = graph.gradient_order
    update = [updates.get(variable.name, 0.0) for variable in order]
    ready, tail, compute = gradient_paths(graph, seconds, [(v.name,) for v in order], update, streams)
    sizes = np.array([variable.bytes for variable in order], np.float64)
    return Jobs(tuple(variable.name for variable in order), sizes, ready, tail, compute)


def gradient_paths(
    graph: ModelGraph,
    seconds: Mapping[str, float],
    units: Sequence[Sequence[str]],
    update: Sequence[float] | Floats,
    streams: int | None,
) -> tuple[Floats, Floats, float]:
    """Ready time and tail of each unit of variables, and the seconds of a step that waits for none of them.

    `seconds` are given by operator, `update` by unit.
    """
    if streams is not None and (isinstance(streams, bool) or not isinstance(streams, int) or streams < 1):
        raise OffbeatError(f"streams: {streams!r} must be a whole number, at least 1, or None for no limit")
    if graph.source == "skeleton" and streams != 1:
        raise OffbeatError(f"streams: the graph of {graph.name!r} has no dataflow; capture it with example inputs")
    forward, backward = graph.phase("forward"), graph.phase("backward")
    inputs = {op.name: op.inputs for op in (*forward, *backward)}
    ends = list_schedule([op.name for op in backward], inputs, seconds, streams)
    # Micro-batches of the training loop: gradients are complete in the last one.
    whole = max(ends.values(), default=0.0)
    alone = list_schedule([op.name for op in forward], inputs, seconds, streams) if graph.passes > 1 else {}
    earlier = (graph.passes - 1) * (whole + max(alone.values(), default=0.0))
    tails = _tails(graph, seconds, units, update, streams)
    ready = [max(ends.get(graph.variable(name).gradient_from or "", 0.0) for name in names) for names in units]
    compute = earlier + whole + max(tails.values(), default=0.0)
    return np.array(ready) + earlier, np.array([tails[unit] for unit in range(len(units))]), compute


def _tails(
    graph: ModelGraph,
    seconds: Mapping[str, float],
    units: Sequence[Sequence[str]],
    update: Sequence[float] | Floats,
    streams: int | None,
) -> dict[Step, float]:
    """Seconds from the start of each forward operator, and of each unit's update, to the end of forward."""
    unit_of = {name: unit for unit, names in enumerate(units) for name in names}
    readers: dict[Step, list[Step]] = defaultdict(list)
    # As the runtime waits: an update comes before its first reader, or before the first operator if nobody reads it.
    unread = (0, len(graph.variables))
    uses: dict[Step, tuple[int, int]] = {}
    for number, op in enumerate(graph.phase("forward")):
        uses[op.name] = (number, unread[1] + 1)
        for name in op.inputs:
            readers[name].append(op.name)
        for name in op.variables:
            if name in unit_of:
                readers[unit_of[name]].append(op.name)
    for number, variable in enumerate(graph.variables):
        unit = unit_of.get(variable.name)
        if unit is not None:
            use = unread
            if variable.first_use is not None:
                use = (uses[variable.first_use][0], number)
                readers[unit].append(variable.first_use)
            uses[unit] = min(use, uses.get(unit, use))
    order = sorted(uses, key=uses.__getitem__)
    times = {step: float(update[step]) if isinstance(step, int) else seconds[step] for step in order}
    return list_schedule(order[::-1], readers, times, streams)


def list_schedule(
    order: Iterable[Node], after: Mapping[Node, Iterable[Node]], seconds: Mapping[Node, float], streams: int | None
) -> dict[Node, float]:
    """When each node ends, if nodes are issued in this order, each to the stream that has been free for the least time
    when all those `after` it names have ended. Nodes that are not in the order have ended before."""
    nodes = list(order)
    free = [0.0] * min(streams or len(nodes), len(nodes))
    ends: dict[Node, float] = {}
    for node in nodes:
        start = max((ends.get(name, 0.0) for name in after.get(node, ())), default=0.0)
        start = max(start, free[0])
        free.pop(bisect_right(free, start) - 1)
        ends[node] = start + seconds[node]
        insort(free, ends[node])
    return ends
