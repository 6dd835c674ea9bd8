"""A joint graph of one rank → its forward and its backward graph, with what forward keeps for backward.

Forward is what the results need; backward is what depends on gradients, and reads some of forward's values, which are
kept. TensorOpt's tensor reuse (§4.2) chooses among the two copies of an exchanged tensor: `before` keeps the old one,
from which backward exchanges again; `after` the new one, from which backward gets the old one back; `both` whatever
backward reads. What the model computes inside `torch.utils.checkpoint` is not kept but computed again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from offbeat.graph import kinds
from offbeat.runtime.sharded.overlap import overlap
from offbeat.runtime.sharded.trace import RECOMPUTED_KEY, annotation
from offbeat.torch_private import boxed_code

_SAME = {"detach", "alias", "lift_fresh"}


@dataclass(frozen=True)
class Kept:
    """A choice for one exchanged tensor; the joint graph's extra outputs from `place` on are the old copy, the new one
    and, for `after`, the old one made of the new one."""

    keep: Literal["before", "after"]
    place: int


@dataclass(frozen=True)
class Parts:
    """What one rank runs in a step."""

    forward: GraphModule
    """The inputs → results, new values of buffers, and what is kept."""
    backward: GraphModule | None
    """A list of the results' gradients and what is kept, which it empties → the inputs' gradients."""
    outputs: int
    updates: int
    ends: tuple[int, ...]
    """Results that have gradients."""
    trained: tuple[int, ...]
    """Inputs that get one."""
    explained: Callable[[str], AbstractContextManager[None]]
    """Names the ranks that a pass has waited for in vain."""

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Results and new values of buffers, with autograd's graph where gradients are recorded."""
        found = self.run_forward(inputs) if self.backward is None else _Step.apply(self, *inputs)
        return list(found[: self.outputs]), list(found[self.outputs : self.outputs + self.updates])

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with self.explained("the other parts of forward"):
            return self.forward(*inputs)

    def run_backward(self, given: list[Tensor]) -> Sequence[Tensor]:
        assert self.backward is not None
        with self.explained("the other parts of backward"):
            return self.backward(given)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = parts.run_forward(inputs)
        returned = found[: parts.outputs + parts.updates]
        ctx.parts, ctx.inputs = parts, len(inputs)
        ctx.save_for_backward(*found[len(returned) :])
        ctx.mark_non_differentiable(*(t for place, t in enumerate(returned) if place not in parts.ends))
        return tuple(returned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.parts
        given = [gradients[place].contiguous() for place in parts.ends] + list(ctx.saved_tensors)
        # So that backward frees what it has read, unless the user keeps the graph.
        ctx.maybe_clear_saved_tensors()
        found = dict(zip(parts.trained, parts.run_backward(given), strict=True))
        return None, *(found.get(place) for place in range(ctx.inputs))


def cut(
    joint: Graph,
    counts: Mapping[str, Any],
    kept: Iterable[Kept],
    explained: Callable[[str], AbstractContextManager[None]],
) -> Parts:
    """Cuts the joint graph, whose outputs `counts` numbers, and puts its collectives where they overlap with work."""
    _drop_copies(joint)
    placeholders = joint.find_nodes(op="placeholder")
    inputs, tangents = placeholders[: counts["inputs"]], placeholders[counts["inputs"] :]
    given = set(inputs)
    ends = [tangents[place] for place in counts["ends"]]
    found: list[Node] = list(joint.output_node().args[0])
    returned, found = found[: counts["outputs"] + counts["updates"]], found[counts["outputs"] + counts["updates"] :]
    gradients, exchanged = found[: len(counts["trained"])], found[len(counts["trained"]) :]
    forward = _needed(joint, returned)
    again = _recomputed(forward)
    instead: dict[Node, Node] = {}
    for choice in kept:
        old, new = exchanged[choice.place], exchanged[choice.place + 1]
        if choice.keep == "before":
            again |= _between(old, new)
        elif old.op != "placeholder":
            # A parameter or a batch is there anyway.
            instead.setdefault(old, exchanged[choice.place + 2])
    backward = _Backward(ends, forward, again, instead)
    for node in joint.nodes:
        if node in backward.depending:
            backward.fetch(node)
    backward.graph.output([backward.fetch(gradient) for gradient in gradients])
    first = Graph()
    made: dict[Node, Node] = {}
    for node in joint.nodes:
        if node in forward or node in given:
            made[node] = first.node_copy(node, made.__getitem__)
    first.output([made[node] for node in (*returned, *backward.saved)])
    for graph in (first, backward.graph):
        overlap(graph)
    backward.graph.set_codegen(boxed_code())
    return Parts(
        GraphModule(nn.Module(), first),
        GraphModule(nn.Module(), backward.graph) if gradients else None,
        counts["outputs"],
        counts["updates"],
        tuple(counts["ends"]),
        tuple(counts["trained"]),
        explained,
    )


class _Backward:
    """The backward graph in the making."""

    def __init__(
        self, ends: Sequence[Node], forward: set[Node], again: set[Node], instead: Mapping[Node, Node]
    ) -> None:
        self.graph = Graph()
        self.forward, self.again, self.instead = forward, again, instead
        self.saved: list[Node] = []
        """Values of forward that are kept."""
        self.depending = set(ends)
        """What depends on gradients."""
        left = list(ends)
        while left:
            users = [user for user in left.pop().users if user.op != "output" and user not in self.depending]
            self.depending.update(users)
            left += users
        self._made = {end: self.graph.node_copy(end) for end in ends}

    def fetch(self, node: Node) -> Node:
        """The node's copy, made where it is first asked for."""
        if node not in self._made:
            if node in self.instead:
                self._made[node] = self.fetch(self.instead[node])
            elif node.op == "placeholder" or (node in self.forward and node not in self.again):
                self.saved.append(node)
                with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
                    self._made[node] = self.graph.placeholder(node.name)
                self._made[node].meta = dict(node.meta)
            else:
                for source in node.all_input_nodes:
                    self.fetch(source)
                self._made[node] = self.graph.node_copy(node, self._made.__getitem__)
        return self._made[node]


def _drop_copies(graph: Graph) -> None:
    """Removes what only makes another Python object of a tensor."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            name, source = kinds.base_name(node.target), node.args[0] if node.args else None
            same = name == "view" and isinstance(source, Node) and _kind(source) == _kind(node)
            if same or name in _SAME:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _kind(node: Node) -> tuple[Any, ...]:
    return node.meta["val"].shape, node.meta["val"].dtype


def _needed(graph: Graph, results: Iterable[Node]) -> set[Node]:
    """What results are computed from, and all results of those calls; not the inputs."""
    found = {node for node in results if node.op != "placeholder"}
    for node in reversed(graph.nodes):
        if node in found:
            found.update(source for source in node.all_input_nodes if source.op != "placeholder")
    items = {node for node in graph.nodes if node.op == "call_function" and kinds.base_name(node.target) == "getitem"}
    return found | {node for node in items if node.args[0] in found}


def _recomputed(forward: set[Node]) -> set[Node]:
    """What is made and read inside one checkpoint, without random draws, which would come out differently."""
    found = set()
    for node in forward:
        region = annotation(node, RECOMPUTED_KEY)
        inside = region and all(annotation(user, RECOMPUTED_KEY) == region for user in node.users if user in forward)
        if inside and not any(map(_draws, (node, *node.all_input_nodes))):
            found.add(node)
    return found


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _between(old: Node, new: Node) -> set[Node]:
    """The nodes that make the new copy of the old one."""
    found: set[Node] = set()
    left = [new]
    while left:
        node = left.pop()
        if node is not old and node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found
