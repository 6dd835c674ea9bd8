"""How long the optimiser takes on dPRO's models, and what each of its speed-ups is worth → JSON.

    python benchmarks/search_speed.py --json

VGG16, ResNet50, InceptionV3 and BERT-base at full scale on 16 workers with a V100 each, 10 Gbit/s. `optimize` is the
verb with its defaults, warm: kernels are compiled and kept on disk. `ablation` switches the speed-ups of dPRO's section
5.3 on one after another, as its table 5 does: nothing, + coarsened view, + partial replay, + symmetry. Without partial
replay every trial is lowered and replayed, so those runs end at the limit; `predicted_seconds` is what they had found.
`evaluation` is the time to judge one candidate in each way. Processor seconds stand beside wall seconds because other
processes on the machine make the latter longer.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.search.arrange import arrangement_of
from offbeat.search.optimize import predict, search
from offbeat.simulate import simulate
from offbeat.simulate.fast.arrays import arrays_of
from offbeat.simulate.fast.gradients import gradients_of
from offbeat.strategy import build_strategy

MODELS = ("vgg16", "resnet50", "inception_v3", "bert_base")
PAPER_HOURS = {  # dPRO, table 5: strawman, + coarsened view, + partial replay, + symmetry
    "resnet50": [14.60, 5.35, 0.91, 0.29],
    "vgg16": [11.97, 3.74, 0.71, 0.04],
    "inception_v3": [16.75, 6.13, 1.04, 0.47],
    "bert_base": [24.0, 22.01, 3.25, 0.49],
}
STEPS = {
    "strawman": {"coarsen": False, "partial_replay": False, "symmetry": False},
    "+ coarsened view": {"coarsen": True, "partial_replay": False, "symmetry": False},
    "+ partial replay": {"coarsen": True, "partial_replay": True, "symmetry": False},
    "+ symmetry": {"coarsen": True, "partial_replay": True, "symmetry": True},
}


def timed(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    return {
        "wall_seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
    }, result


def per_call(call: Callable[[], Any], repeats: int) -> float:
    """Processor seconds of one call, after one to warm up."""
    call()
    begin = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - begin) / repeats


def evaluations(graph: ModelGraph, cluster: ClusterSpec) -> dict[str, float]:
    """Processor seconds to judge one candidate: PACE-like groups, everything else as in the search."""
    strategy = build_strategy("ddp", graph, cluster)
    plan = lower(graph, cluster, strategy)
    arrays, gradients = arrays_of(plan, Costs()), gradients_of(plan, Costs())
    assert arrays is not None
    assert gradients is not None
    present = arrangement_of(gradients, strategy)
    return {
        "kernel": per_call(lambda: gradients.seconds(present), 200),
        "oracle": per_call(arrays.seconds, 200),
        "lower_and_oracle": per_call(lambda: predict(graph, cluster, Costs(), strategy), 3),
        "lower_and_replay": per_call(lambda: simulate(lower(graph, cluster, strategy), Costs(), memory=False), 3),
        "lower_and_replay_all_ranks": per_call(
            lambda: simulate(lower(graph, cluster, strategy), Costs(), memory=False, fold=False), 1
        ),
    }


def measure(name: str, cluster: ClusterSpec, limit: float, ablate: bool) -> dict[str, Any]:
    captured, graph = timed(lambda: zoo.capture(name))
    spent, best = timed(lambda: search(graph, cluster, time_limit=limit))
    ddp = predict(graph, cluster, Costs(), build_strategy("ddp", graph, cluster))
    row: dict[str, Any] = {
        "operators": len(graph.operators),
        "tensors": len(graph.gradient_order),
        "capture_seconds": captured["wall_seconds"],
        "optimize": {**spent, "predicted_seconds": best.seconds, "decisions": list(best.decisions)},
        "ddp_seconds": ddp,
        "gain_over_ddp": ddp / best.seconds - 1,
        "evaluation_seconds": evaluations(graph, cluster),
        "paper_hours": PAPER_HOURS[name],
    }
    if ablate:
        row["ablation"] = {}
        for step, switches in STEPS.items():
            spent, found = timed(lambda switches=switches: search(graph, cluster, time_limit=limit, **switches))
            ended = spent["wall_seconds"] >= limit
            row["ablation"][step] = {**spent, "reached_limit": ended, "predicted_seconds": found.seconds}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each search")
    parser.add_argument("--no-ablation", action="store_true")
    options = parser.parse_args()
    cluster = ClusterSpec.homogeneous(
        nodes=16, devices_per_node=1, bandwidth="10Gbit/s", latency="50us", memory="32GiB", device="V100-32GB"
    )
    # Loads the compiled kernels, as a process that has searched before has them.
    search(zoo.capture("mlp", scale=0.1), cluster, rounds=1)
    models = {name: measure(name, cluster, options.limit, not options.no_ablation) for name in options.models}
    result = {
        "benchmark": "search_speed",
        "machine": platform.machine(),
        "workers": cluster.world_size,
        "limit_seconds": options.limit,
        "models": models,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'model':<14}{'search s':>9}{'CPU s':>7}{'DDP ms':>9}{'best ms':>9}{'gain':>8}")
    for name, row in models.items():
        took = row["optimize"]
        print(
            f"{name:<14}{took['wall_seconds']:>9.1f}{took['processor_seconds']:>7.1f}{row['ddp_seconds'] * 1e3:>9.1f}"
            f"{took['predicted_seconds'] * 1e3:>9.1f}{row['gain_over_ddp']:>8.1%}"
        )


if __name__ == "__main__":
    main()
