"""A call, how it is split and this rank's parts of its arguments → this rank's parts of its results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.planning import Split, tensors_of
from offbeat.sharding import rules
from offbeat.sharding.calls import ONCE, RULES, Call
from offbeat.torch_private import pytree, schema_of

_MEAN, _SUM = 1, 2


def run_part(split: Split, locals_: Sequence[Tensor], grid: Grid) -> tuple[Tensor, ...]:
    """Runs the call on parts; the results have the layouts `split.results`."""
    call, rule, sums = split.call, RULES.get(split.call.name), split.sums()
    inputs = [added_once(split, position, local, grid) for position, local in enumerate(locals_)]
    changed: dict[str, Any] = {}
    if call.name == "convolution" and call.argument("groups") > 1:
        changed["groups"] = call.argument("groups") * inputs[0].shape[1] // call.inputs[0].shape[1]
    elif call.name == "native_group_norm":
        changed["N"] = inputs[0].shape[0]
    elif rule in (rules.class_loss, rules.element_loss) and sums:
        # Sums of losses and of weights, which are divided where a mean is asked for: `finish` does it for classes.
        changed["reduction"] = _SUM
    if rule is rules.reshaping or call.name == "expand":
        sizes = grid.box(call.outputs[0].shape, split.results[0]).sizes
        return (inputs[0].expand(sizes) if call.name == "expand" else inputs[0].reshape(sizes),)
    if call.name == "embedding" and sums:
        return (_embedding(split, inputs, grid),)
    results = tensors_of(_call(call, inputs, **changed))
    if call.name == "mean" and sums:
        # A part's mean counts for its share of the elements.
        whole = call.inputs[0].numel() // call.outputs[0].numel()
        return (results[0] * (inputs[0].numel() // results[0].numel() / whole),)
    if rule is rules.element_loss and sums and call.argument("reduction") == _MEAN:
        return (results[0] / torch.broadcast_shapes(*(tensor.shape for tensor in call.inputs)).numel(),)
    return results


def finish(split: Split, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What is left to do once sums over ranks are complete."""
    if RULES.get(split.call.name) is rules.class_loss and split.sums() and split.call.argument("reduction") == _MEAN:
        return outputs[0] / outputs[1], outputs[1]
    return tuple(outputs)


def _call(call: Call, inputs: Sequence[Tensor], **changed: Any) -> Any:
    """The operator with other tensors, and with some arguments changed by name."""
    remaining = iter(inputs)
    args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(remaining), (call.args, call.kwargs))
    names = [argument.name for argument in schema_of(call.target).arguments]
    given = [changed.pop(name, value) for name, value in zip(names, args, strict=False)]
    return call.target(*given, **{**kwargs, **changed})


def added_once(split: Split, position: int, local: Tensor, grid: Grid) -> Tensor:
    """The part of an argument, zero where another rank adds it."""
    places = zip(split.split_by, grid.place, strict=True)
    once = [place for axis, place in places if axis is not None and axis.inputs[position] == ONCE]
    if not once:
        return local
    # Every rank traces the same graph, so that all of them communicate in the same order in backward.
    mine = torch.full((), not any(once), device=local.device)
    return torch.where(mine, local, torch.zeros((), dtype=local.dtype, device=local.device))


def _embedding(split: Split, inputs: Sequence[Tensor], grid: Grid) -> Tensor:
    """Looks up the rows held here; the others' terms of the sum are zero."""
    table, indices = inputs
    held = grid.box(split.call.inputs[0].shape, split.inputs[0]).slices[0]
    elsewhere = (indices < held.start) | (indices >= held.stop)
    padding = split.call.argument("padding_idx", -1)
    padding = padding - held.start if held.start <= padding < held.stop else -1
    rows = _call(split.call, (table, (indices - held.start).masked_fill(elsewhere, 0)), padding_idx=padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)
