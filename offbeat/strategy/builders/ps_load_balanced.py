"""AutoDist's TF-PS-LB: every variable whole on the least loaded server."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import served, server_ranks, server_speeds
from offbeat.strategy.model import Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, servers: str = "nodes") -> Strategy:
    """AutoDist §3.1 (2): track each server's bytes and place the next variable, in forward order, on the lightest.

    Use it for many variables of similar size on several nodes.

    `servers` is 'nodes' (the first rank of each node) or 'ranks' (every rank).
    """
    return Strategy(variables=served(graph, server_ranks(cluster, servers), speeds=server_speeds(cluster)))
