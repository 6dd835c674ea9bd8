"""How well the costs of sharded strategies are estimated: random strategies run on an emulated cluster.

    python benchmarks/frontier_accuracy.py --json [--model mlp ...] [--hosts 2|4] [--strategies 20]

For each model the workers draw random strategies of the search's configurations, rehearse them, and then measure by
turns, so that a machine that becomes slower does so for both:
  parts  every operator at each split and every exchange between layouts, each by itself (TensorOpt, section 3.2), and
         steps of the strategy that splits nothing, for what interpreter and optimizer cost;
  steps  of the random strategies, which no estimate uses.
The steps are compared with
  estimate  the rehearsed step priced by these parts (rehearsal/estimate.py);
  search    the sum of costs that FT works with, from operators measured whole and collectives at sizes 2^i.
Time is the median of that half of the steps during which neighbours of a virtual machine took least of it (quiet.py),
memory the median of five steps' peaks of torch's allocator on rank 0. Errors are |estimated / measured - 1|.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

import offbeat

sys.path.insert(0, str(Path(__file__).parent))
from memory_accuracy import peak_of
from quiet import CpuSteal, quietest
from step_time import machine

TIME_TARGET, MEMORY_TARGET = 0.08, 0.05
WARM_UP, TIMED, PARTS_TIMED = 1, 1, 2
"""Steps of a strategy before all others, and in each round; passes over operators and exchanges in each round."""
COUNTED = 3
"""Rounds at least, and steps that count."""
UNSPLIT_EVERY = 4
"""Strategies between two measurements of the one that splits nothing, on which all estimates depend."""
PROFILED = 5
"""Steps of a strategy whose memory is measured."""
CALM_SECONDS = 60
"""Begins no other round after this."""
SLOTS = 1
BANDWIDTH = "2Gbit/s"
MODELS = ("mlp", "cnn", "transformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--hosts", type=int, choices=(2, 4), default=2)
    parser.add_argument("--strategies", type=int, default=20)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    results = [evaluate(model, options.hosts, options.strategies) for model in options.model or MODELS]
    report = {"benchmark": "frontier_accuracy", "machine": machine(), "hosts": options.hosts, "bandwidth": BANDWIDTH,
              "time_target": TIME_TARGET, "memory_target": MEMORY_TARGET, "models": results}  # fmt: skip
    if options.json:
        print(json.dumps(report))


def evaluate(model: str, hosts: int, strategies: int) -> dict[str, Any]:
    """One model: all rows and their mean errors."""
    from offbeat.emulate import Emulation

    with Emulation(hosts, bandwidth=BANDWIDTH) as emulation:
        case = {"model": model, "strategies": strategies, "cluster": emulation.cluster_spec().to_json().decode()}
        done = emulation.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(case)],
            env={"OMP_NUM_THREADS": "1"},
            timeout=560,
        )
    answer = json.loads(next(line for line in done[0].stdout.splitlines() if line.startswith("{")))
    rows = answer["rows"]
    summary = {
        f"{how}_{what}_error": statistics.fmean(abs(row[f"{how}_{what}"] / row[f"measured_{what}"] - 1) for row in rows)
        for how in ("estimate", "search")
        for what in ("seconds", "bytes")
    }
    summary["within_target"] = (
        summary["estimate_seconds_error"] <= TIME_TARGET and summary["estimate_bytes_error"] <= MEMORY_TARGET
    )
    shown = "  ".join(f"{key} {value:.3f}" for key, value in summary.items())
    print(f"{model}: {len(rows)} strategies, {shown}", file=sys.stderr, flush=True)
    return {"model": model, **summary, **answer}


class Classifier(nn.Module):
    """Layers and a linear one on top, with the loss."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


class Transformer(nn.Module):
    """Two encoder layers between words and words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.Linear(128, 512)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.decoder(x).flatten(0, 1), following.flatten())


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model that takes a batch and returns its loss, and a batch; one step takes 20 to 200 ms."""
    torch.manual_seed(0)
    if name == "mlp":
        body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())))
        return Classifier(body, 768, 64), (torch.randn(128, 768), torch.randint(64, (128,)))
    if name == "cnn":
        widths = (16, 32, 32, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return Classifier(nn.Sequential(*layers, nn.Flatten()), 64 * 16, 32), (
            torch.randn(32, 16, 32, 32),
            torch.randint(32, (32,)),
        )
    return Transformer(), (torch.randint(512, (16, 64)), torch.randint(512, (16, 64)))


def work(case: dict[str, Any]) -> None:
    """One rank: draws strategies, measures parts and whole steps by turns; rank 0 prints what it found."""
    from rehearsal.estimate import estimate
    from rehearsal.measure import measure_moves
    from rehearsal.rehearse import rehearse

    from offbeat import ClusterSpec
    from offbeat.runtime.sharded import runtime as sharded_runtime
    from offbeat.runtime.sharded.grid import Grid
    from offbeat.runtime.sharded.trace import trace_forward
    from offbeat.sharding.rescheduling import FineMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.perf_counter()
    model, batch = build(case["model"])
    program = trace_forward(model, model.forward, batch, {})
    sharded_runtime.trace_forward = lambda *_: program
    cluster = ClusterSpec.from_json(case["cluster"]).replace(tables=measure_moves(Grid()))
    drawn = draw(case, model, batch, cluster)
    rehearsals = [rehearse(program, model, strategy, dist.get_world_size()) for strategy, _ in drawn]
    jobs = [Job(case["model"], strategy) for strategy, _ in drawn]
    parts = Parts(rehearsals)
    rounds = measure(jobs, parts, began + CALM_SECONDS)
    timings = parts.timings(rehearsals[0], jobs[0])
    mesh = FineMesh(cluster)
    rows = []
    for (_, searched), rehearsal, job in zip(drawn[1:], rehearsals[1:], jobs[1:], strict=True):
        found = estimate(rehearsal, timings, mesh, SLOTS)
        least_bytes, usual_bytes, most_bytes = job.peak_bytes()
        rows.append(
            {
                "measured_seconds": job.step_seconds(),
                "measured_bytes": usual_bytes,
                "least_measured_bytes": least_bytes,
                "most_measured_bytes": most_bytes,
                "estimate_seconds": found.time_seconds,
                "estimate_bytes": found.memory_bytes,
                "search_seconds": searched[0] + timings.step_seconds,
                "search_bytes": searched[1],
                "estimate_network_seconds": found.network_seconds,
                "measured_update_seconds": statistics.median(job.updating),
                "moves": sum(rehearsal.moves.values()),
                "stolen": statistics.fmean(share for share, _ in job.blocks),
            }
        )
    unsplit = {"step_seconds": jobs[0].step_seconds(), "fixed_seconds": timings.step_seconds}
    if dist.get_rank() == 0:
        counts = {"operators": len(timings.calls), "exchanges": len(timings.shifts), "rounds": rounds}
        print(json.dumps({"rows": rows, "unsplit": unsplit, **counts, "seconds": time.perf_counter() - began}))
    dist.barrier()


def measure(jobs: Sequence["Job"], parts: "Parts", calm_until: float) -> int:
    """Rounds of measurements of parts and of every strategy's steps, by turns, so that a machine that becomes slower
    or faster meanwhile does so for both, until time is up."""
    for job in jobs:
        job.warm_up()
    rounds, order = 0, list(jobs)
    while rounds < COUNTED or not _agreed(time.perf_counter() > calm_until):
        parts.measure()
        for index, job in enumerate(order):
            job.measure()
            if index % UNSPLIT_EVERY == 0:
                jobs[0].measure()
        # Nobody is always the first after the parts.
        shift = len(jobs) // COUNTED
        order = [*order[shift:], *order[:shift]]
        rounds += 1
    return rounds


def _agreed(done: bool) -> bool:
    decision = torch.tensor([done])
    dist.broadcast(decision, 0)
    return bool(decision)


def draw(case: dict[str, Any], model: Any, batch: Any, cluster: Any) -> list[tuple[Any, tuple[float, float]]]:
    """The strategy that splits nothing, then random ones; with each the seconds and bytes that the search adds up."""
    from offbeat.search.frontier.costs import Prices
    from offbeat.search.frontier.evaluate import Strategies, expanded
    from offbeat.search.frontier.units import group
    from offbeat.sharding.rescheduling import FineMesh
    from offbeat.strategy import Strategy

    graph = offbeat.capture(model, batch, name=case["model"]).with_optimizer("SGD", SLOTS)
    graph = graph.with_seconds(whole_seconds(model, batch))
    prices = Prices(graph, FineMesh(cluster), group(graph))
    dice = random.Random(7)
    rows = [[int(np.argmax((configs.before < 0).all(axis=1))) for configs in prices.configs]]
    rows += [[dice.randrange(len(configs)) for configs in prices.configs] for _ in range(case["strategies"])]
    strategies = Strategies(prices, "random")
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        made = []
        for row in rows:
            choices = np.array([row], np.int64)
            found = expanded(prices, choices)
            point = strategies.point(choices, found, dice.randrange(len(found.row)))
            assert point.strategy is not None
            made.append((point.strategy.to_json(), (point.time_seconds, point.memory_bytes)))
        shared = [made]
    dist.broadcast_object_list(shared)
    return [(Strategy.from_json(content), costs) for content, costs in shared[0]]


def whole_seconds(model: Any, batch: Any) -> dict[str, float]:
    """Seconds of every operator of the captured step, measured on whole tensors."""
    from rehearsal.measure import time_calls
    from rehearsal.rehearse import LocalCall, local_call

    from offbeat.graph.joint import joint_graph
    from offbeat.graph.step import make_step

    graph, _ = joint_graph(make_step(model, batch, None))
    calls: dict[str, LocalCall] = {}
    for node in graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "_schema"):
            args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta["val"], (tuple(node.args), dict(node.kwargs)))
            if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
                calls[node.name] = local_call(node.target, args, kwargs)
    distinct = list(dict.fromkeys(calls.values()))
    seconds = dict(zip(distinct, time_calls(distinct), strict=True))
    return {name: seconds[call] for name, call in calls.items()}


class Parts:
    """The operators and exchanges of some rehearsed steps, and what was measured of them."""

    def __init__(self, rehearsals: Sequence[Any]) -> None:
        from offbeat.runtime.sharded.grid import Grid

        self.calls = list({call: None for rehearsal in rehearsals for call in rehearsal.calls})
        self.shifts = list({shift: None for rehearsal in rehearsals for shift in rehearsal.shifts})
        self.grid = Grid()
        self.call_seconds: list[list[float]] = []
        self.shift_seconds: list[list[float]] = []

    def measure(self) -> None:
        from rehearsal.measure import time_calls, time_shifts

        self.call_seconds.append(time_calls(self.calls, rounds=PARTS_TIMED + 1))
        self.shift_seconds.append(time_shifts(self.shifts, self.grid, rounds=PARTS_TIMED))

    def timings(self, rehearsal: Any, unsplit: "Job") -> Any:
        """What the run that splits nothing took longer than its operators is shared out over step, variables, bytes."""
        from rehearsal.estimate import Timings

        calls = dict(zip(self.calls, map(statistics.median, zip(*self.call_seconds, strict=True)), strict=True))
        shifts = dict(zip(self.shifts, map(statistics.median, zip(*self.shift_seconds, strict=True)), strict=True))
        operators = sum(calls[call] * count for call, count in rehearsal.calls.items())
        updating, plain = unsplit.update_seconds(), unsplit.plain_update_seconds()
        return Timings(
            calls,
            step_seconds=max(0.0, unsplit.step_seconds() - updating - operators),
            update_seconds_per_variable=max(0.0, updating - plain) / len(rehearsal.variable_bytes),
            update_seconds_per_byte=plain / sum(rehearsal.variable_bytes),
            shifts=shifts,
        )


class Job:
    """The model trained under one strategy, a few steps now and then."""

    def __init__(self, name: str, strategy: Any) -> None:
        self.model, self.batch = build(name)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        offbeat.distribute(self.model, self.optimizer, strategy=strategy)
        self.blocks: list[tuple[float, float]] = []
        """Stolen share and seconds of each measured step."""
        self.updating: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(*self.batch).backward()
        begin = time.perf_counter()
        self.optimizer.step()
        self.updating.append(time.perf_counter() - begin)

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.step()
        self.updating.clear()

    def measure(self) -> None:
        for _ in range(TIMED):
            dist.barrier()
            steal, begin = CpuSteal(), time.perf_counter()
            self.step()
            dist.barrier()
            seconds = time.perf_counter() - begin
            self.blocks.append((steal.agreed_share(), seconds))

    def step_seconds(self) -> float:
        """Rank 0's median of the steps of which least was stolen, on every rank."""
        return _of_rank_0(statistics.median(quietest(self.blocks, max(COUNTED * TIMED, len(self.blocks) // 2))))

    def update_seconds(self) -> float:
        return _of_rank_0(statistics.median(self.updating))

    def plain_update_seconds(self) -> float:
        """The same update of plain tensors: what of it is arithmetic."""
        plain = [torch.zeros_like(_local(parameter)).requires_grad_() for parameter in self.model.parameters()]
        optimizer = torch.optim.SGD(plain, lr=1e-4, momentum=0.9)
        for tensor in plain:
            tensor.grad = torch.zeros_like(tensor)
        return statistics.median(_seconds(optimizer.step) for _ in range(5))

    def peak_bytes(self) -> tuple[int, float, int]:
        """The least, the median and the most of some steps: they differ by buffers whose end the profiler misses."""
        self.optimizer.zero_grad(set_to_none=True)
        state = [value for held in self.optimizer.state.values() for value in held.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state, *self.batch]
        held = sum(_local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        peaks = [held + self._step_peak_bytes() for _ in range(PROFILED)]
        return min(peaks), statistics.median(peaks), max(peaks)

    def _step_peak_bytes(self) -> int:
        self.optimizer.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("step"):
            self.step()
        return peak_of(profiler)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _of_rank_0(value: float) -> float:
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
