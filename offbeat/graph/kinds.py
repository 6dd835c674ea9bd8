"""The kind, FLOP and bytes moved of an operator call.

The tensors may be fake: only shapes, strides and element types are read. FLOP of matrix products, convolutions and
attention come from torch's own formulas (a multiply-add is two); of element-wise operators it is one per element
written, of reductions, norms and losses one per element read.
"""

import math
from typing import Any

import torch
from torch.utils import flop_counter

from offbeat.torch_private import all_overloads, pytree, schema_of, stored_rows

_NAMES_OF_KIND = {
    "matmul": (
        "mm addmm bmm baddbmm addbmm mv addmv dot vdot ger addr matmul linear linear_backward matmul_backward"
        " _scaled_mm _grouped_mm _scaled_grouped_mm _int_mm _trilinear mkldnn_linear _addmm_activation"
    ),
    "conv": (
        "convolution convolution_backward _convolution cudnn_convolution convolution_overrideable mkldnn_convolution"
        " _slow_conv2d_forward _slow_conv2d_backward slow_conv_transpose2d slow_conv3d conv_depthwise3d"
        " _conv_depthwise2d miopen_convolution cudnn_convolution_transpose"
    ),
    "attention": (
        "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
        " _flash_attention_forward _efficient_attention_forward scaled_dot_product_attention"
        " flex_attention _native_multi_head_attention"
    ),
    "norm": (
        "native_layer_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"
        " _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional"
        " batch_norm_backward cudnn_batch_norm miopen_batch_norm native_group_norm _fused_rms_norm rms_norm"
        " _weight_norm_interface renorm"
    ),
    "embedding": (
        "embedding embedding_dense_backward embedding_sparse_backward embedding_renorm _embedding_bag"
        " _embedding_bag_forward_only _embedding_bag_dense_backward _embedding_bag_sparse_backward"
        " _embedding_bag_per_sample_weights_backward"
    ),
    "loss": (
        "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss smooth_l1_loss huber_loss"
        " binary_cross_entropy multi_margin_loss multilabel_margin_loss_forward soft_margin_loss _ctc_loss"
        " _cudnn_ctc_loss l1_loss kl_div"
    ),
    "rnn": (
        "mkldnn_rnn_layer _cudnn_rnn miopen_rnn lstm gru rnn_tanh rnn_relu lstm_cell _thnn_fused_lstm_cell"
        " _thnn_fused_gru_cell"
    ),
    "view": "_unsafe_view reshape lift_fresh",
    "elementwise": (
        "native_dropout dropout _to_copy copy bernoulli where masked_fill cat stack constant_pad_nd gather scatter"
        " scatter_add index index_put index_select index_add select_scatter slice_scatter select_backward"
        " slice_backward repeat roll flip triu tril one_hot lift_fresh_copy masked_scatter threshold rand_like"
        " randn_like gelu upsample_nearest2d upsample_bilinear2d repeat_interleave as_strided_scatter diagonal_scatter"
        " value_selecting_reduction_backward index_reduce fill addcmul addcdiv _fft_r2c _fft_c2r _fft_c2c new_zeros"
    ),
    "reduction": (
        "sum mean max min amax amin prod var std var_mean std_mean argmax argmin any all norm linalg_vector_norm"
        " logsumexp _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax cumsum"
        " cumprod topk sort max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d"
        " _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d count_nonzero median"
    ),
}
_KIND_OF_NAME = {name: kind for kind, names in _NAMES_OF_KIND.items() for name in names.split()}

_READS_INPUT = {"reduction", "norm", "loss"}
_LOOKUPS = {"embedding", "index", "gather", "index_select", "_embedding_bag", "_embedding_bag_forward_only"}
_ALLOCATES_ONLY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_SDPA_BY_SHAPE = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"}


def base_name(target: Any) -> str:
    """'mm' of aten.mm.default; in-place forms have their functional form's name."""
    schema = schema_of(target)
    name = schema.name.rpartition("::")[2] if schema is not None else getattr(target, "__name__", str(target))
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def kind_of(target: Any) -> str:
    """The kind of a forward or backward operator, as `Operator.kind` lists them."""
    name = base_name(target)
    known = _KIND_OF_NAME.get(name) or ("view" if is_view(target) else None)
    known = known or _KIND_OF_NAME.get(name.removesuffix("_backward"))
    if known is not None:
        return known
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags:
        return "elementwise"
    return "reduction" if getattr(torch.Tag, "reduction", None) in tags else "other"


def is_view(target: Any) -> bool:
    """Whether the result shares its first argument's memory and nothing is read or written."""
    return bool(getattr(target, "is_view", False)) or _KIND_OF_NAME.get(base_name(target)) == "view"


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, each once."""
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return list({id(tensor): tensor for tensor in tensors}.values())


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded dimension is the same memory again and again."""
    if tensor.layout != torch.strided:
        return stored_rows(tensor) * tensor.element_size() * max(1, math.prod(tensor.shape[1:]))
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(int(size) for size, stride in sizes if stride != 0) * tensor.element_size()


def flops_of(target: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of one call."""
    kind = kind_of(target)
    if kind == "view":
        return 0
    formula = flop_counter.flop_registry.get(all_overloads(target))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    name = base_name(target)
    shapes = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor)]
    if name in _SDPA_BY_SHAPE:
        return int(flop_counter.sdpa_flop_count(*shapes[:3]))
    if name.removesuffix("_backward") in _SDPA_BY_SHAPE:
        return int(flop_counter.sdpa_backward_flop_count(*shapes[:4]))
    if kind == "matmul":
        return _product_flops(name, shapes)
    if kind == "rnn":
        return _recurrent_flops(name, args)
    return _element_flops(kind, name, args, out)


def bytes_of(target: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """(bytes read, bytes written) of one call if nothing stays in cache."""
    name = base_name(target)
    if is_view(target) or name in _ALLOCATES_ONLY:
        return 0, 0
    sources = tensors_in((args, kwargs))
    written = sum(touched_bytes(tensor) for tensor in tensors_in(out))
    if name in _LOOKUPS and sources:
        table, *rest = sources
        # A lookup reads the rows it was asked for, not the table.
        rows = written
        if name.startswith("_embedding_bag") and rest:
            rows = rest[0].numel() * math.prod(table.shape[1:]) * table.element_size()
        return min(touched_bytes(table), rows) + sum(map(touched_bytes, rest)), written
    return sum(map(touched_bytes, sources)), written


def _element_flops(kind: str, name: str, args: Any, out: Any) -> int:
    read = sum(tensor.numel() for tensor in tensors_in(args)[:1])
    written = sum(tensor.numel() for tensor in tensors_in(out)[:1])
    if kind == "embedding":
        return read if "backward" in name else written
    if kind in _READS_INPUT:
        # The backward of a reduction is given the small tensor and writes the large one.
        return max(read, written)
    return written if kind == "elementwise" else 0


def _product_flops(name: str, shapes: list[tuple[int, ...]]) -> int:
    """Of the products torch has no formula for."""
    if name in ("dot", "vdot", "mv"):
        return 2 * math.prod(shapes[0])
    if name == "addmv":
        return 2 * math.prod(shapes[1])
    if name in ("ger", "addr"):
        return 2 * math.prod(shapes[-1]) * math.prod(shapes[-2])
    if name == "linear":
        return 2 * math.prod(shapes[0]) * shapes[1][0]
    left, right = (shapes[1], shapes[2]) if name.startswith("add") or name == "_addmm_activation" else shapes[:2]
    return 2 * math.prod(left) * right[-1]


def _recurrent_flops(name: str, args: Any) -> int:
    """Each step multiplies by every weight matrix; backward does so for the input and for the weight."""
    tensors = tensors_in(args)
    steps = math.prod(tensors[0].shape[:-1]) if tensors else 0
    weights = sum(tensor.numel() for tensor in tensors[1:] if tensor.dim() == 2)
    return 2 * weights * steps * (2 if name.endswith("_backward") else 1)
