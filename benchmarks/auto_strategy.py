"""strategy="auto" against tuned DDP: models, links, hosts, real and paced compute, with and without clipping.

    python benchmarks/auto_strategy.py --json [--model vgg ...] [--regime balanced ...] [--hosts 2 ...]
                                       [--compute real ...] [--clip] [--lanes 4] [--seconds 500] [--output FILE]

In every case DDP runs with its default buckets, with growing ones (`bucket_cap_mb_list`) and with six explicit sizes,
of which the two quickest stay, all with `gradient_as_bucket_view=True`; and Offbeat starts cold with "auto" and trains
until it has settled (`settling_steps`). Then short blocks of all alternate, with those of compute alone and of the same
bytes all-reduced back to back, whose larger one is the bound. The link's bandwidth is chosen from the compute, so that
network divided by compute is 1.6, 1.0 or 0.4. `best_over_auto` is the best DDP's step over Offbeat's, from medians;
`decided` says whether their blocks lie apart, the fastest and the slowest of each left out: if not, the machine is too
noisy to tell. Paced compute takes its time without the processor, as an accelerator's does; real compute runs where
every host has a core. `--clip` clips by the global norm in each step, so that no update can be put off.

`--lanes` runs so many cases at a time, each on its share of the processor's cores. No case starts after `--seconds`;
`--output` gets the result after every case.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from step_time import REGIMES, alternate, machine, timed

MODELS = {
    # A zoo name and options, and the seconds of paced compute: parameters of 3 to 35 MiB in 24 to 190 tensors.
    "vgg": ("vgg16", {"scale": 0.25, "batch": 8}, 0.3),
    "resnet": ("resnet50", {"scale": 0.5, "batch": 4}, 0.2),
    "densenet": ("densenet121", {"scale": 0.5, "batch": 4}, 0.1),
    "transformer": ("transformer", {"scale": 0.4, "vocabulary": 500, "shared_embeddings": False}, 0.15),
    "gpt2": ("gpt2", {"scale": 0.25, "batch": 1}, 0.2),
    "seq2seq": ("seq2seq", {"scale": 0.3, "batch": 16}, 0.2),
}
BUCKETS_MIB = (0.5, 1, 2, 4, 8, 16)
BLOCKS, STEPS = 5, 6
TRIED_STEPS = 4
MOST_SETTLING_STEPS = 320
CLIPPED_NORM = 1.0
CASE = ("model", "regime", "hosts", "compute", "clip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--regime", choices=REGIMES, action="append")
    parser.add_argument("--hosts", type=int, choices=(2, 4), action="append")
    parser.add_argument("--compute", choices=("real", "paced"), action="append")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // options.lanes
    cases = [
        (model, regime, hosts, compute, options.clip)
        for compute in options.compute or ("real", "paced")
        for hosts in options.hosts or (2, 4)
        if compute == "paced" or hosts <= each
        for model in options.model or MODELS
        for regime in options.regime or REGIMES
    ]
    from offbeat.emulate.emulation import RankError

    waiting, rows, ends_at = iter(cases), [], time.monotonic() + options.seconds
    result: dict[str, Any] = {"benchmark": "auto_strategy", "machine": {**machine(), "cores": each}}

    def run_lane(lane: int) -> None:
        # Of this thread, and of what it starts.
        os.sched_setaffinity(0, cores[lane * each : (lane + 1) * each])
        while time.monotonic() < ends_at and (case := next(waiting, None)):
            try:
                rows.append(run_case(*case))
            except RankError as error:
                result.setdefault("failed", []).append({**dict(zip(CASE, case, strict=True)), "error": str(error)})
                print(f"{case}: {error}", file=sys.stderr, flush=True)
                continue
            print(describe(rows[-1]), file=sys.stderr, flush=True)
            done = sorted(rows, key=lambda row: cases.index(tuple(row[name] for name in CASE)))
            result.update(asked=len(cases), summary=summary(done), rows=done)
            if options.output:
                options.output.write_text(json.dumps(result, indent=1))

    with ThreadPoolExecutor(options.lanes) as pool:
        list(pool.map(run_lane, range(options.lanes)))
    print(json.dumps(result, indent=1) if options.json else json.dumps(result["summary"]))


def run_case(model: str, regime: str, hosts: int, compute: str, clip: bool) -> dict[str, Any]:
    from offbeat.emulate import Emulation

    case = dict(zip(CASE, (model, regime, hosts, compute, clip), strict=True))
    with Emulation(hosts, bandwidth=None) as cluster:
        alone = launch(cluster, {**case, "local": True})
        bandwidth = 2 * (hosts - 1) / hosts * alone["bytes"] / (REGIMES[regime] * alone["seconds"])
        for host in range(hosts):
            cluster.set_bandwidth(host, bandwidth)
        found = launch(cluster, case)
    return {**case, "emulation": cluster.kind, "bandwidth_mbit": round(bandwidth * 8 / 1e6), **alone, **found}


def launch(cluster: Any, case: dict[str, Any]) -> dict[str, Any]:
    """One run of this file on every host; what rank 0 found."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(case)]
    ended = cluster.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=400)
    return json.loads(next(line for line in reversed(ended[0].stdout.splitlines()) if line.startswith("{")))


# What one rank does


def work(case: dict[str, Any]) -> None:
    import logging

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    found = time_local(case) if case.get("local") else compare(case)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def build(case: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    from offbeat import zoo

    name, options, seconds = MODELS[case["model"]]
    torch.manual_seed(0)
    if case["compute"] == "real":
        return zoo.build(name, **options)
    from paced import PacedModel

    return PacedModel.from_graph(captured(name, **options), seconds / 3, seconds * 2 / 3), (torch.ones(1),)


@functools.cache
def captured(name: str, **options: Any) -> Any:
    from offbeat import zoo

    return zoo.capture(name, **options)


def make_step(case: dict[str, Any], wrap: Any = lambda model, optimizer: (model, optimizer)) -> tuple[Any, Any, Any]:
    """One step of a job, what waits for its last update, and its model."""
    import torch

    model, inputs = build(case)
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    parameters = list(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(*inputs).mean().backward()
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(parameters, CLIPPED_NORM)
        optimizer.step()

    return step, getattr(model, "flush", None), model


def time_local(case: dict[str, Any]) -> dict[str, Any]:
    """A step without the network while every host computes."""
    import torch.distributed as dist

    step, _, model = make_step(case)
    timed(step, 3)
    dist.barrier()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"bytes": size, "seconds": on_all_ranks(statistics.median(timed(step, 8)))}


def compare(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import offbeat

    def ddp(**options: Any) -> Any:
        return lambda model, optimizer: (
            DistributedDataParallel(model, gradient_as_bucket_view=True, **options),
            optimizer,
        )

    tried = {}
    for size in BUCKETS_MIB:
        made = make_step(case, ddp(bucket_cap_mb=size))
        timed(made[0], 3)
        tried[f"ddp_{size}"] = on_all_ranks(statistics.median(timed(made[0], TRIED_STEPS))), made
    jobs = {name: tried[name][1] for name in sorted(tried, key=lambda name: tried[name][0])[:2]}
    jobs["ddp_default"] = make_step(case, ddp())
    jobs["ddp_growing"] = make_step(case, ddp(bucket_cap_mb_list=[0.25 * 2**power for power in range(8)]))
    jobs["compute"] = make_step(case)
    auto = make_step(case, lambda model, optimizer: offbeat.distribute(model, optimizer, quiet=True))
    settled = 0
    while not auto[2].offbeat.settled and settled < MOST_SETTLING_STEPS:
        timed(auto[0], 5)
        settled += 5
    flat = torch.zeros(sum(parameter.numel() for parameter in auto[2].parameters()))
    variants = {name: made[:2] for name, made in {**jobs, "auto": auto}.items()}
    variants["network"] = (lambda: [dist.all_reduce(part) for part in flat.split(2**20)], None)
    for name in ("ddp_default", "ddp_growing", "compute"):
        timed(variants[name][0], 3)
    blocks, stolen = alternate(variants, BLOCKS, STEPS)
    handle = auto[2].offbeat
    return {
        **judged(blocks),
        "tried_ms": {name: round(seconds * 1e3, 2) for name, (seconds, _) in tried.items()},
        "settling_steps": settled,
        "plan": handle.plan.strategy.name,
        "mode": handle.mode,
        "history": [decision.what for decision in handle.history],
        "stolen": stolen,
    }


def on_all_ranks(seconds: float) -> float:
    """The mean over ranks, so that all decide alike."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def judged(blocks: dict[str, list[float]]) -> dict[str, Any]:
    median = {name: statistics.median(seconds) * 1e3 for name, seconds in blocks.items()}
    best = min((name for name in median if name.startswith("ddp")), key=median.__getitem__)
    bound = max(median["compute"], median["network"])
    return {
        "median_ms": {name: round(value, 2) for name, value in median.items()},
        "spread_ms": {name: round((max(times) - min(times)) * 1e3, 2) for name, times in blocks.items()},
        "best": best,
        "bound_ms": round(bound, 2),
        "default_over_auto": round(median["ddp_default"] / median["auto"], 4),
        "best_over_auto": round(median[best] / median["auto"], 4),
        "auto_over_bound": round(median["auto"] / bound, 4),
        "decided": apart(blocks["auto"], blocks[best]),
    }


def apart(mine: list[float], theirs: list[float]) -> bool:
    """Whether the blocks of two variants lie apart, the fastest and the slowest of five or more left out."""
    kept = slice(1, -1) if len(mine) >= 5 else slice(None)
    mine, theirs = sorted(mine)[kept], sorted(theirs)[kept]
    return mine[-1] < theirs[0] or theirs[-1] < mine[0]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["best_over_auto"] for row in rows]
    decided = [row["best_over_auto"] for row in rows if row["decided"]]
    return {
        "cases": len(rows),
        "median_best_over_auto": round(statistics.median(ratios), 4),
        "least_best_over_auto": min(ratios),
        "decided": len(decided),
        "least_of_the_decided": min(decided, default=None),
        "median_default_over_auto": round(statistics.median(row["default_over_auto"] for row in rows), 4),
    }


def describe(row: dict[str, Any]) -> str:
    median, clipped, noisy = row["median_ms"], " clipped" if row["clip"] else "", "" if row["decided"] else " (noisy)"
    return (
        f"{row['hosts']} hosts {row['compute']:<5} {row['model']:<11} {row['regime']:<13} {row['bandwidth_mbit']:>5} "
        f"Mbit/s{clipped}  bound {row['bound_ms']:.0f}  DDP {median['ddp_default']:.0f}  {row['best']} "
        f"{median[row['best']]:.0f}  auto {median['auto']:.0f} ms ({row['plan']})  best/auto "
        f"{row['best_over_auto']:.3f}{noisy}"
    )


if __name__ == "__main__":
    main()
