"""Infer the axes of a captured operator from the shapes of its tensors.

A ModelGraph names an operator's target and the tensors it reads, but neither their order nor its other arguments. Both
are read from shapes here: every call that fits them is a reading, and only axes that all readings have in common are
kept. Softmax is taken to run over the last axis, log-softmax over the last or, beyond matrices, over axis 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, combinations_with_replacement, permutations, zip_longest
from typing import Any

import torch
from torch import Tensor

from offbeat.graph import kinds
from offbeat.graph.model import ModelGraph, Operator
from offbeat.sharding import rules
from offbeat.sharding.calls import RULES, Axis, Call
from offbeat.sharding.layout import WHOLE
from offbeat.torch_private import schema_of

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Captured:
    """The axes of a captured operator."""

    axes: tuple[Axis, ...] = ()
    """Their inputs are the operator's inputs, then its variables, then the graph's inputs."""
    data: frozenset[int] = frozenset()
    """Those of the graph's inputs that it reads directly."""
    known: bool = False
    """Whether its arguments could be read and a rule says how they are split."""


def captured_axes(operator: Operator, graph: ModelGraph, weights: frozenset[str] = frozenset()) -> Captured:
    """The axes of a forward operator; `weights` are the operators that only view or copy variables."""
    views = [graph.operator(name) if name in weights else None for name in operator.inputs]
    through = {name: place for place, view in enumerate(views) if view for name in view.variables}
    direct = [name for name in operator.variables if name not in through]
    found = _axes(
        operator.target,
        tuple(graph.operator(name).outputs[0].shape for name in operator.inputs),
        tuple(graph.variable(name).shape for name in direct),
        tuple(tensor.shape for tensor in graph.inputs),
        tuple(tensor.shape for tensor in operator.outputs),
    )
    first, last = len(operator.inputs), len(operator.inputs) + len(direct)

    def split_of(name: str, axis: Axis) -> int:
        """The axis of a variable that is split, as the operator or the view through which it reads it has it."""
        if name in direct:
            return axis.inputs[first + direct.index(name)]
        view = graph.operator(operator.inputs[through[name]])
        place, split = len(view.inputs) + view.variables.index(name), axis.inputs[through[name]]
        behind = captured_axes(view, graph, weights).axes
        return next((own.inputs[place] for own in behind if own.outputs[0] == split >= 0), WHOLE)

    def spread(axis: Axis) -> Axis:
        variables = (split_of(name, axis) for name in operator.variables)
        return replace(axis, inputs=(*axis.inputs[:first], *variables, *axis.inputs[last:]))

    return replace(found, axes=tuple(map(spread, found.axes))) if through else found


@lru_cache(maxsize=4096)
def _axes(name: str, inputs: Shapes, variables: Shapes, data: Shapes, outputs: Shapes) -> Captured:
    target = _target(name)
    if target is None or not outputs:
        return Captured()
    made = tuple(_tensor(shape) for shape in outputs)
    first = len(inputs) + len(variables)
    found: list[dict[Axis, None]] = []
    read: set[int] = set()
    known = False
    for slots, arguments in _readings(target, inputs, variables, data, outputs):
        call = Call(target, (), arguments, tuple(_tensor(shape) for shape, _ in slots), made)
        known = rules.has_rule(call)
        placed: dict[Axis, None] = {}
        for axis in rules.all_axes(call):
            # What an axis adds once is whole.
            splits = {place: max(split, WHOLE) for (_, place), split in zip(slots, axis.inputs, strict=True)}
            placed[replace(axis, inputs=tuple(splits.get(at, WHOLE) for at in range(first + len(data))))] = None
        found.append(placed)
        read.update(place - first for _, place in slots if place is not None and place >= first)
    common = (axis for axis in found[0] if all(axis in others for others in found)) if found else ()
    return Captured(tuple(common), frozenset(read), known)


@cache
def _target(name: str) -> Any:
    """The operator of this name, such as 'aten.mm.default'; None if this torch has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return None if schema_of(found) is None else found


@cache
def _tensor(shape: Shape) -> Tensor:
    return torch.empty(shape, device="meta")


Slot = tuple[Shape, int | None]
"""A tensor argument: its shape, and its place among inputs, variables and data; None if it is none of these."""
Arguments = dict[str, Any]
Reading = tuple[list[Slot], Arguments]

_TENSORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "embedding", "gather"), (2, 2)),
    **dict.fromkeys(("addmm", "baddbmm"), (3, 3)),
    **dict.fromkeys(("convolution", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy"), (2, 3)),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"), (2, 2)),
    "binary_cross_entropy_with_logits": (2, 4),
    **{name: (1, 5) for name, found in RULES.items() if found in (rules.batch_norm, rules.group_norm)},
}
"""For operators whose tensors play different parts: how many they need, and how many they may have."""


def _readings(target: Any, inputs: Shapes, variables: Shapes, data: Shapes, outputs: Shapes) -> Iterator[Reading]:
    """All calls that fit the shapes: their tensors and their other arguments."""
    name = schema_of(target).name.removeprefix("aten::")
    given: list[Slot] = [(shape, place) for place, shape in enumerate((*inputs, *variables))]
    if name not in _TENSORS:
        if name in ("cat", "stack"):
            given = [slot for slot in given if len(slot[0]) == len(given[0][0])]
        elif kinds.is_view(target):
            given = given[:1]
        for arguments in _arguments(name, [shape for shape, _ in given], outputs) if given else ():
            yield given, arguments
        return
    needed, most = _TENSORS[name]
    for places in permutations(range(most), len(given)):
        # Inputs keep their order, and so do variables.
        if list(places) != sorted(places[: len(inputs)]) + sorted(places[len(inputs) :]):
            continue
        filled = [dict(zip(places, given, strict=True)).get(place) for place in range(most)]
        shapes = _operand_shapes(name, [slot and slot[0] for slot in filled], outputs[0], data)
        if shapes is None or any(slot and slot[0] != shape for slot, shape in zip(filled, shapes, strict=True)):
            continue
        # What is neither a result nor a variable may be of the batch.
        others = [(s, len(given) + data.index(s) if s in data else None) for s in shapes[:needed]]
        slots = [slot or other for slot, other in zip_longest(filled, others) if slot or other]
        yield slots, _operand_arguments(name, shapes, outputs[0])
        if name == "convolution":
            return  # A result is its data rather than its kernel, and arrangements begin with that.


def _operand_shapes(name: str, filled: Sequence[Shape | None], out: Shape, data: Sequence[Shape]) -> list[Shape] | None:
    """The shapes of all tensor arguments from those that are known; None if these do not fit."""
    first, second = filled[:2]
    shapes: list[Shape] | None = None
    match name:
        case "mm" | "bmm" | "addmm" | "baddbmm":
            left, right = filled[-2:]
            known = left or right
            added = [first or out] if len(filled) == 3 else []
            if known and len(known) == len(out) and all(_broadcasts(shape, out) for shape in added):
                inner = known[-1] if left else known[-2]
                shapes = [*added, (*out[:-1], inner), (*out[:-2], inner, out[-1])]
        case "mv":
            inner = first[-1] if first else second[0] if second else 0
            shapes = [(*out, inner), (inner,)]
        case "convolution":
            first = first or next((shape for shape in data if len(shape) == len(out) and shape[0] == out[0]), None)
            if first and second and len(first) == len(second) == len(out) > 2:
                fits = first[0] == out[0] and second[0] in (out[1], first[1])
                shapes = [first, second, (out[1],)] if fits else None
        case "embedding":
            shapes = [first, out[:-1]] if first and len(first) == 2 and first[1] == out[-1] else None
        case "gather":
            shapes = [first, out] if first and len(_changed(first, out)) == 1 else None
        case "nll_loss_forward" | "nll_loss2d_forward":
            shapes = [first, first[:1] + first[2:], first[1:2]] if first and len(first) > 1 else None
        case _ if RULES[name] is rules.element_loss:
            shapes = [first or second or out] * len(filled)
        case _:
            shapes = [out, *[out[1:2]] * (len(filled) - 1)]
    return shapes


def _operand_arguments(name: str, shapes: Sequence[Shape], out: Shape) -> Arguments:
    first, second = shapes[:2]
    if name == "convolution":
        transposed = second[0] == first[1] and first[2] < out[2]
        return {"transposed": transposed, "groups": max(1, (out[1] if transposed else first[1]) // second[1])}
    return {"dim": _changed(first, out)[0]} if name == "gather" else {"reduction": int(not out)}


def _arguments(name: str, given: list[Shape], outputs: Sequence[Shape]) -> list[Arguments]:
    """The arguments other than tensors that fit the shapes; [] if shapes do not tell."""
    source, out = given[0], outputs[0]
    found: list[Arguments] = []
    match name:
        case "flip" | "cumsum" | "cumprod" | "sort" | "index_select":
            pass
        case "transpose":
            for i, j in combinations_with_replacement(range(len(source)), 2):
                if (source[i], source[j], _without(source, i, j)) == (out[j], out[i], _without(out, i, j)):
                    found.append({"dim0": i, "dim1": j})
        case "permute":
            orders = permutations(range(len(source))) if len(source) <= 6 else ()
            found = [{"dims": order} for order in orders if tuple(source[axis] for axis in order) == out]
        case "constant_pad_nd":
            found = [{"pad": [n for axis in reversed(range(len(out))) for n in (0, out[axis] - source[axis])]}]
        case "native_layer_norm" | "_fused_rms_norm":
            # The normalised axes are those whose statistics have one element.
            if len(outputs) > 1 and len(outputs[1]) == len(source) == len(out):
                leading = max((axis + 1 for axis, length in enumerate(outputs[1]) if length > 1), default=0)
                found = [{"normalized_shape": out[leading:]}]
        case _ if RULES.get(name) in (rules.along_others, rules.joining, rules.reduction):
            found = [{"dim": dim} for dim in _dims(name, given, outputs)]
        case _ if RULES.get(name) is rules.attention:
            found = [{}] if len(given) > 2 else []
        case _ if RULES.get(name, rules.pointwise) is not rules.pointwise or all(
            _broadcasts(shape, out) for shape in given
        ):
            found = [{}]
    return found


def _dims(name: str, given: list[Shape], outputs: Sequence[Shape]) -> Iterable[int | list[int]]:
    """The axes that an operator may reduce, join or pick from."""
    source, out = given[0], outputs[0]
    axes = range(len(source))
    changed = sorted({axis for shape in given for axis in _changed(shape, out)})
    if name.endswith("softmax"):
        return (-1, 1) if name == "_log_softmax" and len(out) > 2 else (-1,) if out else ()
    if name == "stack":
        return [axis for axis in range(len(out)) if _without(out, axis) == source]
    if name in ("select", "unbind"):
        parts = len(outputs) if name == "unbind" else None
        return [axis for axis in axes if _without(source, axis) == out and parts in (None, source[axis])]
    if len(source) != len(out):
        return [[*dims] for dims in combinations(axes, len(source) - len(out)) if _without(source, *dims) == out]
    if RULES[name] is rules.reduction:
        return [changed] if changed else ()
    if given == [out] and name in ("cat", "slice"):
        return (0,)
    return changed if len(changed) == 1 else ()


def _changed(source: Shape, out: Shape) -> list[int]:
    return [axis for axis, (before, after) in enumerate(zip(source, out, strict=False)) if before != after]


def _without(shape: Shape, *axes: int) -> Shape:
    return tuple(length for axis, length in enumerate(shape) if axis not in axes)


def _broadcasts(shape: Shape, out: Shape) -> bool:
    behind = zip(reversed(shape), reversed(out), strict=False)
    return len(shape) <= len(out) and all(length in (1, whole) for length, whole in behind)
