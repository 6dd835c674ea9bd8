"""What each rank sends to each other rank to change the layout of a tensor, in one exchange.

This is TensorOpt's tensor re-scheduling (§4, "Flexible tensor splitting"). Along the mesh axes that do not split a
tensor, ranks hold copies; the ranks at one place of these axes hold the tensor once between them. A rank takes what it
lacks from those, so every element has one source, and an all-gather, an all-to-all or any mixture of them over several
mesh axes is one message per pair of ranks: the shortest path of collectives with its steps fused.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from offbeat.sharding.layout import WHOLE, Box, Layout, box_of, groups_of

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
    splitting = [axis for axis, split in enumerate(have) if split != WHOLE]
    group = next(group for group in groups_of(splitting, fine) if rank in group)
    sends = [_shared(before[rank], after[other]) if other in group else None for other in world]
    receives = [_shared(after[rank], before[other]) if other in group else None for other in world]
    local = all(count_elements(_shared(after[each], before[each])) == prod(after[each].sizes) for each in world)
    return Exchange(after[rank].sizes, tuple(sends), tuple(receives), local)


def _shared(box: Box, other: Box) -> Slices | None:
    """The region of `box` that `other` has too, counted from the start of `box`; None if they share nothing."""
    region = []
    for start, mine, theirs in zip(box.starts, box.slices, other.slices, strict=True):
        first, last = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if first >= last:
            return None
        region.append(slice(first - start, last - start))
    return tuple(region)


def count_elements(region: Slices | None) -> int:
    """Elements of a region; 0 of none."""
    return 0 if region is None else prod(part.stop - part.start for part in region)
