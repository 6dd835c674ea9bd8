"""Train with torch's `fully_shard` by a plan of fully sharded units.

torch gathers, frees and reduces by hooks of its own; what is done here is to apply a strategy's choices to it. Every
rank is given its own batch, and the loop stays that of a single device, as do the names and shapes in `state_dict()` of
model and optimizer, which are gathered: every rank must ask for them.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.plan import Plan
from offbeat.runtime.checkpoint import map_state
from offbeat.runtime.comm import TorchWorld
from offbeat.runtime.distribute import check_ranks_agree, variables_of
from offbeat.runtime.handle import Decision, Handle
from offbeat.runtime.memory import MicroBatches, apply_memory_strategy
from offbeat.runtime.mixins import Outer, SpreadModel, with_mixin
from offbeat.runtime.wrapping import begin
from offbeat.strategy import FullyShard
from offbeat.torch_private import gather_asynchronously

log = logging.getLogger("offbeat")


class FsdpRuntime:
    """Everything distribute() attaches to a model and an optimizer whose variables are fully sharded."""

    mode = "barrier"
    settled = True
    predict = None

    def __init__(self, model: nn.Module, optimizer: Optimizer, plan: Plan, world: TorchWorld) -> None:
        fsdp = plan.strategy.fsdp
        assert fsdp is not None
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.world = world
        self.quiet = False
        self.history: list[Decision] = []
        begin(model, optimizer)
        variables_of(model, plan)
        check_ranks_agree(plan, world)
        _share_state(model, world)
        plain = dict(model.named_parameters())
        apply_memory_strategy(model, plan.strategy.model_copy(update={"accumulation": 1}), lambda: self)
        apply_units(model, fsdp, _mesh(fsdp, world))
        if world.device.type == "cpu":
            gather_asynchronously(model)
        self.parameters = dict(model.named_parameters())
        self._hand_over(optimizer, plain)
        self.micro_batches: MicroBatches | None = None
        if plan.strategy.accumulation > 1:
            # Around torch's hooks, which gather the model's own variables for each micro-batch.
            call = partial(nn.Module.__call__, model)
            reduced = SimpleNamespace(parameters=self.parameters, arrivals=SimpleNamespace(synchronise=True))
            self.micro_batches = MicroBatches(call, plan.strategy.accumulation, lambda: reduced)
        model._offbeat = optimizer._offbeat = self
        self.model_class: Any = type(model)
        model.__class__ = with_mixin(OuterFullyShardedModel, type(model))
        # Torch marks the hook it is given, which a bound method does not allow.
        model.register_state_dict_post_hook(partial(self._gather_model))
        model.register_load_state_dict_pre_hook(self._scatter_model)
        optimizer.register_state_dict_post_hook(lambda _, state: map_state(state, lambda _, __, value: _whole(value)))
        optimizer.register_load_state_dict_pre_hook(self._scatter_optimizer)
        log.info("offbeat shards %d units of %s by fully_shard", len(fsdp.wrapped) + 1, type(model).__name__)

    def _hand_over(self, optimizer: Optimizer, plain: dict[str, nn.Parameter]) -> None:
        """The optimizer updates the sharded parameters where it updated plain ones, with their parts of its state."""
        sharded = {id(parameter): self.parameters[name] for name, parameter in plain.items()}
        for group in optimizer.param_groups:
            group["params"] = [sharded.get(id(parameter), parameter) for parameter in group["params"]]
        for old in plain.values():
            new = sharded[id(old)]
            if held := optimizer.state.pop(old, None):
                optimizer.state[new] = {key: _part(value, new) for key, value in held.items()}

    def _gather_model(self, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[name] = _whole(state[name])

    def _scatter_model(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Keeps this rank's part of each variable in a state dict that is being loaded."""
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = _part(state[prefix + name], parameter)

    def _scatter_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parameters = dict(enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)))
        return map_state(state, lambda index, _, value: _part(value, parameters.get(index)))

    def release(self) -> None:
        raise StrategyError("this model is already fully sharded, which cannot be undone: distribute a new one")


class FullyShardedModel(SpreadModel):
    """A model that torch's `fully_shard` trains on all ranks."""

    _offbeat: FsdpRuntime

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        micro_batches = self._offbeat.micro_batches
        return (micro_batches or super().__call__)(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients of backward passes inside stay local, whole, and accumulate."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)

    @property
    def offbeat(self) -> Handle:
        """The current plan, and a way to save it."""
        return Handle(self._offbeat)


class OuterFullyShardedModel(Outer, FullyShardedModel):
    """The model as distribute() returns it."""

    _offbeat_inner = FullyShardedModel


def apply_units(model: nn.Module, fsdp: FullyShard, mesh: DeviceMesh) -> None:
    """Wraps the units and then the model with torch's `fully_shard`, with the choices of the strategy."""
    types = {name: getattr(torch, value) for name in ("param_dtype", "reduce_dtype") if (value := getattr(fsdp, name))}
    policy = MixedPrecisionPolicy(**types)
    for path in (*fsdp.wrapped, ""):
        module = model.get_submodule(path)
        fully_shard(module, mesh=mesh, reshard_after_forward=fsdp.reshard(path), mp_policy=policy)
    depth, units = fsdp.prefetch, [_wrapped(model, path) for path in fsdp.wrapped]
    forward, backward = [_wrapped(model), *units], [_wrapped(model), *reversed(units)]
    for place in range(len(units) if depth else 0):
        forward[place].set_modules_to_forward_prefetch(forward[place + 1 : place + 1 + depth])
        backward[place].set_modules_to_backward_prefetch(backward[place + 1 : place + 1 + depth])


def _wrapped(model: nn.Module, path: str = "") -> FSDPModule:
    unit = model.get_submodule(path)
    assert isinstance(unit, FSDPModule)
    return unit


def _mesh(fsdp: FullyShard, world: TorchWorld) -> DeviceMesh:
    if fsdp.replicas == 1:
        return DeviceMesh.from_group(world.group, world.device.type)
    if world.global_ranks() != list(range(torch.distributed.get_world_size())):
        raise StrategyError(f"fsdp: {fsdp.replicas} replicas need the whole job, not a process_group")
    shape = fsdp.replicas, world.size // fsdp.replicas
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _share_state(model: nn.Module, world: TorchWorld) -> None:
    """Gives every rank the values of rank 0, one tensor at a time on the device."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise StrategyError(f"{name!r} is on the meta device: fsdp needs an initialised model")
            if tensor.numel():
                value = tensor.detach().to(world.device).contiguous()
                world.broadcast(value, 0)
                tensor.copy_(value)


def _whole(value: Any) -> Any:
    """The plain tensor of a DTensor's shards, on the CPU; anything else unchanged."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def _part(value: Any, parameter: Tensor | None) -> Any:
    """This rank's part of a variable's value, or of an optimizer's state for it."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    value = value.detach().to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
