"""Wait-free backpropagation → one all-reduce per gradient, as soon as it is ready."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import SPARSE_ALL_GATHER, trained
from offbeat.strategy.model import Schedule, Strategy, VariableConfig
from offbeat.strategy.registry import register_builder


@register_builder("wfbp")
def build(graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """Poseidon's WFBP as PACE §VI measures it: first come first served, no fusion, `step()` waits for everything."""
    whole = VariableConfig()
    return Strategy(
        variables={variable.name: SPARSE_ALL_GATHER if variable.sparse else whole for variable in trained(graph)},
        schedule=Schedule(mode="barrier"),
    )
