"""A seed → a valid strategy without lossy encoders, for the graph of a real model."""

import math
from itertools import pairwise
from random import Random

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy import Schedule, Shard, Slice, Strategy, VariableConfig


def random_strategy(seed: int, graph: ModelGraph, cluster: ClusterSpec) -> Strategy:
    """Any partitions, synchronisers, servers, stations, rings, groups and schedules; weights in one of three."""
    draw = Random(seed)
    world = cluster.world_size
    weights = tuple(draw.uniform(0.25, 4.0) for _ in range(world)) if draw.random() < 1 / 3 else ()
    if draw.random() < 0.15:
        variables, schedule = _explicit(draw, graph)
    else:
        variables = {
            variable.name: _config(draw, variable, cluster) for variable in graph.gradient_order if draw.random() < 0.9
        }
        schedule = Schedule(
            policy=draw.choice(("fifo", "priority")),
            slice_bytes=draw.choice((None, 1024, 3000)),
            in_flight=draw.randint(1, 4),
            credit_bytes=draw.choice((None, None, 1024, 8192)),
            mode=draw.choice(("auto", "auto", "deferred", "barrier")),
        )
    return Strategy(name=f"random{seed}", weights=weights, schedule=schedule, variables=variables)


def _config(draw: Random, variable: Variable, cluster: ClusterSpec) -> VariableConfig:
    partition: tuple[int, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()
    if variable.shape and draw.random() < 0.6:
        partition = tuple(draw.randint(1, min(length, 3)) for length in variable.shape)
        if draw.random() < 0.5:
            cuts = tuple(
                tuple(sorted(draw.sample(range(1, length), parts - 1)))
                for parts, length in zip(partition, variable.shape, strict=True)
            )
    count = draw.choice((1, math.prod(partition)))
    return VariableConfig(
        partition=partition, cuts=cuts, shards=tuple(_shard(draw, variable, partition, cluster) for _ in range(count))
    )


def _shard(draw: Random, variable: Variable, partition: tuple[int, ...], cluster: ClusterSpec) -> Shard:
    kinds = ["all_reduce", "parameter_server", "sharded"]
    if variable.sparse and math.prod(partition[1:]) == 1:
        kinds += ["sparse_all_gather", "sparse_parameter_server"]
    if variable.factor_rows and math.prod(partition) == 1:
        kinds.append("factor_broadcast")
    kind = draw.choice(kinds)
    ranks = range(cluster.world_size)
    served = kind in ("parameter_server", "sparse_parameter_server")
    ring = tuple(draw.sample(ranks, len(ranks))) if kind == "all_reduce" and draw.random() < 0.4 else ()
    return Shard(
        synchronizer=kind,  # type: ignore[arg-type]
        placement=(draw.choice(ranks),) if served else (),
        stations=_stations(draw, cluster) if kind == "parameter_server" else (),
        reduction_order=ring,
        group=draw.choice((None, 0, 1, 2)),
    )


def _stations(draw: Random, cluster: ClusterSpec) -> tuple[int, ...]:
    nodes = range(len(cluster.nodes))
    return tuple(draw.choice(cluster.ranks_of(node)) for node in nodes if draw.random() < 0.5)


def _explicit(draw: Random, graph: ModelGraph) -> tuple[dict[str, VariableConfig], Schedule]:
    """Every gradient all-reduced in one of three messages, which are cut and shuffled."""
    lengths: dict[int, int] = {}
    variables = {}
    for variable in graph.gradient_order:
        group = draw.randrange(3)
        lengths[group] = lengths.get(group, 0) + variable.elements
        variables[variable.name] = VariableConfig(shards=(Shard(group=group),))
    slices = []
    for group, length in lengths.items():
        inner = draw.sample(range(1, length), min(draw.randint(0, 3), length - 1))
        slices += [Slice(group=group, start=a, stop=b) for a, b in pairwise([0, *sorted(inner), length])]
    draw.shuffle(slices)
    return variables, Schedule(policy="explicit", order=tuple(slices))
