"""Offbeat's own starting point → balanced messages, cut into slices, most urgent first, updates deferred."""

from itertools import groupby

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import (
    SPARSE_ALL_GATHER,
    bytes_option,
    fused,
    in_forward_order,
    trained,
)
from offbeat.strategy.model import Schedule, Strategy
from offbeat.strategy.registry import register_builder


@register_builder("overlap")
def build(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    bucket: str | float = "1MiB",
    slice_bytes: str | float = "2MiB",
    in_flight: int = 1,
) -> Strategy:
    """All-reduce that reaches into the next forward (PACE's overlap), with sizes that hold up on slow and fast links.

    Modules are fused in the order in which backward completes them until a message holds `bucket` bytes, so that small
    gradients do not cost a collective each. A module that is as large itself travels alone, cut into slices, so that an
    urgent message waits for one slice at the most. One collective is under way at a time: two would share the link, and
    each round of the urgent one's ring would queue behind the other's bytes.
    """
    dense = [variable for variable in graph.gradient_order if not variable.sparse]
    configs = fused(_messages(dense, bytes_option("bucket", bucket)))
    configs |= {variable.name: SPARSE_ALL_GATHER for variable in trained(graph) if variable.sparse}
    schedule = Schedule(
        policy="priority", slice_bytes=bytes_option("slice_bytes", slice_bytes, minimum=1024), in_flight=in_flight
    )
    return Strategy(variables=in_forward_order(graph, configs), schedule=schedule)


def _messages(variables: list[Variable], limit: int) -> list[list[Variable]]:
    messages: list[list[Variable]] = []
    filling: list[Variable] = []
    for _, members in groupby(variables, key=lambda variable: (variable.name.rpartition(".")[0], variable.dtype)):
        module = list(members)
        size = sum(variable.bytes for variable in module)
        full = sum(variable.bytes for variable in filling) >= limit
        if filling and (full or size >= limit or filling[0].dtype != module[0].dtype):
            messages.append(filling)
            filling = []
        filling = filling + module
        if size >= limit:
            messages.append(filling)
            filling = []
    return [*messages, filling] if filling else messages
