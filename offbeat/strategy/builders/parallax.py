"""Parallax: all-reduce for dense gradients, partitioned servers for sparse ones."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import (
    ServerLoads,
    chunks,
    count_option,
    fused,
    rows,
    server_ranks,
    server_speeds,
    trained,
)
from offbeat.strategy.model import Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, chunk: int = 64, servers: str = "nodes") -> Strategy:
    """Parallax (Kim et al., EuroSys 2019), as AutoDist §3.2 describes it: the gradient's kind decides.

    Use it for models with large embeddings whose gradients are sparse.

    Dense gradients are all-reduced, every `chunk` adjacent ones together; a sparse variable is spread by rows over
    all servers ('nodes' or 'ranks'), so that each server receives only the rows it owns.
    """
    dense = fused(graph, chunks(graph, count_option("chunk", chunk)))
    ranks = server_ranks(cluster, servers)
    loads = ServerLoads(ranks, server_speeds(cluster))
    sparse = (variable for variable in trained(graph) if variable.sparse)
    return Strategy(variables=dense | {each.name: loads.place(each, min(len(ranks), rows(each))) for each in sparse})
