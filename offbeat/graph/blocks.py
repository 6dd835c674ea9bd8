"""Divide a ModelGraph into blocks: disjoint modules of moderate size that decisions treat as a whole."""

from collections import Counter, defaultdict
from itertools import accumulate, pairwise

from offbeat.graph.model import ModelGraph

LARGEST_SHARE = 0.125
"""A block that keeps more of the activations than this is taken apart, where it has parts."""


def blocks(graph: ModelGraph) -> list[str]:
    """Paths of disjoint modules of moderate size, which together hold what forward keeps, in forward's order."""
    kept = Counter[str]()
    direct: set[str] = set()
    children: dict[str, dict[str, None]] = defaultdict(dict)
    for operator in graph.phase("forward"):
        direct.add(operator.module)
        paths = ["", *accumulate(operator.module.split("."), "{}.{}".format)] if operator.module else [""]
        for path in paths:
            kept[path] += operator.activation_bytes
        for path, below in pairwise(paths):
            children[path][below] = None
    limit = LARGEST_SHARE * max(1, graph.activation_bytes)
    found: list[str] = []
    waiting = [""]
    while waiting:
        path = waiting.pop()
        inner = children[path]
        # A list of modules is never called itself, so nothing can be done to it as a whole.
        listing = path not in direct and all(each.rpartition(".")[2].isdigit() for each in inner)
        if inner and (not path or listing or kept[path] > limit):
            waiting.extend(reversed(inner))
        elif path:
            found.append(path)
    return found
