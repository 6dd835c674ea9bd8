"""AutoDist's AllReduce builder: every few adjacent variables merged into one all-reduce."""

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.strategy.builders._common import chunks, count_option, encoder_option, fused
from offbeat.strategy.model import Encoder, Shard, Strategy


def build(graph: ModelGraph, cluster: ClusterSpec, *, chunk: int = 64, encoder: str | Encoder = "none") -> Strategy:
    """AutoDist §3.2: starting from the first variable, every `chunk` adjacent ones share one collective.

    Use it as a plain baseline on fast links, where the order of messages hardly matters.

    `encoder` is an encoder's name or an Encoder and applies to every dense gradient; sparse ones are gathered.
    """
    messages = chunks(graph, count_option("chunk", chunk))
    return Strategy(variables=fused(graph, messages, Shard(encoder=encoder_option(encoder))))
