"""TicTac: one all-reduce per gradient, in the order in which the next forward needs them."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import unfused
from offbeat.strategy.model import Schedule, Strategy


def build(graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """TicTac (Hashemi et al., SysML 2019) as PACE §VI measures it: ordered by first use, neither fused nor partitioned.

    Use it to compare with TicTac; every tensor costs a collective, so many small ones are slow.

    Where forward is a chain its two orders (TIC and TAC) both are the order in which variables are first read.
    """
    return Strategy(variables=unfused(graph), schedule=Schedule(policy="priority"))
