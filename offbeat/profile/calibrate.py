"""A job's ranks → what each collective costs among them: tables for the cluster file, fits for the replay.

Each collective is measured alone and in a row of several in flight, at sizes 2^i: alone it shows its whole latency, in
a row only what keeps the next one from the link (`offbeat.cost.measured`). Small ones stand between large ones there,
as in a step. What each of a row of nothing but small ones takes differs several-fold from one minute to the next: it
depends on which cores the backend's threads have found. Reduces and broadcasts that go straight to or from their root
are measured alone: how they share links follows from who their roots are (`offbeat.simulate.step`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import cycle, islice
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import orjson
import torch
import torch.distributed as dist

from offbeat import files
from offbeat.cost.measured import CALIBRATED_IN_FLIGHT, SERVED, CollectiveFit, Costs, in_a_row
from offbeat.runtime.channel import Channel, Work, known_costs, open_group, wait
from offbeat.runtime.retime import largest
from offbeat.theft import QUIET, Theft

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather")
SIZES = tuple(2**power for power in (12, 14, 16, 18, 20, 21, 22))
LARGE_BYTES = 2**18
IN_A_ROW = 12
LEFT_OUT = 4
SMALL_IN_A_ROW = 3
"""Small ones before each large one."""
CYCLES = 5
"""Of small ones and a large one; the first is left out."""
REPEATS, SMALL_REPEATS = 3, 6
ATTEMPTS = 2
LONGEST_SECONDS = 0.15
"""Sizes whose row would take longer are left out."""

Sample = tuple[int, float, float]
"""Bytes that each rank puts in, seconds of one collective alone, seconds by which each prolonged a row: of its like if
it is large, of large ones and itself if it is small."""
_measured: WeakKeyDictionary[Any, dict[str, list[Sample]]] = WeakKeyDictionary()


def calibrate_job(folder: str | PathLike[str]) -> Costs:
    """What each collective of the running job costs; rank 0 writes `calibration.json`. Every rank must call it."""
    samples, ranks = measure_job(), dist.get_world_size()
    known = known_costs(dist.get_backend(), ranks)
    fits = {
        (kind, ranks): fit_alone(found) if known.straight and kind in SERVED else fit(found)
        for kind, found in samples.items()
    }
    costs = replace(known, collectives=fits)
    if dist.get_rank() == 0:
        content = orjson.dumps({"costs": costs.to_dict(), "samples": samples}, option=orjson.OPT_INDENT_2)
        files.write_atomic(Path(folder) / "calibration.json", content, "calibration")
    return costs


def measure_job() -> dict[str, list[Sample]]:
    """Samples of every collective among all ranks of the job; measured once in its life."""
    job = dist.distributed_c10d._get_default_group()
    if job not in _measured:
        ranks, me, backend = tuple(range(dist.get_world_size())), dist.get_rank(), dist.get_backend()
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        group = open_group(backend, "offbeat/calibrate", ranks, me, CALIBRATED_IN_FLIGHT, timedelta(minutes=5))
        channel = Channel(group, ranks, me)
        try:
            _measured[job] = _least_disturbed(channel, device)
        finally:
            channel.close()
    return _measured[job]


def _least_disturbed(channel: Channel, device: torch.device) -> dict[str, list[Sample]]:
    """Samples of every collective; once more if neighbours took processors away from one of the ranks meanwhile."""
    found: list[tuple[float, dict[str, list[Sample]]]] = []
    while len(found) < ATTEMPTS and not any(stolen < QUIET for stolen, _ in found):
        theft = Theft()
        samples = {kind: measure(channel, kind, device) for kind in KINDS}
        stolen = torch.tensor([theft.share()], dtype=torch.float64, device=device)
        found.append((largest(channel, stolen).item(), samples))
    return min(found, key=lambda attempt: attempt[0])[1]


def measure(channel: Channel, kind: str, device: torch.device, sizes: Sequence[int] = SIZES) -> list[Sample]:
    """Samples of one collective, the slowest rank's; the same on every rank."""
    larger = [starter(channel, kind, LARGE_BYTES, device, turn) for turn in range(IN_A_ROW)]
    rows = {LARGE_BYTES: _repeat(channel, device, larger, LEFT_OUT, REPEATS)}
    samples: list[Sample] = []
    for size in sizes:
        starts = [starter(channel, kind, size, device, turn) for turn in range(IN_A_ROW)]
        if size >= LARGE_BYTES:
            alone, whole = rows.get(size) or _repeat(channel, device, starts, LEFT_OUT, REPEATS)
            each = whole / (IN_A_ROW - LEFT_OUT)
        else:
            small = cycle(starts)
            row = [start for large in larger[:CYCLES] for start in (*islice(small, SMALL_IN_A_ROW), large)]
            alone, whole = _repeat(channel, device, row, SMALL_IN_A_ROW + 1, SMALL_REPEATS)
            others = rows[LARGE_BYTES][1] / (IN_A_ROW - LEFT_OUT)
            each = max(0.0, (whole / (CYCLES - 1) - others) / SMALL_IN_A_ROW)
        one, rest = largest(channel, torch.tensor([alone, each], dtype=torch.float64, device=device)).tolist()
        samples.append((size, one, rest))
        if rest * IN_A_ROW > LONGEST_SECONDS and len(samples) > 3:
            break
    return samples


def _repeat(
    channel: Channel, device: torch.device, starts: Sequence[Callable[[], Work]], left_out: int, repeats: int
) -> tuple[float, float]:
    """(seconds of the first alone, seconds of a row of all without the first few), medians."""
    alone, row = [], []
    for _ in range(repeats):
        _meet(channel, device)
        alone.append(_ends(starts[:1], device)[0])
        _meet(channel, device)
        ends = _ends(starts, device)
        # Buffers along the way swallow the first ones, which says nothing of a busy link.
        row.append(ends[-1] - ends[left_out - 1])
    return median(alone), median(row)


def fit(samples: Sequence[Sample]) -> CollectiveFit:
    """Seconds per byte from the large ones in a row, overhead from the small, latency from what one alone takes longer.

    A line through all sizes would miss both ends: small collectives cost the same whatever their size, and what large
    ones cost is what a step consists of.
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
    """Seconds per byte from what large ones take alone; before the first byte pass as many as the smallest takes."""
    large = [(size, one) for size, one, _ in samples if size >= LARGE_BYTES]
    (least, first), (most, last) = (large[0], large[-1]) if len(large) > 1 else ((0, 0.0), samples[-1][:2])
    per_byte = max(0.0, (last - first) / (most - least))
    return CollectiveFit(samples[0][1], 0.0, per_byte)


def _overhead(size: int, each: float, per_byte: float) -> float:
    """The overhead at which replay has a cycle of small ones and a large one take that much longer for each of them."""
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
    """A function that starts one collective on tensors of its own.

    Ranks take turns as the root, as a strategy's servers do: one after another they use a link in both directions.
    """
    elements = max(channel.size, size // 4 // channel.size * channel.size)
    tensor = torch.zeros(elements, device=device)
    root = channel.ranks[turn % channel.size]
    match kind:
        case "all_reduce":
            return lambda: channel.all_reduce(tensor)
        case "reduce":
            return lambda: channel.reduce(tensor, root)
        case "broadcast":
            return lambda: channel.broadcast(tensor, root)
        case "all_gather":
            gathered = torch.zeros(elements * channel.size, device=device)
            return lambda: channel.all_gather(gathered, tensor)
        case "reduce_scatter":
            part = torch.zeros(elements // channel.size, device=device)
            return lambda: channel.reduce_scatter(part, tensor)
        case _:
            outputs = [torch.zeros_like(tensor) for _ in channel.ranks] if channel.ranks[channel.index] == root else []
            return lambda: channel.gather(outputs, tensor, root)


def _meet(channel: Channel, device: torch.device) -> None:
    wait(channel.all_reduce(torch.zeros(1, device=device)))
    _synchronise(device)


def _ends(starts: Sequence[Callable[[], Work]], device: torch.device) -> list[float]:
    """Seconds after which each of some collectives, all issued at once, had ended."""
    begin = time.perf_counter()
    works = [start() for start in starts]
    ends = []
    for work in works:
        wait(work)
        _synchronise(device)
        ends.append(time.perf_counter() - begin)
    return ends


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
