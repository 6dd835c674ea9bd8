"""How long the frontier's search takes at 16 devices, and how that grows → JSON.

    python benchmarks/frontier_speed.py --json [--models rnn,transformer] [--growth]

Each model of the zoo is captured once; the search is then timed from the captured graph to the strategies of all
points, after one search of another model has loaded the compiled kernels. `cpu_seconds` is what all threads spent, and
does not depend on what else the machine does. The paper's times (48 cores) stand beside it. FT-LDP (`ldp`) and
FT-Elimination (`elimination`) are compared on the first units of the same model, where the latter ends in time.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

from frontier_reference import eliminate_only

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.search.frontier.costs import Prices
from offbeat.search.frontier.find import find_frontier
from offbeat.search.frontier.track import track
from offbeat.search.frontier.units import group
from offbeat.sharding.rescheduling import FineMesh

DEVICES = 16
# Name, zoo model, batch, target seconds, the paper's seconds (table 3).
MODELS: dict[str, tuple[str, int, float, float | None]] = {
    "rnn": ("seq2seq", 256, 1.0, 0.28),
    "transformer": ("transformer", 256, 15.0, 201.0),
    "wide_resnet": ("wide_resnet", 256, 30.0, 1292.0),
    "bert_large": ("bert_large", 64, 30.0, None),
}
COMPARED_UNITS = 4
COMPARED_CONFIGURATIONS = 12


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall and CPU seconds of a call, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def measure(name: str, cluster: ClusterSpec) -> dict[str, Any]:
    """One model's search."""
    model, batch, target, paper = MODELS[name]
    capture_seconds, _, graph = timed(lambda: zoo.capture(model, batch=batch))
    wall, cpu, frontier = timed(lambda: find_frontier(graph, cluster, devices=DEVICES, engines=("split",)))
    prices = frontier.prices
    assert prices is not None
    return {
        "model": name,
        "forward_operators": len(graph.phase("forward")),
        "units": len(prices.configs),
        "configurations": sum(map(len, prices.configs)),
        "edges": len(prices.flow_costs),
        "points": len(frontier.points),
        "capture_seconds": capture_seconds,
        "search_seconds": wall,
        "cpu_seconds": cpu,
        "target_seconds": target,
        "paper_seconds": paper,
        "met": wall <= target,
        "met_by_cpu_time": cpu <= target,
        "least_memory_bytes": frontier.points[0].memory_bytes,
        "least_time_seconds": frontier.points[-1].time_seconds,
        "compared": compare(graph, cluster),
    }


def compare(graph: Any, cluster: ClusterSpec) -> dict[str, float]:
    """FT-LDP and FT-Elimination on the first units of a model, with fewer configurations."""
    prices = Prices(graph, FineMesh(cluster.subset(DEVICES)), group(graph), COMPARED_CONFIGURATIONS)
    ops, edges = prices.tables(False)
    ops = ops[:COMPARED_UNITS]
    edges = {pair: costs for pair, costs in edges.items() if max(pair) < COMPARED_UNITS}
    ldp, _, exact = timed(lambda: track(ops, edges, cap=0))
    elimination, _, reference = timed(lambda: eliminate_only(ops, edges))
    assert len(exact.points) == len(reference.points)
    return {"units": COMPARED_UNITS, "ldp_seconds": ldp, "elimination_seconds": elimination}


def growth(cluster: ClusterSpec) -> list[dict[str, float]]:
    """Search time of BERT by layers and by devices."""
    rows = []
    for model, devices in (("bert_3l", 16), ("bert_6l", 16), ("bert_base", 16), ("bert_3l", 8), ("bert_3l", 4)):
        graph = zoo.capture(model, batch=64)
        wall, cpu, frontier = timed(
            lambda graph=graph, devices=devices: find_frontier(graph, cluster, devices=devices, engines=("split",))
        )
        assert frontier.prices is not None
        units = len(frontier.prices.configs)
        rows.append({"model": model, "units": units, "devices": devices, "search_seconds": wall, "cpu_seconds": cpu})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--models", default=",".join(MODELS), help="names separated by commas")
    parser.add_argument("--growth", action="store_true", help="also vary layers and devices")
    arguments = parser.parse_args()
    cluster = ClusterSpec.preset("tensoropt")
    find_frontier(zoo.capture("bert_3l", scale=0.1, batch=16), cluster, engines=("split",))
    rows = [measure(name, cluster) for name in arguments.models.split(",")]
    report = {"python": platform.python_version(), "devices": DEVICES, "models": rows}
    if arguments.growth:
        report["growth"] = growth(cluster)
    if arguments.json:
        print(json.dumps(report))
        return
    for row in rows:
        print(f"{row['model']}: {row['search_seconds']:.1f} s ({row['cpu_seconds']:.1f} s of CPU), "
              f"target {row['target_seconds']} s, {row['units']} units, {row['points']} points")  # fmt: skip


if __name__ == "__main__":
    main()
