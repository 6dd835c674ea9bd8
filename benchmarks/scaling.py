"""Scale on paper: weak and strong scaling from 8 to 10,000 simulated devices, DDP's plan against Offbeat's → JSON.

    python benchmarks/scaling.py --json [--model resnet50 ...] [--cluster h100 ...]

Nothing here ran on so many devices. What goes in:

- compute: what the model took on an accelerator in bf16, carried over to the cluster's device
  (`results/accelerator.json`, accelerator_times.py). A model that is not in that file takes its roofline times
  measured step / roofline of a model of its family (`results/gpu_overhead.json`). Either is proportional to samples,
  which is the best case for small batches.
- network: an all-reduce takes the faster of a ring and a tree for DDP's 25 MiB buckets. The ring is the cluster's
  closed form. The tree is NCCL's model of its double binary tree (src/graph/tuning.cc): 2 (log2(nodes) latencies
  between nodes + devices per node - 1 within), twice the bytes at 0.92 of the ring's bandwidth.
- weak scaling: every device has the same samples. Strong scaling: all devices share a fixed global batch; what exceeds
  a device's usual batch is accumulated before the last micro-batch, whose backward communicates.

Ranks that do the same are folded: DDP's plan (the builder "ddp") and Offbeat's (PACE's schedule) are made on one node
with the all-reduce of the whole cluster. Offbeat's is then lowered for rank 0 of the whole cluster and replayed there,
which must give the same step (`simulation_seconds` is what that takes). Plans with servers or sharded updates are not
considered. `full_search` runs the whole optimiser, with the same limit to all-reduce, to show whether it finds more
than PACE's schedule. Efficiency is the step's compute over the step; memory is not checked.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerator_times import AcceleratorTimes, on_device, roofline_seconds

from offbeat import zoo
from offbeat.cluster import ClusterSpec, Node
from offbeat.cost.measured import CollectiveFit, Costs
from offbeat.cost.tables import closed_form
from offbeat.graph import ModelGraph, Operator
from offbeat.plan import lower
from offbeat.search.optimize import predict, search
from offbeat.search.pace.strategy import pace_strategy
from offbeat.simulate import simulate
from offbeat.strategy import Strategy, build_strategy

DEVICES = (8, 80, 1_000, 10_000)
CLUSTERS = ("h100", "a10g")


@dataclass(frozen=True)
class Job:
    """How a model is trained here."""

    samples: int
    """On each device with weak scaling, and at the most in one micro-batch with strong scaling."""
    global_samples: int
    """Of one step with strong scaling; from 10,000 to 80,000, as in published large-batch runs."""
    family: str
    """The model of `results/gpu_overhead.json` that stands for it."""


JOBS = {
    "resnet50": Job(64, 80_000, "resnet50"),
    "bert_large": Job(32, 60_000, "bert_base"),
    "gpt2_xl": Job(4, 10_000, "gpt2"),
}
ACCELERATOR = Path(__file__).parent / "results" / "accelerator.json"
STEPS = Path(__file__).parent / "results" / "gpu_overhead.json"
COMPARED_BYTES = 25 * 2**20
TREE_SHARE_OF_RING = 0.92
PRICED_OUT = CollectiveFit(1e3, 0.0, 0.0)
SEARCHED = ("resnet50", 10_000)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


class Compute:
    """Models and devices → the seconds of operators, from what was measured on an accelerator."""

    def __init__(self) -> None:
        self.times = AcceleratorTimes.load(ACCELERATOR) if ACCELERATOR.exists() else None
        self.steps = json.loads(STEPS.read_text())
        self.sources: dict[str, dict[str, Any]] = {}

    def timed(self, model: str, graph: ModelGraph, node: Node) -> ModelGraph:
        """The graph with the seconds of its operators on a node's device."""
        if self.times is not None and (model, "bf16") in self.times.steps:
            self.sources[model] = {"file": ACCELERATOR.name, "device": self.times.device}
            return on_device(graph, node, self.times.step(model, "bf16"))
        if model not in self.sources:
            factor = self._times_roofline(JOBS[model].family)
            self.sources[model] = {"file": STEPS.name, "device": self.steps["device"], "times_roofline": factor}
        factor = self.sources[model]["times_roofline"]
        return graph.with_seconds({op.name: roofline_seconds([op], node) * factor for op in computing(graph)})

    def _times_roofline(self, family: str) -> float:
        """Measured seconds of forward and backward over their roofline; the update keeps its own estimate."""
        row = next(row for row in self.steps["rows"] if row["model"] == family)
        node = ClusterSpec.homogeneous(nodes=1, device=self.steps["device"].split()[-1]).nodes[0]
        graph = zoo.capture(family, batch=row["batch"])
        updates = roofline_seconds(graph.phase("optimizer"), node)
        return (row["median_ms"]["plain"] / 1e3 - updates) / roofline_seconds(computing(graph), node)


def computing(graph: ModelGraph) -> list[Operator]:
    """Forward's and backward's operators."""
    return [op for op in graph.operators if op.phase != "optimizer"]


def all_reduce(cluster: ClusterSpec) -> tuple[str, CollectiveFit]:
    """The all-reduce of all devices of equal nodes: its algorithm and its cost."""
    ring = closed_form("all_reduce", tuple(range(cluster.world_size)), cluster)
    node, nodes = cluster.nodes[0], len(cluster.nodes)
    latency = 2 * (math.log2(nodes) * node.latency + (node.devices - 1) * node.intra_latency)
    ring_bandwidth = cluster.ring_bandwidth(range(cluster.world_size))
    tree = type(ring)(latency, 2 / (TREE_SHARE_OF_RING * ring_bandwidth))
    name, link = min((("ring", ring), ("tree", tree)), key=lambda each: each[1].seconds(COMPARED_BYTES))
    half = link.latency_seconds / 2
    return name, CollectiveFit(half, half, link.seconds_per_byte)


def folded_costs(fit: CollectiveFit, ranks: int) -> Costs:
    """On one node that stands for all: everybody's all-reduce, and nothing but all-reduce."""
    others = ("reduce", "broadcast", "gather", "send", "reduce_scatter", "all_gather", "all_to_all")
    priced_out = {(kind, count): PRICED_OUT for kind in others for count in range(2, ranks + 1)}
    return Costs(collectives={("all_reduce", ranks): fit, **priced_out})


@dataclass(frozen=True)
class Scene:
    """One cluster at one size."""

    cluster: ClusterSpec
    node: ClusterSpec
    """One of its nodes."""
    algorithm: str
    costs: Costs
    folded: Costs

    @classmethod
    def make(cls, preset: str, devices: int) -> "Scene":
        node = ClusterSpec.preset(preset, nodes=1)
        cluster = ClusterSpec.preset(preset, nodes=devices // node.world_size)
        algorithm, fit = all_reduce(cluster)
        costs = Costs(collectives={("all_reduce", cluster.world_size): fit})
        return cls(cluster, node, algorithm, costs, folded_costs(fit, node.world_size))

    def folded_seconds(self, graph: ModelGraph, strategy: Strategy) -> float:
        """The step, on one node that stands for all."""
        return predict(graph, self.node, self.folded, strategy)

    def replay(self, graph: ModelGraph, strategy: Strategy) -> float:
        """The step, from the plan of the whole cluster."""
        plan = lower(graph, self.cluster, strategy.model_copy(update={"cluster": ""}), rank=0)
        return simulate(plan, self.costs, memory=False).iteration_time


def measure(graph: ModelGraph, scene: Scene, samples: float, usual: int) -> dict[str, Any]:
    """One model, whose graph has the seconds of the usual samples on a device, at one size."""
    last = min(samples, usual)
    seconds = {op.name: op.seconds or 0.0 for op in computing(graph)}
    shrunk = graph.with_seconds({name: value * last / usual for name, value in seconds.items()})
    earlier = sum(seconds.values()) * (samples - last) / usual
    alone = scene.node.subset(1)
    compute = predict(shrunk, alone, Costs(), build_strategy("ddp", shrunk, alone)) + earlier
    ddp = scene.folded_seconds(shrunk, build_strategy("ddp", shrunk, scene.node))
    search_took, best = timed(lambda: pace_strategy(shrunk, scene.node, scene.folded))
    offbeat = scene.folded_seconds(shrunk, best)
    replay_took, replayed = timed(lambda: scene.replay(shrunk, best))
    if not math.isclose(replayed, offbeat, rel_tol=1e-9):
        raise SystemExit(f"{scene.cluster.name}: a step of {replayed} s, on one node that stands for all {offbeat} s")
    return {
        "samples_per_device": samples,
        "all_reduce": scene.algorithm,
        "compute_seconds": compute,
        "ddp_seconds": ddp + earlier,
        "offbeat_seconds": offbeat + earlier,
        "speedup": (ddp + earlier) / (offbeat + earlier),
        "ddp_efficiency": compute / (ddp + earlier),
        "offbeat_efficiency": compute / (offbeat + earlier),
        "search_seconds": search_took,
        "simulation_seconds": replay_took,
    }


def scale(model: str, graph: ModelGraph, preset: str, scenes: dict[int, Scene]) -> list[dict[str, Any]]:
    """All sizes of one model on one kind of cluster."""
    job = JOBS[model]
    rows = []
    for devices, scene in scenes.items():
        for scaling, samples in (("weak", job.samples), ("strong", job.global_samples / devices)):
            row = measure(graph, scene, samples, job.samples)
            rows.append({"cluster": preset, "model": model, "scaling": scaling, "devices": devices, **row})
    return rows


def full_search(graph: ModelGraph, preset: str, scene: Scene) -> dict[str, Any]:
    """What the whole optimiser finds beyond PACE's schedule, and how long that takes."""
    model, devices = SEARCHED
    took, best = timed(lambda: search(graph, scene.node, costs=scene.folded, rounds=12))
    pace = scene.folded_seconds(graph, pace_strategy(graph, scene.node, scene.folded))
    return {
        "cluster": preset,
        "model": model,
        "devices": devices,
        "seconds": took,
        "decisions": list(best.decisions),
        "gain_over_pace": pace / best.seconds - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", choices=JOBS, action="append")
    parser.add_argument("--cluster", choices=CLUSTERS, action="append")
    options = parser.parse_args()
    models = list(options.model or JOBS)
    compute = Compute()
    presets = options.cluster or CLUSTERS
    scenes = {preset: {devices: Scene.make(preset, devices) for devices in DEVICES} for preset in presets}
    rows, searches = [], []
    for model in models:
        graph = zoo.capture(model, batch=JOBS[model].samples)
        for preset in presets:
            on_preset = compute.timed(model, graph, ClusterSpec.preset(preset, nodes=1).nodes[0])
            rows += scale(model, on_preset, preset, scenes[preset])
            if model == SEARCHED[0]:
                searches.append(full_search(on_preset, preset, scenes[preset][SEARCHED[1]]))
    result = {
        "benchmark": "scaling",
        "machine": platform.machine(),
        "compute": compute.sources,
        "jobs": {model: vars(JOBS[model]) for model in models},
        "rows": rows,
        "full_search": searches,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        print(
            f"{row['cluster']:<6}{row['model']:<12}{row['scaling']:<8}{row['devices']:>6} devices, {row['all_reduce']}"
            f"  compute {row['compute_seconds'] * 1e3:8.1f} ms  DDP {row['ddp_efficiency']:.0%}  "
            f"Offbeat {row['offbeat_efficiency']:.0%}  {row['speedup']:.2f}x  search {row['search_seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
