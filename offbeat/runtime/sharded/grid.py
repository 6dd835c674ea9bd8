"""The ranks of a job on the finest mesh, and a rank's part of a tensor → its part under another layout."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from offbeat.sharding.exchange import Exchange, count_elements, plan_exchange
from offbeat.sharding.layout import SUM, WHOLE, Box, Layout, box_of, coordinate, groups_of, prime_factors

_meshes: dict[tuple[Any, str], DeviceMesh] = {}
_groups: dict[tuple[Any, tuple[int, ...]], dist.ProcessGroup] = {}
Change = tuple[Layout, Layout]
"""The layout that a tensor has, and the one that it gets."""


class Grid:
    """All ranks of the job, arranged by the prime factors of their number."""

    def __init__(self) -> None:
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()
        self.fine = prime_factors(self.world)
        self.place = coordinate(self.rank, self.fine)
        self.whole: Layout = (WHOLE,) * len(self.fine)
        on_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @cached_property
    def mesh(self) -> DeviceMesh:
        # A mesh makes process groups, which are kept for the next distribute() of the same job.
        key = (dist.group.WORLD, self.device.type)
        if key not in _meshes:
            _meshes[key] = init_device_mesh(self.device.type, self.fine)
        return _meshes[key]

    def placements(self, layout: Layout) -> tuple[Placement, ...]:
        """The layout as DTensor writes it."""
        return tuple(Partial() if axis == SUM else Replicate() if axis == WHOLE else Shard(axis) for axis in layout)

    def box(self, shape: Sequence[int], layout: Layout, rank: int | None = None) -> Box:
        """What a rank holds of a tensor, this one if not given."""
        return box_of(shape, layout, self.fine, self.rank if rank is None else rank)

    def wrap(self, local: Tensor, shape: Sequence[int], layout: Layout) -> DTensor:
        """A DTensor of this rank's part; `shape` is the whole tensor's."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements(layout), run_check=False, shape=torch.Size(shape), stride=stride
        )

    @torch.no_grad()
    def move(self, local: Tensor, shape: Sequence[int], have: Layout, need: Layout) -> Tensor:
        """This rank's part under layout `need`, given its part under layout `have`."""
        if have != need and SUM in have:
            local, have = self._sum(local, shape, have, need)
        if have == need:
            return local
        return self._exchange(local, plan_exchange(tuple(shape), have, need, self.fine, self.rank), have, need)

    def _exchange(self, local: Tensor, plan: Exchange, have: Layout, need: Layout) -> Tensor:
        return exchange(local, plan, self.rank)

    def _sum(self, local: Tensor, shape: Sequence[int], have: Layout, need: Layout) -> tuple[Tensor, Layout]:
        """Completes sums, already in parts where nothing else splits the tensor axis, else whole in one all-reduce."""
        scattered = scattered_sums(have, need)
        if scattered != have:
            terms = self.wrap(local.contiguous(), shape, have)
            local = terms.redistribute(placements=self.placements(scattered)).to_local()
        summed = tuple(index for index, axis in enumerate(scattered) if axis == SUM)
        if summed:
            local = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(local, group=self._group(summed))
        return local, tuple(WHOLE if axis == SUM else axis for axis in scattered)

    def _group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """The ranks that differ from this one along these axes only; every rank asks for the same axes in turn."""
        if len(axes) == len(self.fine):
            return dist.group.WORLD
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        key = (dist.group.WORLD, axes)
        if key not in _groups:
            members = [list(group) for group in groups_of(axes, self.fine)]
            _groups[key], _ = dist.new_subgroups_by_enumeration(members)
        return _groups[key]

    def shift(self, local: Tensor, shape: Sequence[int], layouts: Change, gradients: Change) -> Tensor:
        """As `move`, with `gradients` the change of the gradient in backward."""
        if layouts[0] == layouts[1] and (gradients[0] == gradients[1] or not local.requires_grad):
            return local
        return _Shift.apply(local, self, tuple(shape), layouts, gradients)


def exchange(local: Tensor, plan: Exchange, rank: int, swap: Callable[..., Any] | None = None) -> Tensor:
    """This rank's new part; every rank must call it. `swap` stands in for torch's exchange of buffers."""
    if plan.local:
        region = plan.sends[rank]
        if region is None:
            return local.new_empty(plan.sizes)
        # A copy, so that the rest of the old part can be freed.
        return local[region].clone(memory_format=torch.contiguous_format)
    pieces = [local[region].reshape(-1) for region in plan.sends if region is not None]
    outgoing = torch.cat(pieces) if pieces else local.new_empty(0)
    received, sent = ([count_elements(region) for region in regions] for regions in (plan.receives, plan.sends))
    incoming = local.new_empty(sum(received))
    width = local.element_size()
    (swap or dist.all_to_all_single)(
        # As bytes, because not every backend knows every element type.
        incoming.view(torch.uint8),
        outgoing.view(torch.uint8),
        [count * width for count in received],
        [count * width for count in sent],
    )
    part = local.new_empty(plan.sizes)
    for region, piece in zip(plan.receives, incoming.split(received), strict=True):
        if region is not None:
            part[region].copy_(piece.view(part[region].shape))
    return part


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
