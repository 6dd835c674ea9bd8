"""An operator that computes → its axes (see `axes`).

An operator that neither this module nor `views` describes has no axes and is run whole on every rank, which is never
wrong.
"""

from collections.abc import Callable, Sequence

import torch

from offbeat.graph import kinds
from offbeat.runtime.sharded import views  # noqa: F401 - registers its rules
from offbeat.runtime.sharded.axes import ONCE, RULES, Axis, Call, aligned, rule
from offbeat.runtime.sharded.layout import SUM, WHOLE


def axes_of(call: Call) -> tuple[Axis, ...]:
    """All axes along which a call may be split; () if it has to run whole."""
    if any(tensor.numel() == 0 for tensor in call.inputs) or not call.inputs or not call.outputs or is_random(call):
        return ()
    if (found := RULES.get(call.name)) is not None:
        return tuple(axis for axis in found(call) if axis.length > 1)
    if torch.Tag.pointwise in call.target.tags:
        return tuple(axis for axis in pointwise(call) if axis.length > 1)
    return ()


def has_rule(call: Call) -> bool:
    """Whether running the call whole is what its rule says, rather than the lack of one."""
    return not call.inputs or call.name in RULES or torch.Tag.pointwise in call.target.tags


def is_random(call: Call) -> bool:
    """Whether the result depends on the random generator."""
    if torch.Tag.nondeterministic_seeded not in call.target.tags:
        return False
    return not (kinds.kind_of(call.target) == "attention" and not call.argument("dropout_p"))


def broadcast_axes(call: Call, shape: Sequence[int], outputs: Callable[[int], tuple[int, ...]]) -> list[Axis]:
    """One axis per axis of the shape that all arguments are broadcast to."""
    return [
        Axis(tuple(aligned(tensor.shape, axis, len(shape)) for tensor in call.inputs), outputs(axis), length)
        for axis, length in enumerate(shape)
    ]


@rule("clone", "_to_copy", "alias", "detach", "copy", "where", "masked_fill", "lift_fresh_copy", "zeros_like")
@rule("ones_like", "full_like", "threshold", "gelu", "lift_fresh", "bitwise_not", "logical_not")
def pointwise(call: Call) -> list[Axis]:
    shape = call.outputs[0].shape
    return broadcast_axes(call, shape, lambda axis: (axis,) * len(call.outputs))


@rule("mm", "bmm")
def product(call: Call) -> list[Axis]:
    left, right = call.inputs
    stacked = left.dim() - 2
    axes = [Axis((0, 0), (0,), left.shape[0])] if stacked else []
    return [
        *axes,
        Axis((stacked, WHOLE), (stacked,), left.shape[-2]),
        Axis((WHOLE, stacked + 1), (stacked + 1,), right.shape[-1]),
        Axis((stacked + 1, stacked), (SUM,), left.shape[-1]),
    ]


@rule("addmm", "baddbmm")
def product_and_sum(call: Call) -> list[Axis]:
    added, left, right = call.inputs
    axes = product(Call(call.target, (), {}, (left, right), call.outputs))
    rank = left.dim()
    return [
        Axis(
            (ONCE if axis.outputs[0] == SUM else aligned(added.shape, axis.outputs[0], rank), *axis.inputs),
            axis.outputs,
            axis.length,
        )
        for axis in axes
    ]


@rule("mv")
def matrix_times_vector(call: Call) -> list[Axis]:
    rows, columns = call.inputs[0].shape
    return [Axis((0, WHOLE), (0,), rows), Axis((1, 0), (SUM,), columns)]


@rule("convolution")
def convolution(call: Call) -> list[Axis]:
    data, weight, *bias = call.inputs
    axes = [Axis((0, WHOLE, *(WHOLE for _ in bias)), (0,), data.shape[0])]
    if not call.argument("transposed") and call.argument("groups") == 1:
        axes.append(Axis((WHOLE, 0, *(0 for _ in bias)), (1,), weight.shape[0]))
        axes.append(Axis((1, 1, *(ONCE for _ in bias)), (SUM,), weight.shape[1]))
    return axes


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> list[Axis]:
    data, *others = call.inputs
    leading = data.dim() - len(call.argument("normalized_shape"))
    whole = (WHOLE,) * len(others)
    return [Axis((axis, *whole), (axis,) * len(call.outputs), data.shape[axis]) for axis in range(leading)]


@rule("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit")
@rule("native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update_functional")
def batch_norm(call: Call) -> list[Axis]:
    """Channels are independent. Samples are not while training: their statistics are those of the whole batch."""
    data, *others = call.inputs
    channels = data.shape[1]
    results = tuple(0 if tuple(tensor.shape) == (channels,) else WHOLE for tensor in call.outputs[1:])
    axes = [Axis((1, *(0 for _ in others)), (1, *results), channels)]
    if call.name == "_native_batch_norm_legit_no_training":
        axes.append(Axis((0, *(WHOLE for _ in others)), (0, *(WHOLE for _ in results)), data.shape[0]))
    return axes


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
    axes = []
    for axis, length in enumerate(query.shape[:2]):
        if key.shape[axis] == length == value.shape[axis]:
            biases = tuple(aligned(tensor.shape, axis, 4) for tensor in bias)
            outputs = tuple(
                axis if tensor.dim() >= 3 and tensor.shape[:2] == query.shape[:2] else WHOLE for tensor in call.outputs
            )
            axes.append(Axis((axis, axis, axis, *biases), outputs, length))
    return axes


_REDUCTIONS = (
    "sum mean amax amin prod var std var_mean std_mean logsumexp any all argmax argmin max min linalg_vector_norm norm"
    " _softmax _log_softmax _safe_softmax cumsum cumprod sort topk count_nonzero"
)


@rule(*_REDUCTIONS.split())
def reduction(call: Call) -> list[Axis]:
    """Independent along every axis that is not reduced; a sum along those too."""
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
        elif call.name == "sum":
            axes.append(Axis((axis,), (SUM,), length))
    return axes


_SPATIAL_AXES = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "avg_pool1d": 1,
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2,
    "upsample_nearest2d": 2,
    "upsample_bilinear2d": 2,
    "tril": 2,
    "triu": 2,
}


@rule(*_SPATIAL_AXES)
def leading_axes(call: Call) -> list[Axis]:
    """Samples and channels of pooling and the like."""
    leading = call.inputs[0].shape[: call.inputs[0].dim() - _SPATIAL_AXES[call.name]]
    return [Axis((axis,), (axis,) * len(call.outputs), length) for axis, length in enumerate(leading)]


@rule("nll_loss_forward", "nll_loss2d_forward")
def class_loss(call: Call) -> list[Axis]:
    """Samples; a mean is the sum of the parts over the sum of their weights."""
    scores = call.inputs[0]
    if scores.dim() < 2:
        return []
    whole = (WHOLE,) * (len(call.inputs) - 2)
    outputs = (0, WHOLE) if call.argument("reduction") == 0 else (SUM, SUM)
    return [Axis((0, 0, *whole), outputs, scores.shape[0])]


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
@rule("soft_margin_loss")
def element_loss(call: Call) -> list[Axis]:
    """Every axis; a mean is the sum of the parts over the number of elements."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.inputs))
    if call.argument("reduction") == 0:
        return broadcast_axes(call, shape, lambda axis: (axis,))
    return broadcast_axes(call, shape, lambda axis: (SUM,))
