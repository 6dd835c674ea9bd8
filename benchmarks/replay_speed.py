"""How fast graphs are replayed → JSON: tasks per second, and one step of BERT-base on 128 ranks in full detail.

    python benchmarks/replay_speed.py --json

`layered`: a million tasks in layers, each waiting for two random ones of the layer before, on 64 devices; first ready
first served, and with priorities. `training`: eight workers with a link each, chains of compute that release ring
all-reduces. `bert_base_128`: the plan of BERT-base under DDP's buckets on 128 nodes with 100 Gbit/s, every all-reduce
expanded into its messages between all ranks; the time is that of `simulate(plan, expand=True)`, so it includes making
the graph and the timeline, and capture is not part of it. `folded_10000`: the same model on 10,000 nodes, whose ranks
are folded. Everything is warm: compiled and run once before. Best of the repeats, on one core; other processes on the
machine make every number worse, so that the processor's time stands beside the wall's.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.simulate import TaskGraph, replay, simulate
from offbeat.simulate.collectives import GraphBuilder, Links, add_collective
from offbeat.simulate.expand import ExpandedSteps
from offbeat.simulate.predict import BARRIER_STEPS, DEFERRED_STEPS
from offbeat.simulate.roles import find_roles
from offbeat.strategy import build_strategy

TASKS = 1_000_000
MESSAGES = 206


def layered(width: int, devices: int, prioritised: bool) -> TaskGraph:
    rng = np.random.default_rng(0)
    after = np.repeat(np.arange(width, TASKS), 2)
    before = (after // width - 1) * width + rng.integers(0, width, len(after))
    return TaskGraph.from_arrays(
        rng.uniform(1e-4, 1e-3, TASKS),
        rng.integers(0, devices, TASKS),
        np.stack([before, after], axis=1),
        rng.integers(0, 100, TASKS) if prioritised else None,
    )


def training(ranks: int, steps: int, segments: int, groups: int, gradient_bytes: float) -> TaskGraph:
    """Each rank's compute is a chain; the backward half releases the groups evenly, and the next step waits for all."""
    rng = np.random.default_rng(0)
    builder = GraphBuilder()
    links = Links(np.arange(ranks) + ranks, 8 / 100e9, 5e-6)
    gradients = np.array_split(rng.dirichlet(np.ones(MESSAGES)) * gradient_bytes, groups)
    share = [float(group.sum()) for group in gradients]
    releases = np.linspace(segments // 2, segments - 1, groups).astype(int)
    arrived: list[np.ndarray] = []
    for _ in range(steps):
        seconds = rng.uniform(0.8, 1.2, segments)[:, None] * rng.uniform(0.98, 1.02, (segments, ranks)) * 5e-4
        compute = builder.add(seconds, np.arange(ranks))
        builder.connect(compute[:-1], compute[1:])
        for done in arrived:
            builder.connect(done, compute[0])
        arrived = [
            add_collective(builder, "all_reduce", links, size, compute[segment])
            for size, segment in zip(share, releases, strict=True)
        ]
    return builder.build()


def best(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Wall and processor seconds of the fastest run, after one to warm up."""
    work()
    runs = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        runs.append((time.perf_counter() - wall, time.process_time() - processor))
    return {"wall_seconds": min(run[0] for run in runs), "processor_seconds": min(run[1] for run in runs)}


def replayed(graph: TaskGraph, repeats: int) -> dict[str, float]:
    seconds = best(lambda: replay(graph), repeats)
    rates = {f"tasks_per_{name}": len(graph) / value for name, value in seconds.items()}
    return {"tasks": len(graph), "edges": len(graph.successor), **seconds, **rates}


def plan_of(graph: ModelGraph, nodes: int, builder: str) -> Plan:
    cluster = ClusterSpec.homogeneous(nodes=nodes, bandwidth="100Gbit/s", latency="5us")
    return lower(graph, cluster, build_strategy(builder, graph, cluster))


def simulated(plan: Plan, repeats: int, expand: bool) -> dict[str, float]:
    """Seconds of predicting one plan."""
    result: dict[str, float] = {"ranks": len(plan.replicas), "collectives": len(plan.communication)}
    if expand:
        roles = find_roles(plan, {}, fold=False)
        steps = BARRIER_STEPS if plan.mode == "barrier" else DEFERRED_STEPS
        graph = ExpandedSteps(plan, Costs(), roles, steps).graph()
        result.update(tasks=len(graph), edges=len(graph.successor), steps=steps)

    def work() -> None:
        result["predicted_step_seconds"] = simulate(plan, expand=expand, memory=False).iteration_time

    return best(work, repeats) | result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object (the only format)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    bert = zoo.capture("bert_base")
    begin = time.perf_counter()
    replay(TaskGraph.from_arrays([1.0], [0], np.empty((0, 2), int)))
    result = {
        "benchmark": "replay_speed",
        "machine": platform.processor() or platform.machine(),
        "first_call_seconds": time.perf_counter() - begin,
        "layered": replayed(layered(1000, 64, prioritised=False), options.repeats),
        "layered_priorities": replayed(layered(1000, 64, prioritised=True), options.repeats),
        "training": replayed(training(8, 200, 400, 16, 1e8), options.repeats),
        "bert_base_128": simulated(plan_of(bert, 128, "ddp"), min(3, options.repeats), expand=True),
        "folded_10000": simulated(plan_of(bert, 10_000, "ddp"), min(3, options.repeats), expand=False),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
