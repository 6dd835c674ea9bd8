"""A program and how its calls are split → what this rank runs: a forward and a backward graph on its parts.

Between calls each rank holds plain tensors, its parts. Where a call wants an argument in another layout the part is
exchanged for the one it needs; backward exchanges gradients the other way. Everything else is the operator itself on
parts. All of it is traced once, backward included, on fake tensors: the result is two graphs of local operators and
functional collectives, in an order that all ranks share (`cut`, `overlap`).
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from offbeat.graph.step import tracing
from offbeat.runtime.sharded.calls import finish, run_part
from offbeat.runtime.sharded.cut import Kept, Parts, cut
from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.planning import Planned, Split, is_getitem, structured, tensor_nodes
from offbeat.runtime.sharded.trace import RECOMPUTED_KEY, Program, annotation
from offbeat.sharding.layout import SUM, WHOLE, Layout
from offbeat.sharding.rules import has_rule, is_random
from offbeat.torch_private import FakeTensorMode

log = logging.getLogger("offbeat")


def trace_parts(program: Program, plan: Planned, grid: Grid, inputs: Sequence[Tensor]) -> Parts:
    """The graphs of one rank; `inputs` has its parts of `program.inputs`, of which only kind and strides are read."""
    tracer = _Tracer(program, plan, grid)
    with ExitStack() as stack:
        stack.enter_context(tracing())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(fx_traceback.preserve_node_meta())
        fakes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)
            for t in inputs
        ]
        tangents = [
            torch.empty(grid.box(val.shape, layout).sizes, dtype=val.dtype, device=grid.device)
            for val, layout in tracer.results()
        ]
        joint = make_fx(tracer.joint)(*fakes, *tangents)
    return cut(joint.graph, tracer.counts, tracer.kept, grid.explained)


class _Tracer:
    def __init__(self, program: Program, plan: Planned, grid: Grid) -> None:
        self.program, self.plan, self.grid = program, plan, grid
        self.counts: dict[str, Any] = {}
        self.kept: list[Kept] = []
        for split in plan.splits.values():
            if not has_rule(split.call) and not is_random(split.call):
                _note(split.call.name)

    def results(self) -> list[tuple[Tensor, Layout]]:
        """Each tensor that the model returns, and the layout in which it does."""
        found = [leaf.meta["val"] for leaf in self.program.results if isinstance(leaf, Node)]
        return [(val, self.plan.batch_layout(val)) for val in found]

    def joint(self, *given: Tensor) -> list[Tensor]:
        """Forward and backward: results, new values of buffers, gradients, then what `kept` is about."""
        inputs, tangents = given[: len(self.program.inputs)], given[len(self.program.inputs) :]
        values: dict[Node, Any] = dict(zip(self.program.inputs, inputs, strict=True))
        exchanged: list[Tensor] = []
        for node in self.program.nodes:
            if is_getitem(node):
                values[node] = values[node.args[0]][node.args[1]]
                continue
            region = annotation(node, RECOMPUTED_KEY)
            with (
                torch.no_grad() if self.program.without_grad(node) else nullcontext(),
                fx_traceback.annotate({RECOMPUTED_KEY: region}) if region else nullcontext(),
            ):
                values[node] = self._run(self.plan.splits[node], values, exchanged)
        leaves = [leaf for leaf in self.program.results if isinstance(leaf, Node)]
        outputs = [
            self._returned(leaf, values[leaf], need) for leaf, (_, need) in zip(leaves, self.results(), strict=True)
        ]
        updates = [self._returned(node, values[node], self.grid.whole).detach() for _, node in self.program.updates]
        trained = [position for position, tensor in enumerate(inputs) if tensor.requires_grad]
        ends = [position for position, tensor in enumerate(outputs) if tensor.requires_grad]
        gradients: Sequence[Tensor | None] = []
        if trained and ends:
            # A rank that returns its part computes a loss of its own, and what is trained is their mean, as DDP has it.
            shares = [
                prod(s for s, a in zip(self.grid.fine, need, strict=True) if a != WHOLE) for _, need in self.results()
            ]
            gradients = torch.autograd.grad(
                [outputs[end] for end in ends],
                [inputs[position] for position in trained],
                [tangents[end] / shares[end] if shares[end] > 1 else tangents[end] for end in ends],
                allow_unused=True,
            )
        reached = [position for position, found in zip(trained, gradients, strict=False) if found is not None]
        self.counts = {
            "inputs": len(inputs),
            "outputs": len(outputs),
            "updates": len(updates),
            "ends": ends,
            "trained": reached,
        }
        return [*outputs, *updates, *(found for found in gradients if found is not None), *exchanged]

    def _run(self, split: Split, values: Mapping[Node, Any], exchanged: list[Tensor]) -> Any:
        parts = []
        for position, node in enumerate(tensor_nodes(split.node)):
            have, need = self.plan.layouts[node], split.inputs[position]
            shape = split.call.inputs[position].shape
            part = self.grid.shift(values[node], shape, (have, need), (split.gradients[position], have))
            if have != need and split.keep != "both":
                back = [self.grid.move(part, shape, need, have)] if split.keep == "after" else []
                self.kept.append(Kept(split.keep, len(exchanged)))
                exchanged += [values[node], part, *back]
            parts.append(part)
        results = run_part(split, parts, self.grid)
        outputs = []
        for result, whole, have, need in zip(results, split.call.outputs, split.results, split.outputs, strict=True):
            gradient = tuple(WHOLE if axis == SUM else axis for axis in have)
            outputs.append(self.grid.shift(result, whole.shape, (have, need), (need, gradient)))
        return structured(split.node.meta["val"], finish(split, outputs))

    def _returned(self, node: Node, local: Tensor, need: Layout) -> Tensor:
        have = self.plan.layouts[node]
        return self.grid.shift(local, node.meta["val"].shape, (have, need), (need, have))


@cache
def _note(operator: str) -> None:
    log.info("operator %s has no sharding rule, so every rank computes all of it", operator)
