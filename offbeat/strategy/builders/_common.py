"""Helpers shared by several builders: options, variables and servers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, cycle, islice
from typing import cast, get_args

from pydantic import ValidationError

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy.model import Encoder, EncoderName, Shard, Synchronizer, VariableConfig
from offbeat.units import parse_bytes

Configs = dict[str, VariableConfig]
"""Configurations by variable name."""
Size = str | float
"""Bytes, or a text such as '4MiB'."""
_ALL_REDUCE = Shard()
# All-reduce systems gather a sparse gradient: every rank receives every rank's rows.
_SPARSE_ALL_GATHER = VariableConfig(shards=(Shard(synchronizer="sparse_all_gather"),))


def trained(graph: ModelGraph) -> tuple[Variable, ...]:
    """The variables that get a gradient, in forward order."""
    return tuple(variable for variable in graph.variables if variable.gradient_from is not None)


def fused(graph: ModelGraph, messages: Iterable[Sequence[Variable]], shard: Shard = _ALL_REDUCE) -> Configs:
    """Whole dense variables configured like `shard`, one group per message; sparse ones gathered. In forward order."""
    configs = {variable.name: _SPARSE_ALL_GATHER for variable in trained(graph) if variable.sparse}
    for group, members in enumerate(messages):
        config = VariableConfig(shards=(shard.model_copy(update={"group": group}),))
        configs |= {variable.name: config for variable in members}
    return {variable.name: configs[variable.name] for variable in graph.variables if variable.name in configs}


def unfused(graph: ModelGraph, configure: Callable[[Variable], VariableConfig] = lambda _: VariableConfig()) -> Configs:
    """Dense variables as `configure` says, by default whole and all-reduced alone; sparse ones are gathered."""
    return {each.name: _SPARSE_ALL_GATHER if each.sparse else configure(each) for each in trained(graph)}


def chunks(graph: ModelGraph, chunk: int) -> list[list[Variable]]:
    """Every `chunk` adjacent dense variables in one message; a chunk of several dtypes makes one message for each."""
    dense = [variable for variable in trained(graph) if not variable.sparse]
    messages: dict[tuple[int, str], list[Variable]] = {}
    for position, variable in enumerate(dense):
        messages.setdefault((position // chunk, variable.dtype), []).append(variable)
    return list(messages.values())


def size_buckets(graph: ModelGraph, *limits: int) -> list[list[Variable]]:
    """torch's `_compute_bucket_assignment_by_size`: a bucket of dense gradients closes once it has reached its limit.

    Each dtype fills its own bucket; its n-th bucket has the n-th limit in bytes, later ones have the last limit.
    """
    closed: list[list[Variable]] = []
    filling: dict[str, list[Variable]] = {}
    filled_bytes: Counter[str] = Counter()
    closed_count: Counter[str] = Counter()
    for variable in graph.gradient_order:
        if variable.sparse:
            continue
        dtype = variable.dtype
        filling.setdefault(dtype, []).append(variable)
        filled_bytes[dtype] += variable.bytes
        if filled_bytes[dtype] >= limits[min(closed_count[dtype], len(limits) - 1)]:
            closed.append(filling.pop(dtype))
            closed_count[dtype] += 1
            filled_bytes[dtype] = 0
    return closed + list(filling.values())


def rows(variable: Variable) -> int:
    """Length of axis 0; 1 for a scalar and for an empty tensor, which cannot be cut."""
    return variable.shape[0] if variable.elements and variable.shape else 1


def row_partition(variable: Variable, parts: int) -> tuple[int, ...]:
    """Partition vector that cuts axis 0 only; () where there is nothing to cut."""
    return (parts, *(1 for _ in variable.shape[1:])) if parts > 1 else ()


def even_lengths(length: int, parts: int) -> list[int]:
    """Lengths of the shards of an axis that is cut as evenly as whole elements allow."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def parts_within(variable: Variable, limit_bytes: int) -> int:
    """The fewest row shards of which none exceeds the limit; a row that does stays whole."""
    rows_per_shard = max(1, limit_bytes * rows(variable) // max(1, variable.bytes))
    return math.ceil(rows(variable) / rows_per_shard)


def server_ranks(cluster: ClusterSpec, servers: str) -> tuple[int, ...]:
    """The cluster's servers where it has any; else of 'nodes' the first rank of each, of 'ranks' every rank."""
    if cluster.servers and servers in ("nodes", "ranks"):
        return cluster.servers
    if servers == "nodes":
        return tuple(cluster.ranks_of(node)[0] for node in range(len(cluster.nodes)))
    if servers == "ranks":
        return tuple(range(cluster.world_size))
    raise StrategyError(f"servers: {servers!r} is neither 'nodes' nor 'ranks'")


def server_speeds(cluster: ClusterSpec) -> Mapping[int, float] | None:
    """The bandwidth of each server that holds no replica; None where there are none, and servers share their links.

    Servers of one node share its interface.
    """
    if not cluster.servers:
        return None
    nodes = {rank: cluster.device_of(rank) for rank in cluster.servers}
    return {rank: node.bandwidth / node.devices for rank, node in nodes.items()}


class ServerLoads:
    """Bytes placed on each server so far; the next shard goes to the server with the least bytes for its speed.

    Speeds are relative: without them every server counts alike, which is AutoDist's load balancing (§3.1, TF-PS-LB).
    """

    def __init__(self, servers: Sequence[int], speeds: Mapping[int, float] | None = None) -> None:
        self.speeds = speeds or dict.fromkeys(servers, 1.0)
        self.bytes = dict.fromkeys(servers, 0)

    def least(self, count: int) -> list[int]:
        """The `count` least loaded servers, lightest first; with fewer servers than that, in turns."""
        order = sorted(self.bytes, key=lambda rank: self.bytes[rank] / self.speeds[rank])
        return list(islice(cycle(order), count))

    def by_speed(self, sizes: Sequence[int]) -> list[int]:
        """The server of each of these shards, one after another where it would be complete first."""
        held, owners = dict(self.bytes), []
        for size in sizes:
            owners.append(min(held, key=lambda rank: (held[rank] + size) / self.speeds[rank]))
            held[owners[-1]] += size
        return owners

    def place(self, variable: Variable, parts: int) -> VariableConfig:
        """The variable in `parts` row shards of even size, each on one of the least loaded servers."""
        lengths = even_lengths(rows(variable), parts)
        if len(set(self.speeds.values())) == 1:
            return self.place_lengths(variable, lengths, self.least(parts))
        row_bytes = variable.bytes // max(1, rows(variable))
        return self.place_lengths(variable, lengths, self.by_speed([length * row_bytes for length in lengths]))

    def place_lengths(self, variable: Variable, lengths: Sequence[int], owners: Sequence[int]) -> VariableConfig:
        """The variable in row shards of these lengths, each on its owner."""
        row_bytes = variable.bytes // max(1, rows(variable))
        for owner, length in zip(owners, lengths, strict=True):
            self.bytes[owner] += length * row_bytes
        partition = row_partition(variable, len(lengths))
        even = list(lengths) == even_lengths(sum(lengths), len(lengths))
        kind: Synchronizer = "sparse_parameter_server" if variable.sparse else "parameter_server"
        return VariableConfig(
            partition=partition,
            cuts=() if even else (tuple(accumulate(lengths[:-1])), *(() for _ in partition[1:])),
            shards=tuple(Shard(synchronizer=kind, placement=(owner,)) for owner in owners),
        )


def served(
    graph: ModelGraph,
    ranks: Sequence[int],
    parts: Callable[[Variable], int] = lambda _: 1,
    speeds: Mapping[int, float] | None = None,
) -> Configs:
    """Every variable in `parts(variable)` row shards on the least loaded of the servers."""
    loads = ServerLoads(ranks, speeds)
    return {variable.name: loads.place(variable, parts(variable)) for variable in trained(graph)}


def shards_for(variable: Variable, threshold: int, most: int) -> int:
    """The row shards of a variable: `most` above the threshold in bytes, or as many as it has rows; 1 below it."""
    return min(most, rows(variable)) if variable.bytes > threshold else 1


def count_option(name: str, value: object, minimum: int = 1) -> int:
    """A whole number of at least `minimum`, or one sentence that names the option."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise StrategyError(f"{name}: {value!r} is not a whole number of at least {minimum}")
    return value


def bytes_option(name: str, value: Size, minimum: int = 1) -> int:
    """A size of at least `minimum` bytes, or one sentence that names the option."""
    size = parse_bytes(value, name)
    if size < minimum:
        raise StrategyError(f"{name}: {value!r} is less than {minimum} bytes")
    return size


def encoder_option(value: object) -> Encoder:
    """An Encoder, or the name of one that needs no further options."""
    if isinstance(value, Encoder):
        return value
    if value not in get_args(EncoderName):
        raise StrategyError(f"encoder: {value!r} is neither an Encoder nor one of {', '.join(get_args(EncoderName))}")
    try:
        return Encoder(name=cast(EncoderName, value))
    except ValidationError as error:
        raise StrategyError(f"encoder: {files.first_problem(error)}; pass an Encoder instead of its name") from None
