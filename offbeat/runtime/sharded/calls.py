"""A call, how it is split and this rank's parts of its arguments → this rank's parts of its results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.planning import Split, tensors_of
from offbeat.sharding.calls import ONCE, Call
from offbeat.torch_private import pytree, schema_of

_MEAN, _SUM = 1, 2
_RESHAPING = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")


def run_part(split: Split, locals_: Sequence[Tensor], grid: Grid) -> tuple[Tensor, ...]:
    """Runs the call on parts; the results have the layouts `split.results`."""
    inputs = [_added_once(split, position, local, grid) for position, local in enumerate(locals_)]
    special = _SPECIAL.get(split.call.name) or (_SUMMED.get(split.call.name) if split.sums() else None)
    return tensors_of(_call(split.call, inputs) if special is None else special(split, inputs, grid))


def finish(split: Split, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What is left to do once sums over ranks are complete."""
    if split.call.name in _CLASS_LOSSES and split.sums() and split.call.argument("reduction") == _MEAN:
        return outputs[0] / outputs[1], outputs[1]
    return tuple(outputs)


def _call(call: Call, inputs: Sequence[Tensor], **changed: Any) -> Any:
    """The operator with other tensors, and with some arguments changed by name."""
    remaining = iter(inputs)
    args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(remaining), (call.args, call.kwargs))
    args = list(args)
    for position, argument in enumerate(schema_of(call.target).arguments):
        if argument.name in changed:
            if position < len(args):
                args[position] = changed[argument.name]
            else:
                kwargs[argument.name] = changed[argument.name]
    return call.target(*args, **kwargs)


def _added_once(split: Split, position: int, local: Tensor, grid: Grid) -> Tensor:
    if not any(axis is not None and axis.inputs[position] == ONCE for axis in split.split_by):
        return local
    # Every rank builds the same autograd graph, so that all of them communicate in the same order in backward.
    mine = torch.tensor(split.adds(position, grid.place), device=local.device)
    return torch.where(mine, local, torch.zeros((), dtype=local.dtype, device=local.device))


def _local_shape(split: Split, grid: Grid) -> tuple[int, ...]:
    return grid.box(split.call.outputs[0].shape, split.results[0]).sizes


def _convolution(split: Split, inputs: Sequence[Tensor], grid: Grid) -> Tensor:
    groups = split.call.argument("groups")
    if groups > 1:
        groups = groups * inputs[0].shape[1] // split.call.inputs[0].shape[1]
    return _call(split.call, inputs, groups=groups)


def _embedding(split: Split, inputs: Sequence[Tensor], grid: Grid) -> Tensor:
    """Looks up the rows held here; the others' terms of the sum are zero."""
    table, indices = inputs
    box = grid.box(split.call.inputs[0].shape, split.inputs[0])
    first, count = box.starts[0], box.sizes[0]
    elsewhere = (indices < first) | (indices >= first + count)
    padding = split.call.argument("padding_idx", -1)
    padding = padding - first if first <= padding < first + count else -1
    rows = _call(split.call, (table, (indices - first).masked_fill(elsewhere, 0)), padding_idx=padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def _mean(split: Split, inputs: Sequence[Tensor], grid: Grid) -> Tensor:
    """A part's mean counts for its share of the elements."""
    result = _call(split.call, inputs)
    whole = split.call.inputs[0].numel() // split.call.outputs[0].numel()
    return result * (inputs[0].numel() // result.numel() / whole)


def _element_loss(split: Split, inputs: Sequence[Tensor], grid: Grid) -> Tensor:
    total = _call(split.call, inputs, reduction=_SUM)
    if split.call.argument("reduction") == _MEAN:
        total = total / torch.broadcast_shapes(*(tensor.shape for tensor in split.call.inputs)).numel()
    return total


_CLASS_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_ELEMENT_LOSSES = (
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss binary_cross_entropy_with_logits"
)
_Special = Callable[[Split, Sequence[Tensor], Grid], Any]
_SPECIAL: dict[str, _Special] = {
    **dict.fromkeys(_RESHAPING, lambda split, inputs, grid: inputs[0].reshape(_local_shape(split, grid))),
    "expand": lambda split, inputs, grid: inputs[0].expand(_local_shape(split, grid)),
    "convolution": _convolution,
    "native_group_norm": lambda split, inputs, grid: _call(split.call, inputs, N=inputs[0].shape[0]),
}
"""Operators that are called in another way on parts."""
_SUMMED: dict[str, _Special] = {
    "embedding": _embedding,
    "mean": _mean,
    # Sums of losses and of weights; `finish` divides where a mean is asked for.
    **dict.fromkeys(_CLASS_LOSSES, lambda split, inputs, grid: _call(split.call, inputs, reduction=_SUM)),
    **dict.fromkeys(_ELEMENT_LOSSES.split(), _element_loss),
}
"""Operators that are called in another way where their results are terms of a sum."""
