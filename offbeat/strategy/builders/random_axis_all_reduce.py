"""AutoDist's RandomAxisPartitionAR → variables cut along a random axis, each shard all-reduced alone."""

from random import Random

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.builders._common import SPARSE_ALL_GATHER, count_option, smallest_divisor, trained
from offbeat.strategy.model import Strategy, VariableConfig
from offbeat.strategy.registry import register_builder


@register_builder("random_axis_all_reduce")
def build(graph: ModelGraph, cluster: ClusterSpec, *, seed: int = 0, max_shards: int = 16) -> Strategy:
    """One axis longer than 1 is drawn for each variable and cut into its smallest divisor's number of shards.

    A divisor above `max_shards` (a prime axis) gives `max_shards` nearly equal shards instead. Equal seeds give equal
    strategies.
    """
    random, bound = Random(count_option("seed", seed, minimum=0)), count_option("max_shards", max_shards)
    return Strategy(
        variables={
            variable.name: SPARSE_ALL_GATHER if variable.sparse else _partitioned(variable, random, bound)
            for variable in trained(graph)
        }
    )


def _partitioned(variable: Variable, random: Random, bound: int) -> VariableConfig:
    axes = [axis for axis, length in enumerate(variable.shape) if length > 1]
    if not axes:
        return VariableConfig()
    axis = random.choice(axes)
    parts = min(smallest_divisor(variable.shape[axis]), bound)
    if parts == 1:
        return VariableConfig()
    return VariableConfig(partition=tuple(parts if each == axis else 1 for each in range(len(variable.shape))))
