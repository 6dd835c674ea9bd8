"""How well replay predicts the step time of NCCL ranks on one GPU, each an emulated host.

    python benchmarks/gpu_replay_accuracy.py --record FOLDER [--ranks 2] [--model transformer ...]    where the GPU is
    python benchmarks/gpu_replay_accuracy.py --json --predict FOLDER                                  there or anywhere

For each model and bandwidth the ranks run every strategy in turn: steps without a recorder give the measured time,
further steps with it the profile. What is predicted of what is as in replay_accuracy.py. The batch is the same at both
bandwidths: about as much compute as network at the slower one. bf16 autocast, fused AdamW.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_step_time import MODELS, Case, agreed, timed
from replay_accuracy import predict_cross, predict_same, summary
from step_time import machine

GBITS = {"slow": 5, "fast": 10}
STRATEGIES = ("ddp", "ddp 2MiB", "overlap", "wfbp")
BATCH = {"transformer": 640, "resnet": 96, "vgg": 512}
WARM_UP, TIMED, RECORDED = 6, 8, 12
LIMIT_SECONDS = 200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path, help="folder for the recordings and rows.json")
    parser.add_argument("--predict", type=Path, help="a folder that --record has filled")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    if options.record:
        record(options.record.resolve(), options.ranks, options.model or list(MODELS))
    folder = options.predict or options.record
    if folder is None:
        parser.error("--record or --predict is needed")
    saved = json.loads((folder / "rows.json").read_text())
    rows: list[dict[str, Any]] = []
    for model in {row["model"]: None for row in saved["rows"]}:
        of_model = [row for row in saved["rows"] if row["model"] == model]
        predict_same(folder, of_model)
        predict_cross(folder, of_model)
        rows += of_model
    for row in rows:
        errors = "  ".join(f"{key} {row[key]:+.3f}" for key in ("same", "cross", "daydream") if key in row)
        print(
            f"{row['model']:<12} {row['speed']:<5} {row['strategy']:<9} {row['measured_ms']:7.1f} ms  {errors}",
            file=sys.stderr,
        )
    result = {"benchmark": "gpu_replay_accuracy", "machine": saved["machine"], "summary": summary(rows), "rows": rows}
    print(json.dumps(result["summary"], indent=1), file=sys.stderr)
    if options.json:
        print(json.dumps(result, indent=1))


def record(folder: Path, ranks: int, models: list[str]) -> None:
    """Runs and records every model and strategy, in one start of the ranks for each bandwidth."""
    import torch

    from offbeat.emulate import Emulation

    rows: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for speed, gbit in GBITS.items():
        with Emulation(ranks, f"{gbit}Gbit/s", gpu=True) as cluster:
            task = json.dumps({"folder": str(folder), "speed": speed, "models": models})
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", task]
            ends = cluster.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT_SECONDS)
            found = json.loads(next(line for line in ends[0].stdout.splitlines() if line.startswith("[")))
            rows += [{**row, "hosts": ranks, "speed": speed, "bandwidth": gbit * 1e9 / 8} for row in found]
            machine_said = {**machine(), "gpu": torch.cuda.get_device_name()}
            (folder / "rows.json").write_text(json.dumps({"machine": machine_said, "rows": rows}))


def work(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rows = [
        {"model": model, "strategy": strategy, **measure(model, strategy, task)}
        for model in task["models"]
        for strategy in STRATEGIES
    ]
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def measure(model: str, strategy: str, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step without a recorder, before and after a recording, and with it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import offbeat

    case = Case({"model": model, "quick": False, "precision": "autocast", "clip": False, "plans": []})
    case.batch = BATCH[model]
    name, _, bucket = strategy.partition(" ")

    def wrap(made: Any, optimizer: Any) -> tuple[Any, Any]:
        if name == "ddp":
            size = {"bucket_cap_mb": int(bucket.removesuffix("MiB"))} if bucket else {}
            return DistributedDataParallel(made, **size), optimizer
        return offbeat.distribute(made, optimizer(made.parameters()), name)

    case.add("job", wrap)
    step, trace = case.steps["job"], f"{model}-{task['speed']}/{strategy.replace(' ', '-')}"
    # The engine rebuilds its order after steps 4, 8 and 20.
    timed(step, 21, WARM_UP)
    before = agreed(timed(step, TIMED))
    dist.barrier()
    with offbeat.Recorder(Path(task["folder"]) / trace) as recorder:
        for _ in range(2):
            step()
            recorder.step()
        clock = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        clock[0].record()
        for _ in range(RECORDED):
            step()
            recorder.step()
        clock[1].record()
        clock[1].synchronize()
        recorded = agreed(clock[0].elapsed_time(clock[1]) / 1e3 / RECORDED)
    after = agreed(timed(step, TIMED))
    if name != "ddp":
        case.models["job"]._offbeat.release()
    plain = (before + after) / 2
    case.steps.clear()
    case.models.clear()
    return {
        "trace": trace,
        "measured_ms": round(plain * 1e3, 3),
        "before_ms": round(before * 1e3, 3),
        "after_ms": round(after * 1e3, 3),
        "recorder_overhead": round(recorded / plain - 1, 4),
    }


if __name__ == "__main__":
    main()
