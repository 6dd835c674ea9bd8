"""Build one training step that runs on stand-ins for the model's tensors.

Both ways of capturing run the user's forward on other tensors than the model's own (fakes, or leaves that share the
weights' memory), so that whatever forward does to them, the model is afterwards what it was.
"""

import functools
import inspect
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import CaptureError
from offbeat.graph.model import ITEM_BYTES, Constant, Operator, TensorSpec, Variable
from offbeat.torch_private import nested_tracing, pytree, registries


@dataclass(frozen=True)
class Step:
    """Everything needed to compute the loss once."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    loss_fn: Callable[..., Any] | None

    def input_tensors(self) -> list[Tensor]:
        """The tensors among the example inputs and targets."""
        return [leaf for leaf in self._flat()[0] if isinstance(leaf, Tensor)]

    def loss(self, tensors: Sequence[Tensor]) -> Tensor:
        """The loss with `tensors` in place of the example tensors."""
        leaves, structure = self._flat()
        replacing = iter(tensors)
        leaves = [next(replacing) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs, targets = pytree.tree_unflatten(leaves, structure)
        output = self.model(*args, **kwargs)
        if self.loss_fn is None:
            return loss_of_output(output)
        loss = self.loss_fn(output, *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"loss_fn must return a tensor with one element, got {got}")
        return _differentiable(loss, "the loss that loss_fn returns")

    def _flat(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten((self.args, self.kwargs, self.targets))


def make_step(model: nn.Module, example_inputs: Any, loss_fn: Callable[..., Any] | None) -> Step:
    """Sorts the example inputs into arguments of the model and of the loss function."""
    named = isinstance(example_inputs, Mapping)
    listed = example_inputs if isinstance(example_inputs, tuple | list) else () if named else (example_inputs,)
    args, targets = tuple(listed), ()
    if loss_fn is not None and _required_parameters(loss_fn) == 2:
        if len(args) < 2:
            raise CaptureError(
                "loss_fn takes the output and a target, so example_inputs must be a tuple whose last element is the "
                f"target, got {type(example_inputs).__name__}"
            )
        args, targets = args[:-1], args[-1:]
    return Step(model, args, dict(example_inputs) if named else {}, targets, loss_fn)


def loss_of_output(output: Any) -> Tensor:
    """The loss a model returns: the scalar itself, a `loss` entry or attribute, or a tuple's first floating-point
    element if it is a scalar; else the sum of every floating-point output that requires grad."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and not isinstance(output, Tensor):
        return _differentiable(named if named.numel() == 1 else named.sum(), "the output's 'loss'")
    leaves = list(_floating_tensors(output))
    if leaves and leaves[0].numel() == 1 and not isinstance(output, Mapping):
        return _differentiable(leaves[0], "the model's output")
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if not leaves:
        raise CaptureError(
            f"the model's output ({type(output).__name__}) holds no floating-point tensor that depends on a trainable "
            "parameter"
        )
    return functools.reduce(operator.add, [leaf.sum() for leaf in leaves])


def tensor_spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        # Rare types (quantised, sub-byte) keep the right size under the name of a plain type.
        name = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[dtype.itemsize]
    return name


def make_variables(
    model: nn.Module, operators: Iterable[Operator], describe: Callable[[str, nn.Parameter], dict[str, Any]]
) -> tuple[Variable, ...]:
    """The trainable parameters in order of first use; `describe` gives what a trace has found out about one."""
    position = {operator.name: index for index, operator in enumerate(operators)}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    variables = [
        Variable(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            aliases=tuple(names[id(parameter)][1:]),
            **describe(name, parameter),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    return tuple(sorted(variables, key=lambda each: position[each.first_use] if each.first_use else math.inf))


def sparse_embeddings(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """The embeddings whose gradients are sparse."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [embedding for embedding in embeddings if embedding.sparse]


def constants_of(model: nn.Module) -> tuple[Constant, ...]:
    """Frozen parameters, then buffers."""
    frozen = [(name, p, "frozen") for name, p in model.named_parameters() if not p.requires_grad]
    buffers = [(name, b, "buffer") for name, b in model.named_buffers()]
    return tuple(
        Constant(name, tuple(tensor.shape), dtype_name(tensor.dtype), kind)  # type: ignore[arg-type]
        for name, tensor, kind in frozen + buffers
    )


@contextmanager
def standing_in(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, the model holds `stand_ins[id(tensor)]` wherever it held `tensor`; after, it holds what it held before,
    and every attribute that forward bound anew is what it was."""
    modules = list(model.modules())
    held = [registry for m in modules for registry in (m.__dict__, *registries(m))]
    before = [dict(registry) for registry in held]
    try:
        for module in modules:
            own = registries(module)
            for key, value in list(module.__dict__.items()):
                if any(value is registry for registry in own[:2]):
                    value.update(_swapped(value, stand_ins) or {})
                elif (replaced := _swapped(value, stand_ins)) is not None:
                    module.__dict__[key] = replaced
        yield
    finally:
        for registry, saved in zip(held, before, strict=True):
            registry.clear()
            registry.update(saved)


@contextmanager
def tracing() -> Iterator[None]:
    """Inside, gradients are recorded and nothing runs compiled; Python's and NumPy's random numbers go on as before."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            nested_tracing(),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def module_calls(
    model: nn.Module, enter: Callable[[str, nn.Module, Any], None], leave: Callable[[str], None]
) -> Iterator[None]:
    """Inside, `enter(path, module, args)` and `leave(path)` are called around each forward of the model's modules."""
    handles = []
    for path, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda m, args, path=path: enter(path, m, args), prepend=True),
            module.register_forward_hook(lambda m, args, out, path=path: leave(path), always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _swapped(value: Any, stand_ins: Mapping[int, Tensor]) -> Any:
    """The value with its tensors replaced, one level deep (RNNs keep their weights in a list too); None if none is."""
    if isinstance(value, Tensor):
        return stand_ins.get(id(value))
    if type(value) in (list, tuple) and any(id(item) in stand_ins for item in value):
        return type(value)(stand_ins.get(id(item), item) for item in value)
    if isinstance(value, dict) and any(id(item) in stand_ins for item in value.values()):
        return {key: stand_ins.get(id(item), item) for key, item in value.items()}
    return None


def _required_parameters(function: Callable[..., Any]) -> int:
    """How many positional arguments a loss function must be given, 1 or 2."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
    if required > 2:
        raise CaptureError(f"loss_fn must take (output) or (output, target), not {required} arguments")
    return max(required, 1)


def _floating_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    parts: Iterable[Any] = output if isinstance(output, tuple | list) else ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif is_dataclass(output):
        parts = [getattr(output, field.name) for field in fields(output)]
    for part in parts:
        yield from _floating_tensors(part)


def _differentiable(loss: Tensor, what: str) -> Tensor:
    if not loss.requires_grad:
        raise CaptureError(f"{what} depends on no trainable parameter, so there is nothing to train")
    return loss
