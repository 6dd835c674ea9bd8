"""A program, how its calls are split and this rank's tensors → the model's outputs, whole on every rank.

Between calls each rank holds plain tensors, its parts. Where a call wants an argument in another layout the part is
exchanged for the one it needs; backward exchanges gradients the other way. Everything else, backward included, is the
operator itself on parts.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from offbeat.runtime.sharded.calls import finish, run_part
from offbeat.runtime.sharded.grid import Grid
from offbeat.runtime.sharded.planning import Split, is_getitem, structured, tensor_nodes
from offbeat.runtime.sharded.trace import Program
from offbeat.sharding.layout import SUM, WHOLE
from offbeat.sharding.rules import has_rule, is_random
from offbeat.torch_private import pytree, storage_of

log = logging.getLogger("offbeat")


class Executor:
    """Runs one program."""

    def __init__(
        self,
        program: Program,
        plan: tuple[dict[Node, Split], dict[Node, Any]],
        grid: Grid,
        random: AbstractContextManager[None],
    ) -> None:
        self.program, self.grid, self.random = program, grid, random
        self.splits, self.layouts = plan
        self._done_with = _last_readers(program)
        for split in self.splits.values():
            if not has_rule(split.call) and not is_random(split.call):
                _note(split.call.name)

    def run(self, state: Mapping[str, Tensor], batch: Sequence[Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The model's output, and the new values of the buffers it changes. `state` has this rank's parts."""
        values: dict[Node, Any] = {node: state[name] for node, name in self.program.state.items()}
        values |= {node: batch[position] for node, position in self.program.batch.items()} | self.program.constants
        for node in self.program.nodes:
            if is_getitem(node):
                values[node] = values[node.args[0]][node.args[1]]
            else:
                with torch.no_grad() if self.program.without_grad(node) else nullcontext():
                    values[node] = self._run(self.splits[node], values)
            for past in self._done_with.get(node, ()):
                del values[past]
        results = [self._whole(leaf, values[leaf]) if isinstance(leaf, Node) else leaf for leaf in self.program.results]
        updates = {name: self._whole(node, values[node]).detach() for name, node in self.program.updates}
        return pytree.tree_unflatten(results, self.program.structure), updates

    def _run(self, split: Split, values: Mapping[Node, Any]) -> Any:
        parts, replaced = [], {}
        for position, node in enumerate(tensor_nodes(split.node)):
            have, need = self.layouts[node], split.inputs[position]
            shape = split.call.inputs[position].shape
            part = self.grid.shift(values[node], shape, (have, need), (split.gradients[position], have))
            if split.keep == "before" and have != need:
                replaced[_identity(part)] = (values[node].detach(), shape, have, need)
            parts.append(part)
        # Autograd keeps the part that was held before an exchange, and backward exchanges it again.
        keeping_before = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: replaced.get(_identity(tensor), tensor),
            lambda kept: kept if isinstance(kept, Tensor) else self.grid.move(*kept),
        )
        with keeping_before if replaced else nullcontext(), self.random if is_random(split.call) else nullcontext():
            results = run_part(split, parts, self.grid)
        outputs = []
        for result, whole, have, need in zip(results, split.call.outputs, split.results, split.outputs, strict=True):
            gradient = tuple(WHOLE if axis == SUM else axis for axis in have)
            outputs.append(self.grid.shift(result, whole.shape, (have, need), (need, gradient)))
        return structured(split.node.meta["val"], finish(split, outputs))

    def _whole(self, node: Node, local: Tensor) -> Tensor:
        have = self.layouts[node]
        return self.grid.shift(local, node.meta["val"].shape, (have, self.grid.whole), (self.grid.whole, have))


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    # Not by its address, which all tensors of the meta device share.
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _last_readers(program: Program) -> dict[Node, list[Node]]:
    """For each call the values that no later one reads, so that forward holds no more than it needs."""
    last = {source: node for node in program.nodes for source in node.all_input_nodes}
    kept = {leaf for leaf in program.results if isinstance(leaf, Node)} | {node for _, node in program.updates}
    past: dict[Node, list[Node]] = defaultdict(list)
    for source, reader in last.items():
        if source not in kept:
            past[reader].append(source)
    return past


@cache
def _note(operator: str) -> None:
    log.info("operator %s has no sharding rule, so every rank computes all of it", operator)
