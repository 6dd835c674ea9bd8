"""Step time of Offbeat against tuned DDP on an emulated cluster, all variants in one run.

    python benchmarks/step_time.py --json [--quick] [--blocks 5] [--hosts 2|4] [--model vgg ...] [--regime balanced ...]

For each model and regime, eight explicit bucket sizes of DDP are tried first; then the workers alternate short blocks
of steps of compute alone, DDP with its default buckets, DDP with the two sizes that were best, and Offbeat. The bound
is max(compute, network): `compute` is the local step, `network` an all-reduce of all gradients. The link's bandwidth is
chosen from the measured compute, so that network / compute is 1.6 (network-bound), 1.0 (balanced) or 0.4
(compute-bound). `processor_ms` is a second bound, this machine's own: the processor time of one step's computing and
of one all-reduce of all gradients on all emulated hosts, kernel included, divided by the cores. `schedule_ms` is what
the best schedule of the gradients could reach on that link if cutting, sending and updating cost nothing (PACE's
optimum): a gradient cannot be sent before it exists nor used before it has arrived. With two hosts compute is real;
with four it is paced (it takes the time without taking the processor, as an accelerator's does), because four workers
do not fit on two cores; only then is `schedule_ms` known. Medians of the blocks, in milliseconds; ratios are what
counts. Blocks during which the machine's neighbours took processor time are repeated (quiet.py).
"""

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from quiet import CpuSteal, enough, quietest

DDP_BUCKETS_MIB = (0.25, 0.5, 1, 2, 4, 8, 16, 25)
REGIMES = {"network-bound": 1.6, "balanced": 1.0, "compute-bound": 0.4}
MODELS = {
    # zoo name and options: parameters of 6-35 MiB and about 0.1-0.2 s of compute on one core
    "vgg": ("vgg16", {"scale": 0.25, "batch": 8}),
    "resnet": ("resnet50", {"scale": 0.5, "batch": 4}),
    "transformer": ("transformer", {"scale": 0.4, "vocabulary": 500, "shared_embeddings": False}),
    # Its embedding is complete last and needed first, so that nothing can hide it: no schedule reaches the bound.
    "transformer_tied": ("transformer", {"scale": 0.3}),
}
PACED_STEP_SECONDS = 0.15
STRETCH = {("vgg", 2): 2, ("vgg", 4): 4, ("resnet", 4): 2, ("transformer", 4): 2, ("transformer_tied", 4): 2}
"""Of paced compute, by model and hosts. Links are as much slower, so that two cores can carry all the hosts' traffic:
at 0.15 s the emulation's processor time would be what is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a smoke test")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of steps of each variant")
    parser.add_argument("--hosts", type=int, choices=(2, 4), action="append")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--regime", choices=REGIMES, action="append")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    rows = []
    for hosts in options.hosts or (2, 4):
        for model in options.model or MODELS:
            for regime in options.regime or REGIMES:
                row = run_case(hosts, model, regime, 3 if options.quick else options.blocks, options.quick)
                rows.append(row)
                print(describe(row), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"benchmark": "step_time", "machine": machine(), "rows": rows}, indent=1))


def run_case(hosts: int, model: str, regime: str, blocks: int, quick: bool) -> dict:
    from offbeat.emulate import Emulation

    paced = hosts > 2
    steps = 6
    buckets = (0.5, 2, 8) if quick else DDP_BUCKETS_MIB
    case = {
        "hosts": hosts,
        "model": model,
        "regime": regime,
        "paced": paced,
        "paced_seconds": paced_seconds(model, hosts),
        "blocks": blocks,
        "steps": steps,
        "buckets_mib": buckets,
    }
    compute = paced_seconds(model, hosts) if paced else local_compute_seconds(model)
    size = parameter_bytes(model)
    bandwidth = 2 * (hosts - 1) / hosts * size / (REGIMES[regime] * compute)
    with Emulation(hosts, bandwidth=bandwidth) as cluster:
        results = cluster.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(case)],
            env={"OMP_NUM_THREADS": "1"},
            timeout=880,
        )
    row = json.loads(next(line for line in results[0].stdout.splitlines() if line.startswith("{")))
    if paced:
        row["schedule_ms"] = round(best_schedule(model, compute * 1e3, row["median_ms"]["network"]), 2)
    return {**case, "emulation": cluster.kind, "bandwidth_mbit": round(bandwidth * 8 / 1e6), "bytes": size, **row}


def best_schedule(model: str, compute: float, network: float) -> float:
    """The shortest step that any order of slices allows, if the link carries all in `network` and updates are free."""
    from offbeat.search.auto.trials import with_compute_seconds
    from offbeat.search.pace import jobs_of, preemptive_schedule

    # At such peaks updates, the only operators without a time of their own, take none.
    jobs = jobs_of(with_compute_seconds(captured(model), compute / 3, compute * 2 / 3), 1e30, 1e30)
    duration = network * jobs.sizes / jobs.sizes.sum()
    return preemptive_schedule(jobs.ready, duration, jobs.tail).makespan


def paced_seconds(model: str, hosts: int) -> float:
    """Of one step's compute, where it is paced."""
    return PACED_STEP_SECONDS * STRETCH.get((model, hosts), 1)


def build(model: str, paced: bool, step_seconds: float = PACED_STEP_SECONDS):
    import torch

    from offbeat import zoo

    name, options = MODELS[model]
    torch.manual_seed(0)
    if paced:
        from paced import PacedModel

        built = PacedModel.from_graph(captured(model), step_seconds / 3, step_seconds * 2 / 3)
        return built, (torch.ones(1),)
    return zoo.build(name, **options)


@functools.cache
def captured(model: str):
    from offbeat import zoo

    name, options = MODELS[model]
    return zoo.capture(name, **options)


def parameter_bytes(model: str) -> int:
    from offbeat import zoo

    name, options = MODELS[model]
    return sum(p.numel() * p.element_size() for p in zoo.build(name, **options)[0].parameters())


@functools.cache
def local_compute_seconds(model: str) -> float:
    """Step time of one worker while every core runs one, which is what the workers will see."""
    import subprocess

    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r}); import step_time; step_time.time_local({model!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    return statistics.mean(float(run.communicate(timeout=120)[0]) for run in runs)


def time_local(model: str) -> None:
    import torch

    torch.set_num_threads(1)
    built, inputs = build(model, paced=False)
    step = make_step(built, torch.optim.SGD(built.parameters(), lr=1e-4, momentum=0.9), inputs)
    print(statistics.median(timed(step, 12)[2:]))


def make_step(model, optimizer, inputs):
    def step() -> None:
        optimizer.zero_grad()
        model(*inputs).mean().backward()
        optimizer.step()

    return step


def timed(step, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def work(case: dict) -> None:
    import logging

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import offbeat

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    variants = {}

    def add(name, wrap) -> None:
        model, inputs = build(case["model"], case["paced"], case["paced_seconds"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        model, optimizer = wrap(model, optimizer)
        finish = getattr(model, "flush", None)
        variants[name] = (make_step(model, optimizer, inputs), finish)

    for size in case["buckets_mib"]:
        add(f"ddp_{size}", lambda m, o, size=size: (DistributedDataParallel(m, bucket_cap_mb=size), o))
    tried = {name: round(try_out(step) * 1e3, 2) for name, (step, _) in variants.items()}
    for name in sorted(tried, key=tried.__getitem__)[2:]:
        del variants[name]
    add("local", lambda model, optimizer: (model, optimizer))
    add("ddp_default", lambda model, optimizer: (DistributedDataParallel(model), optimizer))
    add("offbeat", lambda model, optimizer: offbeat.distribute(model, optimizer, strategy="auto"))
    flat = torch.zeros(sum(p.numel() for p in build(case["model"], case["paced"])[0].parameters()))
    variants["network"] = (lambda: [dist.all_reduce(part) for part in flat.split(2**20)], None)

    for name, (step, finish) in variants.items():
        timed(step, 32 if name == "offbeat" else 3)
        if finish:
            finish()
    busy: dict[str, list[float]] = {}
    blocks, steal = alternate(variants, case["blocks"], case["steps"], busy)
    if dist.get_rank() == 0:
        print(json.dumps({"tried_ms": tried, **summary(blocks, busy), "stolen": steal}), flush=True)
    dist.barrier()


def alternate(
    variants: dict, count: int, steps: int, busy: dict[str, list[float]] | None = None
) -> tuple[dict[str, list[float]], float]:
    """Seconds of a step in so many blocks of every variant, in turn, and the share of time stolen from the machine.

    `busy` gets the processor time of a step in every block, of all ranks together.
    """
    import torch.distributed as dist

    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    order = list(variants)
    whole = CpuSteal()
    while not enough(measured, count):
        for name in order:
            step, finish = variants[name]
            dist.barrier()
            # Two steps fill the pipeline, so that the clock starts and stops with one step's updates outstanding.
            timed(step, 2)
            steal, begin = CpuSteal(), time.perf_counter()
            timed(step, steps)
            seconds = (time.perf_counter() - begin) / steps
            if busy is not None:
                busy.setdefault(name, []).append(steal.busy_seconds() / steps)
            if finish:
                finish()
            measured[name].append((steal.agreed_share(), seconds))
        order = [*order[1:], order[0]]
    return {name: quietest(pairs, count) for name, pairs in measured.items()}, round(whole.share(), 4)


def try_out(step) -> float:
    """A bucket size's median step, the same on every rank, so that all keep the same ones."""
    import torch
    import torch.distributed as dist

    timed(step, 2)
    seconds = torch.tensor([statistics.median(timed(step, 5))])
    dist.all_reduce(seconds)
    return float(seconds) / dist.get_world_size()


def summary(blocks: dict[str, list[float]], busy: dict[str, list[float]]) -> dict:
    median = {name: statistics.median(times) * 1e3 for name, times in blocks.items()}
    spread = {name: (max(times) - min(times)) * 1e3 for name, times in blocks.items()}
    best = min((name for name in median if name.startswith("ddp_") and name != "ddp_default"), key=median.__getitem__)
    best = min(best, "ddp_default", key=median.__getitem__)
    bound = max(median["local"], median["network"])
    processor = sum(statistics.median(busy[name]) for name in ("local", "network")) / len(os.sched_getaffinity(0)) * 1e3
    return {
        "median_ms": {name: round(value, 2) for name, value in median.items()},
        "spread_ms": {name: round(value, 2) for name, value in spread.items()},
        "bound_ms": round(bound, 2),
        "processor_ms": round(processor, 2),
        "best_ddp": best,
        "offbeat_over_bound": round(median["offbeat"] / bound, 4),
        "offbeat_over_both_bounds": round(median["offbeat"] / max(bound, processor), 4),
        "ddp_default_over_offbeat": round(median["ddp_default"] / median["offbeat"], 4),
        "best_ddp_over_offbeat": round(median[best] / median["offbeat"], 4),
        "best_ddp_over_bound": round(median[best] / bound, 4),
    }


def describe(row: dict) -> str:
    median = row["median_ms"]
    return (
        f"{row['hosts']} hosts {'paced' if row['paced'] else 'real'} {row['model']:<12} {row['regime']:<14}"
        f" {row['bandwidth_mbit']:>6} Mbit/s  compute {median['local']:.0f}  network {median['network']:.0f}"
        f"  DDP {median['ddp_default']:.0f}  best DDP {median[row['best_ddp']]:.0f} ({row['best_ddp']})"
        f"  Offbeat {median['offbeat']:.0f} ms = {row['offbeat_over_bound']:.3f} x bound"
        f" (processor {row['processor_ms']:.0f}),"
        f" {row['ddp_default_over_offbeat']:.2f} x DDP, {row['best_ddp_over_offbeat']:.2f} x best DDP"
    )


def machine() -> dict:
    import torch

    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
