"""ModelGraph + ClusterSpec → ModelFrontier: the time/memory frontier of a step over all engines, and TensorOpt's
options to choose from it (section 4.1).

Operator splits are TensorOpt's own frontier (`_splits`): group operators, enumerate and price configurations, track the
frontier, keep or re-schedule tensors, make strategies. Replicas, with sharded updates or fully sharded, are what
`optimize` finds under one memory limit after another (`_replicas`), so that `distribute(memory_limit=…)` takes the same
points. Beside them, splits get a better estimate of memory (`offbeat.search.frontier.rehearse`); alone they have FT's
own sums, as in the paper. The graph's batch is the whole batch of all devices, of which a replica computes its share.

- mini-time: `ModelFrontier.min_time(memory=…)`
- mini-parallelism: `ModelFrontier.min_devices(memory=…)`
- profiling: `profile_devices`, whose rows also carry what a step costs where the cluster's nodes have a price
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.graph.model import ModelGraph
from offbeat.graph.share import batch_share, batch_size
from offbeat.search.frontier.algebra import Ints, frontier_reduce
from offbeat.search.frontier.costs import Prices, columns
from offbeat.search.frontier.evaluate import Expanded, Strategies, expanded
from offbeat.search.frontier.model import Frontier, FrontierPoint, too_little
from offbeat.search.frontier.rehearse import rehearsed
from offbeat.search.frontier.track import track
from offbeat.search.frontier.units import group
from offbeat.search.optimize import REPLICAS, by_memory
from offbeat.search.passes import Candidate
from offbeat.sharding.rescheduling import FineMesh
from offbeat.simulate import step_seconds
from offbeat.strategy.model import ENGINES, Engine
from offbeat.units import quote

OBJECTIVES = ("memory", "time", "communication", "money")
MOST_CONFIGURATIONS = 40
MOST_POINTS = 128
UNLIMITED = 1e6
"""Times the bandwidth of a link that nothing waits for."""


@dataclass(frozen=True)
class Chosen:
    """A number of devices and the fastest point that fits them."""

    devices: int
    point: FrontierPoint


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelFrontier(Frontier):
    """The frontier of one model on one cluster, with its points by the first objective upwards."""

    graph: ModelGraph = field(repr=False, compare=False)
    cluster: ClusterSpec = field(repr=False, compare=False)
    """The whole cluster; the points may use fewer devices of it."""
    devices: int
    objectives: tuple[str, str]
    searched: tuple[Engine, ...]
    """The engines that points were looked for of."""
    notes: tuple[str, ...]
    """Operators that stay whole because no sharding rule is known for them, and engines that were left out."""
    prices: Prices = field(repr=False, compare=False)
    """What operator splits were found from; baselines are computed from it."""

    @property
    def about(self) -> dict[str, str | int | None]:
        """What the points are of: model, samples of a step, precision, cluster, devices."""
        return {
            "model": self.graph.name,
            "batch": batch_size(self.graph),
            "precision": ", ".join(sorted({variable.dtype for variable in self.graph.variables})),
            "cluster": self.cluster.name,
            "devices": self.devices,
        }

    def min_devices(self, memory: str | int) -> Chosen:
        """The fewest devices, among the powers of two and all, on which a strategy fits in `memory` each."""
        most = self.cluster.world_size
        tried = [*(1 << n for n in range((most - 1).bit_length())), most]
        seen: tuple[FrontierPoint, ...] = ()
        for devices in tried:
            options: Any = {"objectives": self.objectives, "margin": self.margin, "engines": self.searched}
            options["devices"] = devices
            found = self if devices == self.devices else find_frontier(self.graph, self.cluster, **options)
            if point := found.fastest_within(memory):
                return Chosen(devices, point)
            seen += found.points
        raise too_little(memory, seen, self.margin, f" on {' or '.join(map(str, tried))} devices")

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the frontier with its turning point, as SVG or as a page with it; one of operator splits alone with the
        systems that TensorOpt compares with."""
        from offbeat.search.frontier.baselines import baselines
        from offbeat.search.frontier.picture import draw

        draw(self, path, baselines(self.prices) if self.searched == ("split",) else None)

    @property
    def title(self) -> str:
        about = self.about
        batch = "" if about["batch"] is None else f", batch {about['batch']}"
        return f"{about['model']}{batch}, {about['precision']}, on {self.devices} devices of {about['cluster']}"


@dataclass(frozen=True)
class ProfileRow:
    """The best that a number of devices can do."""

    devices: int
    point: FrontierPoint | None
    """None where nothing fits."""
    dollars_per_step: float | None


def find_frontier(
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    engines: Sequence[Engine] | None = None,
    objectives: tuple[str, str] = ("memory", "time"),
    devices: int | None = None,
    margin: float = 0.0,
    configurations: int = MOST_CONFIGURATIONS,
    points: int = MOST_POINTS,
    threads: int | None = None,
) -> ModelFrontier:
    """The non-dominated ways to run a training step on the devices of a cluster.

    `engines` are some of replicated, sharded, fsdp and split, by default all that the objectives can be computed for.
    `objectives` are two of memory, time, communication and money; `devices` uses only that many, the first ones;
    `configurations` bounds how many an operator may choose from, and `points` how many splits are returned. `threads`
    None is all cores; it does not change the result."""
    searched = _searched(engines, objectives)
    if not 0 <= margin < 1:
        raise OffbeatError(f"margin must be at least 0 and less than 1, got {margin!r}")
    least = (("configurations", configurations, 1), ("points", points, 2), ("threads", threads, 1))
    for name, value, lowest in least:
        if value is not None and value < lowest:
            raise OffbeatError(f"{name} must be at least {lowest}, got {value!r}")
    if not graph.phase("forward"):
        raise OffbeatError(f"graph {graph.name!r}: it has no forward operators to split; capture it with capture()")
    count = cluster.world_size if devices is None else devices
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= cluster.world_size:
        raise OffbeatError(f"devices must be 1 to {cluster.world_size}, got {quote(devices)}")
    used = cluster.subset(count)
    units = group(graph)
    prices = Prices(graph, FineMesh(used), units, configurations)
    found = list(_splits(prices, objectives, points, threads)) if "split" in searched else []
    if len(searched) > 1:
        found = [rehearsed(point, prices) for point in found]
    notes = list(units.notes) if "split" in searched else []
    replicated = [engine for engine in REPLICAS if engine in searched]
    if replicated:
        try:
            found += [_replicas(candidate) for candidate in by_memory(batch_share(graph, count), used, replicated)]
        except OffbeatError as error:
            if not found:
                raise
            notes.append(f"only operator splits: {error}")
    if not found:
        raise OffbeatError(f"graph {graph.name!r}: no strategy of {', '.join(searched)} can run it on {count} devices")
    memory, compute, network = np.array([(p.memory_bytes, p.compute_seconds, p.network_seconds) for p in found]).T
    amounts = columns(memory, compute, network, objectives)
    return ModelFrontier(
        tuple(found[index] for index in frontier_reduce(amounts)),
        margin,
        graph=graph,
        cluster=cluster,
        devices=count,
        objectives=objectives,
        searched=searched,
        notes=tuple(notes),
        prices=prices,
    )


def _searched(engines: Sequence[Engine] | None, objectives: tuple[str, str]) -> tuple[Engine, ...]:
    if len(objectives) != 2 or len(set(objectives)) != 2 or not set(objectives) <= set(OBJECTIVES):
        raise OffbeatError(f"objectives must be two of {', '.join(OBJECTIVES)}, got {quote(objectives)}")
    possible: tuple[Engine, ...] = ("split",) if "communication" in objectives else ENGINES
    chosen = possible if engines is None else tuple(engines)
    if isinstance(engines, str) or not chosen or not set(chosen) <= set(possible):
        # How much replicas communicate says nothing of their time, because it overlaps with compute.
        raise OffbeatError(f"engines must be some of {', '.join(possible)} for these objectives, got {quote(engines)}")
    return tuple(engine for engine in ENGINES if engine in chosen)


def _splits(prices: Prices, objectives: tuple[str, str], points: int, threads: int | None) -> Iterator[FrontierPoint]:
    """TensorOpt's frontier of operator splits."""
    # With re-scheduled tensors kept for speed, and for memory.
    tables = [prices.tables(small, objectives) for small in (False, True)[: 1 + ("memory" in objectives)]]
    choices = np.unique(np.concatenate([track(*costs, threads=threads).choices for costs in tables]), axis=0)
    found = expanded(prices, choices)
    strategies = Strategies(prices, "frontier")
    return (strategies.point(choices, found, int(index)) for index in _thinned(found, objectives, points))


def _replicas(candidate: Candidate) -> FrontierPoint:
    """A replayed strategy; what communication adds to its compute is what it gains by links without limits."""
    plan, seconds = candidate.plan, candidate.seconds
    unlimited = replace(plan, cluster=plan.cluster.with_links(bandwidth=UNLIMITED, latency=1 / UNLIMITED))
    compute = min(seconds, step_seconds(unlimited, Costs()))
    strategy = candidate.strategy
    return FrontierPoint(seconds, candidate.peak_bytes, compute, seconds - compute, strategy, engine=strategy.engine)


def profile_devices(
    graph: ModelGraph,
    cluster: ClusterSpec,
    counts: Iterable[int],
    memory: str | int | None = None,
    *,
    engines: Sequence[Engine] | None = None,
    margin: float = 0.0,
    price_per_device_hour: float | None = None,
) -> tuple[ProfileRow, ...]:
    """The fastest strategy on each number of devices: TensorOpt's profiling option.

    `memory` is the limit of each device, by default the smallest device's own. A step's price is that of the devices it
    uses, by `price_per_device_hour` or the cluster's own prices."""
    limit = memory if memory is not None else min(node.memory for node in cluster.nodes)
    rows = []
    for devices in counts:
        point = find_frontier(graph, cluster, engines=engines, devices=devices, margin=margin).fastest_within(limit)
        nodes = [cluster.device_of(rank) for rank in range(devices)]
        prices = [node.price_per_hour / node.devices for node in nodes if node.price_per_hour is not None]
        if price_per_device_hour is not None:
            prices = [price_per_device_hour] * devices
        dollars = math.fsum(prices) * point.time_seconds / 3600 if point and len(prices) == devices else None
        rows.append(ProfileRow(devices, point, dollars))
    return tuple(rows)


def _thinned(found: Expanded, objectives: tuple[str, str], most: int) -> Ints:
    """The non-dominated points, or `most` of them spread evenly along the frontier, with both ends."""
    points = columns(found.memory, found.compute, found.network, objectives)
    kept = frontier_reduce(points)
    if len(kept) <= most:
        return kept
    span = np.ptp(points[kept], axis=0)
    steps = np.abs(np.diff(points[kept], axis=0, prepend=points[kept[:1]])) / np.where(span > 0, span, 1.0)
    along = np.cumsum(steps.sum(axis=1))
    places = np.searchsorted(along, np.linspace(0.0, along[-1], most))
    return kept[np.unique(np.minimum(places, len(kept) - 1))]
