"""A graph with functional collectives → the same graph, with time between the start of each and the wait for it.

A collective starts as soon as what it sends is there and the one before it has arrived: then as much as one exchange is
fetched ahead, and no more memory is taken. It is waited for where its result is first computed with. Sums of gradients
that nothing in backward reads are waited for at its end, several of one group of ranks in one collective. The order of
collectives depends on shapes of whole tensors only, so that it is the same on all ranks.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from math import prod

from torch.fx import Graph, Node

from offbeat.graph import kinds
from offbeat.runtime.sharded.grid import MOVE_KEY
from offbeat.runtime.sharded.trace import annotation
from offbeat.sharding.layout import BUCKET_BYTES
from offbeat.torch_private import collectives

_MOVING = {"cat", "clone", "getitem", "view", "slice", "split_with_sizes", "constant_pad_nd", "new_empty"}
c10d = collectives()


def is_wait(node: Node) -> bool:
    return node.target is c10d.wait_tensor.default


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    return (
        node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional" and not is_wait(node)
    )


def _is_moving(node: Node) -> bool:
    """Whether it only copies elements or looks at them in another way."""
    return node.op == "call_function" and (kinds.base_name(node.target) in _MOVING or kinds.is_view(node.target))


def overlap(graph: Graph) -> None:
    """Waits late, sums several gradients at once, and starts early."""
    last = _only_returned(graph)
    late: set[Node] = set()
    for node in graph.nodes:
        if is_wait(node) or ((_is_moving(node) or node in last) and late.intersection(node.all_input_nodes)):
            late.add(node)
    for node in reversed(list(graph.nodes)):
        if node in late and node.users:
            min(node.users).prepend(node)
    buckets: dict[tuple[object, ...], list[list[Node]]] = defaultdict(lambda: [[]])
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if last.issuperset(node.users):
            found = buckets[(node.args[2], node.meta["val"].dtype)]
            found[-1].append(node)
            if sum(map(_whole_bytes, found[-1])) >= BUCKET_BYTES:
                found.append([])
    for bucket in chain.from_iterable(buckets.values()):
        _sum_together(graph, bucket)
    for node in list(graph.nodes):
        if is_collective(node):
            _start_early(graph, node)


def _start_early(graph: Graph, collective: Node) -> None:
    """Moves a collective, and what packs its message, up to its inputs or to the collective before it."""
    packing = [collective]
    for node in packing:
        packing += [
            source
            for source in node.all_input_nodes
            if _is_moving(source) and source not in packing and all(user in packing for user in source.users)
        ]
    packing.sort()
    previous = collective.prev
    while previous.op != "root" and not (is_collective(previous) or is_wait(previous)):
        previous = previous.prev
    sources = {source for node in packing for source in node.all_input_nodes if source not in packing}
    placeholders = graph.find_nodes(op="placeholder")
    place = max([*sources, *placeholders[-1:], *([previous] if previous.op != "root" else [])], default=None)
    if place is None or not place < packing[0]:
        return
    for node in packing:
        place.append(node)
        place = node


def _whole_bytes(node: Node) -> int:
    _, shape, *_ = annotation(node, MOVE_KEY)
    return prod(shape) * node.meta["val"].dtype.itemsize


def _sum_together(graph: Graph, bucket: Sequence[Node]) -> None:
    if len(bucket) < 2:
        return
    with graph.inserting_after(bucket[-1]):
        inputs = [node.args[0] for node in bucket]
        together = graph.call_function(c10d.all_reduce_coalesced.default, (inputs, "sum", bucket[0].args[2]))
    together.meta["val"] = [node.meta["val"] for node in bucket]
    place = together
    for index, node in enumerate(bucket):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (together, index))
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place)
        graph.erase_node(node)


def _only_returned(graph: Graph) -> set[Node]:
    """Nodes that take a received tensor to the output, and may add others to it on the way."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        light = is_wait(node) or _is_moving(node) or kinds.base_name(node.target) == "add"
        if light and node.users and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found
