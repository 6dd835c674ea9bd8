"""torch's FSDP2: units of modules whose variables are gathered before use and freed afterwards."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import bytes_option
from offbeat.strategy.model import FullyShard, Precision, Reshard, Strategy
from offbeat.strategy.validate import unit_problems

LARGEST_BLOCK = 0.25
"""A block with more of the model's bytes than this is taken apart, where it has blocks inside."""
SMALLEST_PART = 0.05
"""Share of such a block's bytes that each block inside must have."""
LARGEST_MODULE = 0.125
"""The same for the units of a model without blocks."""


def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    units: str | float | Sequence[str] = "auto",
    reshard: Reshard = True,
    root: Reshard = False,
    prefetch: int = 1,
    replicas: int = 1,
    param_dtype: Precision | None = None,
    reduce_dtype: Precision | None = None,
    recompute: bool = False,
) -> Strategy:
    """`fully_shard` (Zhao et al., VLDB 2023; torch.distributed.fsdp) on each unit, and at last on the model itself.

    Use it when parameters, gradients and optimizer state do not fit on a device.

    `units` are module paths; or a size, for modules of at most so many bytes; or 'auto', for the repeated blocks of the
    model (`layers.0`, `layers.1`, …). Modules that cannot be units by themselves, because others read their variables,
    are left to the model. `reshard` is every unit's choice and `root` the model's own; `recompute` computes every unit
    again in backward.
    """
    if isinstance(units, str) and units == "auto":
        chosen = _blocks(graph) or _modules(graph, graph.parameter_bytes * LARGEST_MODULE)
    elif isinstance(units, str | int | float):
        chosen = _modules(graph, bytes_option("units", units))
    else:
        chosen = list(units)
    if isinstance(units, str | int | float):
        chosen = [path for path in chosen if not any(unit_problems(FullyShard(units={path: True}), graph))]
    described = FullyShard(
        units=dict.fromkeys(chosen, reshard) | ({"": root} if root is not False else {}),
        prefetch=prefetch,
        replicas=replicas,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    return Strategy(fsdp=described, recompute=tuple(chosen) if recompute else ())


class _Tree:
    """The modules that operators belong to, with the bytes of the variables inside each."""

    def __init__(self, graph: ModelGraph) -> None:
        self.bytes: Counter[str] = Counter()
        self.children: dict[str, dict[str, None]] = defaultdict(dict)
        forward = graph.phase("forward")
        self.called = {operator.module for operator in forward}
        for path in dict.fromkeys(operator.module for operator in forward):
            for outer, inner in pairwise(_around(path)):
                self.children[outer][inner] = None
        for variable in graph.variables:
            for path in _around(variable.name.rpartition(".")[0]):
                self.bytes[path] += variable.bytes

    def is_list(self, path: str) -> bool:
        """Whether it may be a list of modules, which is never called itself."""
        inner = self.children[path]
        return path not in self.called and all(each.rpartition(".")[2].isdigit() for each in inner)

    def split(self, path: str, limit: float) -> list[str]:
        """Modules with variables inside one, each of at most so many bytes or without parts, in forward's order."""
        inner = list(self.children[path])
        if inner and (not path or self.is_list(path) or self.bytes[path] > limit):
            return [unit for each in inner for unit in self.split(each, limit)]
        return [path] if path and self.bytes[path] else []

    def blocks(self, path: str, limit: float) -> list[str]:
        """Members of lists inside a module: the outermost, or those inside them where they are too large."""
        inner = list(self.children[path])
        members = [each for each in inner if each.rpartition(".")[2].isdigit() and self.bytes[each]]
        found: list[str] = []
        for each in inner:
            within = self.blocks(each, limit)
            whole = len(members) > 1 and each in members and not self.is_list(each)
            parts = self.bytes[each] > limit and within
            if whole and not (parts and min(self.bytes[part] for part in parts) > SMALLEST_PART * self.bytes[each]):
                within = [each]
            found += within
        return found


def _around(path: str) -> list[str]:
    """A module and all around it, outermost first."""
    return ["", *accumulate(path.split("."), "{}.{}".format)] if path else [""]


def _blocks(graph: ModelGraph) -> list[str]:
    return _Tree(graph).blocks("", graph.parameter_bytes * LARGEST_BLOCK)


def _modules(graph: ModelGraph, limit: float) -> list[str]:
    return _Tree(graph).split("", limit)
