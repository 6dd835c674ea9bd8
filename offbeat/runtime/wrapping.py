"""Refuse models that something else exchanges too: another wrapper around or inside, or another distributed model.

And those of which several parameters share their memory, where a plan updates them apart.
"""

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.plan import Plan
from offbeat.runtime.lazy import sharing_memory
from offbeat.torch_private import is_flat_parameter, uncompiled

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Torch's classes that exchange gradients themselves; they are not imported for a check."""


def begin(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Before a model is distributed: undoes an earlier call for the same objects, and refuses other exchanges."""
    targets = (uncompiled(model), optimizer)
    attached = [held for target in targets if (held := vars(target).get("_offbeat")) is not None]
    check_unwrapped(model, attached)
    for runtime in dict.fromkeys(attached):
        runtime.release()
    refuse_wrapping()


def check_unwrapped(model: torch.nn.Module, replaced: Collection[Any] = ()) -> None:
    """Another averaging or sharding on top of Offbeat's would corrupt the training; that of `replaced` will end."""
    for path, module in model.named_modules():
        where = f"its module {path!r}" if path else "it"
        if wrapper := _wrapper(module):
            raise StrategyError(
                f"distribute() needs the plain model, but {where} is wrapped in {wrapper}: "
                f"remove the wrapper, or pass its .module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise StrategyError(
                f"distribute() needs modules of Python code, but {where} is a torch.jit.ScriptModule: "
                f"distribute the model first, and script a copy of it"
            )
        if vars(module).get("_offbeat") not in (None, *replaced):
            raise StrategyError(
                f"distribute() needs a plain model, but {where} is distributed by Offbeat already: distribute the "
                f"whole model, and only once"
            )
    engines = [getattr(runtime, "engine", None) for runtime in replaced]
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_offbeat_watcher", None) not in (None, *engines):
            raise StrategyError(
                f"parameter {name!r} belongs to another model that Offbeat distributes: distribute one model that "
                f"contains both"
            )
        if not replaced and (isinstance(parameter, DTensor) or is_flat_parameter(parameter)):
            raise StrategyError(
                f"parameter {name!r} is already sharded (FSDP or a DTensor): Offbeat distributes plain models only"
            )


@cache
def refuse_wrapping() -> None:
    """From now on torch's wrappers refuse modules with a distributed model inside."""
    register_module_module_registration_hook(_check_wrapped)


def _check_wrapped(parent: torch.nn.Module, _: str, module: torch.nn.Module | None) -> None:
    if module is not None and (wrapper := _wrapper(parent)):
        for path, inner in module.named_modules():
            if "_offbeat" in vars(inner):
                already_distributed(wrapper, path)


def _wrapper(module: torch.nn.Module) -> str | None:
    """Which of torch's wrappers a module is, if any."""
    kinds = (kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
    return next((kind for kind in kinds if kind in WRAPPERS), None)


def already_distributed(wrapper: str, path: str = "") -> None:
    """Refuses a wrapper around a distributed model."""
    what = f"the module {path!r} in it" if path else "this model"
    raise StrategyError(
        f"Offbeat already distributes {what}: remove {wrapper}, which would exchange its gradients a second time"
    )


def shared_memory(model: torch.nn.Module, plan: Plan) -> str:
    """In words which parameters share their memory, if any; StrategyError if they are not updated one after another."""
    shared = sharing_memory(dict(model.named_parameters()))
    if shared is None:
        return ""
    one, other = shared
    updated = ""
    if not plan.whole_state or any(message.staleness for message in plan.messages):
        updated = f"strategy {plan.strategy.name!r} updates them apart"
    elif on_gpu(model):
        updated = "a GPU updates them at the same time, on every rank with another result"
    if updated:
        raise StrategyError(
            f"parameters {one!r} and {other!r} share their memory, and {updated}: let both names be one parameter "
            f"(module.weight = other.weight, not .data)"
        )
    return f"parameters {one!r} and {other!r} share their memory"


def on_gpu(model: torch.nn.Module) -> bool:
    """Whether torch updates many parameters in one kernel by default."""
    return any(parameter.is_cuda for parameter in model.parameters())
