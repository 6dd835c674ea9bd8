"""ModelGraph + speed of a device → ready time and tail of every gradient, for PACE's scheduler.

The step is seen from the start of backward to the end of the next forward, with each variable's update just before
the variable's first reader. By default a device computes one operator after the other, in the graph's order: a gradient
is ready when all backward operators up to its own have run, and its tail is all computation from its update on. With
`parallel` every operator starts as soon as its inputs exist (PACE's constraint 5), and both are longest paths.
"""

from dataclasses import dataclass

import numpy as np

from offbeat.graph.model import ModelGraph, Operator
from offbeat.search.pace.schedule import Floats


@dataclass(frozen=True, slots=True)
class Jobs:
    """The gradients of one step in the order they become ready, as arrays of equal length."""

    names: tuple[str, ...]
    sizes: Floats
    """Bytes."""
    ready: Floats
    """Seconds after the start of backward."""
    tail: Floats
    """Seconds of computation that remain once the gradient is synchronised."""
    compute_seconds: float
    """The step without any synchronisation: no schedule makes it shorter."""


def jobs_of(graph: ModelGraph, flops_per_second: float, bytes_per_second: float, *, parallel: bool = False) -> Jobs:
    """The jobs of the graph's gradients, with operator times that were measured or estimated from these speeds."""
    seconds = {op.name: op.estimate(flops_per_second, bytes_per_second) for op in graph.operators}
    ready = _ready(graph, seconds, parallel)
    tails = _tails(graph, seconds, parallel)
    order = graph.gradient_order
    backward = max((ready[op.name] for op in graph.phase("backward")), default=0.0)
    return Jobs(
        names=tuple(variable.name for variable in order),
        sizes=np.array([variable.bytes for variable in order], np.float64),
        ready=np.array([ready.get(variable.gradient_from or "", 0.0) for variable in order], np.float64),
        tail=np.array([tails.variable.get(variable.name, 0.0) for variable in order], np.float64),
        compute_seconds=backward + tails.whole,
    )


@dataclass(frozen=True, slots=True)
class _Tails:
    variable: dict[str, float]
    whole: float
    """Seconds of all updates and the forward."""


def _ready(graph: ModelGraph, seconds: dict[str, float], parallel: bool) -> dict[str, float]:
    """Seconds after the start of backward at which each backward operator ends."""
    ends: dict[str, float] = {}
    clock = 0.0
    for op in graph.phase("backward"):
        if parallel:
            # What forward left behind exists when backward starts.
            clock = max((ends.get(name, 0.0) for name in op.inputs), default=0.0)
        clock += seconds[op.name]
        ends[op.name] = clock
    return ends


def _tails(graph: ModelGraph, seconds: dict[str, float], parallel: bool) -> _Tails:
    updates = {op.variables[0]: seconds[op.name] for op in graph.phase("optimizer") if op.variables}
    forward = graph.phase("forward")
    return (
        _parallel_tails(graph, forward, seconds, updates)
        if parallel
        else _serial_tails(graph, forward, seconds, updates)
    )


def _serial_tails(
    graph: ModelGraph, forward: tuple[Operator, ...], seconds: dict[str, float], updates: dict[str, float]
) -> _Tails:
    by_first_use: dict[str | None, list[str]] = {}
    for variable in graph.variables:
        by_first_use.setdefault(variable.first_use, []).append(variable.name)
    tails: dict[str, float] = {}
    remaining = 0.0
    # A variable that forward never reads is updated last.
    for place in (None, *(op.name for op in reversed(forward))):
        remaining += seconds[place] if place is not None else 0.0
        for name in reversed(by_first_use.get(place, [])):
            remaining += updates.get(name, 0.0)
            tails[name] = remaining
    return _Tails(tails, remaining)


def _parallel_tails(
    graph: ModelGraph, forward: tuple[Operator, ...], seconds: dict[str, float], updates: dict[str, float]
) -> _Tails:
    after: dict[str, float] = {}
    tails = dict.fromkeys((variable.name for variable in graph.variables), 0.0)
    first_uses = {variable.name: variable.first_use for variable in graph.variables}
    for op in reversed(forward):
        path = after.get(op.name, 0.0) + seconds[op.name]
        for name in op.inputs:
            after[name] = max(after.get(name, 0.0), path)
        for name in op.variables:
            tails[name] = max(tails[name], path)
        after[op.name] = path
    for name, first_use in first_uses.items():
        tails[name] = max(tails[name], after.get(first_use or "", 0.0)) + updates.get(name, 0.0)
    return _Tails(tails, max((*tails.values(), *after.values()), default=0.0))
