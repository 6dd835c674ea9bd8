"""The ranks of a job on the finest mesh, and a rank's part of a tensor → its part under another layout.

Parts are exchanged by functional collectives on groups of their own (`groups`).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from itertools import count
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import traceback as fx_traceback

from offbeat.runtime.comm import CommunicationFailed, TorchWorld, torch_world
from offbeat.runtime.faults import worker_lost
from offbeat.runtime.sharded.groups import groups
from offbeat.sharding.exchange import Exchange, Slices, count_elements, plan_exchange
from offbeat.sharding.layout import SUM, WHOLE, Box, Layout, box_of, coordinate, groups_of, prime_factors
from offbeat.torch_private import collectives

_meshes: dict[tuple[Any, str], DeviceMesh] = {}
_numbers = count()
c10d = collectives()
MOVE_KEY = "offbeat_move"
"""Annotates traced nodes with the move they belong to: its number, the whole tensor's shape, the two layouts."""
Change = tuple[Layout, Layout]
"""The layout that a tensor has, and the one that it gets."""


class Grid:
    """All ranks of the job, arranged by the prime factors of their number."""

    def __init__(self, job: TorchWorld | None = None, timeout: timedelta = timedelta(minutes=10)) -> None:
        """`job` says on which device parts lie."""
        self.job = job or torch_world()
        self.device = self.job.device
        self.timeout = timeout
        self.world = self.job.size
        self.rank = self.job.rank
        self.fine = prime_factors(self.world)
        self.place = coordinate(self.rank, self.fine)
        self.whole: Layout = (WHOLE,) * len(self.fine)

    @cached_property
    def mesh(self) -> DeviceMesh:
        # A mesh makes process groups, which are kept for the next distribute() of the same job.
        key = (dist.group.WORLD, self.device.type)
        if key not in _meshes:
            _meshes[key] = init_device_mesh(self.device.type, self.fine)
        return _meshes[key]

    def box(self, shape: Sequence[int], layout: Layout, rank: int | None = None) -> Box:
        """What a rank holds of a tensor, this one if not given."""
        return box_of(shape, layout, self.fine, self.rank if rank is None else rank)

    def wrap(self, local: Tensor, shape: Sequence[int], layout: Layout) -> DTensor:
        """A DTensor of this rank's part; `shape` is the whole tensor's."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        placements = [Replicate() if axis == WHOLE else Shard(axis) for axis in layout]
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    @torch.no_grad()
    def move(self, local: Tensor, shape: Sequence[int], have: Layout, need: Layout) -> Tensor:
        """This rank's part under layout `need`, given its part under layout `have`; every rank must call it."""
        if have == need:
            return local
        with fx_traceback.annotate({MOVE_KEY: (next(_numbers), tuple(shape), have, need)}):
            if SUM in have:
                local, have = self._sum(local, have, need)
            if have == need:
                return local
            if (axes := self._changed_alone(shape, have, need)) and local.dtype != torch.bool:
                return self._regroup(local, axes, have[axes[0]], need[axes[0]])
            plan = plan_exchange(tuple(shape), have, need, self.fine, self.rank)
            return exchange(local, plan, self.rank, self.group(tuple(range(len(self.fine)))))

    def _changed_alone(self, shape: Sequence[int], have: Layout, need: Layout) -> tuple[int, ...]:
        """The fine axes that give up one tensor axis for another, or for none, with equal parts; () if it is not so."""
        axes = tuple(index for index, (old, new) in enumerate(zip(have, need, strict=True)) if old != new)
        if len({(have[axis], need[axis]) for axis in axes}) != 1 or have[axes[0]] == WHOLE:
            return ()
        for layout in (have, need):
            if (split := layout[axes[0]]) != WHOLE:
                cutting = tuple(index for index, axis in enumerate(layout) if axis == split)
                if cutting[-len(axes) :] != axes or shape[split] % prod(self.fine[index] for index in cutting):
                    return ()
        return axes

    def _regroup(self, local: Tensor, axes: tuple[int, ...], old: int, new: int) -> Tensor:
        """An all-gather or an all-to-all among the ranks along some axes."""
        parts = prod(self.fine[axis] for axis in axes)
        if new == WHOLE:
            arriving = c10d.all_gather_into_tensor(local.contiguous(), parts, self.group(axes))
            if old == 0:
                return c10d.wait_tensor(arriving)
            stacked = c10d.wait_tensor(arriving).unflatten(0, (parts, -1))
        else:
            outgoing = local.unflatten(new, (parts, -1)).movedim(new, 0).contiguous()
            arriving = c10d.all_to_all_single(outgoing, [1] * parts, [1] * parts, self.group(axes))
            stacked = c10d.wait_tensor(arriving)
        return stacked.movedim(0, old).flatten(old, old + 1)

    def _sum(self, local: Tensor, have: Layout, need: Layout) -> tuple[Tensor, Layout]:
        """Completes sums, already in parts where nothing else splits the tensor axis, else whole in one all-reduce."""
        scattered = scattered_sums(have, need)
        for index, axis in enumerate(scattered):
            if axis != have[index]:
                local = self._reduce_scatter(local, index, axis)
        summed = tuple(index for index, axis in enumerate(scattered) if axis == SUM)
        if summed:
            local = c10d.wait_tensor(c10d.all_reduce(local, "sum", self.group(summed)))
        return local, tuple(WHOLE if axis == SUM else axis for axis in scattered)

    def _reduce_scatter(self, local: Tensor, index: int, axis: int) -> Tensor:
        """This rank's part along a tensor axis of the sum over a fine axis."""
        parts, length = self.fine[index], local.shape[axis]
        longest = -(-length // parts)
        # Torch's collective wants equal parts, one after another.
        padding = [0, 0] * (local.dim() - 1 - axis) + [0, parts * longest - length]
        equal = torch.nn.functional.pad(local, padding) if padding[-1] else local
        stacked = equal.unflatten(axis, (parts, longest)).movedim(axis, 0).flatten(0, 1).contiguous()
        mine = c10d.wait_tensor(c10d.reduce_scatter_tensor(stacked, "sum", parts, self.group((index,))))
        first = min(length, self.place[index] * longest)
        return mine.narrow(axis, 0, min(longest, length - first))

    def group(self, axes: tuple[int, ...]) -> str:
        """The name of the group of ranks that differ from this one along these axes only; they ask for it in turn."""
        members = next(group for group in groups_of(axes, self.fine) if self.rank in group)
        return groups.name(self.job, members, self.timeout)

    @contextmanager
    def explained(self, what: str) -> Generator[None, None, None]:
        """Turns an error of the backend into WorkerLost, which names the ranks that `what` has waited for in vain."""
        try:
            yield
        except Exception as error:
            groups.broken = True
            # Gloo's errors are of no class of their own; they begin with its file that noticed them.
            if not (isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))):
                raise
            raise worker_lost(self.rank, what, CommunicationFailed(str(error), self.job.lost_ranks)) from error

    def shift(self, local: Tensor, shape: Sequence[int], layouts: Change, gradients: Change) -> Tensor:
        """As `move`, with `gradients` the change of the gradient in backward."""
        if layouts[0] == layouts[1] and (gradients[0] == gradients[1] or not local.requires_grad):
            return local
        return _Shift.apply(local, self, tuple(shape), layouts, gradients)


def exchange(local: Tensor, plan: Exchange, rank: int, group: str) -> Tensor:
    """This rank's new part; every rank must call it."""
    # A part of the old one, because all ranks must trace the same dependencies to have the same order.
    nothing = local.reshape(-1)[:0]
    if plan.local:
        region = plan.sends[rank]
        if region is None:
            return nothing.view(plan.sizes)
        # A copy, so that the rest of the old part can be freed.
        return local[region].clone(memory_format=torch.contiguous_format)
    pieces = [local[region].reshape(-1) for region in plan.sends if region is not None]
    outgoing = torch.cat(pieces or [nothing])
    received, sent = ([count_elements(region) for region in regions] for regions in (plan.receives, plan.sends))
    width = local.element_size()
    # As bytes, because not every backend knows every element type.
    arriving = c10d.all_to_all_single(
        outgoing.view(torch.uint8), [count * width for count in received], [count * width for count in sent], group
    )
    incoming = c10d.wait_tensor(arriving).view(local.dtype)
    pairs = zip(plan.receives, incoming.split(received), strict=True)
    found = [(region, piece) for region, piece in pairs if region is not None]
    return _joined(found, 0) if found else incoming.view(plan.sizes)


def _joined(pieces: Sequence[tuple[Slices, Tensor]], axis: int) -> Tensor:
    """The tensor that pieces make, which are cut at the same places along each axis."""
    region, piece = pieces[0]
    if axis == len(region):
        return piece.view([part.stop - part.start for part in region])
    starts = sorted({region[axis].start for region, _ in pieces})
    rows = [_joined([found for found in pieces if found[0][axis].start == start], axis + 1) for start in starts]
    return torch.cat(rows, axis) if len(rows) > 1 else rows[0]


def scattered_sums(have: Layout, need: Layout) -> Layout:
    """`have` with those sums completed in parts whose tensor axis nothing else splits."""
    return tuple(
        wanted if axis == SUM and wanted not in have and need.count(wanted) == 1 and wanted >= 0 else axis
        for axis, wanted in zip(have, need, strict=True)
    )


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, shape: Any, layouts: Change, gradients: Change) -> Tensor:
        ctx.grid, ctx.shape, ctx.gradients = grid, shape, gradients
        moved = grid.move(local, shape, *layouts)
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.grid.move(gradient, ctx.shape, *ctx.gradients), None, None, None, None
