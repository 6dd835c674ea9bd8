"""TicTac → one all-reduce per gradient, the one that the next forward needs first going first."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import SPARSE_ALL_GATHER, trained
from offbeat.strategy.model import Schedule, Strategy, VariableConfig
from offbeat.strategy.registry import register_builder


@register_builder("tictac")
def build(graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """TicTac (Hashemi et al., SysML 2019) as PACE §VI measures it: ordered by first use, neither fused nor partitioned.

    Where forward is a chain its two orders (TIC and TAC) both are the order in which variables are first read.
    """
    whole = VariableConfig()
    return Strategy(
        variables={variable.name: SPARSE_ALL_GATHER if variable.sparse else whole for variable in trained(graph)},
        schedule=Schedule(policy="priority"),
    )
