"""Measure the cost of collectives among a job's ranks: tables for the cluster file, fits for replay.

Each collective is measured alone and back to back with several in flight, at sizes 2^i. Alone it shows its whole
latency; in a row, only what keeps the next one from the link (`offbeat.cost.measured`). Small collectives are measured
between large ones, as in a step: the time of back-to-back small ones varies several-fold between starts, with the cores
on which the backend's threads run. Reduces and broadcasts that go straight to or from their root are measured alone:
how they share links follows from their roots (`offbeat.simulate.step`).

For a cluster file every collective is measured under every even partitioning of the ranks that a mesh of them has:
groups of consecutive ranks, and those that differ along any axes of the finest mesh (`offbeat.sharding.layout`). All
groups of one partitioning talk at the same time (TensorOpt, section 3.2). On GPUs the file also says what each node's
devices are and how fast they multiply and copy while all of them do. `python -m offbeat.profile.calibrate FILE` does it
as one rank of a job.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import combinations, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import orjson
import torch
import torch.distributed as dist

from offbeat import files
from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.cluster.parts import Collective, Groups
from offbeat.cost.measured import CALIBRATED_IN_FLIGHT, SERVED, CollectiveFit, in_a_row
from offbeat.cost.tables import latency_steps
from offbeat.cpu_steal import QUIET, CpuSteal
from offbeat.errors import OffbeatError
from offbeat.launch import this_place
from offbeat.plan.model import sent_per_byte
from offbeat.runtime.comm import Channel, Work, known_costs, torch_world
from offbeat.runtime.retime import largest
from offbeat.sharding.layout import groups_of, prime_factors
from offbeat.timeline.clock import Moment, clock_of
from offbeat.torch_private import default_group

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather")
"""What jobs use."""
SURVEYED: tuple[Collective, ...] = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
"""What a cluster file has tables of."""
SIZES = tuple(2**power for power in (12, 14, 16, 18, 20, 21, 22))
LARGE_BYTES = 2**18
IN_A_ROW = 12
LEFT_OUT = 4
SMALL_IN_A_ROW = 3
"""Small collectives before each large one."""
CYCLES = 5
"""Repetitions of some small collectives and a large one; the first is left out."""
REPEATS, SMALL_REPEATS = 3, 6
ATTEMPTS = 2
LONGEST_SECONDS = 0.15
"""Sizes whose row would take longer are left out."""

Sample = tuple[int, float, float]
"""Bytes that each rank puts in, seconds of one collective alone, and seconds that each one adds to a row."""
Measured = dict[tuple[str, int], list[Sample]]
"""By collective and number of ranks: samples of the slowest group."""
Surveyed = dict[tuple[Collective, Groups], list[Sample]]
"""By collective and partitioning of all ranks: samples of the slowest group."""
MULTIPLIED, COPIED_BYTES = 8192, 2**30
"""Rows and columns of the matrices by which a GPU's rate is measured, and bytes of the tensor that is copied."""
_TIMEOUT = timedelta(minutes=5)
_measured: WeakKeyDictionary[Any, dict[str, list[Sample]]] = WeakKeyDictionary()


def calibrate_job(folder: Path, writer: int = 0) -> None:
    """Measures what each collective of the running job costs, on every rank; one of them writes `calibration.json`."""
    samples, within, between = measure_all()
    ranks = dist.get_world_size()
    known = known_costs(dist.get_backend(), ranks)

    def fits(measured: Measured) -> dict[tuple[str, int], CollectiveFit]:
        return {
            key: fit_alone(found) if known.straight and key[0] in SERVED else fit(found)
            for key, found in measured.items()
        }

    if dist.get_rank() == writer:
        everyone = {(kind, ranks): found for kind, found in samples.items()}
        costs = replace(known, collectives=fits(between | everyone), within=fits(within))
        content = {"costs": costs.to_dict(), "samples": samples}
        written = orjson.dumps(content, option=orjson.OPT_INDENT_2)
        files.write_atomic(folder / "calibration.json", written, "calibration")


def measure_all() -> tuple[dict[str, list[Sample]], Measured, Measured]:
    """What `measure_job` and `measure_nodes` find. Every rank must call it, also those that only serve."""
    return measure_job(), *measure_nodes()


def measure_job() -> dict[str, list[Sample]]:
    """Samples of every collective among all ranks of the job, measured only once per job."""
    job = default_group()
    if job not in _measured:
        world = torch_world()
        everyone = tuple(range(world.size))
        with closing(world.open_channel("offbeat/calibrate", everyone, CALIBRATED_IN_FLIGHT, _TIMEOUT)) as channel:
            _measured[job] = _least_disturbed(channel, world.device)
    return _measured[job]


def measure_nodes() -> tuple[Measured, Measured]:
    """Samples of every collective among the ranks of a node, all nodes at once, and among the first rank of each node.

    Both are empty unless some of several nodes have several ranks; the same on every rank.
    """
    world = torch_world()
    names: list[str] = world.all_gather_object(this_place().node)
    nodes = [tuple(rank for rank, name in enumerate(names) if name == node) for node in dict.fromkeys(names)]
    if not 1 < len(nodes) < world.size:
        return {}, {}
    found: list[Measured] = []
    for level, groups in (("within", nodes), ("between", [tuple(ranks[0] for ranks in nodes)])):
        mine: Measured = {}
        for ranks in groups:
            if world.rank in ranks and len(ranks) > 1:
                name = f"offbeat/calibrate/{level}/{ranks[0]}"
                with closing(world.open_channel(name, ranks, CALIBRATED_IN_FLIGHT, _TIMEOUT)) as channel:
                    mine = {(kind, len(ranks)): measure(channel, kind, world.device) for kind in KINDS}
        # Ranks that take no part wait here. Nodes of one size may differ; the slowest counts.
        everyones: list[Measured] = world.all_gather_object(mine)
        keys = dict.fromkeys(key for each in everyones for key in each)
        found.append({key: slowest([each[key] for each in everyones if key in each]) for key in keys})
    return found[0], found[1]


def _least_disturbed(channel: Channel, device: torch.device) -> dict[str, list[Sample]]:
    """Samples of every collective, measured again if the machine's host took CPU time from a rank."""
    found: list[tuple[float, dict[str, list[Sample]]]] = []
    while len(found) < ATTEMPTS and not any(stolen < QUIET for stolen, _ in found):
        steal = CpuSteal()
        samples = {kind: measure(channel, kind, device) for kind in KINDS}
        stolen = torch.tensor([steal.share()], dtype=torch.float64, device=device)
        found.append((largest(channel, stolen).item(), samples))
    return min(found, key=lambda attempt: attempt[0])[1]


def measure(channel: Channel, kind: str, device: torch.device) -> list[Sample]:
    """Samples of one collective, the slowest rank's; the same on every rank."""
    larger = [starter(channel, kind, LARGE_BYTES, device, turn) for turn in range(IN_A_ROW)]
    large = _repeat(channel, device, larger, LEFT_OUT, REPEATS)
    samples: list[Sample] = []
    for size in SIZES:
        starts = [starter(channel, kind, size, device, turn) for turn in range(IN_A_ROW)]
        if size >= LARGE_BYTES:
            alone, whole = large if size == LARGE_BYTES else _repeat(channel, device, starts, LEFT_OUT, REPEATS)
            each = whole / (IN_A_ROW - LEFT_OUT)
        else:
            small = cycle(starts)
            row = [start for last in larger[:CYCLES] for start in (*islice(small, SMALL_IN_A_ROW), last)]
            alone, whole = _repeat(channel, device, row, SMALL_IN_A_ROW + 1, SMALL_REPEATS)
            others = large[1] / (IN_A_ROW - LEFT_OUT)
            each = max(0.0, (whole / (CYCLES - 1) - others) / SMALL_IN_A_ROW)
        one, rest = largest(channel, torch.tensor([alone, each], dtype=torch.float64, device=device)).tolist()
        samples.append((size, one, rest))
        if rest * IN_A_ROW > LONGEST_SECONDS and len(samples) > 3:
            break
    return samples


def _repeat(
    channel: Channel, device: torch.device, starts: Sequence[Callable[[], Work]], left_out: int, repeats: int
) -> tuple[float, float]:
    """Medians: (seconds of the first one alone, seconds of the row without the first `left_out`)."""
    meeting = [lambda: channel.all_reduce(torch.zeros(1, device=device))]
    alone, row = [], []
    for _ in range(repeats):
        _ends(meeting, device)
        alone.append(_ends(starts[:1], device)[0])
        _ends(meeting, device)
        ends = _ends(starts, device)
        # Buffers along the way absorb the first ones.
        row.append(ends[-1] - ends[left_out - 1])
    return median(alone), median(row)


def fit(samples: Sequence[Sample]) -> CollectiveFit:
    """Seconds per byte from large collectives in a row, overhead from small ones, latency from those alone.

    A line through all sizes would fit neither end: small collectives cost the same whatever their size.
    """
    large = [(size, each) for size, _, each in samples if size >= LARGE_BYTES]
    if len(large) > 1:
        per_byte = max(0.0, (large[-1][1] - large[0][1]) / (large[-1][0] - large[0][0]))
    else:
        per_byte = samples[-1][2] / samples[-1][0]
    small = [(size, each) for size, _, each in samples if size < LARGE_BYTES]
    overhead = median(_overhead(size, each, per_byte) for size, each in small or large)
    latency = median(max(0.0, one - overhead - per_byte * size) for size, one, _ in samples)
    return CollectiveFit(overhead, latency, per_byte)


def fit_alone(samples: Sequence[Sample]) -> CollectiveFit:
    """Seconds per byte from large collectives alone; the overhead is what the smallest one takes."""
    large = [(size, one) for size, one, _ in samples if size >= LARGE_BYTES]
    (least, first), (most, last) = (large[0], large[-1]) if len(large) > 1 else ((0, 0.0), samples[-1][:2])
    per_byte = max(0.0, (last - first) / (most - least))
    return CollectiveFit(samples[0][1], 0.0, per_byte)


def _overhead(size: int, each: float, per_byte: float) -> float:
    """The overhead with which replay lets each small collective prolong a row by `each` seconds."""
    wire = [per_byte * size] * SMALL_IN_A_ROW + [per_byte * LARGE_BYTES]
    goal = SMALL_IN_A_ROW * each + wire[-1]
    low, high = 0.0, max(0.0, goal)
    for _ in range(40):
        overhead = (low + high) / 2
        fixed = [overhead] * len(wire) * CYCLES
        taken = in_a_row([seconds + overhead for seconds in wire * CYCLES], fixed, CALIBRATED_IN_FLIGHT)
        low, high = (overhead, high) if sum(taken[len(wire) :]) < goal * (CYCLES - 1) else (low, overhead)
    return high if high > 1e-7 else 0.0


def starter(channel: Channel, kind: str, size: int, device: torch.device, turn: int = 0) -> Callable[[], Work]:
    """A function that starts one collective on its own tensors; ranks take turns as the root, as servers do."""
    elements = max(channel.size, size // 4 // channel.size * channel.size)
    tensor = torch.zeros(elements, device=device)
    root = channel.ranks[turn % channel.size]
    arguments: tuple[Any, ...]
    match kind:
        case "all_reduce":
            arguments = (tensor,)
        case "reduce" | "broadcast":
            arguments = (tensor, root)
        case "all_to_all":
            arguments = (torch.zeros_like(tensor), tensor)
        case "all_gather":
            arguments = (torch.zeros(elements * channel.size, device=device), tensor)
        case "reduce_scatter":
            arguments = (torch.zeros(elements // channel.size, device=device), tensor)
        case _:
            outputs = [torch.zeros_like(tensor) for _ in channel.ranks] if channel.ranks[channel.index] == root else []
            arguments = (outputs, tensor, root)
    return partial(getattr(channel, kind), *arguments)


def _ends(starts: Sequence[Callable[[], Work]], device: torch.device) -> list[float]:
    """Seconds until each of the collectives, all issued at once, has ended."""
    clock = clock_of(device)
    begin = clock.now()
    works = [start() for start in starts]
    ends: list[Moment] = []
    for work in works:
        work.wait()
        ends.append(clock.now())
    clock.wait(ends[-1])
    return [clock.seconds(end) - clock.seconds(begin) for end in ends]


def partitionings(world: int) -> list[Groups]:
    """Every even partitioning of so many ranks that a mesh of them has, the largest groups last."""
    factors = prime_factors(world)
    axes = (some for count in range(1, len(factors) + 1) for some in combinations(range(len(factors)), count))
    sizes = (size for size in range(2, world + 1) if world % size == 0)
    found = {tuple(sorted(groups_of(some, factors))) for some in axes}
    found |= {tuple(tuple(range(first, first + size)) for first in range(0, world, size)) for size in sizes}
    return sorted(found, key=lambda groups: (len(groups[0]), groups))


def measure_partitionings(world: int) -> Surveyed:
    """Samples of every collective under every partitioning."""
    job = torch_world()
    measured: Surveyed = {}
    for number, groups in enumerate(partitionings(world)):
        mine = next(group for group in groups if job.rank in group)
        with closing(job.open_channel(f"offbeat/survey/{number}/{mine[0]}", mine, 2, _TIMEOUT)) as channel:
            for kind in SURVEYED:
                dist.barrier()
                found: list[list[Sample]] = [[] for _ in range(world)]
                dist.all_gather_object(found, measure(channel, kind, job.device))
                measured[kind, groups] = slowest(found)
    return measured


def slowest(groups: list[list[Sample]]) -> list[Sample]:
    """The slowest group's time at each size that all groups measured."""
    return [
        (rows[0][0], max(alone for _, alone, _ in rows), max(each for _, _, each in rows))
        for rows in zip(*groups, strict=False)
    ]


def device_figures(device: torch.device, size: int = MULTIPLIED, copied: int = COPIED_BYTES) -> dict[str, Any]:
    """A node's fields about its device: name, memory, and FLOP and bytes per second as measured here and now."""
    known = torch.cuda.get_device_properties(device)
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Random values: on zeros a GPU draws less power and multiplies faster.
    matrices = [torch.randn(size, size, dtype=dtype, device=device) for _ in range(2)]
    return {
        "device": known.name,
        "memory": known.total_memory,
        "peak_flops": 2 * size**3 / _seconds(partial(torch.matmul, *matrices), device),
        # A copy reads and writes.
        "memory_bandwidth": 2 * copied / _seconds(torch.empty(copied, dtype=torch.uint8, device=device).clone, device),
    }


def _seconds(action: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Of one of some in a row, after some that warm up."""
    for _ in range(3):
        action()
    clock = clock_of(device)
    begin = clock.now()
    for _ in range(repeats):
        action()
    end = clock.now()
    clock.wait(end)
    return (clock.seconds(end) - clock.seconds(begin)) / repeats


def cluster_of(
    measured: Surveyed,
    nodes: Sequence[int],
    within: Measured,
    between: Measured,
    devices: Sequence[dict[str, Any]] | None = None,
) -> ClusterSpec:
    """The cluster of nodes of so many ranks, with the bandwidth that all-reduces reached, and a table for each
    partitioning. `within` and `between` are what `measure_nodes` found.

    `devices` are the figures of every rank's device; a node has those of its slowest. Without them they are CPUs.
    """
    world, largest = sum(nodes), max(nodes)
    fields: dict[str, float | None] = {}
    if len(nodes) > 1:
        fields["address"] = None
        found = between["all_reduce", len(nodes)] if between else measured["all_reduce", (tuple(range(world)),)]
        fields["bandwidth"], fields["latency"] = link_of(found, len(nodes) if between else world)
    if largest > 1:
        consecutive = tuple(tuple(range(first, first + largest)) for first in range(0, world, largest))
        found = within["all_reduce", largest] if within else measured["all_reduce", consecutive]
        fields["intra_bandwidth"], fields["intra_latency"] = link_of(found, largest)
    tables = tuple(
        CollectiveTable(
            collective=kind,
            groups=groups,
            sizes_bytes=tuple(bytes for bytes, _, _ in samples),
            seconds=tuple(alone for _, alone, _ in samples),
        )
        for (kind, groups), samples in measured.items()
    )
    local = ClusterSpec.local(1).nodes[0]
    slowest_devices: list[dict[str, Any]] = [{}] * len(nodes)
    if devices is not None:
        each = iter(devices)
        slowest_devices = [min(islice(each, ranks), key=lambda one: one["peak_flops"]) for ranks in nodes]
    made = tuple(
        local.model_copy(update={**fields, **figures, "devices": ranks, "name": f"node{number}"})
        for number, (ranks, figures) in enumerate(zip(nodes, slowest_devices, strict=True))
    )
    return ClusterSpec(name="calibrated", nodes=made, tables=tables)


def link_of(samples: list[Sample], participants: int) -> tuple[float, float]:
    """(bytes per second, seconds of latency) of a ring's links, from its all-reduces."""
    fitted = fit(samples)
    if not fitted.seconds_per_byte:
        raise OffbeatError("all_reduce: large messages took no longer than small ones, so the bandwidth is unknown")
    latency = (fitted.overhead_seconds + fitted.latency_seconds) / latency_steps("all_reduce", participants)
    return sent_per_byte("all_reduce", participants) / fitted.seconds_per_byte, latency


def main(path: str) -> None:
    """Measures the running job's ranks, each of which must call it; rank 0 writes the cluster file."""
    if not dist.is_initialized():
        on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.get_world_size()
    if world < 2:
        raise OffbeatError(f"ranks: calibration needs at least 2, got {world}")
    nodes = ClusterSpec.of_ranks(torch_world().all_gather_object(this_place().node))
    if nodes is None:
        raise OffbeatError("ranks: the ranks of a node are not consecutive, as a cluster file requires")
    devices: list[Any] | None = None
    if dist.get_backend() == "nccl":
        devices = [None] * world
        dist.barrier()
        dist.all_gather_object(devices, device_figures(torch_world().device))
    sizes = [node.devices for node in nodes.nodes]
    cluster = cluster_of(measure_partitionings(world), sizes, *measure_nodes(), devices)
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
