"""Capture a coarser ModelGraph by running one training step on real tensors.

For models whose forward cannot be traced, such as those that branch on values. Consecutive tensor operators that run
for the same module become one operator, so a leaf module gives one forward and one backward operator; what a module
computes between its children's calls is an operator too. A backward operator belongs to the module whose forward made
its autograd node: nodes are numbered in order, and the numbers at which modules are entered and left are recorded.
"""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.graph import kinds
from offbeat.graph.model import Operator, Phase, TensorSpec, Variable
from offbeat.graph.step import Step, make_variables, module_calls, standing_in, tensor_spec, tracing
from offbeat.torch_private import TorchDispatchMode, autograd_node_number, storage_of, stored_rows

_WORK = ("flops", "bytes_read", "bytes_written", "activation_bytes")


@dataclass(eq=False)
class _Run:
    """Consecutive tensor operators of one call of one module."""

    name: str
    phase: Phase
    call: "_Call"
    work: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_WORK, 0)))
    inputs: dict[str, None] = field(default_factory=dict)
    variables: dict[str, None] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    weight_of_kind: Counter[str] = field(default_factory=Counter)

    def operator(self) -> Operator:
        return Operator(
            name=self.name,
            # The kind that does most of the work names the whole; bytes decide where nothing is computed.
            kind=max(self.weight_of_kind, key=self.weight_of_kind.__getitem__, default="other"),
            target=self.call.target,
            phase=self.phase,
            module=self.call.module,
            inputs=tuple(name for name in self.inputs if name != self.name),
            variables=tuple(self.variables),
            outputs=self.outputs,
            **self.work,
        )


@dataclass(eq=False, slots=True)
class _Call:
    """One call of one module, equal to no other."""

    module: str
    target: str


def trace_hooks(step: Step) -> tuple[tuple[Operator, ...], tuple[Variable, ...]]:
    """Forward and backward operators in execution order, and the variables in order of first use."""
    originals = dict(step.model.named_parameters())
    leaves = {name: _leaf(parameter, step.model) for name, parameter in originals.items()}
    stand_ins: dict[int, Tensor] = {id(originals[name]): leaf for name, leaf in leaves.items()}
    stand_ins.update((id(buffer), buffer.detach().clone()) for buffer in step.model.buffers())
    recorder = _Recorder(step, leaves)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        tracing(),
        torch.random.fork_rng(devices=devices),
        _gradients_kept(originals),
        torch.autograd.set_multithreading_enabled(False),
        standing_in(step.model, stand_ins),
        module_calls(step.model, recorder.enter, recorder.leave),
    ):
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in step.input_tensors()]
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda tensor: tensor):
            loss = step.loss(inputs)
            recorder.phase = "backward"
            loss.backward()
    operators = tuple(run.operator() for run in recorder.runs)
    return operators, make_variables(step.model, operators, recorder.describe)


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
    """Afterwards each parameter has the gradient it had before, even one that the model hides from `standing_in`."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


class _Recorder(TorchDispatchMode):
    """Adds every tensor operator of the step to a run."""

    def __init__(self, step: Step, leaves: dict[str, nn.Parameter]):
        super().__init__()
        self.phase: Phase = "forward"
        self.runs: list[_Run] = []
        self._first_use: dict[str, str] = {}
        self._gradient_from: dict[str, str] = {}
        self._linear_rows: dict[str, list[int]] = defaultdict(list)
        self._leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        self._name_of = {id(leaf): name for name, leaf in self._leaves.items()}
        self._variables_in: dict[int, list[tuple[range, str]]] = defaultdict(list)
        """The bytes that each variable takes up in a storage; slices of one flat buffer share it."""
        self._stack = [_Call("", _class_name(step.model))]
        self._boundaries = [(0, self._stack[0])]
        self._names: Counter[str] = Counter()
        self._producer: dict[int, _Run] = {}
        self._kept: set[int] = set()
        for name, leaf in self._leaves.items():
            start = leaf.storage_offset() * leaf.element_size()
            self._variables_in[_storage_key(leaf)].append((range(start, start + leaf.nbytes), name))
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name))

    def enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._stack.append(_Call(path, _class_name(module)))
        self._boundaries.append((torch.autograd._get_sequence_nr(), self._stack[-1]))
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and id(weight) in self._name_of and args and isinstance(args[0], Tensor):
            self._linear_rows[self._name_of[id(weight)]].append(math.prod(args[0].shape[:-1]))

    def leave(self, path: str) -> None:
        self._stack.pop()
        self._boundaries.append((torch.autograd._get_sequence_nr(), self._stack[-1]))

    def saved(self, tensor: Tensor) -> Tensor:
        """Adds memory that autograd keeps to the run that made it, once."""
        key = _storage_key(tensor)
        if key in self._producer and key not in self._kept:
            self._kept.add(key)
            strided = tensor.layout == torch.strided
            held = tensor.untyped_storage().nbytes() if strided else kinds.touched_bytes(tensor)
            self._producer[key].work["activation_bytes"] += held
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
        run.work.update(flops=flops, bytes_read=bytes_read, bytes_written=bytes_written)
        run.weight_of_kind[kinds.kind_of(func)] += flops * 2**20 + bytes_read + bytes_written
        for tensor in kinds.tensors_in((args, kwargs)):
            key = _storage_key(tensor)
            if key in self._producer:
                run.inputs[self._producer[key].name] = None
            for taken, name in self._variables_in.get(key, ()):
                if tensor.storage_offset() * tensor.element_size() in taken:
                    run.variables[name] = None
                    if self.phase == "forward" and not kinds.is_view(func):
                        self._first_use.setdefault(name, run.name)
        if not kinds.is_view(func):
            self._producer.update((_storage_key(tensor), run) for tensor in results)
        run.outputs = tuple(tensor_spec(tensor) for tensor in results)
        return out

    def _run(self) -> _Run:
        """The current run, or a new one if the operator belongs to another call."""
        call = self._stack[-1]
        if self.phase == "backward":
            number = autograd_node_number()
            if number is not None and number <= self._boundaries[-1][0]:
                call = self._boundaries[bisect.bisect_right(self._boundaries, number, key=lambda b: b[0]) - 1][1]
            elif self.runs:
                # Between two nodes the engine itself adds and stores gradients.
                call = self.runs[-1].call
        if not self.runs or (self.runs[-1].call, self.runs[-1].phase) != (call, self.phase):
            base = f"{self.phase}.{call.module or 'model'}"
            count = self._names[base]
            self._names[base] += 1
            self.runs.append(_Run(f"{base}#{count}" if count else base, self.phase, call))
        return self.runs[-1]

    def describe(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """What was seen of a variable."""
        gradient = self._leaves[name].grad
        sparse = gradient is not None and gradient.is_sparse
        rows = self._linear_rows.get(name, [])
        return {
            "first_use": self._first_use.get(name),
            "gradient_from": self._gradient_from.get(name),
            "sparse": sparse,
            "sparse_rows": min(stored_rows(gradient), parameter.shape[0]) if gradient is not None and sparse else 0,
            "factor_rows": rows[0] if len(rows) == 1 and name in self._gradient_from else 0,
        }

    def _ready(self, name: str) -> None:
        if self.runs and self.runs[-1].phase == "backward":
            self._gradient_from[name] = self.runs[-1].name


def _storage_key(tensor: Tensor) -> int:
    return storage_of(tensor) if tensor.layout == torch.strided else id(tensor)


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
