"""Small graphs → their frontier by TensorOpt's two slower methods, which `track` is tested against.

`brute_force` enumerates all strategies (section 3.1). `eliminate_only` is FT-Elimination (section 3.2): no line is kept
for LDP; node, edge and branch elimination go on until two operators are left, and those are enumerated. Both are plain
numpy and Python, and share nothing with `track` but the sums and Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.search.frontier.algebra import Floats, frontier_reduce
from offbeat.search.frontier.track import Tracked, total_costs

Entry = tuple[float, float, dict[int, int]]
"""Memory, time and the configurations decided so far, by operator."""

_MOST_STRATEGIES = 4_000_000


def brute_force(ops: Sequence[Floats], edges: Mapping[tuple[int, int], Floats]) -> Tracked:
    """The frontier of all strategies."""
    sizes = [len(costs) for costs in ops]
    if np.prod(sizes, dtype=np.float64) > _MOST_STRATEGIES:
        raise OffbeatError(f"brute_force: configurations of {sizes} make more than {_MOST_STRATEGIES} strategies")
    every = np.indices(sizes).reshape(len(sizes), -1).T if sizes else np.zeros((1, 0), np.int64)
    return _tracked(ops, edges, every)


def eliminate_only(ops: Sequence[Floats], edges: Mapping[tuple[int, int], Floats]) -> Tracked:
    """The frontier by exact eliminations alone."""
    state = _State(ops, edges)
    while len(state.ops) > 2:
        state.step()
    total: list[Entry] = [(0.0, 0.0, {})]
    nodes = sorted(state.ops)
    pairs = state.edges.get((nodes[0], nodes[1])) if len(nodes) == 2 else None
    if pairs is not None:
        first, second = (state.ops[node] for node in nodes)
        total = _union([_product(_product(first[k], pairs[k, p]), second[p]) for k, p in pairs])
    else:
        for node in nodes:
            total = _product(total, _union(list(state.ops[node].values())))
    choices = np.array([[entry[2][node] for node in range(len(ops))] for entry in total], np.int64)
    return _tracked(ops, edges, choices.reshape(len(total), len(ops)))


class _State:
    """Frontiers of operators by configuration, and of pairs i < j by both; merged configurations are nested tuples."""

    def __init__(self, ops: Sequence[Floats], edges: Mapping[tuple[int, int], Floats]) -> None:
        self.ops: dict[int, dict[Any, list[Entry]]] = {
            node: {k: [(float(m), float(t), {node: k})] for k, (m, t) in enumerate(costs)}
            for node, costs in enumerate(ops)
        }
        self.edges: dict[tuple[int, int], dict[tuple[Any, Any], list[Entry]]] = {
            pair: {(k, p): [(float(m), float(t), {})] for k, row in enumerate(costs) for p, (m, t) in enumerate(row)}
            for pair, costs in edges.items()
        }

    def step(self) -> None:
        """Removes one operator: the one with fewest neighbours, and the highest index of those."""
        degree = {node: len(self._neighbours(node)) for node in self.ops}
        node = min(self.ops, key=lambda candidate: (degree[candidate], -candidate))
        neighbours = self._neighbours(node)
        if len(neighbours) == 0:
            other = min(candidate for candidate in self.ops if candidate != node)
            alone = _union(list(self.ops.pop(node).values()))
            self.ops[other] = {p: _product(entries, alone) for p, entries in self.ops[other].items()}
        elif len(neighbours) == 1:
            self._merge_leaf(node, neighbours[0])
        elif len(neighbours) == 2:
            self._eliminate_node(node, *neighbours)
        else:
            self._branch(node, neighbours[0])

    def _neighbours(self, node: int) -> list[int]:
        return sorted({end for pair in self.edges if node in pair for end in pair} - {node})

    def _take(self, node: int, other: int) -> dict[tuple[Any, Any], list[Entry]]:
        """Removes the pair's table and returns it with `node` first."""
        if node < other:
            return self.edges.pop((node, other))
        return {(k, p): entries for (p, k), entries in self.edges.pop((other, node)).items()}

    def _put(self, node: int, other: int, table: dict[tuple[Any, Any], list[Entry]]) -> None:
        """Adds a table, by edge elimination (Eq. 5) where the pair has one."""
        if node > other:
            node, other, table = other, node, {(p, k): entries for (k, p), entries in table.items()}
        old = self.edges.get((node, other))
        self.edges[node, other] = {key: _product(old[key], table[key]) for key in table} if old else table

    def _merge_leaf(self, node: int, other: int) -> None:
        edge, own = self._take(node, other), self.ops.pop(node)
        self.ops[other] = {
            p: _product(entries, _union([_product(own[k], edge[k, p]) for k in own]))
            for p, entries in self.ops[other].items()
        }

    def _eliminate_node(self, node: int, before: int, after: int) -> None:
        first, second, own = self._take(node, before), self._take(node, after), self.ops.pop(node)
        table = {
            (w, p): _union([_product(_product(first[k, w], own[k]), second[k, p]) for k in own])
            for w in self.ops[before]
            for p in self.ops[after]
        }
        self._put(before, after, table)

    def _branch(self, node: int, into: int) -> None:
        edge, own, target = self._take(node, into), self.ops.pop(node), self.ops[into]
        merged = {(p, k): _product(_product(target[p], own[k]), edge[k, p]) for p in target for k in own}
        for other in self._neighbours(into):
            table = self._take(into, other)
            self._put(into, other, {(pair, s): table[pair[0], s] for pair in merged for s in self.ops[other]})
        for other in self._neighbours(node):
            table = self._take(node, other)
            self._put(into, other, {(pair, s): table[pair[1], s] for pair in merged for s in self.ops[other]})
        self.ops[into] = merged


def _product(first: list[Entry], second: list[Entry]) -> list[Entry]:
    return _reduce([(a[0] + b[0], a[1] + b[1], {**a[2], **b[2]}) for a in first for b in second])


def _union(frontiers: list[list[Entry]]) -> list[Entry]:
    return _reduce([entry for frontier in frontiers for entry in frontier])


def _reduce(entries: list[Entry]) -> list[Entry]:
    """Algorithm 1."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda candidate: candidate[:2]):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def _tracked(ops: Sequence[Floats], edges: Mapping[tuple[int, int], Floats], choices: NDArray[np.int64]) -> Tracked:
    points = total_costs(ops, edges, choices)
    kept = frontier_reduce(points)
    return Tracked(points[kept], choices[kept])
