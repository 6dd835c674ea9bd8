"""ModelGraph + ClusterSpec + seed → random strategies from the region where good ones lie (AutoDist §2.4, AutoSync §6).

The space is the whole of a synchronous and lossless Strategy: what would change the training (lossy encoders,
staleness) is left out, as in the paper. A strategy is drawn in two stages. First a `Draft`: for each variable its
synchroniser and its partition, and for the step its schedule and the number of merge groups. Size thresholds say which
variables are never and which are always partitioned. Then two constraints complete it, both on shards:

    load balance (supplement, Algorithm 1)      server shards → owners         `balance_loads`
    adjacent merge (supplement, Algorithm 2)    collective shards → groups     `merge_adjacent`

Algorithm 1's logits are bytes, whose softmax is an argmax for any real model. Here they are divided by the mean shard's
bytes, so that the draw stays random among servers whose loads differ by less than a shard.
`neighbours.py` draws from the neighbourhood of a known strategy: it takes the Draft back out and changes one part.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.random import Generator

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, Variable
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig, check_fits
from offbeat.strategy.model import SERVERS, Synchronizer

Servers = Literal["nodes", "ranks"]
COLLECTIVES = ("all_reduce", "sharded")
"""Synchronisers whose shards may be merged into groups."""
_Sized = tuple[Variable, int, int]
"""A variable, the number of one of its shards, and that shard's bytes."""


@dataclass(frozen=True)
class Space:
    """What may be drawn, and how often."""

    small_bytes: int = 64 * 2**10
    """Variables below this are never partitioned."""
    large_bytes: int = 8 * 2**20
    """Variables above this always are."""
    partition_share: float = 0.3
    """Share of the variables between the two that are."""
    max_shards: int = 8
    """Of one variable."""
    slice_bytes: tuple[int | None, ...] = (None, 2**18, 2**19, 2**20, 2**21, 2**22, 2**23)
    in_flight: tuple[int, ...] = (1, 2, 3, 4)
    collectives_only_share: float = 0.4
    """Share of the strategies that use no server for dense gradients; as many again use little else."""
    deferred_share: float = 0.8
    """Share of the strategies whose updates reach into the next forward."""
    sharded_share: float = 0.0
    """Share of the strategies in which collectives are reduce-scatter and all-gather; gloo's cost twice the bytes."""

    def __post_init__(self) -> None:
        if not 0 <= self.small_bytes <= self.large_bytes:
            raise OffbeatError(f"space: small_bytes {self.small_bytes} is above large_bytes {self.large_bytes}")
        if self.max_shards < 1:
            raise OffbeatError(f"space: max_shards {self.max_shards} is not at least 1")
        for name in ("partition_share", "collectives_only_share", "deferred_share", "sharded_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise OffbeatError(f"space: {name} {value} is not a share from 0 to 1")


@dataclass(frozen=True)
class Choice:
    """One variable of a draft."""

    synchronizer: Synchronizer
    partition: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A strategy whose server shards have no owner and whose collective shards have no group yet."""

    choices: dict[str, Choice]
    groups: int
    """Merge groups of the collectives; 0 leaves every shard alone."""
    schedule: Schedule = field(default_factory=Schedule)
    servers: Servers = "nodes"
    stations: bool = False
    """Nodes with several replicas reduce among themselves first."""
    kept_groups: dict[str, tuple[int | None, ...]] | None = None
    """Groups of the shards of variables that come from a known strategy. With them Algorithm 2 is left out, and
    collective shards that are not among them stay alone."""
    kept_owners: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Owners of such shards; Algorithm 1 places the others."""


class Sampler:
    """Draws strategies; the same seed gives the same ones in the same order."""

    def __init__(self, graph: ModelGraph, cluster: ClusterSpec, seed: int = 0, space: Space | None = None) -> None:
        self.graph, self.cluster, self.space = graph, cluster, space or Space()
        self.random = np.random.default_rng(seed)
        self.variables = graph.gradient_order
        if not self.variables:
            raise OffbeatError(f"graph {graph.name!r}: no variable gets a gradient, so there is nothing to synchronise")

    def sample(self, count: int) -> list[Strategy]:
        """So many different strategies, or fewer where the space holds no more."""
        return self.distinct(count, lambda: self.complete(self.draft()))

    def draft(self) -> Draft:
        """Everything but owners and groups, at random."""
        space, random = self.space, self.random
        kind = random.random()
        served_share = 0.0 if kind < space.collectives_only_share else random.random()
        if served_share and kind > 1 - space.collectives_only_share / 2:
            served_share = 1.0
        collective: Synchronizer = "sharded" if random.random() < space.sharded_share else "all_reduce"
        choices = {}
        for variable in self.variables:
            served = random.random() < (0.5 if variable.sparse else served_share)
            synchronizer = synchronizer_of(variable, served, collective)
            choices[variable.name] = Choice(synchronizer, self.partition(variable, synchronizer))
        return Draft(choices, self._group_count(), self.schedule(), self.servers(), bool(random.random() < 0.5))

    def complete(self, draft: Draft) -> Strategy:
        """The draft with an owner for each server shard and a group for each collective one."""
        shards = [
            (variable, index, size)
            for variable in self.variables
            for index, size in enumerate(_shard_bytes(variable, draft.choices[variable.name].partition))
        ]
        owner_of, group_of = self._owners(draft, shards), _groups(draft, shards)
        stations = self._stations() if draft.stations else ()
        configs = {}
        for name, choice in draft.choices.items():
            count = math.prod(choice.partition)
            made = [
                _shard(choice.synchronizer, owner_of.get((name, i)), group_of.get((name, i)), stations)
                for i in range(count)
            ]
            alike = len(set(made)) == 1
            configs[name] = VariableConfig(partition=choice.partition, shards=tuple(made[:1] if alike else made))
        ordered = {
            variable.name: configs[variable.name] for variable in self.graph.variables if variable.name in configs
        }
        strategy = Strategy(
            name="auto",
            model=self.graph.name,
            graph=self.graph.signature,
            cluster=self.cluster.digest,
            schedule=draft.schedule,
            variables=ordered,
        )
        check_fits(strategy, self.graph, self.cluster)
        return strategy

    def _owners(self, draft: Draft, shards: Sequence[_Sized]) -> dict[tuple[str, int], int]:
        """Algorithm 1 for the server shards that have no owner yet."""
        kept = {(name, i): owner for name, owners in draft.kept_owners.items() for i, owner in enumerate(owners)}
        served = [entry for entry in shards if draft.choices[entry[0].name].synchronizer in SERVERS]
        free = [(variable.name, index, size) for variable, index, size in served if (variable.name, index) not in kept]
        ranks = self.server_ranks(draft.servers)
        loads = [0.0] * len(ranks)
        for variable, index, size in served:
            if kept.get((variable.name, index)) in ranks:
                loads[ranks.index(kept[variable.name, index])] += size
        owners = balance_loads([size for _, _, size in free], self._bandwidths(ranks), self.random, loads)
        return kept | {(name, i): ranks[owner] for (name, i, _), owner in zip(free, owners, strict=True)}

    def partition(self, variable: Variable, synchronizer: Synchronizer) -> tuple[int, ...]:
        space, random = self.space, self.random
        chance = random.random()
        if variable.bytes < space.small_bytes or not variable.shape:
            return ()
        if variable.bytes <= space.large_bytes and chance >= space.partition_share:
            return ()
        axes = [axis for axis, length in enumerate(variable.shape) if length > 1]
        if synchronizer in ("sparse_all_gather", "sparse_parameter_server"):
            axes = [axis for axis in axes if axis == 0]
        if not axes:
            return ()
        # Rows lie together in memory, so axis 0 is what every system cuts; others are worth a try now and then.
        axis = axes[0] if random.random() < 0.8 else int(random.choice(axes))
        most = min(space.max_shards, variable.shape[axis])
        parts = int(random.integers(2, most + 1)) if most >= 2 else 1
        return tuple(parts if position == axis else 1 for position in range(len(variable.shape))) if parts > 1 else ()

    def schedule(self) -> Schedule:
        space, random = self.space, self.random
        return Schedule(
            policy="priority" if random.random() < 0.6 else "fifo",
            slice_bytes=space.slice_bytes[int(random.integers(len(space.slice_bytes)))],
            in_flight=space.in_flight[int(random.integers(len(space.in_flight)))],
            mode="auto" if random.random() < space.deferred_share else "barrier",
        )

    def _group_count(self) -> int:
        """Log-uniform from 1 to one for each variable."""
        return round(math.exp(self.random.uniform(0.0, math.log(len(self.variables)))))

    def servers(self) -> Servers:
        return "nodes" if self.random.random() < 0.5 else "ranks"

    def server_ranks(self, servers: Servers) -> tuple[int, ...]:
        if servers == "ranks":
            return tuple(range(self.cluster.world_size))
        return tuple(self.cluster.ranks_of(node)[0] for node in range(len(self.cluster.nodes)))

    def _bandwidths(self, ranks: Sequence[int]) -> list[float]:
        """Bytes per second of each server; those of one node share its interface."""
        sharing = Counter(self.cluster.node_of(rank) for rank in ranks)
        nodes = [self.cluster.node_of(rank) for rank in ranks]
        return [self.cluster.node_bandwidth(node) / sharing[node] for node in nodes]

    def _stations(self) -> tuple[int, ...]:
        ranks = [self.cluster.ranks_of(node) for node in range(len(self.cluster.nodes))]
        return tuple(members[0] for members in ranks if len(members) > 1)

    def distinct(self, count: int, draw: Callable[[], Strategy], seen: set[str] | None = None) -> list[Strategy]:
        known = set() if seen is None else set(seen)
        found: list[Strategy] = []
        for _ in range(4 * count + 16):
            if len(found) >= count:
                break
            strategy = draw()
            if strategy.digest not in known:
                known.add(strategy.digest)
                found.append(strategy)
        return found


def balance_loads(
    sizes: Sequence[int], bandwidths: Sequence[float], random: Generator, loads_before: Sequence[float] = ()
) -> list[int]:
    """The supplement's Algorithm 1: a server for each shard, drawn so that loads follow bandwidths."""
    speeds = np.asarray(bandwidths, dtype=np.float64)
    shares = speeds / speeds.sum()
    loads = np.array(loads_before or [0.0] * len(shares))
    unit = max(1.0, float(np.mean(sizes))) if len(sizes) else 1.0
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        logits = (loads.sum() * shares - loads) / unit
        weights = np.exp(logits - logits.max())
        owner = int(random.choice(len(shares), p=weights / weights.sum()))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def merge_adjacent(sizes: Sequence[int], groups: int) -> list[int | None]:
    """The supplement's Algorithm 2: adjacent shards, from the input to the loss, in groups of similar bytes."""
    if groups < 1:
        return [None] * len(sizes)
    limit = sum(sizes) / groups
    assigned: list[int | None] = []
    group, load = 0, 0
    for size in sizes:
        # The last group takes what is left, also where rounding would open one more.
        if load >= limit and group < groups - 1 and assigned:
            group, load = group + 1, 0
        assigned.append(group)
        load += size
    return assigned


def _groups(draft: Draft, shards: Sequence[_Sized]) -> dict[tuple[str, int], int | None]:
    """Algorithm 2 for the collective shards, or the groups that a draft keeps."""
    if draft.kept_groups is not None:
        return {(name, i): group for name, groups in draft.kept_groups.items() for i, group in enumerate(groups)}
    merged = [entry for entry in shards if draft.choices[entry[0].name].synchronizer in COLLECTIVES]
    # `gradient_order` is from the loss to the input.
    groups = merge_adjacent([size for _, _, size in merged[::-1]], draft.groups)[::-1]
    return {(variable.name, index): group for (variable, index, _), group in zip(merged, groups, strict=True)}


def synchronizer_of(variable: Variable, served: bool, collective: Synchronizer) -> Synchronizer:
    if variable.sparse:
        return "sparse_parameter_server" if served else "sparse_all_gather"
    return "parameter_server" if served else collective


def _shard(synchronizer: Synchronizer, owner: int | None, group: int | None, stations: tuple[int, ...]) -> Shard:
    if owner is None:
        return Shard(synchronizer=synchronizer, group=group)
    return Shard(
        synchronizer=synchronizer,
        placement=(owner,),
        stations=stations if synchronizer == "parameter_server" else (),
    )


def _shard_bytes(variable: Variable, partition: tuple[int, ...]) -> list[int]:
    """Bytes of each shard in row-major order, cut as evenly as whole elements allow."""
    sizes = [variable.bytes // max(1, variable.elements)] if variable.elements else [0]
    if not partition:
        return [variable.bytes]
    for length, parts in zip(variable.shape, partition, strict=True):
        cuts = [length // parts + (part < length % parts) for part in range(parts)]
        sizes = [size * cut for size in sizes for cut in cuts]
    return sizes
