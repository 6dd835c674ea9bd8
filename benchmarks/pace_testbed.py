"""PACE's testbed by simulation: its speed-up over WFBP, Horovod and TicTac beside the paper's → JSON.

    python benchmarks/pace_testbed.py --json

12 workers with one GTX 1080 Ti each on 10 Gbit/s (preset pace_10g), the four models of the paper's table II with its
batch sizes (section VI-B). Graphs are captured, not run. Operator times are the roofline's, times one factor that makes
ResNet-50 as fast on one worker as it was measured on this GPU; `single_worker_samples_per_second` shows what that
gives for each model.

Each baseline is replayed as its builder makes it (`step`: WFBP and Horovod wait for everything in the optimizer's
step, as in PyTorch) and with updates that reach into the next forward (`engine`: MXNet's dependency engine, which the
paper's testbed ran). TicTac always does the latter. The paper's figures are ranges over the four models.
"""

import argparse
import json
from typing import Any

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.search.optimize import predict, search
from offbeat.search.pace.strategy import pace_strategy
from offbeat.strategy import Strategy, build_strategy

# PACE, section VI-B: 64 and 32 images, 4096 and 2048 tokens. The zoo's sentences have 32 and 64 tokens.
MODELS = {"vgg16": 64, "resnet50": 32, "seq2seq": 128, "transformer": 32}
BASELINES = ("wfbp", "horovod", "tictac")
PAPER = {"wfbp": [0.20, 0.36], "horovod": [0.03, 0.32], "tictac": [0.13, 0.21]}
RESNET50_IMAGES_PER_SECOND = 209.0
SOURCES = {
    "paper": "PACE, section VI-C: speed-up at 10 Gbit/s over the four models",
    "compute": "ResNet-50 on a GTX 1080 Ti, FP32: 209 images/s (Lambda, RTX 2080 Ti Deep Learning Benchmarks with "
    "TensorFlow, 2019); its ratio to the roofline is applied to every model",
    "network": "preset pace_10g: ring all-reduce, 10 Gbit/s, the preset's default latency of Ethernet",
}


def roofline_seconds(graph: ModelGraph, cluster: ClusterSpec) -> dict[str, float]:
    node = cluster.device_of(0)
    return {op.name: op.estimate(node.peak_flops, node.memory_bandwidth) for op in graph.operators}


def scaled(graph: ModelGraph, cluster: ClusterSpec, factor: float) -> ModelGraph:
    """The graph with roofline times of forward and backward times a factor."""
    seconds = roofline_seconds(graph, cluster)
    kept = {op.name for op in graph.phase("optimizer")}
    return graph.with_seconds({name: value * (1 if name in kept else factor) for name, value in seconds.items()})


def calibrated_factor(graph: ModelGraph, cluster: ClusterSpec, samples: int) -> float:
    total = sum(roofline_seconds(graph, cluster).values())
    updates = sum(roofline_seconds(graph, cluster)[op.name] for op in graph.phase("optimizer"))
    return (samples / RESNET50_IMAGES_PER_SECOND - updates) / (total - updates)


def deferred(strategy: Strategy) -> Strategy:
    return strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update={"mode": "deferred"})})


def measure(graph: ModelGraph, cluster: ClusterSpec, batch: int) -> dict[str, Any]:
    pace = predict(graph, cluster, Costs(), pace_strategy(graph, cluster))
    compute = sum(op.seconds or 0.0 for op in graph.operators)
    speedups: dict[str, Any] = {}
    for name in BASELINES:
        strategy = build_strategy(name, graph, cluster)
        speedups[name] = {
            "step": predict(graph, cluster, Costs(), strategy) / pace - 1,
            "engine": predict(graph, cluster, Costs(), deferred(strategy)) / pace - 1,
            "paper": PAPER[name],
        }
    best = search(graph, cluster, rounds=12)
    return {
        "tensors": len(graph.gradient_order),
        "parameters": graph.parameter_count,
        "batch": batch,
        "compute_seconds": compute,
        "single_worker_samples_per_second": batch / compute,
        "pace_seconds": pace,
        "pace_speedup": speedups,
        "optimize_seconds": best.seconds,
        "optimize_over_pace": pace / best.seconds - 1,
        "optimize_decisions": list(best.decisions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    cluster = ClusterSpec.preset("pace_10g")
    graphs = {name: zoo.capture(name, batch=MODELS[name]) for name in dict.fromkeys(("resnet50", *options.models))}
    factor = calibrated_factor(graphs["resnet50"], cluster, MODELS["resnet50"])
    models = {name: measure(scaled(graphs[name], cluster, factor), cluster, MODELS[name]) for name in options.models}
    result = {
        "benchmark": "pace_testbed",
        "cluster": "pace_10g",
        "workers": cluster.world_size,
        "compute_factor": factor,
        "sources": SOURCES,
        "models": models,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print("speed-up over WFBP, Horovod and TicTac, with updates that reach into the next forward")
    print(f"{'model':<13}{'compute ms':>11}{'PACE ms':>9}{'optimize ms':>13}  speed-ups")
    for name, row in models.items():
        gains = ", ".join(f"{row['pace_speedup'][each]['engine']:+.1%}" for each in BASELINES)
        print(
            f"{name:<13}{row['compute_seconds'] * 1e3:>11.1f}{row['pace_seconds'] * 1e3:>9.1f}"
            f"{row['optimize_seconds'] * 1e3:>13.1f}  {gains}"
        )


if __name__ == "__main__":
    main()
