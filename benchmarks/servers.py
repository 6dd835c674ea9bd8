"""Servers that hold no replica against all-reduce, on hosts with unequal links.

    python benchmarks/servers.py --json [--model vgg ...] [--steps 20]

Four workers with links of 0.5, 0.5, 1 and 1 Gbit/s train paced models; two more hosts with 1 Gbit/s and no accelerator
may keep parameters for them. Every strategy is a job of its own. `gain` is the step of the best all-reduce builder over
that of the best one with servers, from medians of rank 0.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from step_time import machine

GBIT = (0.5, 0.5, 1.0, 1.0, 1.0, 1.0)
SERVERS = (4, 5)
MODELS = {
    # A zoo name and options, and the seconds of paced compute.
    "vgg": ("vgg16", {"scale": 0.25, "batch": 8}, 0.3),
    "bert": ("bert_base", {"scale": 0.25, "batch": 1}, 0.2),
}
ALL_REDUCE = ("all_reduce", "ddp", "horovod", "overlap", "partitioned_all_reduce")
SERVED = ("byteps", "partitioned_ps", "fast_servers")
WARM_UP_STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--builder", choices=ALL_REDUCE + SERVED, action="append")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    wanted = options.builder or ALL_REDUCE + SERVED
    rows = [run_model(model, wanted, options.steps) for model in options.model or MODELS]
    result = {"benchmark": "servers", "machine": machine(), "gbit": GBIT, "servers": SERVERS, "rows": rows}
    print(json.dumps(result, indent=1) if options.json else json.dumps({row["model"]: row["gain"] for row in rows}))


def run_model(model: str, wanted: tuple[str, ...], steps: int) -> dict[str, Any]:
    from offbeat.emulate import Emulation

    median_ms = {}
    with Emulation(len(GBIT), bandwidth=None) as emulation:
        for host, gbit in enumerate(GBIT):
            emulation.set_bandwidth(host, gbit * 1e9 / 8)
        for builder in wanted:
            case = json.dumps({"model": model, "builder": builder, "steps": steps})
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", case]
            ended = emulation.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=300)
            seconds = json.loads(ended[0].stdout.splitlines()[-1])["seconds"]
            median_ms[builder] = round(statistics.median(seconds) * 1e3, 2)
            print(f"{model:<5} {builder:<23} {median_ms[builder]:.0f} ms", file=sys.stderr, flush=True)
    best = {
        kind: min((name for name in median_ms if name in names), key=median_ms.__getitem__, default=None)
        for kind, names in (("all_reduce", ALL_REDUCE), ("servers", SERVED))
    }
    around, served = best["all_reduce"], best["servers"]
    gain = None if around is None or served is None else round(median_ms[around] / median_ms[served], 3)
    return {"model": model, "median_ms": median_ms, "best": best, "gain": gain}


def work(case: dict[str, Any]) -> None:
    """What one rank does; distribute() does not return on the servers."""
    import torch
    import torch.distributed as dist
    from paced import PacedModel

    import offbeat
    from offbeat import zoo

    torch.set_num_threads(1)
    name, options, seconds = MODELS[case["model"]]
    torch.manual_seed(0)
    graph = zoo.capture(name, **options)
    model = PacedModel.from_graph(graph, seconds / 3, seconds * 2 / 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    nodes = [
        {"bandwidth": gbit * 1e9 / 8, "device": "cpu", "role": "server" if host in SERVERS else "worker"}
        for host, gbit in enumerate(GBIT)
    ]
    offbeat.distribute(model, optimizer, case["builder"], cluster=offbeat.ClusterSpec(nodes=nodes), quiet=True)
    taken = []
    for _ in range(WARM_UP_STEPS + case["steps"]):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(1)).mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": taken[WARM_UP_STEPS:]}), flush=True)


if __name__ == "__main__":
    main()
