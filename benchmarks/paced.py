"""Layers with durations → a model that computes like an accelerator: on time, without the CPU, with true gradients.

A PacedModel owns real parameters. Its forward and backward sleep as long as the given layers would compute, and
backward hands every parameter a gradient of its true size through autograd, so that hooks and DistributedDataParallel
work as usual.
With the input reduced to one signal h_i per sample, and g_i the gradient of the loss with respect to output i,

    gradient of parameter p = sum_i g_i * (h_i + DECAY * p)

which takes one pass over p, is linear in the loss and, for the mean over a batch, averages over replicas to the
gradient of the joint batch. Initial values are multiples of 1/64 and DECAY is a power of two, so with inputs such as
small integers nothing is rounded, and equality with a run on one device can be checked bit for bit.
"""

import math
import resource
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError
from offbeat.graph.model import ModelGraph, Operator, Phase

DECAY = 0.125
# Longer than a host waits by accident, shorter than a wait for the network that is worth emulating.
_BLOCKED_SECONDS = 1e-3


class DeviceClock:
    """The queue of one accelerator: work starts when it is issued or when the work before it ends, whichever is later.

    The host must stay with a layer until it is done, because its gradients are used by the CPU. A real host would not:
    it would issue the next layer meanwhile. So work counts as issued earlier by the time the host has spent between
    `issue` and the end of `wait` since its last `synchronize`. Hence oversleeping and the host's own work between
    layers do not add up, and the device idles only where the host needs longer than the device. A host that blocked on
    something else, such as the network, was not ahead and loses that lead; one that other programs kept from the
    processor keeps it.
    """

    def __init__(self) -> None:
        self._free_at = 0.0
        self._lead_seconds = 0.0
        self._issued_at = 0.0
        self._woke_at = 0.0
        self._woke_at_cpu = 0.0
        self._woke_after_blocks = 0
        self._thread = 0

    def synchronize(self) -> None:
        """From here on work is issued now, not ahead."""
        self._lead_seconds = 0.0

    def issue(self, seconds: float) -> float:
        """Queues work and returns the time on `time.perf_counter` at which the device will have done it."""
        now = time.perf_counter()
        idle = (now - self._woke_at) - (time.thread_time() - self._woke_at_cpu)
        blocked = idle > _BLOCKED_SECONDS and _blocks() > self._woke_after_blocks
        if blocked or self._thread != threading.get_ident():
            self._lead_seconds = 0.0
        self._issued_at = now
        self._free_at = max(self._free_at, now - self._lead_seconds) + seconds
        return self._free_at

    def wait(self, deadline: float) -> None:
        """Sleeps until the device has reached `deadline`."""
        now = time.perf_counter()
        while now < deadline:
            time.sleep(deadline - now)
            now = time.perf_counter()
        self._lead_seconds += now - self._issued_at
        self._woke_at, self._woke_at_cpu = now, time.thread_time()
        self._woke_after_blocks, self._thread = _blocks(), threading.get_ident()


def _blocks() -> int:
    """How often this thread gave up the processor of its own accord."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@dataclass(frozen=True)
class PacedLayer:
    """One layer: what it owns and how long it computes."""

    name: str
    """Dotted path of the module; '' is the model itself."""
    parameter_shapes: Mapping[str, tuple[int, ...]]
    forward_seconds: float
    backward_seconds: float
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Element type of parameters that are not float32, by name."""

    def __post_init__(self) -> None:
        for duration in ("forward_seconds", "backward_seconds"):
            value = getattr(self, duration)
            if not (math.isfinite(value) and value >= 0):
                raise OffbeatError(f"layer {self.name!r}: {duration} {value!r} is not a duration")


class PacedModel(nn.Module):
    """The layers in order; the output has one value per sample, to be reduced to a loss by the caller."""

    def __init__(self, layers: Sequence[PacedLayer], clock: DeviceClock | None = None) -> None:
        super().__init__()
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            raise OffbeatError("layers: two layers have the same name")
        # Names that leave 'layers', 'clock' and the like to the modules of the paced model.
        self._paced_clock = clock or DeviceClock()
        self._paced_layers = tuple(layers)
        self._paced_owners = tuple(_owner(self, layer) for layer in layers)

    @classmethod
    def from_graph(cls, graph: ModelGraph, forward_seconds_total: float, backward_seconds_total: float) -> "PacedModel":
        """One layer per module that owns variables, in order of first use; gradients are dense.

        Each phase's time is shared out by the measured time of the modules' operators if the graph was profiled, else
        by their FLOPs. Operators of modules without variables count for the layer before them.
        """
        return cls(layers_of(graph, forward_seconds_total, backward_seconds_total))

    def forward(self, inputs: Tensor) -> Tensor:
        self._paced_clock.synchronize()
        floating = inputs if inputs.is_floating_point() else inputs.float()
        signal = floating.flatten(1).mean(1) if floating.dim() > 1 else floating.reshape(-1)
        anchor = torch.ones((), requires_grad=True)
        for layer, owner in zip(self._paced_layers, self._paced_owners, strict=True):
            if owner is self:
                signal = _run_layer(self, self._paced_clock, layer, anchor, signal)
            else:
                # A call of the module, so that its forward hooks run.
                signal = owner(self._paced_clock, layer, anchor, signal)
        return signal


class _PacedOwner(nn.Module):
    """The module of a layer."""

    def forward(self, clock: DeviceClock, layer: PacedLayer, anchor: Tensor, signal: Tensor) -> Tensor:
        return _run_layer(self, clock, layer, anchor, signal)


def _run_layer(owner: nn.Module, clock: DeviceClock, layer: PacedLayer, anchor: Tensor, signal: Tensor) -> Tensor:
    parameters = [getattr(owner, name) for name in layer.parameter_shapes]
    return _PacedFunction.apply(clock, layer, anchor, signal, *parameters)


class _PacedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, clock: DeviceClock, layer: PacedLayer, anchor: Tensor, signal: Tensor, *parameters: Tensor
    ) -> Tensor:
        """`anchor` requires a gradient, so that layers without parameters take part in backward."""
        deadline = clock.issue(layer.forward_seconds)
        ctx.clock, ctx.layer = clock, layer
        ctx.save_for_backward(signal, *parameters)
        clock.wait(deadline)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        deadline = ctx.clock.issue(ctx.layer.backward_seconds)
        upstream = outputs[0]
        signal, *parameters = ctx.saved_tensors
        offset, decay = torch.dot(upstream, signal), DECAY * float(upstream.sum())
        needed = ctx.needs_input_grad[4:]
        gradients = [
            torch.add(offset.to(parameter.dtype), parameter.detach(), alpha=decay) if wanted else None
            for parameter, wanted in zip(parameters, needed, strict=True)
        ]
        ctx.clock.wait(deadline)
        return None, None, None, upstream, *gradients


def layers_of(graph: ModelGraph, forward_seconds_total: float, backward_seconds_total: float) -> list[PacedLayer]:
    """The layers `PacedModel.from_graph` is made of."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    dtypes: dict[str, dict[str, str]] = {}
    for variable in graph.variables:
        module, _, name = variable.name.rpartition(".")
        shapes.setdefault(module, {})[name] = variable.shape
        dtypes.setdefault(module, {})[name] = variable.dtype
    if not shapes:
        raise OffbeatError(f"graph {graph.name!r}: a model without variables cannot be paced")
    forward = _shares(graph, "forward", list(shapes))
    backward = _shares(graph, "backward", list(shapes)[::-1])
    return [
        PacedLayer(
            module,
            shapes[module],
            forward_seconds_total * forward[module],
            backward_seconds_total * backward[module],
            dtypes[module],
        )
        for module in shapes
    ]


def _shares(graph: ModelGraph, phase: Phase, modules: Sequence[str]) -> dict[str, float]:
    """The part of a phase's work that falls on each module, adding up to 1."""
    operators = graph.phase(phase)
    profiled = all(operator.seconds is not None for operator in operators)
    work = dict.fromkeys(modules, 0.0)
    current = modules[0]
    for operator in operators:
        current = _layer_of(operator, work, current)
        work[current] += (operator.seconds or 0.0) if profiled else operator.flops
    total = sum(work.values())
    return {module: amount / total if total else 1 / len(modules) for module, amount in work.items()}


def _layer_of(operator: Operator, modules: Mapping[str, float], current: str) -> str:
    if operator.module in modules:
        return operator.module
    for name in operator.variables:
        return name.rpartition(".")[0]
    return current


def _owner(root: nn.Module, layer: PacedLayer) -> nn.Module:
    """The module of a layer, made along with those on the way to it, with its parameters."""
    owner = root
    for step in layer.name.split(".") if layer.name else ():
        child = owner._modules.get(step)
        if child is None:
            child = _PacedOwner()
            owner.add_module(step, child)
        owner = child
    for name, shape in layer.parameter_shapes.items():
        dtype = getattr(torch, layer.dtypes.get(name, "float32"))
        # From -1 to 1 and over again: the same on every rank, whatever the random state, and exact in every float type.
        values = torch.arange(math.prod(shape), dtype=torch.int32).remainder_(129).sub_(64).to(dtype).div_(64)
        owner.register_parameter(name, nn.Parameter(values.reshape(shape)))
    return owner
