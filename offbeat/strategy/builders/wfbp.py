"""Wait-free backpropagation: one all-reduce per gradient, as soon as it is ready."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import unfused
from offbeat.strategy.model import Schedule, Strategy


def build(graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """Poseidon's WFBP as PACE §VI measures it: first come first served, no fusion, `step()` waits for everything.

    Use it to compare with first come, first served; every tensor costs a collective.
    """
    return Strategy(variables=unfused(graph), schedule=Schedule(mode="barrier"))
