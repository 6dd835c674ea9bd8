"""AutoDist's TF-PS-LB → every variable whole on the server that has the least so far."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import ServerLoads, server_ranks, trained
from offbeat.strategy.model import Strategy
from offbeat.strategy.registry import register_builder


@register_builder("ps_load_balanced")
def build(graph: ModelGraph, cluster: ClusterSpec, *, servers: str = "nodes") -> Strategy:
    """AutoDist §3.1 (2): track each server's bytes and place the next variable, in forward order, on the lightest.

    `servers` is 'nodes' (the first rank of each node) or 'ranks' (every rank).
    """
    loads = ServerLoads(server_ranks(cluster, servers))
    return Strategy(variables={variable.name: loads.place(variable) for variable in trained(graph)})
