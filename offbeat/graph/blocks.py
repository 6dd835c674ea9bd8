"""Divide a ModelGraph into blocks: disjoint modules of moderate size that decisions treat as a whole."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate, pairwise

from offbeat.graph.model import ModelGraph

LARGEST_SHARE = 0.125
"""A block that keeps more of the activations than this is taken apart, where it has parts."""


def blocks(graph: ModelGraph) -> list[str]:
    """Paths of disjoint modules of moderate size, which together hold what forward keeps, in forward's order."""
    kept = totals((operator.module, operator.activation_bytes) for operator in graph.phase("forward"))
    return ModuleTree(graph).split(kept, LARGEST_SHARE * max(1, graph.activation_bytes))


class ModuleTree:
    """The modules that forward's operators belong to, and all modules around them."""

    def __init__(self, graph: ModelGraph) -> None:
        self.children: dict[str, dict[str, None]] = defaultdict(dict)
        self.called = dict.fromkeys(operator.module for operator in graph.phase("forward"))
        for path in self.called:
            for outer, inner in pairwise(around(path)):
                self.children[outer][inner] = None

    def is_list(self, path: str) -> bool:
        """Whether it may be a list of modules, which is never called itself and so is no unit of anything."""
        return path not in self.called and all(each.rpartition(".")[2].isdigit() for each in self.children[path])

    def split(self, held: Counter[str], limit: float, path: str = "") -> list[str]:
        """Disjoint modules inside one, each of which holds at most so much or has no parts, in forward's order."""
        inner = list(self.children[path])
        if inner and (not path or self.is_list(path) or held[path] > limit):
            return [unit for each in inner for unit in self.split(held, limit, each)]
        return [path] if path else []


def around(path: str) -> list[str]:
    """A module and all modules around it, outermost first."""
    return ["", *accumulate(path.split("."), "{}.{}".format)] if path else [""]


def totals(amounts: Iterable[tuple[str, int]]) -> Counter[str]:
    """What each module holds, all modules inside it included."""
    held: Counter[str] = Counter()
    for module, amount in amounts:
        for path in around(module):
            held[path] += amount
    return held
