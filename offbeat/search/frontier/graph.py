"""Undirected graph as adjacency → its components and the nodes of its linear structure.

FT keeps a line of nodes for LDP and eliminates the rest (TensorOpt, section 3.2, 'we mark the first operator'). The
line here is found at once: take two ends far apart; a node belongs to the line if every path between the ends passes
it. The ends themselves belong to it only if they are in no cycle.
"""

from collections.abc import Iterable, Mapping

Adjacency = Mapping[int, Iterable[int]]


def component(adjacency: Adjacency, start: int) -> list[int]:
    """The nodes connected to `start`, nearest first."""
    reached = [start]
    seen = {start}
    for node in reached:
        for other in sorted(adjacency[node]):
            if other not in seen:
                seen.add(other)
                reached.append(other)
    return reached


def line(adjacency: Adjacency, start: int) -> list[int]:
    """The nodes that every path between two far ends of the component of `start` passes, in order.

    An end with one neighbour is part of the line, one inside a cycle is not."""
    first = component(adjacency, start)[-1]
    last = component(adjacency, first)[-1]
    if last < first:
        first, last = last, first
    parent, entered, low = _search(adjacency, first)
    found = [last] if first != last and _degree(adjacency, last) == 1 else []
    node = last
    while node != first:
        above = parent[node]
        if above != first and low[node] >= entered[above]:
            found.append(above)
        node = above
    if _degree(adjacency, first) == 1:
        found.append(first)
    return found[::-1]


def _degree(adjacency: Adjacency, node: int) -> int:
    return sum(1 for _ in adjacency[node])


def _search(adjacency: Adjacency, root: int) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Depth-first: each node's parent, its number, and the least number its subtree reaches by an edge out of it."""
    parent: dict[int, int] = {root: root}
    entered = {root: 0}
    low = {root: 0}
    stack = [(root, iter(sorted(adjacency[root])))]
    while stack:
        node, others = stack[-1]
        for other in others:
            if other not in entered:
                parent[other] = node
                entered[other] = low[other] = len(entered)
                stack.append((other, iter(sorted(adjacency[other]))))
                break
            if other != parent[node]:
                low[node] = min(low[node], entered[other])
        else:
            stack.pop()
            if node != root:
                low[parent[node]] = min(low[parent[node]], low[node])
    return parent, entered, low
