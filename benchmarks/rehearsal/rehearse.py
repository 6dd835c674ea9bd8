"""A program and a strategy that splits its operators → what one rank does in a step, without computing it.

The graphs that the rank would run are traced, and read: what they call on parts, what they exchange and how many bytes
they hold. So the estimate is of what will be run, whatever a configuration asks for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils import _pytree as pytree

from offbeat.runtime.sharded.cut import Parts
from offbeat.runtime.sharded.grid import MOVE_KEY, Grid, scattered_sums
from offbeat.runtime.sharded.local import trace_parts
from offbeat.runtime.sharded.overlap import is_collective
from offbeat.runtime.sharded.planning import plan_splits, variable_layouts
from offbeat.runtime.sharded.trace import Program, annotation
from offbeat.sharding.exchange import Exchange, count_elements, plan_exchange
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
    grid = _Stage(world, rank)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ranks = {name: parameter.dim() for name, parameter in trained.items()}
    layouts = variable_layouts(program.operators, strategy, grid.fine, ranks)
    plan = plan_splits(program, strategy, grid.fine, layouts, strict=True)
    with FakeTensorMode():
        inputs = [
            torch.empty(
                grid.box(node.meta["val"].shape, plan.layouts[node]).sizes,
                dtype=node.meta["val"].dtype,
                requires_grad=program.state.get(node) in trained,
            )
            for node in program.inputs
        ]
    parts = trace_parts(program, plan, grid, inputs)
    assert parts.backward is not None
    calls: Counter[LocalCall] = Counter()
    shifts: Counter[Shift] = Counter()
    for graph in (parts.forward.graph, parts.backward.graph):
        moving = {_move_of(node)[0] for node in graph.nodes if is_collective(node) or _is_item(node)} - {None}
        for node in graph.nodes:
            own = node.op == "call_function" and _move_of(node)[0] not in moving and not is_collective(node)
            if own and not _is_view(node.target):
                args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta["val"], (node.args, node.kwargs))
                calls[local_call(node.target, args, kwargs)] += 1
        moves = {_move_of(node): node.meta["val"].dtype for node in graph.nodes if _move_of(node)[0] in moving}
        for (_, *move), dtype in moves.items():
            shifts.update(grid.shifts(*move, dtype))
    variables = tuple(t.nbytes for t, name in zip(inputs, program.state.values(), strict=False) if name in trained)
    constants = sum(tensor.nbytes for tensor in inputs) - sum(variables)
    return Rehearsal(calls, shifts, variables, constants, _most_held_bytes(parts))


def _move_of(node: Node) -> tuple[Any, ...]:
    return annotation(node, MOVE_KEY) or (None,)


def _is_item(node: Node) -> bool:
    """Whether the node is one of several sums made by one collective."""
    return node.op == "call_function" and any(is_collective(source) for source in node.all_input_nodes)


def _most_held_bytes(parts: Parts) -> int:
    """The most bytes of values that the two graphs hold at once, beside their inputs."""
    assert parts.backward is not None
    forward, backward = parts.forward.graph, parts.backward.graph
    inputs = {number for node in forward.find_nodes(op="placeholder") for number, _ in _storages(node)}
    steps = [node for graph in (forward, backward) for node in graph.nodes if node.op == "call_function"]
    readers = {number: index for index, node in enumerate(steps) for number in _read(node)}
    returned = {number for node in backward.output_node().all_input_nodes for number, _ in _storages(node)}
    held: dict[int, int] = {}
    most = 0
    for index, node in enumerate(steps):
        held.update((number, size) for number, size in _storages(node) if number not in inputs)
        most = max(most, sum(held.values()))
        for number in [*_read(node), *dict(_storages(node))]:
            if readers.get(number, -1) <= index and number not in returned:
                held.pop(number, None)
    return most


def _read(node: Node) -> list[int]:
    return [number for source in node.all_input_nodes for number, _ in _storages(source)]


def _storages(node: Node) -> list[tuple[int, int]]:
    """A number for each storage behind a value, and its bytes."""
    tensors = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()) for tensor in tensors]


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
    if not hasattr(target, "_schema"):
        return True  # a result picked from several
    returns = target._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


class _Stage(Grid):
    """A place on a mesh of ranks of which no other exists."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        self.fine = prime_factors(world)
        self.place = coordinate(rank, self.fine)
        self.whole: Layout = (WHOLE,) * len(self.fine)
        self.device = torch.device("cpu")

    def group(self, axes: tuple[int, ...]) -> str:
        return ""

    def shifts(self, shape: tuple[int, ...], have: Layout, need: Layout, dtype: torch.dtype) -> Iterator[Shift]:
        """The completion of sums, and the exchange, that a move consists of."""
        if SUM in have:
            scattered = scattered_sums(have, need)
            moves = []
            part = self._part(shape, have, dtype)
            size = float(prod(part.shape) * dtype.itemsize)
            for axis, (before, after) in enumerate(zip(have, scattered, strict=True)):
                if before != after:
                    moves.append(Move("reduce_scatter", (axis,), size))
                    size /= self.fine[axis]
            summed = tuple(axis for axis, split in enumerate(scattered) if split == SUM)
            if summed:
                moves.append(Move("all_reduce", summed, size))
            complete = tuple(WHOLE if axis == SUM else axis for axis in scattered)
            yield Shift(part, shape, have, complete, tuple(moves))
            have = complete
        plan = plan_exchange(shape, have, need, self.fine, self.rank)
        if have != need and not plan.local:
            move = exchange_move(plan, have, need, self, dtype.itemsize)
            yield Shift(self._part(shape, have, dtype), shape, have, need, (move,))

    def _part(self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> Part:
        return _part(torch.empty(self.box(shape, layout).sizes, dtype=dtype, device="meta"))


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
