"""Two layouts of a tensor → what each rank sends to each other, in one exchange.

This is TensorOpt's tensor re-scheduling (§4, "Flexible tensor splitting"). Along the mesh axes that do not split a
tensor, ranks hold copies; the ranks at one place of these axes hold the tensor once between them. A rank takes what it
lacks from those, so every element has one source, and an all-gather, an all-to-all or any mixture of them over several
mesh axes is one message per pair of ranks: the shortest path of collectives with its steps fused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from offbeat.sharding.layout import WHOLE, Box, Layout, box_of, coordinate

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Exchange:
    """One rank's part of bringing a tensor from one layout to another."""

    sizes: tuple[int, ...]
    """Of the part it ends up with."""
    sends: tuple[Slices | None, ...]
    """For each rank the region of its part that goes there."""
    receives: tuple[Slices | None, ...]
    """For each rank the region of its new part that comes from there."""
    local: bool
    """No rank needs anything of another."""


@lru_cache(maxsize=8192)
def plan_exchange(shape: tuple[int, ...], have: Layout, need: Layout, fine: tuple[int, ...], rank: int) -> Exchange:
    """What `rank` sends and receives; every rank derives its own, and they agree."""
    world = range(prod(fine))
    before = [box_of(shape, have, fine, each) for each in world]
    after = [box_of(shape, need, fine, each) for each in world]
    groups = [_group(have, fine, each) for each in world]
    mine = groups[rank]
    sends = [_within(before[rank], before[rank], after[other]) if groups[other] == mine else None for other in world]
    receives = [_within(after[rank], before[other], after[rank]) if groups[other] == mine else None for other in world]
    local = all(
        before[each].starts[axis] <= after[each].starts[axis]
        and after[each].starts[axis] + after[each].sizes[axis] <= before[each].starts[axis] + before[each].sizes[axis]
        for each in world
        for axis in range(len(shape))
        if all(after[each].sizes)
    )
    return Exchange(after[rank].sizes, tuple(sends), tuple(receives), local)


def _group(layout: Layout, fine: Sequence[int], rank: int) -> tuple[int, ...]:
    """Where a rank stands along the mesh axes that do not split the tensor."""
    place = coordinate(rank, fine)
    return tuple(index for axis, index in zip(layout, place, strict=True) if axis == WHOLE)


def _within(frame: Box, one: Box, other: Box) -> Slices | None:
    """The region two boxes share, counted from the start of `frame`; None if they share nothing."""
    region = []
    for origin, start, size, other_start, other_size in zip(
        frame.starts, one.starts, one.sizes, other.starts, other.sizes, strict=True
    ):
        first, last = max(start, other_start), min(start + size, other_start + other_size)
        if first >= last:
            return None
        region.append(slice(first - origin, last - origin))
    return tuple(region)


def count_elements(region: Slices | None) -> int:
    """Elements of a region; 0 of none."""
    return 0 if region is None else prod(part.stop - part.start for part in region)
