"""Operators on parts, and the exchanges of a job → the seconds that each takes here.

TensorOpt (section 3.2) measures operators at each split and collectives under each device partitioning at sizes 2^i
(`measure_moves`). For a strategy that is at hand, `time_shifts` measures the very exchanges it will make.

An exchange costs a step more than it takes by itself: ranks that have computed arrive at different moments, threads
that slept are woken, and the operators after it find cold caches. So what counts is by how much exchanges prolong a
loop of computation (`_Loop`). They are made through `Grid.shift`, so that the copies around a collective count. Now and
then a small exchange takes several times what it mostly does, and a step makes many: means add up, medians do not.
"""

import time
from collections.abc import Sequence
from itertools import combinations
from math import prod

import torch
import torch.distributed as dist
from rehearsal.rehearse import LocalCall, Part, Shift
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.cluster import CollectiveTable
from offbeat.runtime.sharded.grid import Grid
from offbeat.sharding.layout import SUM, WHOLE, Layout, groups_of

SIZES = tuple(2**power for power in (10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23))
LONGEST_SECONDS = 0.1
"""Sizes beyond one that takes so long are left out; bandwidth stays from there on."""
SHORTEST_SECONDS = 1e-6
"""Where noise hides what an exchange takes."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
TURNS = ((2**20, 2), (2**17, 4), (0, 8))
"""Exchanges in one pass through a loop, for parts of at least so many bytes: more of those that vary more."""
WORK_EVERY = 3
"""Exchanges after which the loop runs without one."""
WORK_WIDTH = 256
"""A product of two square matrices this wide takes about a millisecond of one core, as operators between exchanges do
in the steps of benchmarks/frontier_accuracy.py."""


def time_calls(calls: Sequence[LocalCall], rounds: int = 8) -> list[float]:
    """Median seconds of each call, by turns, so that a call finds the caches as another one left them.

    In a job every rank must call it with the same calls; the result is the mean over ranks, all of which are busy."""
    seconds = torch.zeros(rounds, len(calls), dtype=torch.float64)
    for turn in range(rounds):
        if dist.is_initialized():
            dist.barrier()
        for index, call in enumerate(calls):
            seconds[turn, index] = _timed(call)
    # The first round loads kernels.
    found = seconds[min(1, rounds - 1) :].quantile(0.5, dim=0)
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


def time_shifts(shifts: Sequence[Shift], grid: Grid, rounds: int = 8) -> list[float]:
    """Seconds by which each exchange prolongs a step, by turns; every rank must call it with the same ones."""
    loop = _Loop(grid)
    working = torch.zeros(rounds, -(-len(shifts) // WORK_EVERY), dtype=torch.float64)
    seconds = torch.zeros(rounds, len(shifts), dtype=torch.float64)
    for turn in range(rounds):
        for index, shift in enumerate(shifts):
            if index % WORK_EVERY == 0:
                working[turn, index // WORK_EVERY] = loop.seconds(None)
            seconds[turn, index] = loop.seconds(shift)
    for passes in (working, seconds):
        dist.all_reduce(passes, op=dist.ReduceOp.MAX)
    # What of a turn is work is the same for all of them, so its mean is over many more passes.
    return (_mean(seconds) - _mean(working.reshape(-1, 1))).clamp(min=SHORTEST_SECONDS).tolist()


def _mean(seconds: Tensor) -> Tensor:
    """The mean of each column without its extremes, which others on the machine made."""
    dropped = max(int(len(seconds) > 2), len(seconds) // 10)
    return seconds.sort(dim=0).values[dropped : len(seconds) - dropped].mean(dim=0)


def measure_moves(grid: Grid, sizes: Sequence[int] = SIZES, repeats: int = 3) -> tuple[CollectiveTable, ...]:
    """Tables of every collective over every set of fine mesh axes; every rank must call it."""
    axes = [chosen for count in range(1, len(grid.fine) + 1) for chosen in combinations(range(len(grid.fine)), count)]
    return tuple(_table(grid, kind, chosen, sizes, repeats) for chosen in axes for kind in COLLECTIVES)


def _table(grid: Grid, kind: str, axes: tuple[int, ...], sizes: Sequence[int], repeats: int) -> CollectiveTable:
    seconds: list[float] = []
    for size in sizes:
        seconds += time_shifts([_shift_of(grid, kind, axes, size)], grid, repeats)
        if seconds[-1] > LONGEST_SECONDS:
            break
    return CollectiveTable(
        collective=kind,  # type: ignore[arg-type]
        groups=groups_of(axes, grid.fine),
        sizes_bytes=tuple(sizes[: len(seconds)]),
        seconds=tuple(seconds),
    )


def _shift_of(grid: Grid, kind: str, axes: tuple[int, ...], size: int) -> Shift:
    """The collective on a matrix of which each rank puts `size` bytes in."""
    parts = len(groups_of(axes, grid.fine)[0])
    rows = 2 * parts
    split = kind in ("all_gather", "all_to_all")
    columns = max(parts, size * (parts if split else 1) // (4 * rows) // parts * parts)

    def layout(symbol: int) -> Layout:
        return tuple(symbol if axis in axes else WHOLE for axis in range(len(grid.fine)))

    have = layout(0 if split else SUM)
    need = layout({"all_to_all": 1, "reduce_scatter": 0}.get(kind, WHOLE))
    local = (rows // parts if split else rows, columns)
    return Shift(Part(local, (columns, 1), torch.float32), (rows, columns), have, need, ())


class _Loop:
    """Turns of computation, with or without an exchange after each."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._left = torch.randn(WORK_WIDTH, WORK_WIDTH, device=grid.device)
        self._right = torch.randn(WORK_WIDTH, WORK_WIDTH, device=grid.device)

    @torch.no_grad()
    def seconds(self, shift: Shift | None) -> float:
        """Of a turn on this rank, in a pass that all begin at one moment."""
        local = self._local(shift) if shift else torch.zeros(0)
        # By the part that was rehearsed, because all ranks must make as many.
        held_bytes = prod(shift.part.shape) * shift.part.dtype.itemsize if shift else 0
        turns = next(turns for size, turns in TURNS if held_bytes >= size)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(turns):
            torch.relu(self._left @ self._right)
            if shift:
                self.grid.shift(local, shift.shape, (shift.have, shift.need), (shift.need, shift.have))
        return (time.perf_counter() - begin) / turns

    def _local(self, shift: Shift) -> Tensor:
        """This rank's part, which may be smaller than that of the rank that rehearsed."""
        sizes = self.grid.box(shift.shape, shift.have).sizes
        same = tuple(sizes) == shift.part.shape
        local = _drawn(shift.part) if same else torch.zeros(sizes, dtype=shift.part.dtype)
        return local.to(self.grid.device)
