"""Poseidon: sufficient factors for dense layers where they are smaller, balanced servers for the rest."""

from math import prod

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import (
    ServerLoads,
    Size,
    bytes_option,
    server_ranks,
    server_speeds,
    shards_for,
    trained,
)
from offbeat.strategy.model import Shard, Strategy, VariableConfig


def build(graph: ModelGraph, cluster: ClusterSpec, *, threshold: Size = "2MiB", servers: str = "nodes") -> Strategy:
    """Poseidon (Zhang et al., ATC 2017): its HybComm rule chooses for each variable, first come first served (WFBP).

    Use it for large fully connected layers and small batches, as in VGG.

    An M×N weight whose gradient is a product of K rows is broadcast as its two factors where `factors_win`; any other
    variable goes to the servers ('nodes' or 'ranks'), above `threshold` (Poseidon's key-value pairs have 2 MB) in one
    shard per server.
    """
    limit = bytes_option("threshold", threshold, minimum=0)
    ranks = server_ranks(cluster, servers)
    loads = ServerLoads(ranks, server_speeds(cluster))
    broadcast = VariableConfig(shards=(Shard(synchronizer="factor_broadcast"),))
    return Strategy(
        variables={
            variable.name: broadcast
            if factors_win(variable, len(cluster.workers))
            else loads.place(variable, shards_for(variable, limit, len(ranks)))
            for variable in trained(graph)
        }
    )


def factors_win(variable: Variable, workers: int) -> bool:
    """Poseidon's Algorithm 1, in elements that each worker sends.

    Its test 2K(P₁−1)(M+N) ≤ 2MN(P₁+P₂−2)/P₂ counts sending and receiving; halved, and with as many servers as workers,
    it reads K(P−1)(M+N) < 2MN(P−1)/P, whose right side is also what a ring all-reduce sends.
    """
    if variable.sparse or not variable.factor_rows or len(variable.shape) < 2:
        return False
    height, width = variable.shape[0], prod(variable.shape[1:])
    factors = variable.factor_rows * (workers - 1) * (height + width)
    return factors * workers < 2 * height * width * (workers - 1)
