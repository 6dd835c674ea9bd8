"""Tables of operators and edges → one frontier, with what is needed to read each point's choices back.

TensorOpt, section 3.2. The graph is undirected here: a pair of operators has one table, whichever way data flows.

- edge elimination, Eq. 5: a pair that gets a second table has their product (`_eliminate_inner`)
- node elimination, Eq. 4: `_eliminate_inner`, a node with two neighbours
- a node with one neighbour is merged into it by `_eliminate_leaf`: Eq. 6 with the union over its configurations, which
  no other node needs to know
- branch elimination, Eq. 6: `_merge`, two neighbours become one node whose configurations are the pairs
- heuristic elimination, Eq. 7: `_fix`, a node's configuration is decided
- LDP, Algorithm 3: `_walk`, along the nodes that `line` marks ('we mark the first operator'). They are found at once:
  take two ends far apart; a node belongs to the line if every path between them passes it, an end only if it is in no
  cycle.

Tables are interned and combinations remembered by the identity of what goes in, so layers with equal costs are solved
once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import numpy as np

from offbeat.search.frontier.algebra import UNIT, Combiner, Floats, Ints, Pattern, Table

NONE = -1
"""No node; it has one configuration."""
_MERGED_CONFIGURATIONS = 256

Adjacency = Mapping[int, Collection[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table, the nodes whose configurations its cells stand for, and where its points come from."""

    table: Table
    nodes: tuple[int, ...] = ()
    """In row-major order; the nodes of an edge in ascending order."""
    left: "Factor | None" = None
    right: "Factor | None" = None
    over: int = NONE
    """The node whose configuration a point decides, by the cell of its left point."""
    pattern: Pattern = field(default_factory=lambda: Pattern((), (), ()))
    """How it was combined."""


class Elimination:
    """One run of FT. `weight` is the share of memory, against time, in the decisions of heuristic elimination."""

    def __init__(
        self, ops: list[Table], edges: dict[tuple[int, int], Table], combiner: Combiner, weight: float
    ) -> None:
        self.combine = combiner
        self.size = {NONE: 1, **{node: op.cells for node, op in enumerate(ops)}}
        self.op = {node: Factor(op, (node,)) for node, op in enumerate(ops)}
        self.adjacent: dict[int, dict[int, Factor]] = {node: {} for node in self.op}
        for (i, j), table in edges.items():
            self.adjacent[i][j] = self.adjacent[j][i] = Factor(table, (i, j))
        # Factors that make memory and time comparable: the total of their means is 1 each, then weighted.
        tables = [*ops, *edges.values()]
        memory, time = (sum(float(getattr(t, name).mean()) for t in tables) for name in ("memory", "time"))
        self.scale = weight / (memory or 1.0), (1.0 - weight) / (time or 1.0)
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
        points = len(result.table.memory)
        chosen = {node: np.full(points, configuration) for node, configuration in self.fixed.items()}
        pending: list[tuple[Factor, Ints]] = [(result, np.arange(points))]
        while pending:
            factor, selected = pending.pop()
            if factor.left is not None and factor.right is not None:
                left, right = factor.table.left[selected], factor.table.right[selected]
                pending += [(factor.left, left), (factor.right, right)]
                if factor.over >= 0:
                    cells = np.searchsorted(factor.left.table.start, left, side="right") - 1
                    chosen[factor.over] = cells // factor.pattern.a_step % factor.pattern.terms
        for node, absorbed, size in reversed(self.merged):
            chosen[absorbed] = chosen[node] % size
            chosen[node] = chosen[node] // size
        return chosen

    def _eliminate_all(self, nodes: Iterable[int], marked: set[int]) -> None:
        """Eliminates unmarked nodes with one or two neighbours until none is left, leaves first, then by index.

        By index, a chain is eliminated from its start: each step then multiplies a grown table by a given one."""
        left = set(nodes) - marked
        while few := [(len(self.adjacent[node]), node) for node in left if 0 < len(self.adjacent[node]) <= 2]:
            degree, node = min(few)
            left.remove(node)
            if degree == 1:
                self._eliminate_leaf(node)
            else:
                self._eliminate_inner(node)

    def _eliminate_leaf(self, node: int) -> None:
        (other,) = self.adjacent[node]
        message = self._combine(self.op[node], self.adjacent[node][other], (other,), over=node)
        self._forget(node)
        self.op[other] = self._product(self.op[other], message)

    def _eliminate_inner(self, node: int) -> None:
        low, high = sorted(self.adjacent[node])
        first, second = self.adjacent[node][low], self.adjacent[node][high]
        # The node's own cost joins the smaller of its two edges.
        if len(first.table.memory) <= len(second.table.memory):
            first = self._product(first, self.op[node])
        else:
            second = self._product(second, self.op[node])
        edge = self._combine(first, second, (low, high), over=node)
        self._forget(node)
        if high in self.adjacent[low]:
            edge = self._product(self.adjacent[low][high], edge)
        self.adjacent[low][high] = self.adjacent[high][low] = edge

    def _walk(self, nodes: list[int]) -> Factor:
        """LDP along a line; the nodes are then gone."""
        total = self.op[nodes[0]]
        for node, other in pairwise(nodes):
            edge = self.adjacent[node][other]
            own = self.op[other]
            single = len(own.table.memory) <= own.table.cells
            if single:
                edge = self._product(edge, own)
            total = self._combine(total, edge, (other,), over=node, last_use=True)
            total = total if single else self._product(total, own)
        total = self._combine(total, Factor(UNIT), (), over=nodes[-1])
        for node in nodes:
            self._forget(node)
        return total

    def _simplify(self, nodes: list[int]) -> None:
        """Branch elimination where the merged node stays small (or the result must be exact), else heuristic."""
        inside = set(nodes)

        def merged_cells(i: int, j: int) -> int:
            neighbours = (self.adjacent[i].keys() | self.adjacent[j].keys()) - {i, j}
            return self.size[i] * self.size[j] * sum(self.size[node] for node in neighbours)

        pairs = [(i, j) for i in nodes for j in self.adjacent[i] if i < j and j in inside]
        _, i, j = min((merged_cells(i, j), i, j) for i, j in pairs)
        if not self.combine.cap or self.size[i] * self.size[j] <= _MERGED_CONFIGURATIONS:
            self._merge(i, j)
        else:
            self._fix(max(nodes, key=lambda node: (len(self.adjacent[node]), -node)))

    def _merge(self, node: int, absorbed: int) -> None:
        """Makes `node` the pair (node, absorbed), its configurations node-major."""
        between = self.adjacent[node].pop(absorbed)
        del self.adjacent[absorbed][node]
        own = self._combine(self.op[node], self.op[absorbed], (node, absorbed))
        own = self._product(own, between)
        for other in sorted(self.adjacent[node].keys() | self.adjacent[absorbed].keys()):
            joined = [self.adjacent[end][other] for end in (node, absorbed) if other in self.adjacent[end]]
            nodes = (node, absorbed, other) if node < other else (other, node, absorbed)
            edge = self._combine(joined[0], joined[1] if len(joined) > 1 else Factor(UNIT), nodes)
            edge = replace(edge, nodes=(min(node, other), max(node, other)))
            self.adjacent[node][other] = self.adjacent[other][node] = edge
        self._forget(absorbed)
        self.op[node] = replace(own, nodes=(node,))
        self.merged.append((node, absorbed, self.size[absorbed]))
        self.size[node] *= self.size[absorbed]

    def _fix(self, node: int) -> None:
        """Decides a node's configuration; its own cost goes to one neighbour, each edge's to the neighbour it joins."""
        chosen = self._best(node)
        self.fixed[node] = chosen
        others = sorted(self.adjacent[node])
        self.op[others[0]] = self._combine(self.op[others[0]], self.op[node], (others[0],), fixed={node: chosen})
        for other in others:
            edge = self.adjacent[node][other]
            self.op[other] = self._combine(self.op[other], edge, (other,), fixed={node: chosen})
        self._forget(node)

    def _best(self, node: int) -> int:
        """The configuration with the least weighted cost of the node, its edges and its neighbours' best answers."""
        score = self._least(self.op[node].table)
        for other, edge in self.adjacent[node].items():
            both = self._least(edge.table).reshape([self.size[end] for end in edge.nodes])
            both = both if node < other else both.T
            score = score + (both + self._least(self.op[other].table)).min(axis=1)
        return int(np.argmin(score))

    def _least(self, table: Table) -> Floats:
        """The least weighted cost in each cell."""
        return np.minimum.reduceat(table.memory * self.scale[0] + table.time * self.scale[1], table.start[:-1])

    def _product(self, left: Factor, right: Factor) -> Factor:
        """For each cell of `left`, whose nodes are all or more than those of `right`."""
        return self._combine(left, right, left.nodes)

    def _combine(
        self,
        left: Factor,
        right: Factor,
        nodes: tuple[int, ...],
        over: int = NONE,
        fixed: dict[int, int] | None = None,
        last_use: bool = False,
    ) -> Factor:
        """The product for each configuration of `nodes`: the union over the configurations of node `over`, with some
        nodes of `right` in a `fixed` one. After its `last_use`, `left` keeps its pointers only, for unrolling."""
        pattern = Pattern(
            tuple(self.size[node] for node in nodes),
            tuple(self._stride(left, node) for node in nodes),
            tuple(self._stride(right, node) for node in nodes),
            terms=self.size[over],
            a_step=self._stride(left, over),
            b_step=self._stride(right, over),
            b_first=sum(chosen * self._stride(right, node) for node, chosen in (fixed or {}).items()),
        )
        table = self.combine(left.table, right.table, pattern, remember=not last_use)
        if last_use:
            left = replace(left, table=replace(left.table, memory=np.empty(0), time=np.empty(0)))
        return Factor(table, nodes, left, right, over, pattern)

    def _stride(self, factor: Factor, node: int) -> int:
        """Cells between neighbouring configurations of a node in a table; 0 if it does not depend on the node."""
        if node not in factor.nodes:
            return 0
        return prod(self.size[later] for later in factor.nodes[factor.nodes.index(node) + 1 :])

    def _forget(self, node: int) -> None:
        for other in self.adjacent.pop(node):
            if other in self.adjacent:
                del self.adjacent[other][node]
        del self.op[node]


def component(adjacency: Adjacency, start: int) -> dict[int, int]:
    """The nodes connected to `start`, nearest first, each with the one it is reached from."""
    parent = {start: start}
    reached = [start]
    for node in reached:
        for other in sorted(adjacency[node]):
            if other not in parent:
                parent[other] = node
                reached.append(other)
    return parent


def line(adjacency: Adjacency, start: int) -> list[int]:
    """The nodes that every path between two far ends of the component of `start` passes, in order."""
    first = list(component(adjacency, start))[-1]
    first, last = sorted((first, list(component(adjacency, first))[-1]))
    parent = component(adjacency, first)
    path = [last]
    while path[-1] != first:
        path.append(parent[path[-1]])
    place = {node: position for position, node in enumerate(reversed(path))}
    found: list[int] = []
    seen: set[int] = set()
    farthest = 0
    for node, position in place.items():
        # Nothing before this node leads past it.
        if farthest == position and (node not in (first, last) or len(adjacency[node]) == 1):
            found.append(node)
        pending = [node]
        while pending:
            for other in adjacency[pending.pop()]:
                farthest = max(farthest, place.get(other, 0))
                if other not in place and other not in seen:
                    seen.add(other)
                    pending.append(other)
    return found
