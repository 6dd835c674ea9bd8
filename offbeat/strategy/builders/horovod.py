"""Horovod's default: gradients that become ready in one cycle share all-reduces of bounded size."""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import Size, bytes_option, fused
from offbeat.strategy.model import Schedule, Strategy
from offbeat.units import parse_seconds


def build(
    graph: ModelGraph, cluster: ClusterSpec, *, fusion_bytes: Size = "64MiB", cycle: str | float = "5ms"
) -> Strategy:
    """Horovod's tensor fusion (Sergeev & Del Balso, 2018): 5 ms and 64 MB are its defaults (dPRO §7.1).

    Use it to compare with Horovod at its defaults.

    A background thread wakes once per `cycle`, counted here from the start of backward, and fuses what has become
    ready since. Ready times are the measured ones, else estimated on the cluster's slowest device. Sparse gradients
    are gathered, and `step()` waits for everything.
    """
    limit = bytes_option("fusion_bytes", fusion_bytes)
    period_seconds = parse_seconds(cycle, "cycle")
    if period_seconds <= 0:
        raise StrategyError(f"cycle: {cycle!r} must be more than 0 seconds")
    ready_seconds = gradient_ready_seconds(graph, cluster)
    cycles: dict[int, list[Variable]] = {}
    for variable in graph.gradient_order:
        if not variable.sparse:
            cycles.setdefault(int(ready_seconds[variable.name] // period_seconds), []).append(variable)
    messages = (message for ready in cycles.values() for message in fuse(ready, limit))
    return Strategy(variables=fused(graph, messages), schedule=Schedule(mode="barrier"))


def gradient_ready_seconds(graph: ModelGraph, cluster: ClusterSpec) -> dict[str, float]:
    """When each gradient is complete, counted from the start of backward, on the device that takes longest."""
    backward = graph.phase("backward")
    devices = dict.fromkeys((node.peak_flops, node.memory_bandwidth) for node in cluster.nodes)
    slowest = max(([operator.estimate(*device) for operator in backward] for device in devices), key=sum)
    ends = dict(zip((operator.name for operator in backward), accumulate(slowest), strict=True))
    return {variable.name: ends.get(variable.gradient_from or "", 0.0) for variable in graph.gradient_order}


def fuse(ready: Iterable[Variable], limit: int) -> list[list[Variable]]:
    """Horovod's `Controller::FuseResponses`: fill a message in order, looking past other dtypes while they are small.

    A tensor above the limit travels alone. What was looked past is tried again for the next message.
    """
    waiting = deque(ready)
    messages: list[list[Variable]] = []
    while waiting:
        message = [waiting.popleft()]
        size, skipped_size = message[0].bytes, 0
        skipped: list[Variable] = []
        while waiting:
            if waiting[0].dtype == message[0].dtype and size + waiting[0].bytes <= limit:
                size += waiting[0].bytes
                message.append(waiting.popleft())
                continue
            skipped_size += waiting[0].bytes
            if size + skipped_size > limit:
                break
            skipped.append(waiting.popleft())
        waiting.extendleft(reversed(skipped))
        messages.append(message)
    return messages
