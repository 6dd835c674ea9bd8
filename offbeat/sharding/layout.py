"""The part of a tensor on each rank, from a device mesh and tensor maps (TensorOpt §2.1).

Operators may arrange the same ranks in different meshes ([4] here, [2, 2] there). All of them are seen on one mesh, the
finest: the prime factors of the number of ranks. A mesh axis of size 4 is then two fine axes of size 2, and a layout
says for every fine axis which axis of the tensor it splits. Where several fine axes split one tensor axis, the first
cuts it and the next cut the parts, each as `torch.chunk` does, so that sizes need not divide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.errors import StrategyError

WHOLE = -1
"""In a layout: the fine axis does not split the tensor, its ranks all hold the same."""
SUM = -2
"""In a layout: the ranks along the fine axis hold terms whose sum is the tensor."""

BUCKET_BYTES = 4 * 2**20
"""Gradients that one group of ranks holds terms of are summed together as soon as they are so long."""

Layout = tuple[int, ...]
"""For each fine axis the tensor axis it splits, WHOLE or SUM."""


def prime_factors(number: int) -> tuple[int, ...]:
    """Ascending; (1,) for 1."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors) or (1,)


def fine_axes(mesh: Sequence[int], fine: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each axis of a mesh, the fine axes it is made of, in row-major order of the ranks where that is possible."""
    if math.prod(mesh) != math.prod(fine):
        raise StrategyError(f"mesh {list(mesh)} has {math.prod(mesh)} devices, the job has {math.prod(fine)} ranks")
    left = list(range(len(fine)))
    parts = []
    for size in mesh:
        taken, rest = [], size
        for axis in list(left):
            if rest > 1 and rest % fine[axis] == 0:
                rest //= fine[axis]
                taken.append(axis)
                left.remove(axis)
        parts.append(tuple(taken))
    return tuple(parts)


def layout_of(tensor_map: Sequence[int], mesh: Sequence[int], fine: Sequence[int]) -> Layout:
    """The layout that a tensor map on a mesh describes."""
    parts = fine_axes(mesh, fine)
    layout = [WHOLE] * len(fine)
    for tensor_axis, mesh_axis in enumerate(tensor_map):
        if mesh_axis >= 0:
            for axis in parts[mesh_axis]:
                layout[axis] = tensor_axis
    return tuple(layout)


@dataclass(frozen=True)
class Box:
    """The part of a tensor that one rank holds."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def coordinate(rank: int, fine: Sequence[int]) -> tuple[int, ...]:
    """The position of a rank on the fine mesh."""
    return tuple(int(index) for index in np.unravel_index(rank, fine))


def groups_of(axes: Sequence[int], fine: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ only along these fine axes."""
    rest = [axis for axis in range(len(fine)) if axis not in axes]
    ranks = np.arange(math.prod(fine)).reshape(fine).transpose(*rest, *axes)
    return tuple(map(tuple, ranks.reshape(-1, math.prod(fine[axis] for axis in axes)).tolist()))


def box_of(shape: Sequence[int], layout: Layout, fine: Sequence[int], rank: int) -> Box:
    """The part of a tensor of this shape that a rank holds under a layout."""
    starts, sizes = [0] * len(shape), list(shape)
    for axis, parts, index in zip(layout, fine, coordinate(rank, fine), strict=True):
        if axis >= 0:
            longest = -(-sizes[axis] // parts)
            first = min(sizes[axis], index * longest)
            starts[axis] += first
            sizes[axis] = min(longest, sizes[axis] - first)
    return Box(tuple(starts), tuple(sizes))


def shortest_part(length: int, parts: Sequence[int]) -> int:
    """The smallest piece of an axis that is cut into `parts[0]`, each of them into `parts[1]`, and so on."""
    layout = (0,) * len(parts)
    return min(box_of((length,), layout, parts, rank).sizes[0] for rank in range(math.prod(parts)))
