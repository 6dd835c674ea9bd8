"""Draw random strategies from the region where good ones lie (AutoDist §2.4, AutoSync §6).

The space is the whole of a synchronous and lossless Strategy: what would change the training (lossy encoders,
staleness) is left out, as in the paper. For each variable a synchroniser (all-reduce, sharded updates, servers,
sufficient factors where they are smaller, and sums of servers where the cluster has servers without a replica) and a
partition over one or several axes are drawn, and for the step a schedule and the number of merge groups. Size
thresholds say which variables are never and which are always partitioned.
Two constraints complete a draw, both on shards:

    load balance (supplement, Algorithm 1)      server shards → owners         `balance_loads`
    adjacent merge (supplement, Algorithm 2)    collective shards → groups     `merge_adjacent`

Algorithm 1's logits are bytes, whose softmax is an argmax for any real model. Here they are divided by the mean shard's
bytes, so that the draw stays random among servers whose loads differ by less than a shard.
`neighbours.py` draws from the neighbourhood of a known strategy.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, Variable
from offbeat.graph.model import ITEM_BYTES
from offbeat.plan import Piece
from offbeat.plan.messages import boxes
from offbeat.strategy import Schedule, Shard, Strategy, VariableConfig, check_fits
from offbeat.strategy.builders.poseidon import factors_win
from offbeat.strategy.model import SERVERS, Synchronizer

COLLECTIVES = ("all_reduce", "sharded", "summation_server")
"""Synchronisers whose shards may be merged into groups."""
Configs = dict[str, VariableConfig]


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
    several_axes_share: float = 0.2
    """Share of the partitions that cut more than one axis, where there are more."""
    factor_share: float = 0.3
    """Share of the dense layers' weights sent as sufficient factors, if these are smaller."""
    slice_bytes: tuple[int | None, ...] = (None, 2**18, 2**19, 2**20, 2**21, 2**22, 2**23)
    in_flight: tuple[int, ...] = (1, 2, 3, 4)
    credit_bytes: tuple[int | None, ...] = (None, None, None, 2**20, 2**22)
    collectives_only_share: float = 0.4
    """Share of the strategies without servers for dense gradients; an equal share uses little else."""
    deferred_share: float = 0.8
    """Share of the strategies whose updates overlap the next forward."""
    sharded_share: float = 0.15
    """Share of the strategies in which some or all collectives are reduce-scatter and all-gather, with sharded updates
    between them."""
    summed_share: float = 0.4
    """Share of the strategies in which servers without a replica, where the cluster has any, sum some or all dense
    gradients instead of a ring."""


class Choice(NamedTuple):
    """What is drawn for one variable."""

    synchronizer: Synchronizer
    partition: tuple[int, ...] = ()


class Sampler:
    """Draws strategies; the same seed gives the same ones in the same order."""

    def __init__(self, graph: ModelGraph, cluster: ClusterSpec, seed: int = 0, space: Space | None = None) -> None:
        self.graph, self.cluster, self.space = graph, cluster, space or Space()
        self.plain = Strategy(name="auto", model=graph.name, graph=graph.signature, cluster=cluster.digest)
        self.random = np.random.default_rng(seed)
        self.variables = graph.gradient_order
        self.node_servers = tuple(cluster.ranks_of(node)[0] for node in range(len(cluster.nodes)))
        if not self.variables:
            raise OffbeatError(f"graph {graph.name!r}: no variable gets a gradient, so there is nothing to synchronise")

    def sample(self, count: int) -> list[Strategy]:
        """Return `count` distinct strategies, or fewer where the space holds no more."""
        return self.distinct(count, self._draw)

    def _draw(self) -> Strategy:
        space, random = self.space, self.random
        kind = random.random()
        served_share = 0.0 if kind < space.collectives_only_share else random.random()
        if served_share and kind > 1 - space.collectives_only_share / 2:
            served_share = 1.0
        sharded_share = self._share(space.sharded_share)
        summed_share = self._share(space.summed_share) if self.cluster.servers else 0.0
        choices = {
            variable.name: self.choice(
                variable, self._synchronizer(variable, served_share, sharded_share, summed_share)
            )
            for variable in self.variables
        }
        # Log-uniform from 1 to one for each variable.
        groups = round(math.exp(random.uniform(0.0, math.log(len(self.variables)))))
        schedule = self.schedule()
        return self.strategy(self.grouped(self.placed({}, choices, *self.servers()), groups), schedule)

    def _share(self, often: float) -> float:
        """The share of the variables to which something applies that so many of the strategies have: some or all."""
        random = self.random
        return float(random.choice((random.random(), 1.0))) if random.random() < often else 0.0

    def _synchronizer(
        self, variable: Variable, served_share: float, sharded_share: float, summed_share: float
    ) -> Synchronizer:
        random = self.random
        served, factors = random.random() < (0.5 if variable.sparse else served_share), random.random()
        if variable.sparse:
            return "sparse_parameter_server" if served else "sparse_all_gather"
        if factors < self.space.factor_share and factors_win(variable, len(self.cluster.workers)):
            return "factor_broadcast"
        if served:
            return "parameter_server"
        if summed_share and random.random() < summed_share:
            return "summation_server"
        return "sharded" if random.random() < sharded_share else "all_reduce"

    def synchronizers(self, variable: Variable) -> tuple[Synchronizer, ...]:
        """All synchronisers that may be drawn for a variable."""
        if variable.sparse:
            return ("sparse_all_gather", "sparse_parameter_server")
        found: list[Synchronizer] = ["all_reduce", "parameter_server"]
        if self.space.sharded_share:
            found.append("sharded")
        if self.space.summed_share and self.cluster.servers:
            found.append("summation_server")
        if self.space.factor_share and factors_win(variable, len(self.cluster.workers)):
            found.append("factor_broadcast")
        return tuple(found)

    def strategy(self, configs: Configs, schedule: Schedule) -> Strategy:
        ordered = {v.name: configs[v.name] for v in self.graph.variables if v.name in configs}
        strategy = self.plain.model_copy(update={"schedule": schedule, "variables": ordered})
        check_fits(strategy, self.graph, self.cluster)
        return strategy

    def placed(
        self, configs: Configs, choices: Mapping[str, Choice], servers: Sequence[int], stations: tuple[int, ...]
    ) -> Configs:
        """`configs` with these choices in addition: their server shards placed by Algorithm 1, the others alone."""
        held = Counter[int | None]()
        free: list[tuple[str, int]] = []
        for variable in self.variables:
            config, choice = configs.get(variable.name), choices.get(variable.name)
            if choice is not None and choice.synchronizer in SERVERS:
                whole = VariableConfig(partition=choice.partition)
                free += [(variable.name, size) for size in _shard_bytes(variable, whole)]
            elif choice is None and config is not None:
                for index, size in enumerate(_shard_bytes(variable, config)):
                    held[config.shard(index).owner] += size
        loads = [float(held[rank]) for rank in servers]
        # Servers of one node share its interface.
        nodes = [self.cluster.node_of(rank) for rank in servers]
        bandwidths = [self.cluster.node_bandwidth(node) / nodes.count(node) for node in nodes]
        found = balance_loads([size for _, size in free], bandwidths, self.random, loads)
        shards: dict[str, list[Shard]] = defaultdict(list)
        for (name, _), owner in zip(free, found, strict=True):
            kind = choices[name].synchronizer
            via = stations if kind == "parameter_server" else ()
            shards[name].append(Shard(synchronizer=kind, placement=(servers[owner],), stations=via))
        return configs | {
            name: config_of(choice.partition, shards.get(name) or [Shard(synchronizer=choice.synchronizer)])
            for name, choice in choices.items()
        }

    def grouped(self, configs: Configs, groups: int) -> Configs:
        """Algorithm 2 for all collective shards; `gradient_order` is from the loss to the input."""
        sizes = {
            (variable.name, index): size
            for variable in self.variables
            if configs[variable.name].shards[0].synchronizer in COLLECTIVES
            for index, size in enumerate(_shard_bytes(variable, configs[variable.name]))
        }
        shards = list(sizes)[::-1]
        merged = merge_adjacent([sizes[shard] for shard in shards], groups)
        return regrouped(configs, dict(zip(shards, merged, strict=True)))

    def choice(self, variable: Variable, synchronizer: Synchronizer) -> Choice:
        """The synchroniser with a partition drawn for it."""
        space, random = self.space, self.random
        chance = random.random()
        rows_only = synchronizer in ("sparse_all_gather", "sparse_parameter_server")
        axes = [axis for axis, length in enumerate(variable.shape[:1] if rows_only else variable.shape) if length > 1]
        spared = variable.bytes <= space.large_bytes and chance >= space.partition_share
        whole = synchronizer == "factor_broadcast" or variable.bytes < space.small_bytes
        if not axes or spared or whole:
            return Choice(synchronizer)
        if len(axes) > 1 and random.random() < space.several_axes_share:
            cut = random.permutation(axes)[: int(random.integers(2, len(axes) + 1))].tolist()
        else:
            # Rows lie together in memory, so axis 0 is what every system cuts; others are worth a try now and then.
            cut = [axes[0] if random.random() < 0.8 else int(random.choice(axes))]
        partition, left = [1] * len(variable.shape), space.max_shards
        for axis in cut:
            most = min(left, variable.shape[axis])
            if most > 1:
                # What one axis leaves of the shards goes to the next.
                partition[axis] = int(random.integers(2, (most if axis == cut[-1] else max(2, most // 2)) + 1))
                left //= partition[axis]
        return Choice(synchronizer, tuple(partition) if max(partition) > 1 else ())

    def schedule(self) -> Schedule:
        space, random = self.space, self.random
        return Schedule(
            policy="priority" if random.random() < 0.6 else "fifo",
            slice_bytes=space.slice_bytes[int(random.integers(len(space.slice_bytes)))],
            in_flight=space.in_flight[int(random.integers(len(space.in_flight)))],
            credit_bytes=space.credit_bytes[int(random.integers(len(space.credit_bytes)))],
            mode="auto" if random.random() < space.deferred_share else "barrier",
        )

    def servers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks that may be servers (one of each node; or all that hold no replica, or all workers) and the
        stations: none, or one on each node with several replicas, which then reduce among themselves first."""
        one_each, via_stations = self.random.random() < 0.5, self.random.random() < 0.5
        servers = self.node_servers if one_each else self.cluster.servers or self.cluster.workers
        return servers, self.cluster.stations if via_stations else ()

    def distinct(self, count: int, draw: Callable[[], Strategy], seen: Sequence[str] = ()) -> list[Strategy]:
        """Up to `count` different strategies, none with one of the digests that were `seen`."""
        found: dict[str, Strategy] = {}
        for _ in range(4 * count + 16):
            if len(found) >= count:
                break
            strategy = draw()
            if strategy.digest not in seen:
                found.setdefault(strategy.digest, strategy)
        return list(found.values())


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


def config_of(partition: tuple[int, ...], shards: Sequence[Shard]) -> VariableConfig:
    """Writes equal shards once."""
    return VariableConfig(partition=partition, shards=tuple(shards[:1] if len(set(shards)) == 1 else shards))


def regrouped(configs: Configs, group_of: Mapping[tuple[str, int], int | None]) -> Configs:
    """The configurations with these groups of single shards."""
    changed = {}
    for name in dict.fromkeys(name for name, _ in group_of):
        config = configs[name]
        shards = [config.shard(i).model_copy(update={"group": group_of[name, i]}) for i in range(config.shard_count)]
        changed[name] = config_of(config.partition, shards)
    return configs | changed


def _shard_bytes(variable: Variable, config: VariableConfig) -> list[int]:
    """Bytes of each shard in row-major order."""
    return [Piece(variable.name, box).elements * ITEM_BYTES[variable.dtype] for box in boxes(variable.shape, config)]
