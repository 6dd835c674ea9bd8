"""AutoDist's RandomAxisPartitionAR: variables cut along a random axis, each shard all-reduced alone."""

import math
from random import Random

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import count_option, unfused
from offbeat.strategy.model import Strategy, VariableConfig


def build(graph: ModelGraph, cluster: ClusterSpec, *, seed: int = 0, max_shards: int = 16) -> Strategy:
    """One axis longer than 1 is drawn for each variable and cut into its smallest divisor's number of shards.

    Use it to widen a search: the cuts are drawn at random.

    A divisor above `max_shards` (a prime axis) gives `max_shards` nearly equal shards instead. Equal seeds give equal
    strategies.
    """
    random, bound = Random(count_option("seed", seed, minimum=0)), count_option("max_shards", max_shards)

    def partitioned(variable: Variable) -> VariableConfig:
        axes = [axis for axis, length in enumerate(variable.shape) if length > 1]
        if not axes:
            return VariableConfig()
        axis = random.choice(axes)
        length = variable.shape[axis]
        divisors = (number for number in range(2, math.isqrt(length) + 1) if length % number == 0)
        parts = min(next(divisors, length), bound)
        if parts == 1:
            return VariableConfig()
        return VariableConfig(partition=tuple(parts if each == axis else 1 for each in range(len(variable.shape))))

    return Strategy(variables=unfused(graph, partitioned))
