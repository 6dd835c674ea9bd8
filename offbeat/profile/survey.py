"""A job's ranks → ClusterSpec with what their collectives really cost: tables per device partitioning, and links.

TensorOpt (section 3.2): every collective is measured under every even partitioning of the ranks into groups, which talk
at the same time, at sizes 2^i. `python -m offbeat.profile.survey FILE` does it as one rank of a job.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.cost.tables import latency_steps
from offbeat.errors import OffbeatError
from offbeat.profile.calibrate import KINDS, Sample, fit, measure
from offbeat.profile.whatif import sent_per_byte
from offbeat.runtime.channel import Channel, open_group

_TABULATED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""Of the collectives measured, those that a cluster file has tables for."""
_TIMEOUT = timedelta(minutes=5)

Measured = dict[tuple[str, int], list[Sample]]
"""By collective and size of the groups: samples of the slowest group."""


def survey() -> ClusterSpec:
    """Measures the running job's ranks; the same on every rank, all of which must call it."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    world = dist.get_world_size()
    if world < 2:
        raise OffbeatError(f"ranks: {world} rank has nobody to talk to; calibrate with at least 2")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    per_node = local if 0 < local <= world and world % local == 0 else world
    return cluster_of(measure_partitionings(world), world, per_node)


def measure_partitionings(world: int) -> Measured:
    """Samples of every collective in groups of every size that divides the number of ranks."""
    backend, me = dist.get_backend(), dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    measured: Measured = {}
    for size in (size for size in range(2, world + 1) if world % size == 0):
        first = me // size * size
        ranks = tuple(range(first, first + size))
        name = f"offbeat/survey/{size}/{first}"
        channel = Channel(open_group(backend, name, ranks, me, 2, _TIMEOUT), ranks, me)
        try:
            for kind in KINDS:
                dist.barrier()
                measured[kind, size] = slowest(_of_all_ranks(measure(channel, kind, device)))
        finally:
            channel.close()
    return measured


def slowest(groups: list[list[Sample]]) -> list[Sample]:
    """The slowest group's time at each size that all groups measured."""
    return [
        (rows[0][0], max(alone for _, alone, _ in rows), max(each for _, _, each in rows))
        for rows in zip(*groups, strict=False)
    ]


def cluster_of(measured: Measured, world: int, per_node: int) -> ClusterSpec:
    """The cluster file: links as fast as all-reduces found them, and a table for each partitioning."""
    nodes = world // per_node
    fields: dict[str, float] = {}
    if nodes > 1:
        fields["bandwidth"], fields["latency"] = link_of(measured["all_reduce", world], world)
    if per_node > 1:
        fields["intra_bandwidth"], fields["intra_latency"] = link_of(measured["all_reduce", per_node], per_node)
    tables = tuple(
        CollectiveTable(
            collective=kind,  # type: ignore[arg-type] # one of _TABULATED
            groups=tuple(tuple(range(first, first + size)) for first in range(0, world, size)),
            sizes_bytes=tuple(bytes for bytes, _, _ in samples),
            seconds=tuple(alone for _, alone, _ in samples),
        )
        for (kind, size), samples in measured.items()
        if kind in _TABULATED
    )
    local = ClusterSpec.local(per_node).nodes[0]
    if nodes > 1:
        local = local.model_copy(update={"address": None})
    made = tuple(local.model_copy(update={**fields, "name": f"node{number}"}) for number in range(nodes))
    return ClusterSpec(name="calibrated", nodes=made, tables=tables)


def link_of(samples: list[Sample], participants: int) -> tuple[float, float]:
    """(bytes per second, seconds of latency) of the links of a ring whose all-reduces took so long."""
    fitted = fit(samples)
    if not fitted.seconds_per_byte:
        raise OffbeatError("all_reduce: large messages took no longer than small ones, which tells no bandwidth")
    latency = (fitted.overhead_seconds + fitted.latency_seconds) / latency_steps("all_reduce", participants)
    return sent_per_byte("all_reduce", participants) / fitted.seconds_per_byte, latency


def _of_all_ranks(samples: list[Sample]) -> list[list[Sample]]:
    gathered: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, samples)
    return gathered


def main(path: str) -> None:
    cluster = survey()
    if dist.get_rank() == 0:
        cluster.save(path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OffbeatError as problem:
        print(f"offbeat: rank {os.environ.get('RANK', '0')}: {problem}", file=sys.stderr)
        sys.exit(1)
