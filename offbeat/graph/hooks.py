"""One training step → coarser ModelGraph, from running it once on real tensors.

For models whose forward cannot be traced, such as those that branch on values. Consecutive tensor operators that run
for the same module become one operator, so a leaf module gives one forward and one backward operator; what a module
computes between its children's calls is an operator too. A backward operator belongs to the module whose forward made
its autograd node: nodes are numbered in order, and the numbers at which modules are entered and left are recorded.
"""

import bisect
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.graph import kinds
from offbeat.graph.model import Operator, Phase, TensorSpec, Variable
from offbeat.graph.step import (
    Step,
    aliases_of,
    dtype_name,
    module_calls,
    python_random_kept,
    standing_in,
    tensor_spec,
    uncompiled,
)


@dataclass(eq=False)
class _Run:
    """Consecutive tensor operators of one call of one module."""

    name: str
    phase: Phase
    module: str
    target: str
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    activation_bytes: int = 0
    inputs: dict[str, None] = field(default_factory=dict)
    variables: dict[str, None] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    weight_of_kind: dict[str, int] = field(default_factory=dict)

    def operator(self) -> Operator:
        # The kind that does most of the work names the whole; bytes decide where nothing is computed.
        kind = max(self.weight_of_kind, key=lambda kind: self.weight_of_kind[kind], default="other")
        return Operator(
            name=self.name,
            kind=kind,
            target=self.target,
            phase=self.phase,
            module=self.module,
            inputs=tuple(name for name in self.inputs if name != self.name),
            variables=tuple(self.variables),
            outputs=self.outputs,
            flops=self.flops,
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            activation_bytes=self.activation_bytes,
        )


@dataclass(frozen=True)
class _Call:
    """One call of one module; the model itself is called before any."""

    module: str
    target: str
    serial: int


def trace_hooks(step: Step) -> tuple[tuple[Operator, ...], tuple[Variable, ...]]:
    """Forward and backward operators in execution order, and the variables in order of first use."""
    originals = dict(step.model.named_parameters())
    leaves = {name: _leaf(parameter, step.model) for name, parameter in originals.items()}
    stand_ins: dict[int, Tensor] = {id(originals[name]): leaf for name, leaf in leaves.items()}
    stand_ins.update((id(buffer), buffer.detach().clone()) for buffer in step.model.buffers())
    recorder = _Recorder(step, leaves)
    with ExitStack() as stack:
        stack.enter_context(python_random_kept())
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_gradients_kept(originals))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncompiled())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(standing_in(step.model, stand_ins))
        stack.enter_context(module_calls(step.model, recorder.enter, recorder.leave))
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in step.input_tensors()]
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda tensor: tensor):
            loss = step.loss(inputs)
            recorder.phase = "backward"
            loss.backward()
    return tuple(run.operator() for run in recorder.runs), _variables(step, recorder, leaves)


def _leaf(parameter: nn.Parameter, model: nn.Module) -> nn.Parameter:
    """A parameter with the same memory and its own gradient; a copy where forward writes to the weights."""
    renormed = any(
        module.max_norm is not None and module.weight is parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    )
    data = parameter.detach().clone() if renormed else parameter.detach()
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


@contextmanager
def _gradients_kept(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Parameters a model hides from the swap would get gradients of this step."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


class _Recorder(TorchDispatchMode):
    """Sees every tensor operator of the step and books it to a run."""

    def __init__(self, step: Step, leaves: dict[str, nn.Parameter]):
        super().__init__()
        self.phase: Phase = "forward"
        self.runs: list[_Run] = []
        self.first_use: dict[str, str] = {}
        self.gradient_from: dict[str, str] = {}
        self.rows_of: dict[str, list[int]] = {}
        self._leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        self._name_of = {id(leaf): name for name, leaf in self._leaves.items()}
        self._memory = _Memory(self._leaves)
        self._root = _Call("", _class_name(step.model), 0)
        self._stack = [self._root]
        self._serial = 0
        self._current: _Call | None = None
        self._boundaries: list[tuple[int, _Call]] = [(0, self._root)]
        self._names: dict[str, int] = {}
        self._producer: dict[int, _Run] = {}
        self._kept: set[int] = set()
        for name, leaf in self._leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name))

    def enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._serial += 1
        self._stack.append(_Call(path, _class_name(module), self._serial))
        self._boundaries.append((torch.autograd._get_sequence_nr(), self._stack[-1]))
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and id(weight) in self._name_of and args and isinstance(args[0], Tensor):
            self.rows_of.setdefault(self._name_of[id(weight)], []).append(math.prod(args[0].shape[:-1]))

    def leave(self, path: str) -> None:
        self._stack.pop()
        self._boundaries.append((torch.autograd._get_sequence_nr(), self._stack[-1]))

    def saved(self, tensor: Tensor) -> Tensor:
        """Books memory that autograd keeps to the run that made it, once."""
        key = _storage_key(tensor)
        if key in self._producer and key not in self._kept:
            self._kept.add(key)
            self._producer[key].activation_bytes += _storage_bytes(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = kinds.tensors_in(out)
        name = kinds.base_name(func)
        if name == "lift_fresh":
            # Memory made outside of any operator may lie where a freed result of an earlier run lay.
            self._producer.pop(_storage_key(out), None)
        if not results or name in ("detach", "lift_fresh"):
            return out
        run = self._run()
        flops = kinds.flops_of(func, args, kwargs, out)
        bytes_read, bytes_written = kinds.bytes_of(func, args, kwargs, out)
        run.flops += flops
        run.bytes_read += bytes_read
        run.bytes_written += bytes_written
        kind = kinds.kind_of(func)
        run.weight_of_kind[kind] = run.weight_of_kind.get(kind, 0) + flops * 2**20 + bytes_read + bytes_written
        for tensor in kinds.tensors_in((args, kwargs)):
            source = self._producer.get(_storage_key(tensor))
            if source is not None:
                run.inputs[source.name] = None
            for name in self._memory.names_at(tensor):
                run.variables[name] = None
                if self.phase == "forward" and not kinds.is_view(func):
                    self.first_use.setdefault(name, run.name)
        if not kinds.is_view(func):
            self._producer.update((_storage_key(tensor), run) for tensor in results)
        run.outputs = tuple(tensor_spec(tensor) for tensor in results)
        return out

    def _run(self) -> _Run:
        """The run that goes on, or a new one if another module's turn has come."""
        call = self._stack[-1] if self.phase == "forward" else self._call_of_backward()
        if self.runs and self._current == call and self.runs[-1].phase == self.phase:
            return self.runs[-1]
        self._current = call
        base = f"{self.phase}.{call.module or 'model'}"
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        self.runs.append(_Run(f"{base}#{count}" if count else base, self.phase, call.module, call.target))
        return self.runs[-1]

    def _call_of_backward(self) -> _Call:
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else math.inf
        if number > self._boundaries[-1][0]:
            # The engine adds gradients and stores them on its own account, between two nodes.
            return self._current or self._root
        return self._boundaries[bisect.bisect_right(self._boundaries, number, key=lambda b: b[0]) - 1][1]

    def _ready(self, name: str) -> None:
        if self.runs and self.runs[-1].phase == "backward":
            self.gradient_from[name] = self.runs[-1].name


class _Memory:
    """Finds the variables behind a tensor, views of them included."""

    def __init__(self, leaves: dict[str, nn.Parameter]):
        self._ranges: dict[int, list[tuple[int, int, str]]] = {}
        for name, leaf in leaves.items():
            start = leaf.storage_offset() * leaf.element_size()
            end = start + leaf.numel() * leaf.element_size()
            self._ranges.setdefault(_storage_key(leaf), []).append((start, end, name))

    def names_at(self, tensor: Tensor) -> Iterator[str]:
        # Parameters that are slices of one flat buffer share its storage.
        for start, end, name in self._ranges.get(_storage_key(tensor), ()):
            position = tensor.storage_offset() * tensor.element_size()
            if start <= position < end:
                yield name


def _variables(step: Step, recorder: _Recorder, leaves: dict[str, nn.Parameter]) -> tuple[Variable, ...]:
    position = {run.name: index for index, run in enumerate(recorder.runs)}
    aliases = aliases_of(step.model)
    found = []
    for name, leaf in leaves.items():
        if not leaf.requires_grad:
            continue
        first_use = recorder.first_use.get(name)
        sparse = leaf.grad is not None and leaf.grad.is_sparse
        rows = recorder.rows_of.get(name, [])
        variable = Variable(
            name=name,
            shape=tuple(leaf.shape),
            dtype=dtype_name(leaf.dtype),
            first_use=first_use,
            gradient_from=recorder.gradient_from.get(name),
            sparse=sparse,
            sparse_rows=min(leaf.grad._nnz(), leaf.shape[0]) if sparse and leaf.grad is not None else 0,
            factor_rows=rows[0] if len(rows) == 1 and name in recorder.gradient_from else 0,
            aliases=aliases[name],
        )
        found.append((position[first_use] if first_use else math.inf, variable))
    return tuple(variable for _, variable in sorted(found, key=lambda item: item[0]))


def _storage_key(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _storage_bytes(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return kinds.touched_bytes(tensor)
    return tensor.untyped_storage().nbytes()


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
