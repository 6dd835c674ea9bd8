"""ModelGraph → blocks: modules of moderate size that together hold what forward keeps for backward."""

from collections import defaultdict

from offbeat.graph import ModelGraph, Operator
from offbeat.plan.memory import within

LARGEST_SHARE = 0.125
"""A block that keeps more of the activations than this is taken apart, where it has parts."""


def blocks(graph: ModelGraph) -> list[str]:
    """Paths of disjoint modules, in the order in which forward runs them."""
    kept: dict[str, int] = defaultdict(int)
    direct: set[str] = set()
    children: dict[str, dict[str, None]] = defaultdict(dict)
    for operator in graph.phase("forward"):
        direct.add(operator.module)
        parts = operator.module.split(".") if operator.module else []
        for depth in range(len(parts) + 1):
            path = ".".join(parts[:depth])
            kept[path] += operator.activation_bytes
            if depth < len(parts):
                children[path][".".join(parts[: depth + 1])] = None
    limit = LARGEST_SHARE * max(1, graph.activation_bytes)
    found: list[str] = []
    waiting = [""]
    while waiting:
        path = waiting.pop()
        below = list(children.get(path, ()))
        # A list of modules is never called itself, so nothing can be done to it as a whole.
        listing = path not in direct and below and all(each.rpartition(".")[2].isdigit() for each in below)
        if below and (not path or listing or kept[path] > limit):
            waiting.extend(reversed(below))
        elif path:
            found.append(path)
    return found


def activation_bytes(graph: ModelGraph, paths: list[str]) -> dict[str, int]:
    """What each module's forward keeps for backward."""
    return {path: sum(operator.activation_bytes for operator in _forward(graph, path)) for path in paths}


def forward_work(graph: ModelGraph, paths: list[str]) -> dict[str, float]:
    """What running each module again costs: measured seconds where all were, else FLOP and bytes moved."""
    seconds = {p: [op.seconds for op in _forward(graph, p)] for p in paths}
    if all(value is not None for values in seconds.values() for value in values):
        return {path: float(sum(value or 0.0 for value in values)) for path, values in seconds.items()}
    return {p: float(sum(op.flops + op.bytes_read + op.bytes_written for op in _forward(graph, p))) for p in paths}


def _forward(graph: ModelGraph, path: str) -> list[Operator]:
    return [operator for operator in graph.phase("forward") if within(operator.module, path)]
