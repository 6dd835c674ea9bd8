"""torch's FSDP2: units of modules whose variables are gathered before use and freed afterwards."""

from collections import Counter
from collections.abc import Sequence

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.graph.blocks import ModuleTree, totals
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
    if isinstance(units, str | int | float):
        tree = ModuleTree(graph)
        held = totals((variable.name.rpartition(".")[0], variable.bytes) for variable in graph.variables)
        automatic = units == "auto"
        largest = graph.parameter_bytes * LARGEST_MODULE if automatic else bytes_option("units", units)
        chosen = _blocks(tree, held, graph.parameter_bytes * LARGEST_BLOCK) if automatic else []
        chosen = chosen or [path for path in tree.split(held, largest) if held[path]]
        chosen = [path for path in chosen if not any(unit_problems(FullyShard(units={path: True}), graph))]
    else:
        chosen = list(units)
    described = FullyShard(
        units=dict.fromkeys(chosen, reshard) | ({"": root} if root is not False else {}),
        prefetch=prefetch,
        replicas=replicas,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    return Strategy(fsdp=described, recompute=tuple(chosen) if recompute else ())


def _blocks(tree: ModuleTree, held: Counter[str], limit: float, path: str = "") -> list[str]:
    """Members of lists inside a module: the outermost, or those inside them where they are too large."""
    inner = list(tree.children[path])
    members = [each for each in inner if each.rpartition(".")[2].isdigit() and held[each]]
    found: list[str] = []
    for each in inner:
        within = _blocks(tree, held, limit, each)
        whole = len(members) > 1 and each in members and not tree.is_list(each)
        parts = held[each] > limit and within
        if whole and not (parts and min(held[part] for part in parts) > SMALLEST_PART * held[each]):
            within = [each]
        found += within
    return found
