"""A program and its operators' configurations → how each call is split, and what every tensor's layout is.

For every fine mesh axis each call is split along the axis of the call that its configuration describes. A call without
a configuration follows the layouts its arguments have. A configuration that no axis of the call fits exactly, as one
that splits a reduced axis, is served by the nearest that gives the right result; its output still has the layout it
asks for.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.fx import Node

from offbeat.errors import StrategyError
from offbeat.graph import Operator, kinds
from offbeat.runtime.sharded.trace import Program
from offbeat.sharding.calls import Axis, Call
from offbeat.sharding.layout import SUM, WHOLE, Layout, layout_of, shortest_part
from offbeat.sharding.rules import axes_of
from offbeat.strategy import OperatorConfig, Strategy
from offbeat.torch_private import pytree

Keep = Literal["before", "after", "both"]
Wanted = tuple[list[Layout | None], list[Layout | None]]
"""Layouts that a configuration asks for, of arguments and of results; None where it says nothing."""


@dataclass(frozen=True)
class Planned:
    """How a program runs in parts."""

    splits: dict[Node, "Split"]
    layouts: dict[Node, Any]
    """Of each value, a list of them for calls with several results."""
    part: Layout
    """Of the batch that a rank is given: what splits its samples, which are its first axis."""
    samples: int | None = None
    """In the whole batch; None where every rank is given all of it."""

    def batch_layout(self, tensor: Tensor) -> Layout:
        """In which layout a rank is given a tensor of the batch, or returns one."""
        split = tensor.dim() and tensor.shape[0] == self.samples
        return self.part if split else (WHOLE,) * len(self.part)


@dataclass(frozen=True)
class Split:
    """How one call is run: the layouts before, inside and after it."""

    node: Node
    call: Call
    split_by: tuple[Axis | None, ...]
    """For each fine axis the axis of the call it splits; None where every rank does the same."""
    inputs: tuple[Layout, ...]
    """Layouts that the arguments are brought to."""
    gradients: tuple[Layout, ...]
    """Layouts in which the arguments' gradients come out of the call."""
    results: tuple[Layout, ...]
    """Layouts in which the results come out."""
    outputs: tuple[Layout, ...]
    """Layouts that the results are brought to."""
    keep: Keep = "both"

    def sums(self) -> bool:
        """Whether any result is a sum over ranks."""
        return any(SUM in layout for layout in self.results)


def variable_layouts(
    operators: Mapping[str, Operator], strategy: Strategy, fine: Sequence[int], ranks: Mapping[str, int]
) -> dict[str, Layout]:
    """How each variable is stored: as the first configured operator that computes with it wants it.

    A view's configuration counts only where no other operator has one. `ranks` is the number of axes of each variable.
    """
    chosen: dict[str, Layout] = {}
    configured = [operator for name, operator in operators.items() if name in strategy.operators]
    for operator in sorted(configured, key=lambda operator: operator.kind == "view"):
        config = strategy.operators[operator.name]
        for name, tensor_map in zip(_names(operator, config), config.inputs, strict=False):
            if name in ranks and name in operator.variables and name not in chosen:
                chosen[name] = _layout(operator, name, tensor_map, ranks[name], config, fine)
    return chosen


def plan_splits(
    program: Program,
    strategy: Strategy,
    fine: Sequence[int],
    stored: Mapping[str, Layout],
    *,
    strict: bool,
    part: Layout | None = None,
) -> Planned:
    """How each call of the program runs; `part` splits the samples that a rank is given and returns.

    `strict` refuses configurations that do not fit their operators; without it they are left out, as for an evaluation
    pass, whose operators may have other names than training's."""
    whole = (WHOLE,) * len(fine)
    lengths = [node.meta["val"].shape[0] for node in program.batch if node.meta["val"].dim()]
    planned = Planned({}, {}, part or whole, lengths[0] if part and lengths else None)
    splits, layouts = planned.splits, planned.layouts
    layouts |= {node: planned.batch_layout(node.meta["val"]) for node in program.batch}
    layouts |= {node: stored.get(name, whole) for node, name in program.state.items()}
    layouts |= dict.fromkeys(program.constants, whole)
    for node in program.nodes:
        if is_getitem(node):
            layouts[node] = layouts[node.args[0]][node.args[1]]
            continue
        call = make_call(node)
        config = strategy.operators.get(node.name)
        wanted: Wanted = [None] * len(call.inputs), [None] * len(call.outputs)
        keep: Keep = "both"
        if config is not None and node.name in program.operators:
            with nullcontext() if strict else suppress(StrategyError):
                wanted, keep = _wanted(program, node, call, config, fine), config.keep
        current = [layouts[source] for source in tensor_nodes(node)]
        splits[node] = replace(_split(node, call, wanted, current, fine), keep=keep)
        layouts[node] = structured(node.meta["val"], splits[node].outputs)
    return planned


def samples_layout(program: Program, planned: Planned) -> Layout:
    """How the first call that reads the batch splits its samples."""
    for node in program.nodes:
        for position, source in enumerate(tensor_nodes(node)):
            if source in program.batch and source.meta["val"].dim() and not is_getitem(node):
                return tuple(axis if axis == 0 else WHOLE for axis in planned.splits[node].inputs[position])
    return (WHOLE,) * len(planned.part)


def make_call(node: Node) -> Call:
    """The call with the traced tensors for its arguments."""
    args, kwargs = pytree.tree_map_only(Node, lambda source: source.meta["val"], (tuple(node.args), dict(node.kwargs)))
    return Call(node.target, args, kwargs, tensors_of((args, kwargs)), tensors_of(node.meta["val"]))


def tensors_of(values: Any) -> tuple[Tensor, ...]:
    """Tensors among arguments or results, repeated ones as often as they are given."""
    return tuple(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def tensor_nodes(node: Node) -> list[Node]:
    """Nodes of the tensor arguments, in the order of `Call.inputs`."""
    leaves = pytree.tree_leaves((tuple(node.args), dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Node) and isinstance(leaf.meta["val"], Tensor)]


def _names(operator: Operator, config: OperatorConfig) -> tuple[str, ...]:
    names = operator.inputs + operator.variables
    if config.inputs and len(config.inputs) != len(names):
        raise StrategyError(
            f"operator {operator.name!r}: {len(config.inputs)} input maps are given, it reads {list(names)}"
        )
    return names


def _layout(
    operator: Operator, what: str, tensor_map: Sequence[int], rank: int, config: OperatorConfig, fine: Sequence[int]
) -> Layout:
    if len(tensor_map) != rank:
        raise StrategyError(
            f"operator {operator.name!r}: the map {list(tensor_map)} of {what!r} has {len(tensor_map)} axes, "
            f"the tensor has {rank}"
        )
    try:
        return layout_of(tensor_map, config.mesh, fine)
    except StrategyError as error:
        raise StrategyError(f"operator {operator.name!r}: {error}") from None


def _wanted(program: Program, node: Node, call: Call, config: OperatorConfig, fine: Sequence[int]) -> Wanted:
    operator = program.operators[node.name]
    maps = dict(zip(_names(operator, config), config.inputs, strict=False))
    if len(config.outputs) > len(operator.outputs):
        raise StrategyError(
            f"operator {operator.name!r}: {len(config.outputs)} output maps are given, it has "
            f"{len(operator.outputs)} results"
        )
    inputs: list[Layout | None] = [None] * len(call.inputs)
    for index, (source, tensor) in enumerate(zip(tensor_nodes(node), call.inputs, strict=True)):
        name = program.reads.get(source, "")
        # One map stands for all results of an operator; it describes the first.
        if name in maps and not (is_getitem(source) and len(maps[name]) != tensor.dim()):
            inputs[index] = _layout(operator, name, maps[name], tensor.dim(), config, fine)
    outputs: list[Layout | None] = [None] * len(call.outputs)
    for index, (tensor_map, tensor) in enumerate(zip(config.outputs, call.outputs, strict=False)):
        outputs[index] = _layout(operator, f"result {index}", tensor_map, tensor.dim(), config, fine)
    return inputs, outputs


def _split(node: Node, call: Call, wanted: Wanted, current: Sequence[Layout], fine: Sequence[int]) -> Split:
    options = axes_of(call)
    split_by: list[Axis | None] = []
    for index, parts in enumerate(fine):
        allowed = [None, *(option for option in options if _divides(option, split_by, fine[:index], parts))]
        split_by.append(min(allowed, key=lambda option: _mismatch(option, call, wanted, current, index)))
    given = [[axis.inputs[i] if axis else None for axis in split_by] for i in range(len(call.inputs))]
    inputs = (tuple(WHOLE if at is None else max(at, WHOLE) for at in layout) for layout in given)
    # What every part is given whole has a gradient to which each contributes a term.
    gradients = (tuple(WHOLE if at is None else SUM if at < 0 else at for at in layout) for layout in given)
    whole = (WHOLE,) * len(call.outputs)
    results = tuple(zip(*(axis.outputs if axis else whole for axis in split_by), strict=True))
    outputs = (
        asked if asked is not None else tuple(max(axis, WHOLE) for axis in result)
        for asked, result in zip(wanted[1], results, strict=True)
    )
    return Split(node, call, tuple(split_by), tuple(inputs), tuple(gradients), results, tuple(outputs))


def _divides(option: Axis, earlier: Sequence[Axis | None], sizes: Sequence[int], parts: int) -> bool:
    """Whether a further cut leaves no rank without elements, and none with elements of another's."""
    cuts = [size for size, axis in zip(sizes, earlier, strict=True) if axis is option] + [parts]
    return shortest_part(option.length, cuts) > 0 and all(length % math.prod(cuts) == 0 for length in option.even)


def _mismatch(
    option: Axis | None, call: Call, wanted: Wanted, current: Sequence[Layout], index: int
) -> tuple[int, int, float]:
    """How far splitting by `option` is from the configuration; where that says nothing, the bytes that would move."""
    inputs_off = outputs_off = 0
    moved = 0.0
    for position, (tensor, asked) in enumerate(zip(call.inputs, wanted[0], strict=True)):
        need = WHOLE if option is None else max(option.inputs[position], WHOLE)
        have = (current[position] if asked is None else asked)[index]
        if have != need:
            inputs_off += asked is not None
            # Taking a part of what a rank holds moves nothing, but leaves the other parts to others.
            moved += 1.0 if have == WHOLE else kinds.touched_bytes(tensor) * (1.0 if need == WHOLE else 0.5)
    for position, (tensor, asked) in enumerate(zip(call.outputs, wanted[1], strict=True)):
        made = WHOLE if option is None else option.outputs[position]
        if made == SUM:
            moved += kinds.touched_bytes(tensor) * 2.0
        elif asked is not None:
            outputs_off += asked[index] != made
    return inputs_off, outputs_off, moved


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and kinds.base_name(node.target) == "getitem"


def structured(value: Any, items: Sequence[Any]) -> Any:
    """Something for each tensor of a call's results, in the structure that the traced call has."""
    if isinstance(value, Tensor):
        return items[0]
    remaining = iter(items)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in value]
