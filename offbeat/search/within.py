"""Find the fastest strategy that fits a job's devices, the same on every rank."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import CollectiveFit, Costs
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.launch import this_place
from offbeat.runtime.comm import TorchWorld
from offbeat.runtime.retime import fit_link
from offbeat.search.fsdp import SPARE
from offbeat.search.optimize import search
from offbeat.strategy import Strategy
from offbeat.units import format_bytes, format_seconds, parse_bytes

SEARCH_SECONDS = 20.0


@dataclass(frozen=True)
class Choice:
    """The fastest strategy found under a limit, and what is predicted of it."""

    strategy: Strategy
    seconds: float
    peak_bytes: int
    limit_bytes: int

    @property
    def words(self) -> str:
        engine = {"replicated": "replicated", "sharded": "with sharded updates", "fsdp": "fully sharded"}
        return (
            f"under {format_bytes(self.limit_bytes)} the job is {engine[self.strategy.engine]}; predicted: "
            f"{format_seconds(self.seconds)} per step, {format_bytes(self.peak_bytes)} at the peak"
        )


def strategy_within(
    memory_limit: str | float,
    graph: ModelGraph,
    cluster: ClusterSpec,
    world: TorchWorld,
    micro_batches: bool,
    allow: Sequence[str] = (),
    encoding: Mapping[str, float] | None = None,
) -> Choice:
    """Rank 0 searches, with the link as it is measured now; 'auto' is the memory of the smallest device, with a tenth
    of it to spare. `micro_batches` says that the model returns its loss, `allow` which encoders
    gradients may be sent with, and `encoding` the seconds that each takes for a byte. Every rank must call it."""
    if isinstance(memory_limit, str) and memory_limit == "auto":
        limit = int(min(world.all_gather_object(_device_bytes(world))) * (1 - SPARE))
    else:
        limit = parse_bytes(memory_limit, "memory_limit")
    costs = replace(_link_costs(world), encoding_seconds_per_byte=encoding or {})
    found: tuple[str, float, int] | OffbeatError | None = None
    if world.rank == 0:
        try:
            best = search(
                graph,
                cluster,
                costs=costs,
                memory_limit=limit,
                time_limit=SEARCH_SECONDS,
                micro_batches=micro_batches,
                allow=allow,
            )
            found = best.strategy.to_json(), best.seconds, best.peak_bytes
        except OffbeatError as error:
            found = error
    told = world.all_gather_object(found)[0]
    if isinstance(told, OffbeatError):
        raise told
    chosen, seconds, peak = told
    return Choice(Strategy.from_json(chosen), seconds, peak, limit)


def _device_bytes(world: TorchWorld) -> int:
    """Of this rank's device; ranks on CPUs share their machine's."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    nodes = world.all_gather_object(this_place().node)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // nodes.count(nodes[world.rank])


def _link_costs(world: TorchWorld) -> Costs:
    """What the collectives of all ranks cost, from all-reduces that are timed now.

    A ring moves half of an all-reduce's bytes to gather or to scatter; gloo scatters by reducing everything.
    """
    if world.size < 2:
        return Costs()
    seconds, per_byte = fit_link(world.default_channel(), world.device)
    shares = {
        "all_reduce": 1.0,
        "all_gather": world.size / 2,
        "reduce_scatter": 1.0 if world.backend == "gloo" else 0.5,
    }
    fits = {(kind, world.size): CollectiveFit(0.0, seconds, per_byte * share) for kind, share in shares.items()}
    return Costs(collectives=fits)
