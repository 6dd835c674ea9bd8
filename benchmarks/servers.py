"""Servers that hold no replica against all-reduce, on hosts with unequal links.

    python benchmarks/servers.py --json [--model vgg ...] [--steps 16]

Four workers with links of 0.5, 0.5, 1 and 1 Gbit/s train paced models; two more hosts with 1 Gbit/s and no accelerator
may serve them. Every strategy is a job of its own. `gain` is the step of the best all-reduce builder over that of the
best one with servers, from medians of rank 0; `predicted_ms` is replay's step, from the cluster's links alone.

`optimize` is what `offbeat.optimize` finds for the cluster by replay, without a trial. `transfer` carries that strategy
over to a cluster whose slow links and servers are others, where it runs beside the best all-reduce builder.

A whole run takes a quarter of an hour on a machine that does nothing else.

`idle_cores` and `timeouts` (TCP's, of all hosts, per step) tell whether the machine or lost packets held a job up.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from step_time import machine

GBIT = (0.5, 0.5, 1.0, 1.0, 1.0, 1.0)
SERVERS = (4, 5)
OTHER_GBIT = (1.0, 0.5, 1.0, 0.5, 0.75, 1.0)
"""Of the cluster that a strategy is carried over to."""
MODELS = {
    # A zoo name and options, and the seconds of paced compute.
    "vgg": ("vgg16", {"scale": 0.25, "batch": 8}, 0.3),
    "bert": ("bert_base", {"scale": 0.25, "batch": 1}, 0.2),
    # The same on accelerators that are twice as fast, so that the network rules as it does for vgg.
    "bert_fast": ("bert_base", {"scale": 0.25, "batch": 1}, 0.1),
}
ALL_REDUCE = ("all_reduce", "ddp", "horovod", "overlap", "partitioned_all_reduce")
SERVED = ("byteps", "partitioned_ps", "fast_servers", "optimize")
WARM_UP_STEPS = 9
"""A job has rebuilt its order twice by then, from the times it measured."""
SEARCH_SECONDS = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--builder", choices=ALL_REDUCE + SERVED, action="append")
    parser.add_argument("--steps", type=int, default=16)
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

    graph = timed_graph(model)
    with tempfile.TemporaryDirectory() as folder, Emulation(len(GBIT), bandwidth=None) as emulation:
        jobs = {builder: run_job(emulation, folder, model, graph, builder, GBIT, steps) for builder in wanted}
        best = {kind: fastest(jobs, names) for kind, names in (("all_reduce", ALL_REDUCE), ("servers", SERVED))}
        row = {"model": model, "jobs": jobs, "best": best, "gain": gain(jobs, *best.values())}
        around = best["all_reduce"]
        if "optimize" in jobs:
            row["searched_gain"] = gain(jobs, around, "optimize")
        if "optimize" in jobs and around:
            moved = {
                name: run_job(emulation, folder, model, graph, name, OTHER_GBIT, steps) for name in (around, "transfer")
            }
            row["transfer"] = {"gbit": OTHER_GBIT, "jobs": moved, "gain": gain(moved, around, "transfer")}
    return row


def fastest(jobs: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return min((name for name in jobs if name in names), key=lambda name: jobs[name]["median_ms"], default=None)


def gain(jobs: dict[str, Any], around: str | None, served: str | None) -> float | None:
    if around is None or served is None:
        return None
    return round(jobs[around]["median_ms"] / jobs[served]["median_ms"], 3)


def run_job(
    emulation: Any, folder: str, model: str, graph: Any, name: str, gbit: tuple[float, ...], steps: int
) -> dict[str, Any]:
    """One job's median step, replay's prediction of it, and what the machine did meanwhile."""
    import offbeat
    from offbeat.runtime.comm import known_costs

    cluster, costs = cluster_of(gbit), known_costs("gloo", 4)
    path = Path(folder, "searched.json")
    if name == "optimize":
        strategy = offbeat.optimize(graph, cluster, time_limit=SEARCH_SECONDS, costs=costs)
        strategy.save(path)
    elif name == "transfer":
        strategy = offbeat.transfer(offbeat.Strategy.load(path), graph, cluster)
    else:
        strategy = offbeat.build_strategy(name, graph, cluster)
    predicted = offbeat.simulate(offbeat.lower(graph, cluster, strategy), costs).iteration_time
    ran = Path(folder, "strategy.json")
    strategy.model_copy(update={"graph": "", "cluster": ""}).save(ran)
    for host, each in enumerate(gbit):
        emulation.set_bandwidth(host, each * 1e9 / 8)
    case = json.dumps({"model": model, "strategy": str(ran), "gbit": gbit, "steps": steps})
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", case]
    ended = emulation.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    told = [json.loads(rank.stdout.splitlines()[-1]) for rank in ended[:4]]
    job = {
        "median_ms": round(statistics.median(told[0]["seconds"]) * 1e3, 2),
        "predicted_ms": round(predicted * 1e3, 2),
        "idle_cores": round(told[0]["idle_cores"], 2),
        "timeouts": round(sum(each["timeouts"] for each in told) / steps, 2),
    }
    print(f"{model:<9} {name:<23} {job}", file=sys.stderr, flush=True)
    return job


def cluster_of(gbit: tuple[float, ...]) -> Any:
    import offbeat

    return offbeat.ClusterSpec(
        nodes=[
            {"bandwidth": each * 1e9 / 8, "device": "cpu", "role": "server" if host in SERVERS else "worker"}
            for host, each in enumerate(gbit)
        ]
    )


def timed_graph(model: str) -> Any:
    """The model's graph with the seconds that the paced model takes, shared out by FLOPs as there."""
    from offbeat import zoo

    name, options, seconds = MODELS[model]
    graph = zoo.capture(name, **options)
    times: dict[str, float] = {}
    for phase, share in (("forward", 1 / 3), ("backward", 2 / 3)):
        flops = {operator.name: operator.flops for operator in graph.phase(phase)}
        times |= {name: seconds * share * each / sum(flops.values()) for name, each in flops.items()}
    # A paced layer has no factors of its gradient to send.
    variables = tuple(replace(variable, factor_rows=0) for variable in graph.variables)
    return replace(graph.with_seconds(times), variables=variables)


def work(case: dict[str, Any]) -> None:
    """What one rank does; distribute() does not return on the servers."""
    import torch
    from paced import PacedModel

    import offbeat

    torch.set_num_threads(1)
    *_, seconds = MODELS[case["model"]]
    torch.manual_seed(0)
    graph = timed_graph(case["model"])
    model = PacedModel.from_graph(graph, seconds / 3, seconds * 2 / 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    cluster = cluster_of(case["gbit"])
    offbeat.distribute(model, optimizer, case["strategy"], cluster=cluster, quiet=True)
    taken = []
    for step in range(WARM_UP_STEPS + case["steps"]):
        if step == WARM_UP_STEPS:
            idle, timeouts, start = idle_seconds(), tcp_timeouts(), time.perf_counter()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(1)).mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    idle_cores = (idle_seconds() - idle) / (time.perf_counter() - start)
    told = {"seconds": taken[WARM_UP_STEPS:], "idle_cores": idle_cores, "timeouts": tcp_timeouts() - timeouts}
    print(json.dumps(told), flush=True)


def idle_seconds() -> float:
    """Seconds that all cores of this machine have been idle since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


def tcp_timeouts() -> int:
    """How often a connection of this host has waited in vain for an acknowledgement."""
    names, values = (line.split() for line in Path("/proc/net/netstat").read_text().splitlines()[:2])
    return int(values[names.index("TCPTimeouts")])


if __name__ == "__main__":
    main()
