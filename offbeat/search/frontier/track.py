"""Costs of every operator and edge under every configuration → the frontier of the whole graph, with its choices.

This is TensorOpt's FT (Algorithm 2): eliminate to a line, LDP along it, unroll. Memory and time of a strategy are the
sums of what its choices cost (Eq. 3); any two objectives that add up can take their place.

`exact=True` keeps every point of every partial frontier and decides nothing early: the result is the frontier, to
floating-point rounding. `exact=False` bounds the work in two ways:

- A cell keeps at most `cap` points, fewer in tables over pairs of configurations. What is dropped has a neighbour
  within 2 / (cap − 2) of the cell's range that is kept, and points on the convex hull stay first (`kernels._thin`).
- Where eliminations would need the pairs of two large operators' configurations, one operator's configuration is
  decided (heuristic elimination). This is done for each of WEIGHTS, and the results are united.

The tests hold the hypervolume that `exact=False` loses below 3%.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.search.frontier.algebra import Floats, Table, frontier_reduce, table_of
from offbeat.search.frontier.eliminate import Combiner, Elimination
from offbeat.search.frontier.inputs import checked_edges, checked_ops
from offbeat.search.frontier.prune import useful_configurations

WEIGHTS = (0.5, 0.0, 0.2, 0.8, 1.0)
"""Shares of memory in the decisions of heuristic elimination, one run each."""


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """The frontier of a graph."""

    points: Floats
    """(P, 2) memory and time, by memory strictly upwards and so by time strictly downwards."""
    choices: NDArray[np.int64]
    """(P, n) the configuration of each operator at each point."""
    lossless: bool
    """No point was dropped and nothing was decided early, so this is the exact frontier."""
    decided: tuple[int, ...]
    """The operators whose configuration heuristic elimination decided."""


def track(
    op_costs: Sequence[Any],
    edge_costs: Mapping[tuple[int, int], Any],
    exact: bool = False,
    *,
    cap: int = 256,
    threads: int | None = None,
) -> Tracked:
    """Finds the non-dominated strategies of a graph.

    `op_costs[i]` is (Kᵢ, 2): memory and time of operator i under each configuration. `edge_costs[i, j]` is (Kᵢ, Kⱼ, 2),
    or a list of such; (j, i) adds to (i, j). An infinite cost forbids what it stands for. `cap` is the most points a
    partial frontier keeps (ignored if `exact`); `threads` is None for all cores, and does not change the result."""
    if cap < 16:
        raise OffbeatError(f"cap must be at least 16, got {cap}")
    if threads is not None and threads < 1:
        raise OffbeatError(f"threads must be at least 1, got {threads}")
    ops = checked_ops(op_costs)
    edges = checked_edges(edge_costs, ops)
    workers = threads or _cores()
    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        return _track(ops, edges, Combiner(0 if exact else cap, workers, pool), exact)


def _track(ops: list[Floats], edges: dict[tuple[int, int], Floats], combiner: Combiner, exact: bool) -> Tracked:
    useful = useful_configurations(ops, edges)
    tables: dict[tuple[Any, ...], Table] = {}
    op_tables = [_interned(costs[kept], tables) for costs, kept in zip(ops, useful, strict=True)]
    edge_tables = {(i, j): _interned(costs[np.ix_(useful[i], useful[j])], tables) for (i, j), costs in edges.items()}
    found: list[NDArray[np.int64]] = []
    decided: tuple[int, ...] = ()
    lossless = True
    for weight in WEIGHTS:
        run = Elimination(op_tables, edge_tables, combiner, weight, exact)
        result = run.run()
        chosen = run.choices(result)
        found.append(
            np.stack([useful[node][chosen[node]] for node in range(len(ops))], axis=1)
            if ops
            else np.zeros((1, 0), np.int64)
        )
        decided = tuple(sorted({*decided, *run.fixed}))
        lossless = lossless and not result.table.thinned and not run.fixed
        if not run.fixed:
            break
    choices = np.concatenate(found)
    if not len(choices):
        raise OffbeatError(_impossible(exact or lossless))
    points = total_costs(ops, edges, choices)
    kept = frontier_reduce(points)
    return Tracked(points[kept], choices[kept], lossless, decided)


def total_costs(ops: Sequence[Floats], edges: Mapping[tuple[int, int], Floats], choices: NDArray[np.int64]) -> Floats:
    """(P, 2) memory and time of each row of choices: the sums over operators, then over edges (Eq. 3)."""
    total = np.zeros((len(choices), 2))
    for node, costs in enumerate(ops):
        total += costs[choices[:, node]]
    for (i, j), costs in edges.items():
        total += costs[choices[:, i], choices[:, j]]
    return total


def _interned(costs: Floats, tables: dict[tuple[Any, ...], Table]) -> Table:
    costs = np.ascontiguousarray(costs)
    key = (costs.shape, blake2b(costs.data).digest())
    if key not in tables:
        tables[key] = table_of(costs)
    return tables[key]


def _impossible(certain: bool) -> str:
    if certain:
        return "no strategy is possible: every combination of configurations has an infinite cost"
    return "no strategy was found that avoids the infinite costs; exact=True decides whether there is one"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
