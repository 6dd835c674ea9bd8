"""Costs of every operator and edge under every configuration → the frontier of the whole graph, with its choices.

This is TensorOpt's FT (Algorithm 2): eliminate to a line, LDP along it, unroll. Memory and time of a strategy are the
sums of what its choices cost (Eq. 3); any two objectives that add up can take their place.

With `cap=0` every point of every partial frontier is kept and nothing decided early: the result is the frontier, to
floating-point rounding. Otherwise the work is bounded in two ways:

- A cell keeps at most `cap` points, fewer in tables over pairs of configurations. What is dropped has a neighbour
  within 2 / (cap − 2) of the cell's range that is kept, and points on the convex hull stay first (`algebra._thin`).
- Where eliminations would need the pairs of two large operators' configurations, one operator's configuration is
  decided (heuristic elimination). This is done for each of WEIGHTS, and the results are united.

The tests hold the hypervolume that this loses below 3%.

Before that, configuration k of operator i is dropped when some k' costs no more whatever all others choose:

    op[k] − op[k'] + Σⱼ min over s of (edge[k, s] − edge[k', s]) ≥ 0, in memory and in time

with the sum over the neighbours j and s their configurations (the dead-end elimination criterion of Goldstein, here for
two objectives). Replacing k by k' then never makes a strategy worse, so no point of the frontier is lost.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from offbeat.compiled import compiled
from offbeat.search.frontier.algebra import Combiner, Floats, Table, frontier_reduce, table_of
from offbeat.search.frontier.eliminate import Elimination

WEIGHTS = (0.5, 0.0, 0.2, 0.8, 1.0)
"""Shares of memory in the decisions of heuristic elimination, one run each."""
_DROPPING_ROUNDS = 4
Edges = Mapping[tuple[int, int], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """The frontier of a graph."""

    points: Floats
    """(P, 2) memory and time, by memory strictly upwards and so by time strictly downwards."""
    choices: NDArray[np.int64]
    """(P, n) the configuration of each operator at each point."""


def track(ops: Sequence[Floats], edges: Edges, *, cap: int = 256, threads: int | None = None) -> Tracked:
    """Finds the non-dominated strategies of a graph.

    `ops[i]` is (Kᵢ, 2): memory and time of operator i under each configuration. `edges[i, j]`, with i < j, is
    (Kᵢ, Kⱼ, 2). `cap` is the most points a partial frontier keeps, or 0 for all; `threads` is None for all cores, and
    does not change the result."""
    workers = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    useful = useful_configurations(ops, edges)
    known: dict[object, Table] = {}

    def interned(costs: Floats) -> Table:
        """One table for all costs that are equal."""
        key = costs.shape, blake2b(np.ascontiguousarray(costs).data).digest()
        return known.get(key) or known.setdefault(key, table_of(costs))

    op_tables = [interned(costs[kept]) for costs, kept in zip(ops, useful, strict=True)]
    edge_tables = {(i, j): interned(costs[np.ix_(useful[i], useful[j])]) for (i, j), costs in edges.items()}
    found: list[NDArray[np.int64]] = []
    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        combiner = Combiner(cap, workers, pool)
        for weight in WEIGHTS:
            run = Elimination(op_tables, edge_tables, combiner, weight)
            result = run.run()
            chosen = run.choices(result)
            rows = [kept[chosen[node]] for node, kept in enumerate(useful)]
            found.append(np.array(rows, np.int64).reshape(len(ops), len(result.table.memory)).T)
            if not run.fixed:
                break
    choices = np.concatenate(found)
    points = total_costs(ops, edges, choices)
    best = frontier_reduce(points)
    return Tracked(points[best], choices[best])


def total_costs(ops: Sequence[Floats], edges: Edges, choices: NDArray[np.int64]) -> Floats:
    """(P, 2) memory and time of each row of choices: the sums over operators, then over edges (Eq. 3)."""
    total = np.zeros((len(choices), 2))
    for node, costs in enumerate(ops):
        total += costs[choices[:, node]]
    for (i, j), costs in edges.items():
        total += costs[choices[:, i], choices[:, j]]
    return total


def useful_configurations(ops: Sequence[Floats], edges: Edges) -> list[NDArray[np.int64]]:
    """Indices of the configurations to keep, for each operator."""
    kept = [np.arange(len(costs)) for costs in ops]
    incident: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in edges:
        for end in pair:
            incident[end].append(pair)
    pending = set(range(len(ops)))
    for _ in range(_DROPPING_ROUNDS):
        touched: set[int] = set()
        for node in sorted(pending):
            own = ops[node][kept[node]]
            gap = own[:, None, :] - own[None, :, :]
            for i, j in incident[node] if len(own) > 1 else ():
                edge = edges[i, j][np.ix_(kept[i], kept[j])]
                gap = gap + _least_gap(np.ascontiguousarray(edge if i == node else edge.transpose(1, 0, 2)))
            replaceable = (gap[:, :, 0] >= 0.0) & (gap[:, :, 1] >= 0.0)
            np.fill_diagonal(replaceable, False)
            alive = np.ones(len(own), bool)
            for k in np.flatnonzero(replaceable.any(axis=1)):
                alive[k] = not (replaceable[k] & alive).any()
            if not alive.all():
                kept[node] = kept[node][alive]
                touched.update(end for pair in incident[node] for end in pair if end != node)
        pending = touched
    return kept


@compiled(nogil=True)
def _least_gap(edge):
    """(K, K, 2): the least of edge[k, s] − edge[k', s] over all s. Numpy takes five times as long."""
    gap = np.full((len(edge), len(edge), 2), np.inf)
    for k in range(len(edge)):
        for other in range(len(edge)):
            for s in range(edge.shape[1]):
                for cost in range(2):
                    gap[k, other, cost] = min(gap[k, other, cost], edge[k, s, cost] - edge[other, s, cost])
    return gap
