"""Capture a model and an example batch as a ModelGraph, with the best tracing method the model allows."""

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from offbeat.errors import CaptureError
from offbeat.graph.model import ModelGraph, Operator, Variable, update_operators

if TYPE_CHECKING:
    import torch

    from offbeat.graph.step import Step

_SLOTS = {
    "SGD": 0,
    **dict.fromkeys(("ASGD", "Adagrad", "Muon", "RMSprop"), 1),
    **dict.fromkeys(("Adadelta", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "Rprop", "SparseAdam"), 2),
}
_SLOTS_IF_UNKNOWN = 2

_capturing = ContextVar("_capturing", default=False)


def capture(
    model: "torch.nn.Module",
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: "torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None" = None,
    name: str | None = None,
) -> ModelGraph:
    """Captures the operators and variables of one training step of `model`, which is left unchanged.

    The step is traced on fake tensors: nothing is computed and no weight is allocated, so the model may live on the
    meta device. A model that cannot be traced (one that branches on values) is run once for real instead; the graph
    then has one operator per module, and a warning gives the reason.

    Args:
        model: in the mode (`train()` or `eval()`) it is to be trained in.
        example_inputs: one replica's batch: a tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments. Real, meta and fake tensors all work.
        loss_fn: called as `loss_fn(output)`. If it requires two arguments, the last of `example_inputs` is its target
            and not the model's: `capture(model, (x, y), loss_fn=f)` then calls `f(model(x), y)`. Without it the loss is
            the model's output if that is a scalar tensor, its `loss` entry or attribute if there is one, or a tuple's
            first floating-point element if that is a scalar; otherwise the sum of all floating-point outputs that
            require grad.
        optimizer: what the step ends with: an optimizer, its class or its name. None is plain SGD. A custom
            optimizer counts the state it already holds, or 2 tensors per variable if it holds none.
        name: of the graph; the model's class if not given.

    Raises:
        CaptureError: if the step can neither be traced nor run; its one sentence says why.
    """
    import torch

    from offbeat.graph.step import constants_of, make_step, tensor_spec
    from offbeat.torch_private import uncompiled

    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = uncompiled(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CaptureError(f"model {type(model).__name__} has no parameter that requires grad")
    optimizer_name, slots = optimizer_state(optimizer)
    step = make_step(model, example_inputs, loss_fn)
    token = _capturing.set(True)
    try:
        operators, variables, source = _trace(step)
    finally:
        _capturing.reset(token)
    return ModelGraph(
        name=name or type(model).__name__,
        operators=operators + update_operators(variables, optimizer_name, slots),
        variables=variables,
        constants=constants_of(model),
        inputs=tuple(tensor_spec(tensor) for tensor in step.input_tensors()),
        source=source,
        optimizer=optimizer_name,
        optimizer_slots=slots,
    )


def is_capturing() -> bool:
    """Whether a forward that runs now is part of a capture, not of training."""
    return _capturing.get()


def optimizer_state(optimizer: "torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None") -> tuple[str, int]:
    """The optimizer's name, and how many tensors of a variable's size it keeps for each."""
    import torch

    if optimizer is None:
        return "SGD", 0
    if isinstance(optimizer, str):
        name = next((known for known in _SLOTS if known.lower() == optimizer.lower()), optimizer)
        return name, _SLOTS.get(name, _SLOTS_IF_UNKNOWN)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer.__name__, _SLOTS.get(optimizer.__name__, _SLOTS_IF_UNKNOWN)
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CaptureError(f"optimizer must be a torch.optim.Optimizer, its class or its name, got {name}")
    if name not in _SLOTS:
        # The most state tensors of a parameter's shape that it holds for one.
        held = (
            sum(getattr(value, "shape", None) == parameter.shape for value in state.values())
            for parameter, state in optimizer.state.items()
            if hasattr(parameter, "shape")
        )
        return name, max(held, default=0) or _SLOTS_IF_UNKNOWN
    options = {**optimizer.defaults, **optimizer.param_groups[0]}
    extra = bool(options.get("amsgrad")) + bool(options.get("centered"))
    if name in ("SGD", "RMSprop"):
        extra += bool(options.get("momentum"))
    return name, _SLOTS[name] + extra


def _trace(step: "Step") -> tuple[tuple[Operator, ...], tuple[Variable, ...], Literal["joint", "hooks"]]:
    from offbeat.graph.hooks import trace_hooks

    name = type(step.model).__name__
    try:
        from offbeat.graph.joint import trace_joint

        return *trace_joint(step), "joint"
    except CaptureError:
        raise
    except Exception as error:
        reason = _sentence(error)
    from offbeat.torch_private import FakeTensor

    tensors = [*step.model.parameters(), *step.model.buffers(), *step.input_tensors()]
    if any(isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for tensor in tensors):
        raise CaptureError(
            f"model {name} cannot be traced ({reason}), and cannot be run instead because its tensors are fake or "
            "on the meta device"
        )
    try:
        operators, variables = trace_hooks(step)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"model {name} fails on the example inputs: {_sentence(error)}") from error
    warnings.warn(
        f"{name} was run once because it cannot be traced ({reason}), so its graph is coarser: one operator per module",
        stacklevel=3,
    )
    return operators, variables, "hooks"


def _sentence(error: Exception) -> str:
    """The first line of an error that says something."""
    from offbeat.torch_private import DataDependentOutput, DynamicOutputShape

    if isinstance(error, DynamicOutputShape | DataDependentOutput):
        return f"its forward depends on the values of a tensor, at {error.func}"
    text = next(filter(None, map(str.strip, str(error).splitlines())), "").rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
