"""AutoDist's AllReduce builder → every few adjacent variables merged into one all-reduce."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import (
    SPARSE_ALL_GATHER,
    chunks,
    count_option,
    encoder_option,
    fused,
    in_forward_order,
    trained,
)
from offbeat.strategy.model import Encoder, Strategy
from offbeat.strategy.registry import register_builder


@register_builder("all_reduce")
def build(graph: ModelGraph, cluster: ClusterSpec, *, chunk: int = 64, encoder: str | Encoder = "none") -> Strategy:
    """AutoDist §3.2: starting from the first variable, every `chunk` adjacent ones share one collective.

    `encoder` is an encoder's name or an Encoder and applies to every dense gradient; sparse ones are gathered.
    """
    size = count_option("chunk", chunk)
    code = encoder_option(encoder)
    dense = [variable for variable in trained(graph) if not variable.sparse]
    configs = fused(chunks(dense, size), encoder=code)
    configs |= {variable.name: SPARSE_ALL_GATHER for variable in trained(graph) if variable.sparse}
    return Strategy(variables=in_forward_order(graph, configs))
