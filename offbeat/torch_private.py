"""Every private torch API that Offbeat uses.

Torch may change a name with an underscore in any release. Each such name appears here once, with its purpose and what
happens in a release that lacks it. What is re-exported then fails with one sentence as it is imported; a function whose
docstring says nothing else fails as it is called, with torch's own AttributeError.
"""

import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from torch.nn import Module as _Module
else:
    _Module = object

_FAKE = "torch._subclasses.fake_tensor"
_REEXPORTED = {
    # Capture runs the model once instead of tracing it where one of the first three is missing.
    "aot_export_joint": (
        "torch._functorch.aot_autograd:aot_export_joint_with_descriptors",
        "traces forward and backward as one graph",
    ),
    "descriptors": ("torch._functorch._aot_autograd:descriptors", "tells parameters from inputs in a traced graph"),
    "detect_fake_mode": ("torch._guards:detect_fake_mode", "finds the fake mode of a model's tensors"),
    "FakeTensor": (f"{_FAKE}:FakeTensor", "tells tensors without memory from others"),
    "FakeTensorMode": (f"{_FAKE}:FakeTensorMode", "traces a model without allocating it"),
    "DataDependentOutput": (f"{_FAKE}:DataDependentOutputException", "sees that forward depends on values"),
    "DynamicOutputShape": (f"{_FAKE}:DynamicOutputShapeException", "sees that a shape depends on values"),
    "TorchDispatchMode": (
        "torch.utils._python_dispatch:TorchDispatchMode",
        "sees the operators of a model that cannot be traced",
    ),
    "outside_tracing": (
        "torch.utils._python_dispatch:_disable_current_modes",
        "opens process groups while a model is traced",
    ),
    "pytree": ("torch.utils:_pytree", "finds the tensors in nested arguments"),
    "disable_torch_function": ("torch._C:DisableTorchFunctionSubclass", "reads a parameter without updating it first"),
    "set_grad_enabled": ("torch._C:_set_grad_enabled", "notices that forward enters or leaves torch.no_grad()"),
    "backward_pass": ("torch._C:_current_graph_task_id", "numbers the backward passes (-1 is outside of any)"),
    "storage_use_count": ("torch._C:_storage_Use_Count", "finds out that somebody else holds a view of a parameter"),
    "boxed_code": ("torch.fx.graph:_BoxedCodeGen", "lets backward free what it has read before it returns"),
    "saved_tensors_hooks": (
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "sees that forward is inside torch.utils.checkpoint",
    ),
    "autograd_node": ("torch._C:_current_autograd_node", "tells which module an operator of backward belongs to"),
    "default_group": ("torch.distributed.distributed_c10d:_get_default_group", "finds the job's process group"),
    "default_store": ("torch.distributed.distributed_c10d:_get_default_store", "lets ranks meet without a collective"),
}
"""By Offbeat's name: torch's module and name, and what Offbeat does with it."""


def __getattr__(name: str) -> Any:
    """One of the names above, imported on first use; OffbeatError if this torch lacks it."""
    if name not in _REEXPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _find(name)


@cache
def _find(name: str) -> Any:
    place, purpose = _REEXPORTED[name]
    module, _, attribute = place.partition(":")
    try:
        found = import_module(module)
        return getattr(found, attribute, None) or import_module(f"{module}.{attribute}")
    except ImportError:
        raise OffbeatError(
            f"torch {torch.__version__} has no {module}.{attribute}, with which Offbeat {purpose}: install another "
            f"torch release or a newer Offbeat"
        ) from None


# Tensors and autograd


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the tensor's memory. Unlike the address, it also distinguishes tensors on the meta device."""
    return tensor.untyped_storage()._cdata


def storage_users(tensor: torch.Tensor) -> int:
    """Number of tensors, including the Python object created here, that refer to the tensor's memory."""
    return _find("storage_use_count")(storage_of(tensor))


def version_of(tensor: torch.Tensor) -> int:
    """Number of in-place changes of the tensor."""
    return tensor._version


def stored_rows(tensor: torch.Tensor) -> int:
    """Number of rows stored in a sparse tensor; unlike its indices, it needs no coalescing."""
    return tensor._nnz()


def after_backward(callback: Callable[[], None]) -> None:
    """Calls back at the end of this thread's current backward pass, as DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def autograd_node_number() -> int | None:
    """The place of the running node of a backward pass in the order in which forward made nodes; None between nodes."""
    node = _find("autograd_node")()
    return None if node is None else node._sequence_nr()


def schema_of(operator: Any) -> Any:
    """The names and types of an operator's arguments; None if it is not a torch operator."""
    return getattr(operator, "_schema", None)


def all_overloads(operator: Any) -> Any:
    """The operator by which torch lists its FLOP formulas; the overload itself, which has none, where it is missing."""
    return getattr(operator, "_overloadpacket", operator)


# GPUs


def hold_device(cycles: int) -> None:
    """Lets the GPU wait for some of its clock cycles before it does what is launched next."""
    torch.cuda._sleep(cycles)


# Tracing


def nested_tracing() -> AbstractContextManager[None]:
    """Allows tracing a forward with compiled parts; without it such a model cannot be traced."""
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


def as_if_compiling() -> AbstractContextManager[Any]:
    """Stops libraries from reading values to skip work; without it capture runs their models."""
    return patch.object(torch.compiler, "_is_compiling_flag", True)


def uncompiled(model: Any) -> Any:
    """The model wrapped by torch.compile, or the model itself; without it Offbeat works on the wrapper."""
    return getattr(model, "_orig_mod", model)


# Modules


def registries(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dictionaries in which a module holds its own parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def share_registries(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Makes the module share the other's parameters, buffers and children."""
    for name in ("_parameters", "_buffers", "_modules"):
        module.__dict__[name] = getattr(other, name)


def hooks_of(module: torch.nn.Module) -> Iterator[MutableMapping[int, Any]]:
    """A module's hooks of each kind, by their handles' ids; a kind under another name would be left out."""
    for name, value in module.__dict__.items():
        # torch.fx has lists of its own hooks.
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
            yield value


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether anything observes a module's output or its gradients."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def remove_forward_hooks(module: torch.nn.Module) -> None:
    """Removes all hooks on a module's forward."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


class ModelHooks(_Module):
    """Notifications to a subclass of a model for which torch has no public hook."""

    def _before_conversion(self) -> None:
        """The model is about to be moved or converted, as `to()` and `half()` do. Not called without `_apply`."""

    def _before_wrapping(self, wrapper: str) -> None:
        """Another wrapper begins its work. Not called if the attributes below have other names."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._before_conversion()
        return super()._apply(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # torch.jit reads every attribute of a model.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.parallel."):
            self._before_wrapping("DistributedDataParallel")
        return []

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> None:
        self._before_wrapping("FSDP")


# Optimizers


def hook_step(optimizer: torch.optim.Optimizer, former: type[torch.optim.Optimizer]) -> None:
    """Lets hooks on `step()` run around that of the optimizer's present class, if they did so in its former one."""
    if _hooked(former.step):
        optimizer._patch_step_function()


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """A class's `step()` without the hooks that torch runs around it; in a release with another mark with them."""
    step: Any = kind.step
    return step.__wrapped__ if _hooked(step) else step


def _hooked(step: Any) -> bool:
    return getattr(step, "hooked", False) and hasattr(step, "__wrapped__")


def support_foreach(kind: type) -> None:
    """Enables optimizers' fast paths for parameters of this class; without it they are slower."""
    from torch.optim import optimizer

    supported = getattr(optimizer, "_foreach_supported_types", None)
    if supported is not None and kind not in supported:
        supported.append(kind)


def keep_counting(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that a learning-rate scheduler counts the steps of a step() of its present class.

    The scheduler has put the former class's step() on the optimizer itself, where it would hide the new one. In a
    release with another mark it still does.
    """
    mark = "_wrapped_by_lr_sched"
    if not hasattr(vars(optimizer).get("step"), mark):
        return

    def step(*arguments: Any, **options: Any) -> Any:
        optimizer._opt_called = True  # what the scheduler looks at
        return type(optimizer).step(optimizer, *arguments, **options)

    setattr(step, mark, True)
    vars(optimizer)["step"] = step


# FSDP and DistributedDataParallel


def is_flat_parameter(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 merged several parameters into this one; False if it marks them differently."""
    return getattr(parameter, "_is_flat_param", False)


def gather_asynchronously(model: Any) -> None:
    """Lets a fully sharded model's gathers overlap compute without streams; without it they block."""
    if hasattr(model, "_set_unshard_async_op"):
        model._set_unshard_async_op(True)


def has_communication_hook(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether a communication hook is registered; there can be only one."""
    return bool(model._comm_hooks)


def sample_ddp(model: torch.nn.parallel.DistributedDataParallel, steps: int) -> None:
    """Makes DDP's reducer time itself every few steps."""
    model._set_ddp_runtime_logging_sample_rate(steps)


def ddp_counters(model: torch.nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """What DDP's reducer has counted, in nanoseconds."""
    return model._get_ddp_logging_data()


# Process groups


def collectives() -> Any:
    """Torch's functional collectives, which start when they are called and are waited for by `wait_tensor`."""
    return torch.ops._c10d_functional


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend that runs a process group's collectives on tensors of this device."""
    return group._get_backend(device)


def all_gather_flat(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
    """Starts an all-gather into one tensor, on a process group that torch.distributed does not know."""
    return group._allgather_base(output, tensor, options)


def reduce_scatter_flat(group: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
    """Starts a reduce-scatter of one tensor, on a process group that torch.distributed does not know."""
    return group._reduce_scatter_base(output, tensor, options)


def open_group(backend: str, store: Any, index: int, size: int, in_flight: int, timeout: timedelta) -> Any:
    """A process group that torch.distributed does not know, so that it ends with its last reference.

    Its members meet at `store`. `in_flight` collectives of gloo's run at once.
    """
    import torch.distributed as dist

    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, index, size, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = in_flight
    interfaces = [part for part in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if part]
    options._devices = [gloo.create_device(interface=part) for part in interfaces] or [gloo.create_default_device()]
    return gloo(store, index, size, options)


def named_group(group: Any, name: str, store: Any, device: torch.device) -> Any:
    """A group of `open_group` that functional collectives find by a name, as long as somebody refers to it."""
    import torch.distributed as dist

    kind = getattr(dist.ProcessGroup.BackendType, group.name().upper())
    named = dist.ProcessGroup(store, group.rank(), group.size())
    named._set_default_backend(kind)
    named._register_backend(device, kind, group)
    named._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, named)
    return named
