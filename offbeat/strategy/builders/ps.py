"""A plain parameter server: every variable whole on one rank."""

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import count_option, served
from offbeat.strategy.model import Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, server: int | None = None) -> Strategy:
    """The (Reduce, Broadcast) synchroniser of AutoDist §2.2 with one destination, rank `server`: by default
    the first of the cluster's servers, or rank 0.

    Use it for small models only: all traffic meets at one rank.
    """
    if server is None:
        server = (cluster.servers or (0,))[0]
    if count_option("server", server, minimum=0) >= cluster.world_size:
        raise StrategyError(f"server: rank {server} is outside the cluster of {cluster.world_size} ranks")
    return Strategy(variables=served(graph, (server,)))
