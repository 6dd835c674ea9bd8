"""An operator that moves elements without changing them → its axes (see `axes`)."""

from collections.abc import Sequence

from offbeat.runtime.sharded.axes import Axis, Call, aligned, rule
from offbeat.runtime.sharded.layout import WHOLE


@rule("t", "transpose", "permute", "movedim", "numpy_T")
def permutation(call: Call) -> list[Axis]:
    (tensor,) = call.inputs
    order = list(range(tensor.dim()))
    if call.name == "permute":
        order = [dim % tensor.dim() for dim in call.argument("dims")]
    elif call.name == "transpose":
        first, second = call.argument("dim0"), call.argument("dim1")
        order[first], order[second] = order[second], order[first]
    elif call.name == "t":
        order.reverse()
    else:
        return []
    return [Axis((source,), (axis,), tensor.shape[source]) for axis, source in enumerate(order)]


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")
def reshaping(call: Call) -> list[Axis]:
    """Axes that keep their length, and the leading axis of those that are merged or taken apart."""
    (tensor,) = call.inputs
    return [
        Axis((before,), (after,), before_length, () if before_length == after_length else (before_length, after_length))
        for before, after in leading_pairs(tensor.shape, call.outputs[0].shape)
        for before_length, after_length in [(tensor.shape[before], call.outputs[0].shape[after])]
    ]


def leading_pairs(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """The first axis of each smallest group of axes that one shape and the other make with the same elements."""
    left = [axis for axis, length in enumerate(before) if length != 1]
    right = [axis for axis, length in enumerate(after) if length != 1]
    pairs = []
    while left and right:
        first = left.pop(0), right.pop(0)
        pairs.append(first)
        one, other = before[first[0]], after[first[1]]
        while one != other:
            if one < other:
                one *= before[left.pop(0)]
            else:
                other *= after[right.pop(0)]
    return pairs


@rule("expand")
def expansion(call: Call) -> list[Axis]:
    (tensor,) = call.inputs
    shape = call.outputs[0].shape
    return [Axis((aligned(tensor.shape, axis, len(shape)),), (axis,), length) for axis, length in enumerate(shape)]


@rule("select", "slice", "split", "split_with_sizes", "unbind", "index_select", "flip", "narrow")
def along_others(call: Call) -> list[Axis]:
    """Every axis but the ones that elements are picked from."""
    tensor, *others = call.inputs
    dims = call.argument("dims") if call.name == "flip" else [call.argument("dim", 0)]
    picked = {dim % tensor.dim() for dim in dims}
    removed = call.outputs[0].dim() < tensor.dim()
    whole = (WHOLE,) * len(others)
    return [
        Axis((axis, *whole), (axis - (removed and axis > min(picked)),) * len(call.outputs), length)
        for axis, length in enumerate(tensor.shape)
        if axis not in picked
    ]


@rule("cat", "stack")
def joining(call: Call) -> list[Axis]:
    rank = call.outputs[0].dim()
    joined = call.argument("dim", 0) % rank
    if any(tensor.dim() != call.inputs[0].dim() for tensor in call.inputs):
        return []
    axes = []
    for axis, length in enumerate(call.outputs[0].shape):
        if axis != joined:
            before = axis - (call.name == "stack" and axis > joined)
            axes.append(Axis((before,) * len(call.inputs), (axis,), length))
    return axes


@rule("gather")
def gathering(call: Call) -> list[Axis]:
    tensor, index = call.inputs
    picked = call.argument("dim") % max(1, tensor.dim())
    return [
        Axis((axis, axis), (axis,), length)
        for axis, length in enumerate(index.shape)
        if axis != picked and tensor.shape[axis] == length
    ]


@rule("constant_pad_nd")
def padding(call: Call) -> list[Axis]:
    (tensor,) = call.inputs
    untouched = tensor.dim() - (len(call.argument("pad")) + 1) // 2
    return [Axis((axis,), (axis,), length) for axis, length in enumerate(tensor.shape[:untouched])]
