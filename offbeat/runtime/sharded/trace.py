"""A model and its arguments → its forward pass as a program of operators with the names that capture gives them.

The program is the forward part of the joint graph that `offbeat.capture` reads, so a strategy's operator names mean
the same here. It ends with the model's own outputs; a loss computed outside the model is not part of it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from offbeat.errors import CaptureError
from offbeat.graph import Operator
from offbeat.graph.joint import Walk, joint_graph
from offbeat.graph.step import Step
from offbeat.torch_private import FakeTensor, descriptors, pytree, saved_tensors_hooks, set_grad_enabled

_NO_GRAD_KEY = "offbeat_no_grad"
RECOMPUTED_KEY = "offbeat_recomputed"
"""Annotates nodes with the number of the `torch.utils.checkpoint` that the model computes them in, from 1."""


@dataclass(frozen=True)
class Program:
    """One forward pass, functional: what it changes it returns."""

    nodes: tuple[Node, ...]
    """Calls in order, without those whose result nothing reads."""
    state: dict[Node, str]
    """Parameters and buffers of the model, by name."""
    batch: dict[Node, int]
    """Tensor arguments, by position."""
    constants: dict[Node, Tensor]
    operators: dict[str, Operator]
    """By name, as a ModelGraph has them."""
    reads: dict[Node, str]
    """For each value a call may read, the operator or variable it comes from, as `Operator.inputs` names it."""
    results: tuple[Node | Any, ...]
    """Leaves of the model's output: nodes, or plain values."""
    structure: pytree.TreeSpec
    updates: tuple[tuple[str, Node], ...]
    """Buffers that forward changes, and their new values."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """All that it reads: state, batch and constants."""
        return *self.state, *self.batch, *self.constants

    def without_grad(self, node: Node) -> bool:
        """Whether the model computes it inside `torch.no_grad()`."""
        return bool(annotation(node, _NO_GRAD_KEY))


def annotation(node: Node, key: str) -> Any:
    """What a traced node is annotated with; None if nothing."""
    return (node.meta.get("custom") or {}).get(key)


@dataclass(frozen=True)
class _Forward(Step):
    """A step that ends with the model's outputs instead of a loss."""

    call: Callable[..., Any]
    seen: dict[str, Any] = field(default_factory=dict)

    def loss(self, tensors: Sequence[Tensor]) -> Any:
        replacing = iter(tensors)
        args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(replacing), (self.args, self.kwargs))
        with _Marks():
            output = self.call(*args, **kwargs)
        self.seen["leaves"], self.seen["structure"] = pytree.tree_flatten(output)
        # Copies, so that no output is a view of another tensor; the program returns what was copied.
        return tuple(leaf.clone() for leaf in self.seen["leaves"] if isinstance(leaf, Tensor))


class _Marks(TorchFunctionMode):
    """Annotates what the traced graph does not show: `torch.no_grad()` and `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self._regions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marks: dict[str, Any] = {}
        if not torch.is_grad_enabled() and func is not set_grad_enabled:
            marks[_NO_GRAD_KEY] = True
        hooks = saved_tensors_hooks(True)
        if hooks and "_checkpoint_hook" in hooks[0].__qualname__:
            # The hooks themselves are kept, because their ids may be used again.
            if hooks[0] not in self._regions:
                self._regions.append(hooks[0])
            marks[RECOMPUTED_KEY] = 1 + self._regions.index(hooks[0])
        with fx_traceback.annotate(marks) if marks else nullcontext():
            return func(*args, **(kwargs or {}))


def trace_forward(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program:
    """The program of `forward(*args, **kwargs)`, which is the model's own forward; nothing is computed."""
    step = _Forward(model, args, kwargs, (), None, call=forward)
    try:
        graph, names = joint_graph(step)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise CaptureError(
            f"model {type(model).__name__} cannot be traced, so its operators cannot be split over ranks "
            f"({type(error).__name__}: {reason})"
        ) from error
    return _program(graph, names, model, step.seen)


def _program(graph: Graph, names: dict[str, str], model: nn.Module, seen: dict[str, Any]) -> Program:
    walk = Walk(graph, names)
    # The tracer numbers the model's parameters and buffers.
    named = [*model.named_parameters(), *model.named_buffers()]
    state_names = {f"t{index}": name for index, (name, _) in enumerate(named)}
    tensors, updates = [], []
    output = graph.output_node()
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(desc, descriptors.PlainAOTOutput):
            # Not the copy that was made of what the model returns.
            tensors.append(node.args[0])
        elif isinstance(desc, descriptors.InputMutationAOTOutput):
            changed = desc.mutated_input
            if not isinstance(changed, descriptors.BufferAOTInput):
                raise CaptureError(f"the model changes {changed.expr()} in forward, which only buffers may be")
            updates.append((state_names[changed.target], node))
    wanted = {*tensors, *(node for _, node in updates)}
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    nodes: list[Node] = []
    state: dict[Node, str] = {}
    batch: dict[Node, int] = {}
    constants: dict[Node, Tensor] = {}
    for node in (node for node in graph.nodes if node in wanted):
        desc = node.meta.get("desc")
        if node.op == "call_function":
            nodes.append(node)
        elif isinstance(desc, descriptors.ParamAOTInput | descriptors.BufferAOTInput):
            state[node] = state_names[desc.target]
        elif isinstance(desc, descriptors.PlainAOTInput):
            batch[node] = desc.idx
        elif node.op == "get_attr":
            constants[node] = _constant(getattr(graph.owning_module, str(node.target)))
        else:
            raise CaptureError(f"the model's forward reads {node.name!r}, which is no parameter, buffer or argument")
    origins = {node: walk.variable_of.get(node) or getattr(walk.producer(node), "name", None) for node in wanted}
    reads = {node: origin for node, origin in origins.items() if origin is not None}
    remaining = iter(tensors)
    results = tuple(next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in seen["leaves"])
    running = {node.name for node in nodes}
    operators = {op.name: op for op in walk.operators() if op.name in running}
    return Program(tuple(nodes), state, batch, constants, operators, reads, results, seen["structure"], tuple(updates))


def _constant(value: Any) -> Tensor:
    value = value.constant if isinstance(value, FakeTensor) else value
    if not isinstance(value, Tensor) or value.requires_grad:
        raise CaptureError("the model's forward reads a tensor that is no parameter, buffer or argument of it")
    return value
