"""FSDP2 strategies: starting points of a search under a memory limit, and their neighbours.

Recomputation and micro-batches come from the same passes as for other strategies; here are the choices of `fully_shard`
itself.
"""

from collections.abc import Iterator

from offbeat.cluster import ClusterSpec
from offbeat.search.passes import Candidate, Pass, Problem
from offbeat.strategy import FullyShard, Strategy, build_strategy
from offbeat.units import parse_bytes

SPARE = 0.1
"""Share of a device's memory that 'auto' leaves to the process, the allocator and the estimate's error."""
UNIT_SHARES = (1 / 8, 1 / 32)
"""Unit sizes tried in addition to the model's blocks, as shares of the model."""
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the units that are tried, to be kept after forward or to be recomputed."""
DEEPEST = 4
"""Units that are gathered ahead, at most."""


def limit_bytes(memory_limit: str | float | None, cluster: ClusterSpec) -> int | None:
    """Bytes per rank; 'auto' is the memory of the smallest device, less what should be left."""
    if isinstance(memory_limit, str) and memory_limit == "auto":
        return int(min(node.memory for node in cluster.nodes) * (1 - SPARE))
    return None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")


def sharded_starts(problem: Problem) -> list[Candidate]:
    """Blocks and modules of several sizes as units, freed or kept after forward, in one group of ranks or in several;
    none where `fully_shard` cannot take the model."""
    graph, cluster = problem.graph, problem.cluster
    if cluster.world_size < 2 or any(variable.sparse for variable in graph.variables):
        return []
    points: list[dict[str, object]] = [
        {"units": units, "reshard": reshard} for units in _unit_sizes(problem) for reshard in (True, False)
    ]
    points.append({"root": True})
    points += [{"replicas": groups, "reshard": reshard} for groups in _groups(cluster) for reshard in (True, False)]
    made: dict[str, Candidate] = {}
    for options in points:
        if problem.expired and made:
            break
        strategy = build_strategy("fsdp", graph, cluster, **options)
        if strategy.digest not in made:
            made[strategy.digest] = problem.evaluate(strategy, "fsdp")
    return list(made.values())


def _unit_sizes(problem: Problem) -> list[str | float]:
    return ["auto", *(problem.graph.parameter_bytes * share for share in UNIT_SHARES)]


def _groups(cluster: ClusterSpec) -> list[int]:
    """Numbers of replicas for which all parts lie on one node."""
    nodes = len(cluster.nodes)
    equal = {node.devices for node in cluster.nodes} == {cluster.nodes[0].devices}
    return [nodes] if nodes > 1 and equal and cluster.nodes[0].devices > 1 else []


def _neighbours(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """The strategy with one of its choices taken otherwise."""
    strategy, fsdp = candidate.strategy, candidate.strategy.fsdp
    if fsdp is None:
        return
    for depth in {max(0, fsdp.prefetch - 1), min(DEEPEST, fsdp.prefetch + 1)} - {fsdp.prefetch}:
        yield _with(strategy, prefetch=depth)
    count = len(fsdp.wrapped)
    for share in STEPS:
        # What forward computes last, backward needs first.
        freed = round(count * (1 - share))
        units = {path: place < freed for place, path in enumerate(fsdp.wrapped)}
        yield _with(strategy, units=units | {"": fsdp.reshard("")})
        recompute = strategy.recompute[: round(len(strategy.recompute) * share)]
        if recompute != strategy.recompute:
            yield strategy.model_copy(update={"recompute": recompute})
    yield _with(strategy, units=dict(fsdp.units) | {"": not fsdp.reshard("")})
    shards = problem.cluster.world_size // fsdp.replicas
    node = problem.cluster.nodes[0].devices
    if 1 < node < shards and shards % node == 0:
        yield _with(strategy, units=dict.fromkeys(fsdp.wrapped, node) | {"": fsdp.reshard("")})
    if "bf16" in problem.allow:
        yield _with(strategy, reduce_dtype=None if fsdp.reduce_dtype else "bfloat16")
    for groups in {1, *_groups(problem.cluster)} - {fsdp.replicas}:
        yield _with(strategy, replicas=groups)
    fewer = [parts for parts in range(1, strategy.accumulation) if strategy.accumulation % parts == 0]
    for parts in fewer:
        yield strategy.model_copy(update={"accumulation": parts})
        yield strategy.model_copy(update={"accumulation": parts, "recompute": fsdp.wrapped})
    for size in _unit_sizes(problem):
        other = build_strategy("fsdp", problem.graph, problem.cluster, units=size).fsdp
        if other is not None and other.wrapped != fsdp.wrapped:
            yield _with(strategy, units=dict(other.units) | {"": fsdp.reshard("")})


def _with(strategy: Strategy, **choices: object) -> Strategy:
    assert strategy.fsdp is not None
    described = FullyShard.model_validate(strategy.fsdp.model_dump() | choices)
    # The model itself keeps its variables where nothing is said.
    units = {path: reshard for path, reshard in described.units.items() if path or reshard is not False}
    described = described.model_copy(update={"units": units})
    return strategy.model_copy(update={"fsdp": described})


UNITS = Pass("fsdp", _neighbours, "speed", 0)
"""Improves strategies that fully shard; the registered passes arrange gradients, of which these have none."""
