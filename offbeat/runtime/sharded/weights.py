"""A model's weights, on rank 0 or nowhere yet → each rank's parts of them, and back to plain tensors.

Variables are spread one at a time, so that no rank but the one the user gave them to ever holds all of them. Weights on
the meta device are drawn on rank 0 module by module, by the module's own `reset_parameters`.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.sharded.grid import Grid
from offbeat.sharding.layout import WHOLE, Layout
from offbeat.torch_private import registries


def shard_weights(model: nn.Module, optimizer: Optimizer, layouts: Mapping[str, Layout], grid: Grid) -> None:
    """Replaces each variable by a DTensor that holds this rank's part, in the model and in the optimizer.

    Buffers and frozen parameters stay plain tensors; every rank gets rank 0's.
    """
    _check_drawable(model)
    done: dict[str, nn.Parameter] = {}
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    owners = [
        (module, {key: first_name[id(held)] for key, held in registries(module)[0].items() if held is not None})
        for module in model.modules()
    ]
    for module, names in owners:
        drawn = _drawn(module, grid) if grid.rank == 0 else {}
        for key, name in names.items():
            if name not in done:
                parameter = registries(module)[0][key]
                assert parameter is not None
                trained = parameter.requires_grad
                layout = layouts.get(name, grid.whole) if trained else grid.whole
                value = drawn.get(key, parameter.detach()) if grid.rank == 0 else None
                local = spread(value, parameter, layout, grid)
                local = grid.wrap(local, parameter.shape, layout) if trained else local
                done[name] = nn.Parameter(local, requires_grad=trained)
                _hand_over(optimizer, parameter, done[name], grid)
            # Not into `_parameters`: RNN layers keep a second list of their weights.
            setattr(module, key, done[name])
        buffers = registries(module)[1]
        for key, buffer in list(buffers.items()):
            if buffer is not None:
                value = drawn.get(key, buffer) if grid.rank == 0 else None
                buffers[key] = spread(value, buffer, grid.whole, grid)


def spread(value: Tensor | None, like: Tensor, layout: Layout, grid: Grid) -> Tensor:
    """This rank's part of a tensor that rank 0 has; the others give None. `like` has its shape and type."""
    shape, dtype = tuple(like.shape), like.dtype
    if layout == grid.whole:
        whole = torch.empty(shape, dtype=dtype, device=grid.device) if value is None else value.to(grid.device)
        whole = whole.contiguous()
        if grid.world > 1 and whole.numel():
            grid.job.broadcast(whole, 0)
        return whole
    mine = torch.empty(grid.box(shape, layout).sizes, dtype=dtype, device=grid.device)
    boxes = [grid.box(shape, layout, rank) for rank in range(grid.world)]
    leaving = [0 if value is None else prod(box.sizes) for box in boxes]
    parts = [] if value is None else [value[box.slices].to(grid.device).reshape(-1) for box in boxes]
    packed = torch.cat(parts) if parts else mine.new_empty(0)
    # One collective: NCCL opens a communicator for each pair that sends alone.
    arriving = [mine.numel(), *([0] * (grid.world - 1))]
    if prod(shape):
        dist.all_to_all_single(mine.view(-1), packed, arriving, leaving, group=grid.job.group)
    return mine


def whole_of(value: Any, grid: Grid) -> Any:
    """The plain tensor that a DTensor's parts make, or the value itself; every rank must ask for it."""
    if not isinstance(value, DTensor):
        return value
    return grid.move(value.detach().to_local(), value.shape, layout_of_tensor(value), grid.whole)


def layout_of_tensor(value: DTensor) -> Layout:
    return tuple(placement.dim if placement.is_shard() else WHOLE for placement in value.placements)


def _check_drawable(model: nn.Module) -> None:
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        lacking = [name for name, tensor in own if tensor.is_meta]
        if lacking and _reset(module) is None:
            name = f"{path}.{lacking[0]}" if path else lacking[0]
            raise StrategyError(
                f"{name!r} is on the meta device, and {type(module).__name__} has no reset_parameters() to draw it"
            )


def _reset(module: nn.Module) -> object | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _drawn(module: nn.Module, grid: Grid) -> dict[str, Tensor]:
    """New values of a module's own tensors that are on the meta device; the module is left as it is."""
    tensors = registries(module)[:2]
    before = [dict(held) for held in tensors]
    lacking = {key for held in before for key, tensor in held.items() if tensor is not None and tensor.is_meta}
    if not lacking:
        return {}
    try:
        for held in tensors:
            for key, tensor in held.items():
                if tensor is not None:
                    # Whatever is tied and has a value already is drawn again and thrown away.
                    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=grid.device)
                    held[key] = nn.Parameter(fresh) if isinstance(tensor, nn.Parameter) else fresh
        reset = _reset(module)
        assert callable(reset)
        reset()
        return {key: held[key].detach() for held in tensors for key in held if key in lacking}
    finally:
        for held, saved in zip(tensors, before, strict=True):
            held.update(saved)


def _hand_over(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, grid: Grid) -> None:
    """The optimizer updates `new` where it updated `old`, with the part of its state that belongs to it."""
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        optimizer.state[new] = {key: shard_state(key, value, new, grid) for key, value in state.items()}


def shard_state(key: str, value: Any, parameter: Tensor | None, grid: Grid) -> Any:
    """A variable's value, or one of an optimizer's state for it, in parts as the variable is."""
    if key == "step" or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    layout = layout_of_tensor(parameter)
    part = value[grid.box(value.shape, layout).slices].to(grid.device)
    return grid.wrap(part.clone(memory_format=torch.contiguous_format), value.shape, layout)
