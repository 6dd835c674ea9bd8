"""strategy="auto", started cold, against every builder and DDP at its best bucket, all in one run.

    python benchmarks/auto_strategy.py --json [--model vgg ...] [--regime balanced ...]

On two paced hosts, for each model and bandwidth: every builder and eight bucket sizes of DDP are tried for some steps;
then short blocks of the two best builders, the two best bucket sizes and "auto" alternate. "auto" has had 30 steps
before, in which it recorded, predicted and switched (that a switch leaves the numbers alone is tested in
tests/distributed/test_online.py). Times are medians in milliseconds.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from step_time import (
    DDP_BUCKETS_MIB,
    PACED_STEP_SECONDS,
    REGIMES,
    alternate,
    build,
    machine,
    make_step,
    parameter_bytes,
    timed,
)

HOSTS = 2
BLOCKS, STEPS, COLD_STEPS = 3, 8, 30
HOPELESS = 1.3
"""What takes longer than the best so far by this much after four steps is not tried further."""
SKIPPED = ("random_axis_all_reduce",)
"""Builders that draw lots."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=("vgg", "resnet", "transformer"), action="append")
    parser.add_argument("--regime", choices=REGIMES, action="append")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    rows = []
    for model in options.model or ("vgg", "resnet", "transformer"):
        for regime in options.regime or ("network-bound", "balanced"):
            rows.append(run(model, regime))
            print(describe(rows[-1]), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"benchmark": "auto_strategy", "machine": machine(), "rows": rows}, indent=1))


def run(model: str, regime: str) -> dict:
    from offbeat.emulate import Emulation

    bandwidth = 2 * (HOSTS - 1) / HOSTS * parameter_bytes(model) / (REGIMES[regime] * PACED_STEP_SECONDS)
    with Emulation(HOSTS, bandwidth=bandwidth) as cluster:
        results = cluster.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps({"model": model})],
            env={"OMP_NUM_THREADS": "1"},
            timeout=580,
        )
    found = json.loads(next(line for line in results[0].stdout.splitlines() if line.startswith("{")))
    return {"model": model, "regime": regime, "bandwidth_mbit": round(bandwidth * 8 / 1e6), **found}


def work(case: dict) -> None:
    import logging

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import offbeat

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")

    def make(wrap):
        model, inputs = build(case["model"], paced=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        model, optimizer = wrap(model, optimizer)
        return make_step(model, optimizer, inputs), getattr(model, "flush", None), model

    quickest = math.inf

    def tried(wrap) -> tuple[float, tuple]:
        nonlocal quickest
        made = make(wrap)
        timed(made[0], 2)
        seconds = agreed(timed(made[0], 2))
        if seconds < HOPELESS * quickest:
            seconds = agreed(timed(made[0], 4))
        if made[1]:
            made[1]()
        quickest = min(quickest, seconds)
        return seconds, made

    builders = {}
    for name in offbeat.builders():
        if name not in SKIPPED:
            builders[name] = tried(lambda m, o, name=name: offbeat.distribute(m, o, strategy=name))
    ddp = {}
    for size in DDP_BUCKETS_MIB:
        wrap = lambda m, o, size=size: (DistributedDataParallel(m, bucket_cap_mb=size), o)  # noqa: E731
        ddp[f"ddp_{size}"] = tried(wrap)
    kept = {}
    for group in (builders, ddp):
        for name in sorted(group, key=lambda name: group[name][0])[:2]:
            kept[name] = group[name][1]
    auto = make(lambda m, o: offbeat.distribute(m, o, strategy="auto"))
    timed(auto[0], COLD_STEPS)
    kept["auto"] = auto
    blocks, theft = alternate({name: (step, finish) for name, (step, finish, _) in kept.items()}, BLOCKS, STEPS)
    if dist.get_rank() == 0:
        median = {name: round(statistics.median(times) * 1e3, 2) for name, times in blocks.items()}
        best = min((name for name in median if name != "auto"), key=median.__getitem__)
        strategy = auto[2]._offbeat.plan.strategy
        result = {
            "median_ms": median,
            "tried_ms": {name: round(t / HOSTS * 1e3, 1) for name, (t, _) in {**builders, **ddp}.items()},
            "best_other": best,
            "auto_over_best_other": round(median["auto"] / median[best], 4),
            "auto_plan": strategy.name,
            "stolen": theft,
        }
        print(json.dumps(result), flush=True)
    dist.barrier()


def agreed(seconds: list[float]) -> float:
    """The median, summed over all ranks, so that all decide alike."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([statistics.median(seconds)])
    dist.all_reduce(total)
    return float(total)


def describe(row: dict) -> str:
    return (
        f"{row['model']:<12} {row['regime']:<14} auto ({row['auto_plan']}) {row['median_ms']['auto']:.1f} ms,"
        f" best other {row['median_ms'][row['best_other']]:.1f} ms ({row['best_other']}):"
        f" {row['auto_over_best_other']:.3f}"
    )


if __name__ == "__main__":
    main()
