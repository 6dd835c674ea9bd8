"""How well replay predicts the step time of real runs on an emulated cluster.

    python benchmarks/replay_accuracy.py --json [--hosts 2|4] [--model vgg ...] [--speed slow ...]

For each model, number of hosts and bandwidth the workers run every strategy in turn: steps without a recorder give the
measured time, further steps with it the profile. Then
  same      each profile is replayed and compared with the measured time of its own run;
  cross     the profile of one run (the slow link, Offbeat's `overlap`) predicts all the others;
  daydream  as `cross`, but every tensor takes its size over the bandwidth and nothing else;
  unaligned as `same`, from traces whose clocks were set apart by up to 50 ms and not aligned again.
Compute is paced: it takes the time without taking the processor, as an accelerator's does. With `--real` it is real, on
two hosts; on a machine of two cores it then shares them with the network's work, which replay does not model. Errors
are |predicted / measured - 1|. A run during which the machine's neighbours took processor time is repeated (quiet.py).
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from quiet import QUIET, CpuSteal
from step_time import build, local_compute_seconds, machine, make_step, paced_seconds, parameter_bytes, timed

NETWORK_OVER_COMPUTE = {"slow": 1.4, "fast": 0.6}
STRATEGIES = ("ddp", "ddp 1MiB", "overlap", "wfbp", "ps_load_balanced")
PROFILED = ("slow", "overlap")
WARM_UP, TIMED, RECORDED = 10, 20, 14
ATTEMPTS = 8
SKEW_SECONDS, DRIFT = 0.05, 50e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hosts", type=int, choices=(2, 4), action="append")
    parser.add_argument("--model", choices=("vgg", "resnet", "transformer"), action="append")
    parser.add_argument("--speed", choices=NETWORK_OVER_COMPUTE, action="append")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append")
    parser.add_argument(
        "--keep", type=Path, help="keep the traces in this folder; runs that are there already are taken"
    )
    parser.add_argument("--real", action="store_true", help="real compute, on two hosts")
    parser.add_argument("--run-only", action="store_true", help="run and record, predict nothing (with --keep)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strategy and PROFILED[1] not in options.strategy:
        parser.error(f"--strategy: {PROFILED[1]} must be among them, because its profile predicts the others")
    if options.worker:
        work(json.loads(options.worker))
        return
    folder = options.keep or Path(tempfile.mkdtemp(prefix="offbeat-accuracy-"))
    speeds, strategies = tuple(options.speed or NETWORK_OVER_COMPUTE), tuple(options.strategy or STRATEGIES)
    rows = []
    try:
        for hosts in (2,) if options.real else options.hosts or (2, 4):
            for model in options.model or ("vgg", "resnet", "transformer"):
                case = Case(hosts, model, strategies, paced=not options.real)
                rows += evaluate(folder, case, speeds, run_only=options.run_only)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if options.run_only:
        return
    result = {"benchmark": "replay_accuracy", "machine": machine(), "summary": summary(rows), "rows": rows}
    print(json.dumps(result["summary"], indent=1), file=sys.stderr)
    if options.json:
        print(json.dumps(result, indent=1))


@dataclass(frozen=True)
class Case:
    """A model on so many hosts, and what is run there."""

    hosts: int
    model: str
    strategies: tuple[str, ...]
    paced: bool


def evaluate(folder: Path, case: Case, speeds: tuple[str, ...], *, run_only: bool) -> list[dict]:
    """Runs everything for one model on so many hosts and predicts it."""
    hosts, model = case.hosts, case.model
    compute = 0.0
    rows = []
    for speed in speeds:
        name = f"{model}-{hosts}{'' if case.paced else 'real'}-{speed}"
        done = folder / f"{name}.json"
        if not done.exists():
            compute = compute or (paced_seconds(model, hosts) if case.paced else local_compute_seconds(model))
            bandwidth = 2 * (hosts - 1) / hosts * parameter_bytes(model) / (NETWORK_OVER_COMPUTE[speed] * compute)
            done.parent.mkdir(parents=True, exist_ok=True)
            done.write_text(json.dumps(run(folder, name, case, speed, bandwidth)))
        rows += json.loads(done.read_text())
    if run_only:
        return rows
    predict_same(folder, rows)
    predict_cross(folder, rows)
    for row in rows:
        errors = "  ".join(f"{key} {row[key]:+.3f}" for key in ("same", "cross", "daydream", "unaligned") if key in row)
        print(
            f"{hosts} hosts {model:<12} {row['speed']:<7} {row['strategy']:<18} {row['measured_ms']:7.1f} ms  {errors}",
            file=sys.stderr,
            flush=True,
        )
    return rows


def run(folder: Path, name: str, case: Case, speed: str, bandwidth: float) -> list[dict]:
    from offbeat.emulate import Emulation

    job = asdict(case) | {"step_seconds": paced_seconds(case.model, case.hosts), "folder": str(folder / name)}
    with Emulation(case.hosts, bandwidth=bandwidth) as cluster:
        results = cluster.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(job)],
            env={"OMP_NUM_THREADS": "1"},
            timeout=580,
        )
        measured = json.loads(next(line for line in results[0].stdout.splitlines() if line.startswith("{")))
    return [
        {
            "hosts": case.hosts,
            "model": case.model,
            "speed": speed,
            "bandwidth": bandwidth,
            "strategy": strategy,
            "paced": case.paced,
            "trace": f"{name}/{strategy.replace(' ', '-')}",
            **measured[strategy],
        }
        for strategy in case.strategies
    ]


def work(case: dict) -> None:
    import torch
    import torch.distributed as dist

    from offbeat.profile.calibrate import measure_job

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # As the job's first recorder would, before anything else is under way.
    measure_job()
    measured = {strategy: measure(strategy, case) for strategy in case["strategies"]}
    if dist.get_rank() == 0:
        print(json.dumps(measured), flush=True)
    dist.barrier()


def measure(strategy: str, case: dict) -> dict:
    """Step times without a recorder, before and after a recording, each repeated while neighbours disturb it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import offbeat

    model, inputs = build(case["model"], case["paced"], case["step_seconds"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "ddp 1MiB":
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        model, optimizer = offbeat.distribute(model, optimizer, strategy=strategy)
    step = make_step(model, optimizer, inputs)
    timed(step, WARM_UP)
    dist.barrier()
    plain = quiet_blocks(step)
    recorded, stolen = record(step, Path(case["folder"]) / strategy.replace(" ", "-"))
    plain += quiet_blocks(step)
    if hasattr(model, "flush"):
        model.flush()
    dist.barrier()
    middle = statistics.median(seconds for _, block in plain for seconds in block)
    return {
        "measured_ms": round(middle * 1e3, 3),
        "recorder_overhead": round(statistics.median(recorded[2:]) / middle - 1, 4),
        "stolen": round(max(stolen, *(share for share, _ in plain)), 4),
    }


def quiet_blocks(step) -> list[tuple[float, list[float]]]:
    """Two blocks of steps as (stolen share, seconds): the least disturbed of at most so many attempts."""
    blocks: list[tuple[float, list[float]]] = []
    while len(blocks) < ATTEMPTS and sum(share < QUIET for share, _ in blocks) < 2:
        steal = CpuSteal()
        seconds = timed(step, TIMED // 4)
        blocks.append((steal.agreed_share(), seconds))
    return sorted(blocks, key=lambda block: block[0])[:2]


def record(step, folder: Path) -> tuple[list[float], float]:
    """Seconds of the recorded steps, and the share of the machine stolen meanwhile; the least disturbed attempt's."""
    import torch.distributed as dist

    from offbeat.profile.recorder import Recorder

    best: tuple[list[float], float] = ([], 2.0)
    for attempt in range(ATTEMPTS // 2):
        trial, steal, seconds = folder.with_name(f"{folder.name}-{attempt}"), CpuSteal(), []
        with Recorder(trial) as recorder:
            for _ in range(RECORDED):
                seconds += timed(step, 1)
                recorder.step()
        found = (seconds, steal.agreed_share())
        if dist.get_rank() == 0:
            if found[1] < best[1]:
                shutil.rmtree(folder, ignore_errors=True)
                trial.rename(folder)
            else:
                shutil.rmtree(trial)
        best = min(best, found, key=lambda run: run[1])
        if best[1] < QUIET:
            break
    return best


def predict_same(folder: Path, rows: list[dict]) -> None:
    from offbeat.profile.measure import load_profile
    from offbeat.simulate.predict import simulate

    for row in rows:
        profile = load_profile(folder / row["trace"])
        predicted = simulate(profile.plan, profile.costs, memory=False).iteration_time
        row["same"] = round(predicted * 1e3 / row["measured_ms"] - 1, 4)
        # Every rank keeps its own clock.
        with mock.patch("offbeat.profile.measure.align", lambda traces: (traces, None)):
            skewed = load_profile(skew(folder / row["trace"], folder / "skewed"))
        predicted = simulate(skewed.plan, skewed.costs, memory=False)
        row["unaligned"] = round(predicted.iteration_time * 1e3 / row["measured_ms"] - 1, 4)


def skew(source: Path, target: Path) -> Path:
    """A copy of a trace in which every rank but the first has a clock of its own."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "shared"))
    from skewed_clocks import skewed_copy

    shutil.rmtree(target, ignore_errors=True)
    skewed_copy(source, target, lambda rank: (SKEW_SECONDS * (-1) ** rank * (rank > 0), DRIFT * (rank % 3 - 1)))
    return target


def predict_cross(folder: Path, rows: list[dict]) -> None:
    from offbeat.plan import lower
    from offbeat.profile.measure import load_profile
    from offbeat.simulate.predict import simulate
    from offbeat.strategy import build_strategy

    source = next(row for row in rows if (row["speed"], row["strategy"]) == PROFILED)
    profile = load_profile(folder / source["trace"])
    for row in rows:
        if row is source:
            continue
        name, _, bucket = row["strategy"].partition(" ")
        options = {"bucket": bucket, "first_bucket": bucket} if bucket else {}
        there = profile.with_links(bandwidth=row["bandwidth"] / source["bandwidth"])
        strategy = build_strategy(name, there.graph, there.cluster, **options)
        predicted = simulate(lower(there.graph, there.cluster, strategy), there.costs, memory=False).iteration_time
        row["cross"] = round(predicted * 1e3 / row["measured_ms"] - 1, 4)
        single = lower(profile.graph, profile.cluster, build_strategy("wfbp", profile.graph, profile.cluster))
        naive = simulate(single, daydream(single, row["bandwidth"], profile.costs), memory=False).iteration_time
        row["daydream"] = round(naive * 1e3 / row["measured_ms"] - 1, 4)


def daydream(plan, bandwidth: float, costs):
    """Costs in the manner of Daydream (Zhu et al., ATC 2020): a tensor takes its bytes over the nominal bandwidth and
    nothing else."""
    from offbeat.cost.measured import CollectiveFit

    world = len(plan.replicas)
    per_byte = 2 * (world - 1) / world / bandwidth
    kinds = {(task.kind, len(task.ranks)) for task in plan.communication}
    return replace(costs, collectives={key: CollectiveFit(0.0, 0.0, per_byte) for key in kinds})


def summary(rows: list[dict]) -> dict:
    result: dict = {"runs": len(rows)}
    for key in ("same", "cross", "daydream", "unaligned"):
        errors = sorted(abs(row[key]) for row in rows if key in row)
        if errors:
            result[key] = {"median": statistics.median(errors), "worst": errors[-1], "predictions": len(errors)}
    overhead = [row["recorder_overhead"] for row in rows]
    result["recorder_overhead"] = {"median": statistics.median(overhead), "worst": max(overhead)}
    return result


if __name__ == "__main__":
    main()
