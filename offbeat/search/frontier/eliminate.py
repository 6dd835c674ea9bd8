"""Tables of operators and edges → one frontier, with what is needed to read each point's choices back.

TensorOpt, section 3.2. The graph is undirected here: a pair of operators has one table, whichever way data flows.

- edge elimination, Eq. 5: `_join`, when a pair gets a second table
- node elimination, Eq. 4: `_eliminate_inner`, a node with two neighbours
- a node with one neighbour is merged into it by `_eliminate_leaf`: Eq. 6 with the union over its configurations, which
  no other node needs to know
- branch elimination, Eq. 6: `_merge`, two neighbours become one node whose configurations are the pairs
- heuristic elimination, Eq. 7: `_fix`, a node's configuration is decided
- LDP, Algorithm 3: `_walk`, along the nodes that `graph.line` marks

Tables are interned and combinations remembered by the identity of what goes in, so layers with equal costs are solved
once.
"""

import heapq
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.search.frontier.algebra import UNIT, Floats, Ints, Pattern, Table, combine
from offbeat.search.frontier.graph import component, line

_POINTS_PER_TABLE = 65_536
_LEAST_CAP = 16
_MERGED_CONFIGURATIONS = 256
_EXACT_CELLS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table and where its points come from."""

    table: Table
    left: "Factor | None" = None
    right: "Factor | None" = None
    node: int = -1
    """The node whose configuration a point decides, by the cell of its left point; -1: none."""
    step: int = 1
    size: int = 1
    """The configuration is cell // step % size."""


@dataclass(slots=True)
class Combiner:
    """Combines tables, each combination once."""

    cap: int
    """Points a cell keeps at most; 0: all."""
    threads: int = 1
    pool: Executor | None = None
    known: dict[tuple[Table, Table, Pattern], Table] = field(default_factory=dict)

    def __call__(self, a: Table, b: Table, pattern: Pattern, remember: bool = True) -> Table:
        key = (a, b, pattern)
        if key in self.known:
            return self.known[key]
        cells = int(np.prod(pattern.shape))
        # Tables over pairs of configurations have many cells, of which each needs few points.
        cap = max(_LEAST_CAP, min(self.cap, _POINTS_PER_TABLE // cells)) if self.cap else 0
        result = combine(a, b, pattern, cap, self.threads, self.pool)
        if remember:
            self.known[key] = result
        return result


class Elimination:
    """One run of FT. `weight` is the share of memory, against time, in the decisions of heuristic elimination."""

    def __init__(
        self, ops: list[Table], edges: dict[tuple[int, int], Table], combiner: Combiner, weight: float, exact: bool
    ) -> None:
        self.combine = combiner
        self.exact = exact
        self.size = [op.cells for op in ops]
        self.op = {node: Factor(op) for node, op in enumerate(ops)}
        self.adjacent: dict[int, dict[int, Factor]] = {node: {} for node in self.op}
        for (i, j), table in edges.items():
            self.adjacent[i][j] = self.adjacent[j][i] = Factor(table)
        self.scale = _scale(list(ops) + list(edges.values()), weight)
        self.merged: list[tuple[int, int, int]] = []
        self.fixed: dict[int, int] = {}

    def run(self) -> Factor:
        """The frontier of the whole graph, in one cell."""
        result = Factor(UNIT)
        while self.adjacent:
            start = min(self.adjacent)
            nodes = component(self.adjacent, start)
            marked = line(self.adjacent, start)
            self._eliminate_all(nodes, set(marked))
            left = [node for node in nodes if node in self.adjacent]
            if len(left) > max(1, len(marked)):
                self._simplify([node for node in left if node not in marked])
            else:
                result = self._product(result, self._walk(marked or left))
        return result

    def choices(self, result: Factor) -> dict[int, Ints]:
        """The configuration of every node for every point of the result (unroll)."""
        points = len(result.table.left) if result.table.left is not None else 1
        chosen = {node: np.full(points, configuration) for node, configuration in self.fixed.items()}
        pending: list[tuple[Factor, Ints]] = [(result, np.arange(points))]
        while pending:
            factor, selected = pending.pop()
            if factor.left is None or factor.right is None:
                continue
            assert factor.table.left is not None
            assert factor.table.right is not None
            left, right = factor.table.left[selected], factor.table.right[selected]
            if factor.node >= 0:
                chosen[factor.node] = factor.left.table.cell_of(left) // factor.step % factor.size
            pending += [(factor.left, left), (factor.right, right)]
        for node, absorbed, size in reversed(self.merged):
            chosen[absorbed] = chosen[node] % size
            chosen[node] = chosen[node] // size
        return chosen

    def _eliminate_all(self, nodes: list[int], marked: set[int]) -> None:
        """Eliminates unmarked nodes with one or two neighbours until none is left, leaves first, then by index.

        By index, a chain is eliminated from its start: each step then multiplies a grown table by a given one."""
        queue = [(len(self.adjacent[node]), node) for node in nodes if node not in marked]
        heapq.heapify(queue)
        while queue:
            degree, node = heapq.heappop(queue)
            if node not in self.adjacent or degree != len(self.adjacent[node]) or not 0 < degree <= 2:
                continue
            touched = list(self.adjacent[node])
            if degree == 1:
                self._eliminate_leaf(node)
            else:
                self._eliminate_inner(node)
            for other in touched:
                if other not in marked:
                    heapq.heappush(queue, (len(self.adjacent[other]), other))

    def _eliminate_leaf(self, node: int) -> None:
        (other,) = self.adjacent[node]
        message = self._pass(self.op[node], node, other, self.adjacent[node][other])
        self._forget(node)
        self.op[other] = self._product(self.op[other], message)

    def _eliminate_inner(self, node: int) -> None:
        low, high = sorted(self.adjacent[node])
        first, second = self.adjacent[node][low], self.adjacent[node][high]
        # The node's own cost joins the smaller of its two edges.
        if len(first.table.memory) <= len(second.table.memory):
            first = self._absorb(first, low, node, node)
        else:
            second = self._absorb(second, node, high, node)
        pattern = Pattern(
            (self.size[low], self.size[high], 1),
            (self._stride(low, node), 0, 0),
            (0, self._stride(high, node), 0),
            terms=self.size[node],
            a_step=self._stride(node, low),
            b_step=self._stride(node, high),
        )
        table = self.combine(first.table, second.table, pattern)
        self._forget(node)
        self._join(low, high, Factor(table, first, second, node, pattern.a_step, pattern.terms))

    def _join(self, low: int, high: int, edge: Factor) -> None:
        if high in self.adjacent[low]:
            edge = self._product(self.adjacent[low][high], edge)
        self.adjacent[low][high] = self.adjacent[high][low] = edge

    def _pass(self, cost: Factor, node: int, other: int, edge: Factor, last_use: bool = False) -> Factor:
        """The frontier of the node's cost and edge over its configurations, for each configuration of `other`."""
        pattern = Pattern(
            (self.size[other], 1, 1),
            (0, 0, 0),
            (self._stride(other, node), 0, 0),
            terms=self.size[node],
            a_step=1,
            b_step=self._stride(node, other),
        )
        table = self.combine(cost.table, edge.table, pattern, remember=not last_use)
        if last_use:
            cost = replace(cost, table=cost.table.pointers())
        return Factor(table, cost, edge, node, 1, self.size[node])

    def _walk(self, nodes: list[int]) -> Factor:
        """LDP along a line; the nodes are then gone."""
        total = self.op[nodes[0]]
        for node, other in pairwise(nodes):
            edge = self.adjacent[node][other]
            own = self.op[other]
            single = len(own.table.memory) <= own.table.cells
            if single:
                edge = self._absorb(edge, node, other, other)
            total = self._pass(total, node, other, edge, last_use=True)
            total = total if single else self._product(total, own)
        last = nodes[-1]
        pattern = Pattern((1, 1, 1), (0, 0, 0), (0, 0, 0), terms=self.size[last], a_step=1)
        table = self.combine(total.table, UNIT, pattern)
        for node in nodes:
            self._forget(node)
        return Factor(table, total, Factor(UNIT), last, 1, self.size[last])

    def _simplify(self, nodes: list[int]) -> None:
        """Branch elimination where the merged node stays small (or the result must be exact), else heuristic."""
        inside = set(nodes)
        pairs = [(i, j) for i in nodes for j in self.adjacent[i] if i < j and j in inside]
        i, j = min(pairs, key=self._merged_cells)
        if self.exact or self.size[i] * self.size[j] <= _MERGED_CONFIGURATIONS:
            if self._merged_cells((i, j))[0] > _EXACT_CELLS:
                raise OffbeatError(
                    f"exact=True: merging operators {i} and {j} needs {self._merged_cells((i, j))[0]} pairs of "
                    f"configurations, more than {_EXACT_CELLS}; use exact=False"
                )
            self._merge(i, j)
        else:
            self._fix(max(nodes, key=lambda node: (len(self.adjacent[node]), -node)))

    def _merged_cells(self, pair: tuple[int, int]) -> tuple[int, int, int]:
        i, j = pair
        neighbours = (self.adjacent[i].keys() | self.adjacent[j].keys()) - {i, j}
        return self.size[i] * self.size[j] * sum(self.size[node] for node in neighbours), i, j

    def _merge(self, node: int, absorbed: int) -> None:
        """Makes `node` the pair (node, absorbed), its configurations node-major."""
        sizes = (self.size[node], self.size[absorbed])
        between = self.adjacent[node].pop(absorbed)
        del self.adjacent[absorbed][node]
        pattern = Pattern((*sizes, 1), (1, 0, 0), (0, 1, 0))
        own = self._combined(self.op[node], self.op[absorbed], pattern)
        strides = (self._stride(node, absorbed), self._stride(absorbed, node), 0)
        own = self._combined(own, between, Pattern((*sizes, 1), (sizes[1], 1, 0), strides))
        neighbours = sorted(self.adjacent[node].keys() | self.adjacent[absorbed].keys())
        edges = {other: self._merged_edge(node, absorbed, other) for other in neighbours}
        self._forget(absorbed)
        self.op[node] = own
        self.size[node] = sizes[0] * sizes[1]
        self.merged.append((node, absorbed, sizes[1]))
        for other, edge in edges.items():
            self.adjacent[node][other] = self.adjacent[other][node] = edge

    def _merged_edge(self, node: int, absorbed: int, other: int) -> Factor:
        """The table between the pair (node, absorbed) and a neighbour of either."""
        factors, strides = [], []
        axes = ("node", "absorbed", "other") if node < other else ("other", "node", "absorbed")
        lengths = {"node": self.size[node], "absorbed": self.size[absorbed], "other": self.size[other]}
        for end, axis in ((node, "node"), (absorbed, "absorbed")):
            if other in self.adjacent[end]:
                step = {axis: self._stride(end, other), "other": self._stride(other, end)}
                factors.append(self.adjacent[end][other])
                strides.append(tuple(step.get(name, 0) for name in axes))
        if len(factors) == 1:
            factors.append(Factor(UNIT))
            strides.append((0, 0, 0))
        shape = (lengths[axes[0]], lengths[axes[1]], lengths[axes[2]])
        return self._combined(factors[0], factors[1], Pattern(shape, strides[0], strides[1]))  # type: ignore[arg-type]

    def _fix(self, node: int) -> None:
        """Decides a node's configuration; its own cost goes to one neighbour, each edge's to the neighbour it joins."""
        chosen = self._best(node)
        self.fixed[node] = chosen
        others = sorted(self.adjacent[node])
        to_first = Pattern((self.size[others[0]], 1, 1), (1, 0, 0), (0, 0, 0), b_first=chosen)
        self.op[others[0]] = self._combined(self.op[others[0]], self.op[node], to_first)
        for other in others:
            pattern = Pattern(
                (self.size[other], 1, 1),
                (1, 0, 0),
                (self._stride(other, node), 0, 0),
                b_first=chosen * self._stride(node, other),
            )
            self.op[other] = self._combined(self.op[other], self.adjacent[node][other], pattern)
        self._forget(node)

    def _best(self, node: int) -> int:
        """The configuration with the least weighted cost of the node, its edges and its neighbours' best answers."""
        score = self._least(self.op[node].table)
        for other, edge in self.adjacent[node].items():
            shape = (self.size[node], self.size[other]) if node < other else (self.size[other], self.size[node])
            both = self._least(edge.table).reshape(shape)
            both = both if node < other else both.T
            score = score + (both + self._least(self.op[other].table)).min(axis=1)
        return int(np.argmin(score))

    def _least(self, table: Table) -> Floats:
        """The least weighted cost in each cell."""
        cost = table.memory * self.scale[0] + table.time * self.scale[1]
        filled = np.flatnonzero(np.diff(table.start))
        least = np.full(table.cells, np.inf)
        if len(filled):
            least[filled] = np.minimum.reduceat(cost, table.start[filled])
        return least

    def _stride(self, node: int, other: int) -> int:
        """Cells between neighbouring configurations of `node` in its table with `other`: lower index first."""
        return self.size[other] if node < other else 1

    def _absorb(self, edge: Factor, first: int, second: int, owner: int) -> Factor:
        """The edge with the own cost of one of its ends added."""
        low, high = min(first, second), max(first, second)
        strides = (1, 0, 0) if owner == low else (0, 1, 0)
        pattern = Pattern((self.size[low], self.size[high], 1), (self.size[high], 1, 0), strides)
        return self._combined(edge, self.op[owner], pattern)

    def _product(self, left: Factor, right: Factor) -> Factor:
        """Cell by cell."""
        return self._combined(left, right, Pattern((left.table.cells, 1, 1), (1, 0, 0), (1, 0, 0)))

    def _combined(self, left: Factor, right: Factor, pattern: Pattern) -> Factor:
        return Factor(self.combine(left.table, right.table, pattern), left, right)

    def _forget(self, node: int) -> None:
        for other in self.adjacent.pop(node):
            if other in self.adjacent:
                del self.adjacent[other][node]
        del self.op[node]


def _scale(tables: list[Table], weight: float) -> tuple[float, float]:
    """Factors that make memory and time comparable: the total of their means is 1 each, then weighted."""
    memory = sum(float(table.memory.mean()) for table in tables if len(table.memory))
    time = sum(float(table.time.mean()) for table in tables if len(table.time))
    return weight / (memory or 1.0), (1.0 - weight) / (time or 1.0)
