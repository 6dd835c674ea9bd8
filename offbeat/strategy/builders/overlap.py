"""Offbeat's own starting point: balanced messages, cut into slices, most urgent first, updates deferred."""

from itertools import groupby

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import Size, bytes_option, fused
from offbeat.strategy.model import Schedule, Strategy

SMALL = 0.25
"""Share of a full message below which one is not worth a collective of its own: that takes processor time on all ranks
whatever it carries, as much as about 1 MiB on two cores (gloo)."""


def build(
    graph: ModelGraph, cluster: ClusterSpec, *, bucket: Size = "1MiB", slice_bytes: Size = "2MiB", in_flight: int = 2
) -> Strategy:
    """All-reduce that overlaps the next forward (PACE's overlap), with sizes that work on slow and fast links.

    Use it first if the network takes long and gradients are not clipped by their global norm.

    Modules are fused in the order in which backward completes them until a message holds `bucket` bytes, so that small
    gradients do not cost a collective each. A module that is as large itself begins a message, unless the one before it
    is small, and is cut into slices, so that an urgent message waits for few slices at the most. Two collectives are
    under way at a time: each has moments in which it sends nothing, which the other fills.
    """
    configs = fused(graph, _messages(graph, bytes_option("bucket", bucket)))
    most = bytes_option("slice_bytes", slice_bytes, minimum=1024)
    return Strategy(variables=configs, schedule=Schedule(policy="priority", slice_bytes=most, in_flight=in_flight))


def _messages(graph: ModelGraph, limit: int) -> list[list[Variable]]:
    dense = [variable for variable in graph.gradient_order if not variable.sparse]
    messages: list[list[Variable]] = []
    filled = 0
    for _, members in groupby(dense, key=lambda variable: (variable.name.rpartition(".")[0], variable.dtype)):
        module = list(members)
        size = sum(variable.bytes for variable in module)
        full = filled >= (limit if size < limit else limit * SMALL)
        if not messages or full or messages[-1][0].dtype != module[0].dtype:
            messages.append([])
            filled = 0
        messages[-1] += module
        filled += size
    return messages
