"""What the foundation costs → JSON: capture, lowering, and an all-reduce on emulated hosts.

    python benchmarks/foundation.py --json                  everything
    python benchmarks/foundation.py --json --only lowering  one part

Each part says what it measured and on which machine. Other processes on the machine make every number worse.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from offbeat import units
from offbeat.emulate import Emulation

MODEL = "bert_large"
NODES, DEVICES_PER_NODE = 16, 8
HOSTS, BANDWIDTH, ALL_REDUCE_BYTES, REPEATS = 4, "1Gbit/s", 16 * 2**20, 10
TIMEOUT_SECONDS = 300.0


def capture() -> dict[str, Any]:
    """Seconds and peak memory of capturing the model at full size, in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--capture-here"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _capture_here() -> None:
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begin = time.perf_counter()
    graph = offbeat.zoo.capture(MODEL)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "model": MODEL,
                "parameters": graph.parameter_count,
                "operators": len(graph.operators),
                "seconds": seconds,
                "peak_rss_bytes": peak,
                "rss_before_bytes": imported,
            }
        )
    )


def lowering() -> dict[str, Any]:
    """Seconds to build each builder's strategy, and to lower one rank's part of it."""
    graph = offbeat.zoo.capture(MODEL)
    cluster = offbeat.ClusterSpec.homogeneous(nodes=NODES, devices_per_node=DEVICES_PER_NODE)
    last = cluster.world_size - 1
    seconds = {}
    for name in offbeat.builders():
        begin = time.perf_counter()
        strategy = offbeat.build_strategy(name, graph, cluster)
        built = time.perf_counter()
        plan = offbeat.lower(graph, cluster, strategy, rank=last)
        lowered = time.perf_counter()
        seconds[name] = {
            "build_seconds": built - begin,
            "lower_seconds": lowered - built,
            "messages": len(plan.messages),
            "tasks": len(plan.tasks),
        }
    slowest = max(seconds, key=lambda name: seconds[name]["lower_seconds"])
    return {"model": MODEL, "ranks": cluster.world_size, "rank": last, "slowest": slowest, "builders": seconds}


def all_reduce() -> dict[str, Any]:
    """Share of the link that an all-reduce between emulated hosts reaches, as the slowest rank sees it."""
    with Emulation(HOSTS, BANDWIDTH) as emulation:
        by_rank = emulation.run_function("foundation:time_all_reduce", timeout=TIMEOUT_SECONDS)
        kind = emulation.kind
    seconds = [max(times) for times in zip(*by_rank, strict=True)]
    # A ring sends 2(n-1)/n of the tensor over each link; headers are not counted.
    ideal = 2 * (HOSTS - 1) / HOSTS * ALL_REDUCE_BYTES / units.parse_bandwidth(BANDWIDTH)
    return {
        "hosts": HOSTS,
        "emulation": kind,
        "bandwidth": BANDWIDTH,
        "tensor_bytes": ALL_REDUCE_BYTES,
        "ideal_seconds": ideal,
        "seconds": seconds,
        "median_link_share": ideal / statistics.median(seconds),
        "best_link_share": ideal / min(seconds),
    }


def time_all_reduce() -> list[float]:
    """Runs on every rank: seconds of each all-reduce, from the moment at which all ranks are ready."""
    dist.init_process_group("gloo")
    tensor = torch.ones(ALL_REDUCE_BYTES // 4)
    for _ in range(3):
        dist.all_reduce(tensor)
    seconds = []
    for _ in range(REPEATS):
        tensor.fill_(1.0)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
        assert tensor[0].item() == tensor[-1].item() == dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"capture": capture, "lowering": lowering, "all_reduce": all_reduce}
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of indented JSON")
    parser.add_argument("--only", choices=parts, action="append", help="only this part; may be repeated")
    parser.add_argument("--capture-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.capture_here:
        _capture_here()
        return
    result: dict[str, Any] = {"machine": machine()}
    for name in options.only or parts:
        result[name] = parts[name]()
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
