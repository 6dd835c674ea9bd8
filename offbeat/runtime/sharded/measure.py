"""Operators on parts, and the exchanges of a job → the seconds that each takes here.

TensorOpt (section 3.2) measures operators at each split and collectives under each device partitioning at sizes 2^i.
Collectives are measured through `Grid.move`, so that the copies made around them count.
"""

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.cluster import CollectiveTable
from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.layout import SUM, WHOLE, Layout, coordinate
from offbeat.runtime.sharded.rehearse import LocalCall, Part

SIZES = tuple(2**power for power in (10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23))
LONGEST_SECONDS = 0.1
"""Sizes beyond one that takes so long are left out; bandwidth stays from there on."""
QUIET = 0.25
"""Quantile of repeated measurements that counts: what else the machine does only ever adds to them."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def time_calls(calls: Sequence[LocalCall], rounds: int = 8) -> list[float]:
    """Undisturbed seconds of each call, by turns, so that a call finds the caches as another one left them.

    In a job every rank must call it with the same calls; the result is the mean over ranks, all of which are busy."""
    seconds = torch.zeros(rounds, len(calls), dtype=torch.float64)
    for turn in range(rounds):
        if dist.is_initialized():
            dist.barrier()
        for index, call in enumerate(calls):
            seconds[turn, index] = _timed(call)
    # The first round loads kernels.
    found = seconds[min(1, rounds - 1) :].quantile(QUIET, dim=0)
    if dist.is_initialized() and len(calls):
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found.tolist()


@torch.no_grad()
def _timed(call: LocalCall) -> float:
    args, kwargs = pytree.tree_map_only(Part, _drawn, (call.args, dict(call.kwargs)))
    begin = time.perf_counter()
    call.target(*args, **kwargs)
    return time.perf_counter() - begin


def _drawn(part: Part) -> Tensor:
    """A tensor of this shape; whole numbers are 0 or 1, which any table of rows or classes has."""
    extent = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride, strict=True) if size)
    elements = torch.empty(extent, dtype=part.dtype)
    elements = elements.normal_() if part.dtype.is_floating_point else elements.random_(0, 2)
    return elements.as_strided(part.shape, part.stride)


def measure_moves(grid: Grid, sizes: Sequence[int] = SIZES, repeats: int = 8) -> tuple[CollectiveTable, ...]:
    """Tables of every collective over every set of fine mesh axes; every rank must call it."""
    axes = [chosen for count in range(1, len(grid.fine) + 1) for chosen in combinations(range(len(grid.fine)), count)]
    return tuple(_table(grid, kind, chosen, sizes, repeats) for chosen in axes for kind in COLLECTIVES)


def groups_of(grid: Grid, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ only along these fine axes."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.world):
        place = coordinate(rank, grid.fine)
        members.setdefault(tuple(i for axis, i in enumerate(place) if axis not in axes), []).append(rank)
    return tuple(tuple(group) for group in members.values())


def _table(grid: Grid, kind: str, axes: tuple[int, ...], sizes: Sequence[int], repeats: int) -> CollectiveTable:
    seconds: list[float] = []
    for size in sizes:
        move = _mover(grid, kind, axes, size)
        taken = []
        for _ in range(repeats + 1):
            dist.barrier()
            begin = time.perf_counter()
            move()
            slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            taken.append(float(slowest))
        seconds.append(float(torch.tensor(taken[1:]).quantile(QUIET)))
        if seconds[-1] > LONGEST_SECONDS:
            break
    return CollectiveTable(
        collective=kind,  # type: ignore[arg-type]
        groups=groups_of(grid, axes),
        sizes_bytes=tuple(sizes[: len(seconds)]),
        seconds=tuple(seconds),
    )


def _mover(grid: Grid, kind: str, axes: tuple[int, ...], size: int) -> Callable[[], Any]:
    """A function that moves a matrix of which each rank puts `size` bytes in."""
    parts = len(groups_of(grid, axes)[0])
    rows = 2 * parts
    split = kind in ("all_gather", "all_to_all")
    columns = max(parts, size * (parts if split else 1) // (4 * rows) // parts * parts)

    def layout(symbol: int) -> Layout:
        return tuple(symbol if axis in axes else WHOLE for axis in range(len(grid.fine)))

    have = layout(0 if split else SUM)
    need = layout({"all_to_all": 1, "reduce_scatter": 0}.get(kind, WHOLE))
    local = torch.zeros(rows // parts if split else rows, columns, device=grid.device)
    return lambda: grid.move(local, (rows, columns), have, need)
