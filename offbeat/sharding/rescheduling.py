"""Seconds to change the split of a tensor with the cheapest collectives.

TensorOpt (section 4.2) finds the collectives by a shortest path: nodes are layouts on the finest mesh (`layout`), arcs
are single steps. The steps here are a slice (free), an all-gather and an all-to-all over any of the innermost fine axes
of a tensor axis (`_steps`); gradients that are partial sums are first completed by an all-reduce or a reduce-scatter
(`completed`).

A collective runs in all groups of the mesh at once, so groups that cross the same network interface share it
(`FineMesh.seconds`); a table measured for just these groups is used where the cluster has one.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.cluster import ClusterSpec
from offbeat.compiled import compiled
from offbeat.cost.tables import Collectives, interpolate
from offbeat.sharding.layout import Layout, groups_of, prime_factors

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLICE_SECONDS = 1e-9
"""So that of equally fast ways the one with fewest steps is taken; a slice sends nothing."""


class FineMesh:
    """The devices of a cluster on their finest mesh."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.devices = cluster.world_size
        self.factors = prime_factors(self.devices) if self.devices > 1 else ()
        self._collectives = Collectives(cluster)
        self.seconds = cache(self._seconds)
        self._contention = cache(self._busiest_interface)
        self.paths = cache(self._paths)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Equal numbers for fine axes whose groups are linked alike."""
        seen: dict[tuple[float, ...], int] = {}
        axes = range(len(self.factors))
        speeds = [tuple(self.seconds("all_reduce", (axis,), size) for size in (2.0**10, 2.0**28)) for axis in axes]
        return tuple(seen.setdefault(speed, len(seen)) for speed in speeds)

    def parts(self, axes: Sequence[int]) -> int:
        return prod(self.factors[axis] for axis in axes)

    def _seconds(self, kind: str, axes: tuple[int, ...], size: float) -> float:
        """Time of a collective over these fine axes, in all groups at once; `size` is what each rank puts in."""
        if not axes or size <= 0:
            return 0.0
        groups = groups_of(axes, self.factors)
        table = self.cluster.table(kind, groups) if self.cluster.tables else None  # type: ignore[arg-type]
        if table is not None:
            return interpolate(table, size)
        return max(self._collectives.seconds(kind, group, size) for group in groups) * self._contention(axes)

    def _busiest_interface(self, axes: tuple[int, ...]) -> float:
        """How much slower the busiest interface makes all groups at once than one group alone."""
        leaving: list[Counter[int]] = []
        for group in groups_of(axes, self.factors):
            nodes = [self.cluster.node_of(rank) for rank in group]
            hops = zip(nodes, nodes[1:] + nodes[:1], strict=True)
            leaving.append(Counter(here for here, there in hops if here != there))
        total = sum(leaving, Counter[int]())
        return max((total[node] / max(ring[node] for ring in leaving) for node in total), default=1.0)

    def _paths(self, rank: int, size: int) -> Floats:
        """(L, L) seconds from each layout of a tensor of `size` bytes with `rank` axes to each other."""
        costs = np.where(np.eye((rank + 1) ** len(self.factors)), 0.0, np.inf)
        for kind, axes, parts, here, there in _steps(self.factors, rank):
            seconds = SLICE_SECONDS if kind == "slice" else self.seconds(kind, axes, size / parts)
            costs[here, there] = np.minimum(costs[here, there], seconds)
        return _shortest(costs)

    def completed(self, rank: int, size: int, layout: Layout, partial: tuple[int, ...]) -> Floats:
        """(L,) seconds from partial sums over the fine axes `partial`, split as `layout`, to each layout."""
        paths = self.paths(rank, size)
        if not partial:
            return paths[code_of(layout, rank)]
        held = size / self.parts([axis for axis, split in enumerate(layout) if split >= 0])
        best = self.seconds("all_reduce", partial, held) + paths[code_of(layout, rank)]
        for axis in range(rank):
            if axis not in layout[partial[0] :]:
                scattered = code_of(_moved(layout, partial, axis), rank)
                best = np.minimum(best, self.seconds("reduce_scatter", partial, held) + paths[scattered])
        return best


def code_of(layouts: ArrayLike, rank: int) -> Any:
    """The number of a layout of a tensor with `rank` axes, or (K,) those of (K, F) layouts."""
    digits = np.asarray(layouts, np.int64) + 1
    return digits @ (rank + 1) ** np.arange(digits.shape[-1] - 1, -1, -1)


@lru_cache(maxsize=64)
def _steps(factors: tuple[int, ...], rank: int) -> list[tuple[str, tuple[int, ...], int, Ints, Ints]]:
    """All single steps between layouts, those of one collective, group and number of parts together."""
    arcs: dict[tuple[str, tuple[int, ...], int], list[tuple[int, Layout]]] = defaultdict(list)
    for here, layout in enumerate(product(range(-1, rank), repeat=len(factors))):
        parts = prod(factor for factor, split in zip(factors, layout, strict=True) if split >= 0)
        for axis, other in product(range(-1, rank), repeat=2):
            split = [f for f, at in enumerate(layout) if at == axis]
            # Several fine axes move together; a slice takes one that splits nothing.
            for moving in [(f,) for f in split] if axis < 0 else [tuple(split[-n:]) for n in range(1, len(split) + 1)]:
                if other == axis or (other >= 0 and other in layout[moving[0] :]):
                    continue
                step = ("slice", (), 1) if axis < 0 else ("all_to_all" if other >= 0 else "all_gather", moving, parts)
                arcs[step].append((here, _moved(layout, moving, other)))
    ends = {step: tuple(zip(*pairs, strict=True)) for step, pairs in arcs.items()}
    return [(*step, np.array(before, np.int64), code_of(after, rank)) for step, (before, after) in ends.items()]


def _moved(layout: Layout, moving: tuple[int, ...], axis: int) -> Layout:
    return tuple(axis if f in moving else split for f, split in enumerate(layout))


@compiled(nogil=True)
def _shortest(costs):
    """Floyd and Warshall: the least sum of costs along any way. Half the time of scipy's."""
    for middle in range(len(costs)):
        row = costs[middle]
        for here in range(len(costs)):
            first = costs[here, middle]
            if first < np.inf:
                for there in range(len(costs)):
                    costs[here, there] = min(first + row[there], costs[here, there])
    return costs
