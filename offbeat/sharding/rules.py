"""The axes of each operator (see `calls`): first operators that compute, then those that move elements.

An operator that this module does not describe has no axes and is run whole on every rank, which is never wrong.
TensorOpt (section 2.1) leaves its rules out; these are derived from what the operators compute.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from offbeat.graph import kinds
from offbeat.sharding.calls import ONCE, RULES, Axis, Call, aligned, rule
from offbeat.sharding.layout import SUM, WHOLE


def axes_of(call: Call) -> tuple[Axis, ...]:
    """All axes along which the parts of a call run on their own; () if it has to run whole."""
    return () if is_random(call) else tuple(axis for axis in all_axes(call) if not axis.statistics)


def all_axes(call: Call) -> tuple[Axis, ...]:
    """As `axes_of`, with the axes whose parts share statistics or random numbers."""
    if any(tensor.numel() == 0 for tensor in call.inputs) or not call.inputs or not call.outputs:
        return ()
    found = RULES.get(call.name) or (pointwise if torch.Tag.pointwise in call.target.tags else None)
    return () if found is None else tuple(axis for axis in found(call) if axis.length > 1)


def has_rule(call: Call) -> bool:
    """Whether running the call whole is what its rule says, rather than the lack of one."""
    return not call.inputs or call.name in RULES or torch.Tag.pointwise in call.target.tags


def is_random(call: Call) -> bool:
    """Whether the result depends on the random generator."""
    draws = torch.Tag.nondeterministic_seeded in call.target.tags
    return draws and (kinds.kind_of(call.target) != "attention" or bool(call.argument("dropout_p")))


def broadcast_axes(call: Call, shape: Sequence[int], outputs: Callable[[int], tuple[int, ...]]) -> list[Axis]:
    """One axis per axis of the shape that all arguments are broadcast to."""
    return [
        Axis(tuple(aligned(tensor.shape, axis, len(shape)) for tensor in call.inputs), outputs(axis), length)
        for axis, length in enumerate(shape)
    ]


@rule("clone", "_to_copy", "alias", "detach", "copy", "where", "masked_fill", "lift_fresh_copy", "zeros_like")
@rule("ones_like", "full_like", "threshold", "gelu", "lift_fresh", "bitwise_not", "logical_not", "native_dropout")
@rule("bernoulli", "rand_like", "randn_like", "expand")
def pointwise(call: Call) -> list[Axis]:
    shape = call.outputs[0].shape
    return broadcast_axes(call, shape, lambda axis: (axis,) * len(call.outputs))


_PRODUCTS = {
    **dict.fromkeys(("mm", "addmm"), ("ij", "jk", "ik")),
    **dict.fromkeys(("bmm", "baddbmm"), ("bij", "bjk", "bik")),
    "mv": ("ij", "j", "i"),
}
"""The axes of both factors and of the result, as einsum names them."""


@rule(*_PRODUCTS)
def product(call: Call) -> list[Axis]:
    """The axes of the result and, as a sum, the one that only the factors have. A term may be added to the product."""
    *added, first, second = call.inputs
    left, right, out = _PRODUCTS[call.name]
    lengths = dict(zip(left + right, (*first.shape, *second.shape), strict=True))
    axes = []
    for name in dict.fromkeys(out + left):
        made = out.find(name) if name in out else SUM
        terms = (ONCE if made == SUM else aligned(term.shape, made, len(out)) for term in added)
        axes.append(Axis((*terms, left.find(name), right.find(name)), (made,), lengths[name]))
    return axes


@rule("convolution")
def convolution(call: Call) -> list[Axis]:
    """Samples, the channels of the result and, as a sum, those of the data; with groups, whole groups of channels."""
    weight, biases = call.inputs[1], len(call.inputs) - 2
    groups = call.argument("groups")
    if groups > 1:
        return [*first_axes(call, 1), Axis((1, 0, *[0] * biases), (1,), groups, (groups,))]
    made, read = (1, 0) if call.argument("transposed") else (0, 1)
    return [
        *first_axes(call, 1),
        Axis((WHOLE, made, *[0] * biases), (1,), weight.shape[made]),
        Axis((1, read, *[ONCE] * biases), (SUM,), weight.shape[read]),
    ]


def first_axes(call: Call, count: int) -> list[Axis]:
    """The first axes of the data and of all results; other arguments are whole."""
    data, *others = call.inputs
    whole = [WHOLE] * len(others)
    return [Axis((i, *whole), (i,) * len(call.outputs), length) for i, length in enumerate(data.shape[:count])]


@rule("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit")
@rule("native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update", "_batch_norm_with_update_functional")
def batch_norm(call: Call) -> list[Axis]:
    """Channels are independent. Samples share their statistics while training."""
    data, *others = call.inputs
    channels = data.shape[1]
    results = [0 if tuple(tensor.shape) == (channels,) else WHOLE for tensor in call.outputs[1:]]
    statistics = 0 if call.name == "_native_batch_norm_legit_no_training" else 2 * channels
    whole = (0, *[WHOLE] * len(others)), (0, *[WHOLE] * len(results))
    return [Axis((1, *[0] * len(others)), (1, *results), channels), Axis(*whole, data.shape[0], statistics=statistics)]


@rule("native_group_norm")
def group_norm(call: Call) -> list[Axis]:
    return first_axes(call, 1)


@rule("embedding")
def embedding(call: Call) -> list[Axis]:
    """The rows of the table too may be split: each rank then looks up its own rows and adds zero for others."""
    table, indices = call.inputs
    axes = [Axis((1, WHOLE), (indices.dim(),), table.shape[1]), Axis((0, WHOLE), (SUM,), table.shape[0])]
    if not call.argument("scale_grad_by_freq"):
        axes += [Axis((WHOLE, axis), (axis,), length) for axis, length in enumerate(indices.shape)]
    return axes


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
@rule("_scaled_dot_product_fused_attention_overrideable")
def attention(call: Call) -> list[Axis]:
    """Samples and heads are independent."""
    query, key, value, *bias = call.inputs
    split = [tensor.dim() >= 3 and tensor.shape[:2] == query.shape[:2] for tensor in call.outputs]
    return [
        Axis(
            (axis, axis, axis, *(aligned(tensor.shape, axis, 4) for tensor in bias)),
            tuple(axis if has_it else WHOLE for has_it in split),
            length,
        )
        for axis, length in enumerate(query.shape[:2])
        if key.shape[axis] == length == value.shape[axis]
    ]


_REDUCTIONS = (
    "sum mean amax amin prod var std var_mean std_mean logsumexp any all argmax argmin max min linalg_vector_norm norm"
    " _softmax _log_softmax _safe_softmax cumsum cumprod sort topk count_nonzero"
)


@rule(*_REDUCTIONS.split())
def reduction(call: Call) -> list[Axis]:
    """Independent along every axis that is not reduced; a sum or a mean has terms along the others."""
    if len(call.inputs) > 1:
        return pointwise(call) if torch.Tag.pointwise in call.target.tags else []
    shape = call.inputs[0].shape
    dims = call.argument("dim", [])
    dims = list(range(len(shape))) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    reduced = {dim % max(1, len(shape)) for dim in dims}
    keeps = call.outputs[0].dim() == len(shape) and len(shape) > 0
    axes = []
    for axis, length in enumerate(shape):
        if axis not in reduced:
            after = axis if keeps else axis - sum(dim < axis for dim in reduced)
            axes.append(Axis((axis,), (after,) * len(call.outputs), length))
        elif call.name in ("sum", "mean"):
            axes.append(Axis((axis,), (SUM,), length))
    return axes


_SPATIAL_AXES = {
    "avg_pool1d": 1,
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), 2),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "tril", "triu"), 2),
    **dict.fromkeys(("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d"), 3),
}


@rule(*_SPATIAL_AXES, "native_layer_norm", "_fused_rms_norm")
def leading_axes(call: Call) -> list[Axis]:
    """Samples and channels of pooling and the like; the axes that a layer norm does not normalise."""
    last = _SPATIAL_AXES.get(call.name) or len(call.argument("normalized_shape"))
    return first_axes(call, call.inputs[0].dim() - last)


@rule("nll_loss_forward", "nll_loss2d_forward")
def class_loss(call: Call) -> list[Axis]:
    """Every axis but the classes; a mean is the sum of the parts over the sum of their weights."""
    scores = call.inputs[0]
    if scores.dim() < 2:
        return []
    whole = (WHOLE,) * (len(call.inputs) - 2)
    unreduced = call.argument("reduction") == 0
    return [
        Axis((axis, max(0, axis - 1), *whole), (max(0, axis - 1), WHOLE) if unreduced else (SUM, SUM), length)
        for axis, length in enumerate(scores.shape)
        if axis != 1
    ]


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
@rule("soft_margin_loss")
def element_loss(call: Call) -> list[Axis]:
    """Every axis; a mean is the sum of the parts over the number of elements."""
    shape = np.broadcast_shapes(*(tuple(tensor.shape) for tensor in call.inputs))
    unreduced = call.argument("reduction") == 0
    return broadcast_axes(call, shape, lambda axis: (axis if unreduced else SUM,))


@rule("t", "transpose", "permute")
def permutation(call: Call) -> list[Axis]:
    shape = call.inputs[0].shape
    order = list(reversed(range(len(shape))))
    if call.name == "permute":
        order = [dim % len(shape) for dim in call.argument("dims")]
    elif call.name == "transpose":
        order.sort()
        first, second = call.argument("dim0"), call.argument("dim1")
        order[first], order[second] = order[second], order[first]
    return [Axis((source,), (axis,), shape[source]) for axis, source in enumerate(order)]


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")
def reshaping(call: Call) -> list[Axis]:
    """Axes that keep their length, and the leading axis of those that are merged or taken apart."""
    source, result = call.inputs[0].shape, call.outputs[0].shape
    if source.numel() != result.numel():
        return []
    return [
        Axis((i,), (j,), source[i], () if source[i] == result[j] else (source[i], result[j]))
        for i, j in leading_pairs(source, result)
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


@rule("select", "slice", "split", "split_with_sizes", "unbind", "index_select", "flip", "narrow")
def along_others(call: Call) -> list[Axis]:
    """Every axis but the ones that elements are picked from; a slice that shortens nothing picks from none."""
    tensor, *others = call.inputs
    dims = call.argument("dims") if call.name == "flip" else [call.argument("dim", 0)]
    picked = {dim % tensor.dim() for dim in dims}
    removed = call.outputs[0].dim() < tensor.dim()
    if call.name == "slice" and call.outputs[0].shape == tensor.shape:
        picked = set()
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
    alone = call.name == "cat" and call.inputs[0].shape == call.outputs[0].shape
    return [
        Axis((axis - (call.name == "stack" and axis > joined),) * len(call.inputs), (axis,), length)
        for axis, length in enumerate(call.outputs[0].shape)
        if axis != joined or alone
    ]


@rule("gather")
def gathering(call: Call) -> list[Axis]:
    tensor, index = call.inputs
    picked = call.argument("dim") % max(1, tensor.dim())
    return [
        Axis((axis, axis), (axis,), length)
        for axis, length in enumerate(index.shape)
        if axis != picked and tensor.shape[axis] == length
    ]


@rule("constant_pad_nd", "repeat", "repeat_interleave")
def enlarging(call: Call) -> list[Axis]:
    """The axes to which nothing is added; padding may also cut an end and so keep the length of one it changes."""
    tensor, *others = call.inputs
    shape = call.outputs[0].shape
    if others or tensor.dim() != len(shape):
        return []
    pad = call.argument("pad") if call.name == "constant_pad_nd" else ()
    changed = {tensor.dim() - 1 - position // 2 for position, count in enumerate(pad) if count}
    return [
        Axis((axis,), (axis,), length)
        for axis, length in enumerate(tensor.shape)
        if length == shape[axis] and axis not in changed
    ]
