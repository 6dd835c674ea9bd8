"""Calls of operators that can be split, by name."""

import torch
from torch.utils import _pytree as pytree

from offbeat.sharding.calls import Call

aten = torch.ops.aten


def call(target, *args, **kwargs) -> Call:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    results = target(*args, **kwargs)
    outputs = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    return Call(target, args, kwargs, tuple(tensors), outputs)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


CALLS = {
    "mm": lambda: call(aten.mm.default, ones(4, 6), ones(6, 8)),
    "addmm": lambda: call(aten.addmm.default, ones(8), ones(4, 6), ones(6, 8)),
    "bmm": lambda: call(aten.bmm.default, ones(2, 4, 6), ones(2, 6, 8)),
    "mv": lambda: call(aten.mv.default, ones(4, 6), ones(6)),
    "add": lambda: call(aten.add.Tensor, ones(4, 6), ones(4, 1)),
    "where": lambda: call(aten.where.self, ones(4, 6) > 0, ones(6), ones(4, 6)),
    "sum": lambda: call(aten.sum.dim_IntList, ones(4, 6, 2), [1]),
    "sum all": lambda: call(aten.sum.default, ones(4, 6)),
    "mean": lambda: call(aten.mean.dim, ones(4, 6, 2), [-1], True),
    "softmax": lambda: call(aten._softmax.default, ones(4, 6), 1, False),
    "max": lambda: call(aten.max.dim, ones(4, 6), 0),
    "convolution": lambda: call(
        aten.convolution.default, ones(4, 6, 5, 5), ones(8, 6, 3, 3), ones(8), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "convolution in groups": lambda: call(
        aten.convolution.default, ones(4, 6, 5, 5), ones(8, 3, 3, 3), ones(8), [1, 1], [0, 0], [1, 1], False, [0, 0], 2
    ),
    "transposed convolution": lambda: call(
        aten.convolution.default, ones(4, 6, 5, 5), ones(6, 8, 3, 3), ones(8), [2, 2], [0, 0], [1, 1], True, [0, 0], 1
    ),
    "embedding": lambda: call(aten.embedding.default, ones(8, 4), ones(6, 2).long()),
    "mse_loss": lambda: call(aten.mse_loss.default, ones(4, 6), ones(4, 6)),
    "nll_loss2d": lambda: call(aten.nll_loss2d_forward.default, ones(4, 3, 6, 2), ones(4, 6, 2).long(), None, 2, -1),
    "slice of all": lambda: call(aten.slice.Tensor, ones(4, 6), 1, 0, 6),
    "cat of one": lambda: call(aten.cat.default, [ones(4, 6)], 1),
    "repeat": lambda: call(aten.repeat.default, ones(4, 6), [1, 2]),
    "group_norm": lambda: call(aten.native_group_norm.default, ones(4, 6, 5), ones(6), ones(6), 4, 6, 5, 2, 1e-5),
    "attention": lambda: call(aten._scaled_dot_product_flash_attention_for_cpu.default, *[ones(4, 8, 16, 6)] * 3),
    "depthwise convolution": lambda: call(
        aten.convolution.default, ones(4, 6, 8, 8), ones(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 6
    ),
    "relu": lambda: call(aten.relu.default, ones(4, 6)),
    "mul": lambda: call(aten.mul.Tensor, ones(4, 1, 8), ones(6, 8)),
    "square mm": lambda: call(aten.mm.default, ones(4, 4), ones(4, 4)),
    "amax": lambda: call(aten.amax.default, ones(4, 6, 8), [1]),
    "slice": lambda: call(aten.slice.Tensor, ones(4, 6, 8), 1, 1, 4),
    "triu": lambda: call(aten.triu.default, ones(4, 6, 6)),
    "view": lambda: call(aten.view.default, ones(4, 6, 16), [4, 6, 8, 2]),
    "permute": lambda: call(aten.permute.default, ones(2, 4, 6), [2, 0, 1]),
    "transpose": lambda: call(aten.transpose.int, ones(2, 4, 6), -1, 0),
    "select": lambda: call(aten.select.int, ones(4, 2, 6), 1, 0),
    "split": lambda: call(aten.split.Tensor, ones(4, 6), 3, 1),
    "cat": lambda: call(aten.cat.default, [ones(4, 6), ones(4, 2)], 1),
    "stack": lambda: call(aten.stack.default, [ones(4, 6), ones(4, 6)], 1),
    "gather": lambda: call(aten.gather.default, ones(4, 6), 1, ones(4, 2).long()),
    "pool": lambda: call(aten.max_pool2d_with_indices.default, ones(4, 6, 8, 8), [2, 2]),
    "layer_norm": lambda: call(aten.native_layer_norm.default, ones(4, 6, 8), [8], ones(8), ones(8), 1e-5),
    "batch_norm": lambda: call(
        aten._native_batch_norm_legit_functional.default, ones(4, 6), *[ones(6)] * 4, True, 0.1, 1e-5
    ),
    "pad": lambda: call(aten.constant_pad_nd.default, ones(4, 6, 8), [1, 1]),
}
