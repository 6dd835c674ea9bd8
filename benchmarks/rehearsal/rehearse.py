"""A program and a strategy that splits its operators → what one rank does in a step, without computing it.

The executor itself runs the step, forward and backward, on tensors of the meta device, which have shapes and no
elements. What it calls on its parts, what it exchanges and how many bytes it holds are written down, so that the
estimate is of what will be run, whatever a configuration asks for.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.runtime.sharded.execute import Executor
from offbeat.runtime.sharded.grid import Grid, exchange, scattered_sums
from offbeat.runtime.sharded.planning import plan_splits, variable_layouts
from offbeat.runtime.sharded.trace import Program
from offbeat.sharding.exchange import Exchange, count_elements
from offbeat.sharding.layout import SUM, WHOLE, Layout, coordinate, prime_factors
from offbeat.strategy import Strategy


@dataclass(frozen=True)
class Part:
    """A tensor argument of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class LocalCall:
    """An operator as one rank calls it; tensors among its arguments are Parts."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Move:
    """A collective over fine mesh axes, in all groups of the mesh at once."""

    kind: str
    axes: tuple[int, ...]
    bytes: float
    """What each rank puts in."""


@dataclass(frozen=True)
class Shift:
    """A part brought from one layout to another, as one rank does it; every rank takes part."""

    part: Part
    shape: tuple[int, ...]
    """Of the whole tensor."""
    have: Layout
    need: Layout
    moves: tuple[Move, ...]
    """The collectives it consists of."""


@dataclass(frozen=True)
class Rehearsal:
    """One step of one rank."""

    calls: Counter[LocalCall]
    shifts: Counter[Shift]
    """Those that need other ranks; a part cut out of a larger one is a call."""
    variable_bytes: tuple[int, ...]
    """This rank's part of each variable."""
    constant_bytes: int
    """The batch, buffers and frozen parameters."""
    step_bytes: int
    """The most that forward and backward hold beside these, gradients included."""

    @property
    def moves(self) -> Counter[Move]:
        """All collectives of the step."""
        found: Counter[Move] = Counter()
        for shift, count in self.shifts.items():
            for move in shift.moves:
                found[move] += count
        return found

    def peak_bytes(self, slots: int) -> int:
        """The most held at once, with so many tensors of the optimizer for each variable."""
        return self.step_bytes + self.constant_bytes + (1 + slots) * sum(self.variable_bytes)


def rehearse(program: Program, model: nn.Module, strategy: Strategy, world: int, rank: int = 0) -> Rehearsal:
    """What `rank` of `world` does in a step of the traced program; needs no process group."""
    tape = _Tape()
    grid = _Stage(world, rank, tape)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ranks = {name: parameter.dim() for name, parameter in trained.items()}
    layouts = variable_layouts(program.operators, strategy, grid.fine, ranks)
    plan = plan_splits(program, strategy, grid.fine, layouts, strict=True)
    bare = replace(program, constants={node: value.to("meta") for node, value in program.constants.items()})
    executor = Executor(bare, plan, grid, nullcontext())
    held = _constants(model, trained)
    batch = _batch(program)
    state = {
        name: torch.empty(grid.box(p.shape, layouts.get(name, grid.whole)).sizes, dtype=p.dtype, device="meta")
        for name, p in trained.items()
    }
    for part in state.values():
        part.requires_grad_()
    changed = {name for name, _ in program.updates}
    tape.leave_out([*state.values(), *held.values(), *batch])
    with tape:
        kept = {name: tensor.clone() if name in changed else tensor for name, tensor in held.items()}
        output, _ = executor.run({**kept, **state}, batch)
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        # Not backward(): it copies a transposed gradient into its leaf's order, which that of a DTensor does not need.
        ones = [torch.ones_like(result) for result in results]
        gradients = torch.autograd.grad(results, list(state.values()), ones, allow_unused=True)
    assert len(gradients) == len(state)
    constants = sum(tensor.nbytes for tensor in (*held.values(), *batch))
    return Rehearsal(
        tape.calls, tape.shifts, tuple(part.nbytes for part in state.values()), constants, tape.most_held_bytes
    )


def _constants(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in named if name not in trained}


def _batch(program: Program) -> list[Tensor]:
    """Stand-ins for the tensors of the batch that the program reads, by position."""
    read = {position: node for node, position in program.batch.items()}
    size = max(read, default=-1) + 1
    return [
        # Not like the traced tensor, which is a fake one: its mode would take over.
        torch.empty(val.shape, dtype=val.dtype, device="meta")
        if (val := _value(read.get(position))) is not None
        else torch.empty(0, device="meta")
        for position in range(size)
    ]


def _value(node: Node | None) -> Tensor | None:
    return None if node is None else node.meta["val"]


class _Tape(TorchDispatchMode):
    """Writes down the operators called, and adds up the bytes of all storages made under it that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[LocalCall] = Counter()
        self.shifts: Counter[Shift] = Counter()
        self.held_bytes = self.most_held_bytes = 0
        self._writing = True
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        if self._writing and not _is_view(func):
            self.calls[local_call(func, args, kwargs or {})] += 1
        return result

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """These were there before, and views of them add nothing."""
        self._storages.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _hold(self, storage: Any) -> None:
        number = storage._cdata
        if number not in self._storages:
            self._storages.add(number)
            size = storage.nbytes()
            weakref.finalize(storage, self._drop, number, size)
            self.held_bytes += size
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def _drop(self, number: int, size: int) -> None:
        self._storages.discard(number)
        self.held_bytes -= size

    @contextmanager
    def moving(self, shift: Shift) -> Iterator[None]:
        """What is called inside is part of the collectives and no operator of its own."""
        self.shifts[shift] += 1
        before, self._writing = self._writing, False
        try:
            yield
        finally:
            self._writing = before


def local_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalCall:
    """The call without the elements of its tensors."""
    parts, named = pytree.tree_map_only(Tensor, _part, (tuple(args), dict(kwargs)))
    # A call on the meta device is measured on a real one.
    options = ((name, _hashable(value)) for name, value in named.items() if name != "device")
    return LocalCall(target, _hashable(parts), tuple(sorted(options)))


def _part(tensor: Tensor) -> Part:
    return Part(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list | tuple) else value


def _is_view(target: Any) -> bool:
    returns = target._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


class _Stage(Grid):
    """A place on a mesh of ranks of which no other exists; what they would exchange is written down."""

    def __init__(self, world: int, rank: int, tape: _Tape) -> None:
        self.world, self.rank, self.tape = world, rank, tape
        self.fine = prime_factors(world)
        self.place = coordinate(rank, self.fine)
        self.whole: Layout = (WHOLE,) * len(self.fine)
        self.device = torch.device("meta")
        self._shape: tuple[int, ...] = ()

    def move(self, local: Tensor, shape: Sequence[int], have: Layout, need: Layout) -> Tensor:
        self._shape = tuple(shape)
        return super().move(local, shape, have, need)

    def _exchange(self, local: Tensor, plan: Exchange, have: Layout, need: Layout) -> Tensor:
        if plan.local:
            return exchange(local, plan, self.rank, swap=_nothing)
        moves = (exchange_move(plan, have, need, self, local.element_size()),)
        with self.tape.moving(Shift(_part(local), self._shape, have, need, moves)):
            return exchange(local, plan, self.rank, swap=_nothing)

    def _sum(self, local: Tensor, shape: Sequence[int], have: Layout, need: Layout) -> tuple[Tensor, Layout]:
        scattered = scattered_sums(have, need)
        moves = []
        size = float(local.nbytes)
        for axis, (before, after) in enumerate(zip(have, scattered, strict=True)):
            if before != after:
                moves.append(Move("reduce_scatter", (axis,), size))
                size /= self.fine[axis]
        summed = tuple(axis for axis, split in enumerate(scattered) if split == SUM)
        if summed:
            moves.append(Move("all_reduce", summed, size))
        complete = tuple(WHOLE if axis == SUM else axis for axis in scattered)
        with self.tape.moving(Shift(_part(local), tuple(shape), have, complete, tuple(moves))):
            if scattered != have:
                # Parts are put one after another, and gloo sums a copy of all of them.
                ordered = local.clone(memory_format=torch.contiguous_format)
                copied = ordered.clone()
                local = copied.new_empty(self.box(shape, complete).sizes)
                del ordered, copied
            if summed:
                local = local.clone(memory_format=torch.contiguous_format)
        return local, complete


def exchange_move(plan: Exchange, have: Layout, need: Layout, grid: Grid, item_bytes: int) -> Move:
    """The collective whose cost an exchange has: as many bytes pass between two ranks.

    Axes that change take part; where the new part is larger than the old it is an all-gather, else an all-to-all."""
    axes = tuple(axis for axis, (before, after) in enumerate(zip(have, need, strict=True)) if before not in (after, -1))
    axes = axes or tuple(range(len(have)))
    others = prod(grid.fine[axis] for axis in axes) - 1
    arriving = (
        sum(count_elements(region) for rank, region in enumerate(plan.receives) if rank != grid.rank) * item_bytes
    )
    leaving = sum(count_elements(region) for rank, region in enumerate(plan.sends) if rank != grid.rank) * item_bytes
    passing = max(arriving, leaving)
    if all(need[axis] == WHOLE for axis in axes):
        return Move("all_gather", axes, passing / others)
    return Move("all_to_all", axes, passing * (others + 1) / others)


def _nothing(*_: Any) -> None:
    """Stands for the exchange of buffers, which have no elements here."""
