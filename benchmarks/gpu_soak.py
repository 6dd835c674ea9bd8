"""A long job of two NCCL hosts on one GPU: does it leak, and does it compute what one process computes?

    python benchmarks/gpu_soak.py --json [--steps 10000] [--kill-at 4000] [--seed 0]

The ranks train by changing plans: every few hundred steps all switch to another builder's, and at random a rank is
late, reads its parameters or evaluates. One rank is killed on the way; the other must end by itself, and the job starts
again from its last checkpoint. Losses must equal those of a single process that computes both ranks' batches. Memory of
the device and of the process, threads and open files are sampled; after the first round of all plans they must not
grow.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
SWITCHED_STEPS = 250
SAVED_STEPS = 500
SAMPLED_STEPS = 50
STRATEGIES = ("overlap", "ddp", "sharded", "ps_load_balanced", "partitioned_all_reduce")
ROUND_STEPS = SWITCHED_STEPS * len(STRATEGIES)
MEMORY_TOLERANCE_BYTES = 16 * 2**20
LOSS_TOLERANCE = 1e-9
LOST_SECONDS = 120.0
"""By when the rank that is left must have ended after the other was killed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kill-at", type=int, default=4_000, help="0: nobody is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return 0
    result = soak(options.steps, options.kill_at, options.seed)
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


# One rank


def work(task: dict[str, Any]) -> None:
    """Trains from the last checkpoint to the end; writes losses, samples and checkpoints into the task's folder."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import offbeat
    from offbeat.graph.skeleton import skeleton
    from offbeat.plan import lower
    from offbeat.strategy import build_strategy

    rank, folder = int(os.environ["RANK"]), Path(task["folder"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = load(folder, model, optimizer)
    offbeat.distribute(model, optimizer, STRATEGIES[0], timeout=timedelta(seconds=30))
    runtime, cluster, graph = model._offbeat, model._offbeat.plan.cluster, skeleton(model)
    chance = random.Random(f"{task['seed']}/{rank}/{first}")
    losses = (folder / f"losses{rank}.{task['life']}.jsonl").open("w", buffering=1)
    samples = (folder / f"samples{rank}.{task['life']}.jsonl").open("w")
    for step in range(first, task["steps"]):
        if step % SWITCHED_STEPS == 0:
            chosen = build_strategy(STRATEGIES[step // SWITCHED_STEPS % len(STRATEGIES)], graph, cluster)
            plan = lower(graph, cluster, chosen.model_copy(update={"graph": "", "cluster": ""}), rank=rank)
            runtime.switch(plan)
        optimizer.zero_grad()
        loss = model(batch(step, rank).cuda()).pow(2).mean()
        loss.backward()
        if chance.random() < 0.005:
            time.sleep(chance.uniform(0.005, 0.03))
        optimizer.step()
        if chance.random() < 0.02:
            model[0].weight.norm().item()
        if chance.random() < 0.02:
            with torch.no_grad():
                model(batch(step, rank).cuda())
        losses.write(f"{step} {loss.item()!r}\n")
        if step % SAMPLED_STEPS == 0:
            used = {"step": step, "cuda_bytes": torch.cuda.memory_allocated(), **resources()}
            samples.write(json.dumps(used) + "\n")
            samples.flush()
        if (step + 1) % SAVED_STEPS == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            if rank == 0:
                save(folder, state)
        if rank == 0:
            (folder / "progress").write_text(str(step + 1))
    losses.close()
    model.flush()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def load(folder: Path, model: Any, optimizer: Any) -> int:
    """Takes up the last checkpoint; the step to go on with."""
    import torch

    if not (folder / "checkpoint.pt").exists():
        return 0
    saved = torch.load(folder / "checkpoint.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def save(folder: Path, state: dict[str, Any]) -> None:
    import torch

    torch.save(state, folder / "writing.pt")
    (folder / "writing.pt").rename(folder / "checkpoint.pt")


def make_model() -> Any:
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for width, out in ((64, 256), (256, 256), (256, 256), (256, 16)):
        layers += [torch.nn.Linear(width, out), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).double()


def batch(step: int, rank: int) -> Any:
    import torch

    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def resources() -> dict[str, int]:
    """Resident bytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")) - 1,
        "threads": len(os.listdir("/proc/self/task")),
    }


# The whole job


def soak(steps: int, kill_at: int, seed: int) -> dict[str, Any]:
    """Runs the job, with a kill on the way, and compares it with one process."""
    from offbeat.emulate import Emulation

    with tempfile.TemporaryDirectory() as name, Emulation(RANKS, None, gpu=True) as cluster:
        folder = Path(name)
        began = time.monotonic()
        lives = []
        for life, kill in enumerate((kill_at, 0) if kill_at else (0,)):
            if life:
                # The rank that was killed may have broken what shares the GPU.
                cluster.restart_gpu()
            lives.append(run(cluster, folder, steps, seed, life, kill))
        seconds = time.monotonic() - began
        mine = [read_losses(folder, rank, len(lives)) for rank in range(RANKS)]
        growth = [grown(folder, rank, len(lives) - 1) for rank in range(RANKS)]
    expected = reference(steps)
    error = max(abs(mine[rank].get(step, 1e9) - expected[rank][step]) for rank in range(RANKS) for step in range(steps))
    leaks = [
        name
        for row in growth
        for name, value in row.items()
        if value > (MEMORY_TOLERANCE_BYTES if name.endswith("bytes") else 0)
    ]
    ended = all(life["codes"] == [0, 0] for life in lives[-1:]) and all(life["survivor_ended"] for life in lives)
    return {
        "steps": steps,
        "seconds": seconds,
        "lives": lives,
        "largest_loss_error": error,
        "growth_after_the_first_round": growth,
        "passed": bool(error <= LOSS_TOLERANCE and not leaks and ended),
    }


def run(cluster: Any, folder: Path, steps: int, seed: int, life: int, kill_at: int) -> dict[str, Any]:
    """One life of the job: to the end, or until a rank is killed and the other has ended."""
    task = json.dumps({"folder": str(folder), "steps": steps, "seed": seed, "life": life})
    command, port = [sys.executable, __file__, "--worker", task], cluster.new_port()
    ranks = [cluster.popen(rank, command, master_port=port) for rank in range(RANKS)]
    survivor_ended, waited = True, 0.0
    try:
        if kill_at:
            while ranks[0].poll() is None and progress(folder) < kill_at:
                time.sleep(0.2)
            ranks[1].send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            try:
                ranks[0].wait(LOST_SECONDS)
            except subprocess.TimeoutExpired:
                survivor_ended = False
            waited = time.monotonic() - killed_at
        codes = [process.wait() if survivor_ended else None for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return {
        "codes": codes,
        "survivor_ended": survivor_ended,
        "seconds_until_the_survivor_ended": waited,
        "reached": progress(folder),
    }


def progress(folder: Path) -> int:
    try:
        return int((folder / "progress").read_text() or 0)
    except FileNotFoundError:
        return 0


def read_losses(folder: Path, rank: int, lives: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for life in range(lives):
        for line in (folder / f"losses{rank}.{life}.jsonl").read_text().splitlines():
            step, _, loss = line.partition(" ")
            if loss:
                found[int(step)] = float(loss)
    return found


def grown(folder: Path, rank: int, life: int) -> dict[str, int]:
    """By how much each resource was higher in the last round of plans than in the first that was complete."""
    rows = [json.loads(line) for line in (folder / f"samples{rank}.{life}.jsonl").read_text().splitlines()]
    first = rows[0]["step"]
    early = [row for row in rows if ROUND_STEPS <= row["step"] - first < 2 * ROUND_STEPS]
    late = [row for row in rows if row["step"] >= rows[-1]["step"] - ROUND_STEPS]
    if not early:
        return {}
    names = ("cuda_bytes", "rss_bytes", "files", "threads")
    return {name: max(row[name] for row in late) - max(row[name] for row in early) for name in names}


def reference(steps: int) -> list[list[float]]:
    """Each rank's losses, computed by one process."""
    import torch

    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss = model(batch(step, rank).cuda()).pow(2).mean()
            (loss / RANKS).backward()
            losses[rank].append(loss.item())
        optimizer.step()
    return losses


if __name__ == "__main__":
    sys.exit(main())
