"""ModelGraph + ClusterSpec → ModelFrontier: TensorOpt's cost frontier of a step, and its options (section 4.1).

`find_frontier` reads top-down: group operators, enumerate and price configurations, track the frontier, keep or
re-schedule tensors, make strategies. The graph's batch is the whole batch of all devices.

- mini-time: `ModelFrontier.min_time(memory=…)`
- mini-parallelism: `ModelFrontier.min_devices(memory=…)`
- profiling: `profile_devices`, whose rows also carry what a step costs where the cluster's nodes have a price
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph.model import ModelGraph
from offbeat.search.frontier.algebra import frontier_reduce
from offbeat.search.frontier.costs import Prices, price
from offbeat.search.frontier.evaluate import Expanded, Strategies, expanded
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.search.frontier.resharding import FineMesh
from offbeat.search.frontier.track import track
from offbeat.search.frontier.units import group
from offbeat.units import format_bytes, parse_bytes, quote

OBJECTIVES = ("memory", "time", "communication", "money")
MOST_CONFIGURATIONS = 40
MOST_POINTS = 128


@dataclass(frozen=True)
class Chosen:
    """A number of devices and the fastest point that fits them."""

    devices: int
    point: FrontierPoint


@dataclass(frozen=True)
class ModelFrontier(Frontier):
    """The frontier of one model on one cluster, with its points by the first objective upwards."""

    graph: ModelGraph | None = field(default=None, repr=False, compare=False)
    cluster: ClusterSpec | None = field(default=None, repr=False, compare=False)
    """The whole cluster; the points may use fewer devices of it."""
    devices: int = 0
    objectives: tuple[str, str] = ("memory", "time")
    margin: float = 0.0
    """Share of a memory limit that is left free, for what the estimate does not count."""
    notes: tuple[str, ...] = ()
    """Operators that stay whole because no sharding rule is known for them."""
    prices: Prices | None = field(default=None, repr=False, compare=False)
    """What the points were found from; baselines are computed from it."""

    def __post_init__(self) -> None:
        if self.objectives == ("memory", "time"):
            super().__post_init__()

    def point_within(self, memory: str | int) -> FrontierPoint:
        """The point with the least time that leaves the safety margin free in `memory`."""
        limit = parse_bytes(memory, "memory") * (1 - self.margin)
        fitting = [point for point in self.points if point.memory_bytes <= limit]
        if not fitting:
            least = min((point.memory_bytes for point in self.points), default=math.inf)
            raise OffbeatError(
                f"no strategy on {self.devices} devices fits in memory={quote(memory)}: the least that one needs is "
                f"{format_bytes(math.ceil(least / (1 - self.margin)))}, with a margin of {self.margin:.0%}"
            )
        return min(fitting, key=lambda point: point.time_seconds)

    def min_devices(self, memory: str | int, counts: Iterable[int] | None = None) -> Chosen:
        """The fewest devices on which a strategy fits in `memory` each: mini-parallelism.

        `counts` are the numbers to try; by default the powers of two up to the whole cluster."""
        if self.graph is None or self.cluster is None:
            raise OffbeatError("min_devices: a frontier read from a file knows no graph and no cluster to search again")
        tried = sorted(set(counts) if counts is not None else _powers(self.cluster.world_size))
        least = math.inf
        for devices in tried:
            found = self if devices == self.devices else find_frontier(
                self.graph, self.cluster, objectives=self.objectives, devices=devices, margin=self.margin
            )  # fmt: skip
            try:
                return Chosen(devices, found.point_within(memory))
            except OffbeatError:
                least = min(least, *(point.memory_bytes for point in found.points))
        raise OffbeatError(
            f"no strategy on {' or '.join(map(str, tried))} devices fits in memory={quote(memory)}: the least that one "
            f"needs is {format_bytes(math.ceil(least / (1 - self.margin)))}, with a margin of {self.margin:.0%}"
        )

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the frontier with its turning point and the baselines as SVG."""
        from offbeat.search.frontier.baselines import baselines
        from offbeat.search.frontier.picture import draw

        draw(self, path, marked=baselines(self.prices) if self.prices is not None else {})


@dataclass(frozen=True)
class ProfileRow:
    """The best that a number of devices can do."""

    devices: int
    point: FrontierPoint | None
    """None where nothing fits."""
    dollars_per_step: float | None

    @property
    def time_seconds(self) -> float:
        return self.point.time_seconds if self.point is not None else math.inf


def find_frontier(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    objectives: tuple[str, str] = ("memory", "time"),
    devices: int | None = None,
    margin: float = 0.0,
    configurations: int = MOST_CONFIGURATIONS,
    points: int = MOST_POINTS,
    threads: int | None = None,
) -> ModelFrontier:
    """The non-dominated ways to split a training step over the devices of a cluster.

    `objectives` are two of memory, time, communication and money; `devices` uses only the first so many;
    `configurations` bounds how many an operator may choose from, and `points` how many are returned. `threads` None is
    all cores; it does not change the result."""
    _check(objectives, margin, configurations, points)
    if not graph.phase("forward"):
        raise OffbeatError(f"graph {graph.name!r}: it has no forward operators to split; capture it with capture()")
    used = cluster if devices is None else cluster.subset(_checked_devices(devices, cluster))
    mesh = FineMesh(used)
    units = group(graph)
    prices = price(graph, mesh, units, configurations)
    choices = _tracked(prices, objectives, threads)
    found = expanded(prices, choices)
    kept = _thinned(found, objectives, points)
    strategies = Strategies(prices, "frontier")
    return ModelFrontier(
        tuple(strategies.point(choices, found, int(index)) for index in kept),
        graph,
        cluster,
        mesh.devices,
        objectives,
        margin,
        units.notes,
        prices,
    )


def profile_devices(
    graph: ModelGraph,
    cluster: ClusterSpec,
    counts: Iterable[int],
    memory: str | int | None = None,
    *,
    margin: float = 0.0,
    price_per_device_hour: float | None = None,
) -> tuple[ProfileRow, ...]:
    """The fastest strategy on each number of devices: TensorOpt's profiling option.

    `memory` is the limit of each device, by default the smallest device's own. A step's price is that of the devices it
    uses, by `price_per_device_hour` or the cluster's own prices."""
    limit = memory if memory is not None else min(node.memory for node in cluster.nodes)
    rows = []
    for devices in counts:
        frontier = find_frontier(graph, cluster, devices=devices, margin=margin)
        try:
            point: FrontierPoint | None = frontier.point_within(limit)
        except OffbeatError:
            point = None
        hourly = _hourly_price(cluster, devices, price_per_device_hour)
        dollars = None if point is None or hourly is None else hourly * point.time_seconds / 3600
        rows.append(ProfileRow(devices, point, dollars))
    return tuple(rows)


def money_frontier(rows: Iterable[ProfileRow]) -> tuple[ProfileRow, ...]:
    """The rows that no other beats in both dollars and time, cheapest first."""
    priced = [row for row in rows if row.point is not None]
    dollars = [row.dollars_per_step for row in priced if row.dollars_per_step is not None]
    if len(dollars) < len(priced):
        raise OffbeatError("price_per_device_hour is needed: a node of the cluster has no price_per_hour")
    kept = frontier_reduce(list(zip(dollars, (row.time_seconds for row in priced), strict=True)))
    return tuple(priced[index] for index in kept)


def _tracked(prices: Prices, objectives: tuple[str, str], threads: int | None) -> NDArray[np.int64]:
    """The choices on the frontier with re-scheduled tensors kept for speed, and for memory."""
    found = []
    for small in (False, True) if "memory" in objectives else (False,):
        ops, edges = prices.tables(small, objectives)
        found.append(track(ops, edges, threads=threads).choices)
    return np.unique(np.concatenate(found), axis=0)


def _thinned(found: Expanded, objectives: tuple[str, str], most: int) -> NDArray[np.int64]:
    """The non-dominated points, or `most` of them spread evenly along the frontier, with both ends."""
    values = {
        "memory": found.memory,
        "time": found.time,
        "communication": found.network,
        "money": found.time,
    }
    first, second = (values[objective] for objective in objectives)
    kept = np.asarray(frontier_reduce(np.stack([first, second], axis=1)), np.int64)
    if len(kept) <= most:
        return kept
    along = np.zeros(len(kept))
    for column in (first[kept], second[kept]):
        span = column.max() - column.min()
        along[1:] += np.abs(np.diff(column)) / (span or 1.0)
    along = np.cumsum(along)
    places = np.searchsorted(along, np.linspace(0.0, along[-1], most))
    return kept[np.unique(np.minimum(places, len(kept) - 1))]


def _check(objectives: tuple[str, str], margin: float, configurations: int, points: int) -> None:
    if len(objectives) != 2 or len(set(objectives)) != 2 or not set(objectives) <= set(OBJECTIVES):
        raise OffbeatError(f"objectives must be two of {', '.join(OBJECTIVES)}, got {quote(objectives)}")
    if not 0 <= margin < 1:
        raise OffbeatError(f"margin must be at least 0 and less than 1, got {margin!r}")
    if configurations < 1:
        raise OffbeatError(f"configurations must be at least 1, got {configurations!r}")
    if points < 2:
        raise OffbeatError(f"points must be at least 2, got {points!r}")


def _checked_devices(devices: int, cluster: ClusterSpec) -> int:
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= cluster.world_size:
        raise OffbeatError(f"devices must be 1 to {cluster.world_size}, got {quote(devices)}")
    return devices


def _powers(limit: int) -> list[int]:
    powers = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]
    return powers if powers[-1] == limit else [*powers, limit]


def _hourly_price(cluster: ClusterSpec, devices: int, per_device: float | None) -> float | None:
    if per_device is not None:
        return per_device * devices
    prices = [
        None if (price := cluster.device_of(rank).price_per_hour) is None else price / cluster.device_of(rank).devices
        for rank in range(devices)
    ]
    return None if None in prices else math.fsum(price for price in prices if price is not None)
