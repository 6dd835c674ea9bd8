"""Measure what libraries allocate beside the results of a model's operators, on the GPU where the model lies.

cuDNN takes a workspace from torch's allocator for as long as a convolution runs. How large that is depends on the
algorithm that it chooses for the shapes, the element type and the device: up to gigabytes, of which a graph knows
nothing. So a training step is run once, and the peak of each operator compared with what is allocated when it has
ended. The operator of the graph is the one with the same target, results and work. cuBLAS keeps its workspaces, one
for each thread that launches.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offbeat.graph import kinds
from offbeat.graph.model import ModelGraph, Workspaces
from offbeat.graph.step import make_step, tensor_spec
from offbeat.profile.blocks import untouched
from offbeat.torch_private import TorchDispatchMode, clear_library_workspaces

MATRIX = 64
"""Rows and columns of the matrices for which cuBLAS allocates its workspaces."""
Call = tuple[Any, ...]
"""What tells an operator from others: its target, the shapes of its results, its FLOPs and bytes."""


def with_workspaces(
    graph: ModelGraph, model: nn.Module, example_inputs: Any, loss_fn: Callable[..., Any] | None = None
) -> ModelGraph:
    """The graph with the workspaces of its step; called under autocast, those of a step under autocast.

    The model stays as it is. On processors libraries allocate nothing through torch: the graph is returned as given.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return graph
    step = make_step(model, example_inputs, loss_fn)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    watch = WorkspaceWatch(Allocator(device))
    with untouched(model), torch.autograd.set_multithreading_enabled(False), watch:
        torch.autograd.grad(step.loss(step.input_tensors()), parameters, allow_unused=True)
    torch.clear_autocast_cache()
    return replace(graph, workspaces=Workspaces(_kept(device), watch.of(graph)))


class Allocator:
    """Torch's allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Counts the peak from here."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def passed(self) -> int:
        """Bytes at the peak that are free again."""
        known = torch.cuda.memory_stats(self.device)
        return known["allocated_bytes.all.peak"] - known["allocated_bytes.all.current"]


class WorkspaceWatch(TorchDispatchMode):
    """Looks at the allocator around each operator."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.found: dict[Call, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.allocator.begin()
        out = func(*args, **kwargs)
        passed = self.allocator.passed()
        if passed > 0:
            results = tuple(tensor_spec(tensor) for tensor in kinds.tensors_in(out))
            work = kinds.flops_of(func, args, kwargs, out), *kinds.bytes_of(func, args, kwargs, out)
            call = (str(func), results, *work)
            self.found[call] = max(passed, self.found.get(call, 0))
        return out

    def of(self, graph: ModelGraph) -> dict[str, int]:
        """The bytes of those operators of a graph that were seen to allocate some."""
        calls = {op.name: (op.target, op.outputs, op.flops, op.bytes_read, op.bytes_written) for op in graph.operators}
        return {name: self.found[call] for name, call in calls.items() if call in self.found}


def _kept(device: torch.device) -> int:
    """Bytes that the threads of forward and backward keep once they have multiplied matrices."""
    clear_library_workspaces()
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(MATRIX, MATRIX, device=device, dtype=dtype, requires_grad=True)
        bias = torch.ones(MATRIX, device=device, dtype=dtype, requires_grad=True)
        torch.autograd.grad((nn.functional.linear(ones, ones, bias) @ ones).sum(), (ones, bias))
    del ones, bias
    return torch.cuda.memory_allocated(device) - before
