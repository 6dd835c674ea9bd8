"""How well the costs of sharded strategies are estimated: random strategies run on an emulated cluster.

    python benchmarks/frontier_accuracy.py --json [--model mlp ...] [--hosts 2|4] [--strategies 24]

For each model the workers first measure what TensorOpt (section 3.2) measures: every collective under every device
partitioning at sizes 2^i, and every operator at each split; and a few steps of the strategy that splits nothing, for
what interpreter and optimizer cost. Then random strategies of the search's configurations, which were not used for any
of this, are run and compared with
  estimate  the rehearsed step priced by these measurements (`offbeat.search.frontier.estimate`);
  search    the sum of costs that FT works with, from the same tables and operators measured whole.
Time is the median of the steps during which neighbours of a virtual machine took least of it (quiet.py), memory the
peak of torch's allocator on rank 0. Errors are |estimated / measured - 1|.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
from quiet import Theft, quietest
from step_time import machine

TIME_TARGET, MEMORY_TARGET = 0.08, 0.05
WARM_UP, TIMED, COUNTED = 2, 7, 4
SLOTS = 1
BANDWIDTH = "2Gbit/s"
MODELS = ("mlp", "cnn", "transformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--hosts", type=int, choices=(2, 4), default=2)
    parser.add_argument("--strategies", type=int, default=24)
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
    """One rank: measures, draws strategies, runs them; rank 0 prints what it found."""
    from offbeat import ClusterSpec
    from offbeat.runtime.sharded import runtime as sharded_runtime
    from offbeat.runtime.sharded.grid import Grid
    from offbeat.runtime.sharded.measure import measure_moves, time_calls
    from offbeat.runtime.sharded.rehearse import rehearse
    from offbeat.runtime.sharded.trace import trace_forward
    from offbeat.search.frontier.estimate import Timings, estimate
    from offbeat.search.frontier.resharding import FineMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model, batch = build(case["model"])
    program = trace_forward(model, model.forward, batch, {})
    sharded_runtime.trace_forward = lambda *_: program
    cluster = ClusterSpec.from_json(case["cluster"]).replace(tables=measure_moves(Grid()))
    drawn = draw(case, model, batch, cluster)
    rehearsals = [rehearse(program, model, strategy, world) for strategy, _ in drawn]
    calls = list({call: None for rehearsal in rehearsals for call in rehearsal.calls})
    calibrating = time.perf_counter()
    timings = Timings(dict(zip(calls, time_calls(calls), strict=True)))
    calibrating = time.perf_counter() - calibrating
    # A process's first steps are slower than its later ones, so the strategy that splits nothing is run once before.
    run(case["model"], drawn[0][0])
    runs = [run(case["model"], strategy) for strategy, _ in drawn]
    timings = with_overheads(timings, rehearsals[0], runs[0])
    mesh = FineMesh(cluster)
    rows = []
    for (_, searched), rehearsal, measured in zip(drawn[1:], rehearsals[1:], runs[1:], strict=True):
        found = estimate(rehearsal, timings, mesh, SLOTS)
        rows.append(
            {
                "measured_seconds": measured["step_seconds"],
                "measured_bytes": measured["peak_bytes"],
                "estimate_seconds": found.time_seconds,
                "estimate_bytes": found.memory_bytes,
                "search_seconds": searched[0] + timings.step_seconds,
                "search_bytes": searched[1],
                "estimate_network_seconds": found.network_seconds,
                "moves": sum(rehearsal.moves.values()),
                "stolen": measured["stolen"],
            }
        )
    if dist.get_rank() == 0:
        whole = {"step_seconds": runs[0]["step_seconds"], "fixed_seconds": timings.step_seconds}
        print(json.dumps({"rows": rows, "unsplit": whole, "operators": len(calls), "calibrating": calibrating}))
    dist.barrier()


def draw(case: dict[str, Any], model: Any, batch: Any, cluster: Any) -> list[tuple[Any, tuple[float, float]]]:
    """The strategy that splits nothing, then random ones; with each the seconds and bytes that the search adds up."""
    from offbeat.search.frontier.costs import price
    from offbeat.search.frontier.evaluate import Strategies, expanded
    from offbeat.search.frontier.resharding import FineMesh
    from offbeat.search.frontier.units import group
    from offbeat.strategy import Strategy

    graph = offbeat.capture(model, batch, name=case["model"]).with_optimizer("SGD", SLOTS)
    graph = graph.with_seconds(whole_seconds(model, batch))
    prices = price(graph, FineMesh(cluster), group(graph))
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
    from offbeat.graph.joint import joint_graph
    from offbeat.graph.step import make_step
    from offbeat.runtime.sharded.measure import time_calls
    from offbeat.runtime.sharded.rehearse import LocalCall, local_call

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


def run(name: str, strategy: Any) -> dict[str, float]:
    """The median step of a strategy, and its peak of memory on this rank."""
    model, batch = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    offbeat.distribute(model, optimizer, strategy=strategy)
    updating: list[float] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        begin = time.perf_counter()
        optimizer.step()
        updating.append(time.perf_counter() - begin)

    for _ in range(WARM_UP):
        step()
    blocks = []
    for _ in range(TIMED):
        dist.barrier()
        theft, begin = Theft(), time.perf_counter()
        step()
        dist.barrier()
        blocks.append((theft.share(), time.perf_counter() - begin))
    optimizer.zero_grad(set_to_none=True)
    held = _held_bytes(model, optimizer, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("step"):
        step()
    quiet = quietest(blocks, COUNTED)
    found = torch.tensor([statistics.median(quiet), statistics.median(updating[WARM_UP:])], dtype=torch.float64)
    dist.broadcast(found, 0)
    local = [_local(parameter) for parameter in model.parameters()]
    return {
        "step_seconds": float(found[0]),
        "update_seconds": float(found[1]),
        "plain_update_seconds": _plain_update_seconds(local),
        "peak_bytes": held + peak_of(profiler),
        "stolen": statistics.fmean(share for share, _ in blocks),
    }


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _held_bytes(model: Any, optimizer: Any, batch: Any) -> int:
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *state, *batch]
    return sum(_local(tensor).nbytes for tensor in tensors)


def _plain_update_seconds(parts: list[Any]) -> float:
    """The same update of plain tensors: what of it is arithmetic."""
    plain = [torch.zeros_like(part).requires_grad_() for part in parts]
    optimizer = torch.optim.SGD(plain, lr=1e-4, momentum=0.9)
    for tensor in plain:
        tensor.grad = torch.zeros_like(tensor)
    return statistics.median(_seconds(optimizer.step) for _ in range(5))


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def with_overheads(timings: Any, rehearsal: Any, measured: dict[str, float]) -> Any:
    """What the run that splits nothing took longer than its operators, shared out over step, variables and bytes."""
    plain = measured["plain_update_seconds"]
    operators = sum(timings.calls[call] * count for call, count in rehearsal.calls.items())
    return replace(
        timings,
        step_seconds=max(0.0, measured["step_seconds"] - measured["update_seconds"] - operators),
        update_seconds_per_variable=max(0.0, measured["update_seconds"] - plain) / len(rehearsal.variable_bytes),
        update_seconds_per_byte=plain / sum(rehearsal.variable_bytes),
    )


if __name__ == "__main__":
    main()
