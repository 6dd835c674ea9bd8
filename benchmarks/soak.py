"""A long job under stress: does it leak, and does it still compute what an undisturbed job computes?

    python benchmarks/soak.py --json [--steps 1000] [--kills 2] [--seed 0]

Four ranks on an emulated cluster train a small model with strategy="auto". At random a rank is late for a step, a
host's link changes its bandwidth, and twice a rank is killed: the others must end by themselves, and the job starts
again from its last checkpoint. Every fifth step each rank notes its resident memory, open files and threads. After the
warm-up of the last life (first plan, first search, compiled kernels) they must not grow: files and threads not at all,
though a plan with more process groups needs more of both; memory by no more than `MEMORY_TOLERANCE_BYTES`, and the
slope of a Theil-Sen line through it is printed too. The losses must equal those of a job that nothing disturbed, with a
fixed strategy; it sums in another order, hence the tolerance.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

RANKS = 4
SAMPLED_STEPS = 5
SAVED_STEPS = 10
WARM_UP_STEPS = 50
"""The first search, with all its trials, is over by then."""
STRAGGLER_CHANCE = 0.03
STRAGGLER_SECONDS = (0.02, 0.08)
CHANGED_STEPS = 40
"""Steps between two changes of a link."""
BANDWIDTHS = ("100Mbit/s", "200Mbit/s", "500Mbit/s", "1Gbit/s", "2Gbit/s")
MEMORY_TOLERANCE_BYTES = 8 * 2**20
LOSS_TOLERANCE = 1e-9
LOST_SECONDS = 60.0
"""By when the ranks that are left must have ended after one was killed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return 0
    result = soak(options.steps, options.kills, options.seed)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print("passed" if result["passed"] else "failed", json.dumps(result["growth"]))
    return 0 if result["passed"] else 1


# What one rank does


def work(task: dict[str, Any]) -> None:
    """Trains from the last checkpoint to the end; writes losses, samples and checkpoints into the task's folder."""
    import logging

    import torch
    import torch.distributed as dist

    import offbeat

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    folder, rank = Path(task["folder"]), int(os.environ["RANK"])
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    from datetime import timedelta

    model, optimizer = offbeat.distribute(model, optimizer, task["strategy"], timeout=timedelta(seconds=20))
    first, losses = load(folder, rank, model, optimizer)
    chance = random.Random(f"{task['seed']}/{rank}/{first}")
    samples = (folder / f"samples{rank}.{task['life']}.jsonl").open("w")
    late = 0
    for step in range(first, task["steps"]):
        optimizer.zero_grad()
        inputs, targets = batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if task["stress"] and chance.random() < STRAGGLER_CHANCE:
            time.sleep(chance.uniform(*STRAGGLER_SECONDS))
            late += 1
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % SAVED_STEPS == 0 or step + 1 == task["steps"]:
            save(folder, rank, step + 1, model, optimizer, losses)
        if step % SAMPLED_STEPS == 0:
            samples.write(
                json.dumps(
                    {"step": step, "late": late, "settled": model.offbeat.settled, **resources(), **needs(model)}
                )
                + "\n"
            )
            samples.flush()
        if rank == 0:
            # Written in place: a new file for each step would be work that training does not do.
            with (folder / "progress").open("w") as stream:
                stream.write(str(step + 1))
    samples.close()
    dist.barrier()


def make_model() -> Any:
    import torch

    layers: list[Any] = []
    for width, out in ((64, 192), (192, 192), (192, 192), (192, 16)):
        layers += [torch.nn.Linear(width, out), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).double()


def batch(step: int, rank: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :16].sin()


def resources() -> dict[str, int]:
    """Resident bytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        # Less the one that lists them.
        "files": len(os.listdir("/proc/self/fd")) - 1,
        "threads": len(os.listdir("/proc/self/task")),
    }


def needs(model: Any) -> dict[str, int]:
    """What the plans so far need: process groups, which stay open for the next plan, and their threads."""
    opened = model._offbeat.opened
    return {"groups": len(opened), "in_flight": sum(in_flight for _, _, in_flight, _ in opened)}


def save(folder: Path, rank: int, step: int, model: Any, optimizer: Any, losses: list[float]) -> None:
    """A checkpoint is there for all ranks or for none: its step is known once every rank has written its losses."""
    import torch
    import torch.distributed as dist

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    (folder / f"losses{rank}.{step}.json").write_text(json.dumps(losses))
    dist.barrier()
    if rank == 0:
        torch.save(state, folder / "state.new")
        (folder / "state.new").replace(folder / "state.pt")
    dist.barrier()
    for old in folder.glob(f"losses{rank}.*.json"):
        if old.name != f"losses{rank}.{step}.json":
            old.unlink()


def load(folder: Path, rank: int, model: Any, optimizer: Any) -> tuple[int, list[float]]:
    import torch

    if not (folder / "state.pt").exists():
        return 0, []
    state = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], json.loads((folder / f"losses{rank}.{state['step']}.json").read_text())


# What happens to the job


def soak(steps: int, kills: int, seed: int) -> dict[str, Any]:
    from offbeat.emulate import Emulation

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        calm, stressed = Path(place) / "calm", Path(place) / "stressed"
        with Emulation(RANKS, None) as cluster:
            live(cluster, calm, {"strategy": "overlap", "steps": steps, "stress": False, "seed": seed, "life": 0})
        with Emulation(RANKS, "1Gbit/s") as cluster:
            events = Events(cluster, stressed, steps, kills, seed)
            lives = 0
            while True:
                task = {"strategy": "auto", "steps": steps, "stress": True, "seed": seed, "life": lives}
                lives += 1
                if live(cluster, stressed, task, events):
                    break
            kind = cluster.kind
        same = loss_difference(calm, stressed, steps)
        growth = [grown(stressed, rank, lives - 1) for rank in range(RANKS)]
        late = sum(
            sum(row["late"] for row in samples(stressed, rank, life)[-1:])
            for rank in range(RANKS)
            for life in range(lives)
        )
        log = "".join(path.read_text(errors="replace") for path in sorted(stressed.glob("log0.*")))
    leaked = any(row["files"] or row["threads"] or row["rss_bytes"] > MEMORY_TOLERANCE_BYTES for row in growth)
    return {
        "benchmark": "soak",
        "emulation": kind,
        "ranks": RANKS,
        "steps": steps,
        "seed": seed,
        "lives": lives,
        "killed": events.killed,
        "bandwidth_changes": events.changes,
        "late_steps": late,
        "plans_kept": len(re.findall(r"step \d+: keeps '.*before,", log)),
        "plans_given_up": log.count(": drops '"),
        "searches_begun_again": log.count(": searches again: "),
        "largest_loss_difference": same,
        "loss_tolerance": LOSS_TOLERANCE,
        "memory_tolerance_bytes": MEMORY_TOLERANCE_BYTES,
        "growth": growth,
        "seconds": round(time.monotonic() - began, 1),
        "passed": not leaked and same <= LOSS_TOLERANCE and len(events.killed) == kills,
    }


class Events:
    """Decides, from the steps done, when a link changes and when which rank is killed."""

    def __init__(self, cluster: Any, folder: Path, steps: int, kills: int, seed: int) -> None:
        self.cluster, self.folder = cluster, folder
        self.chance = random.Random(seed)
        # The last life is the longest, because growth is looked for in it.
        self.doomed = [round(steps * 0.15) * (place + 1) for place in range(kills)]
        self.killed: list[dict[str, Any]] = []
        self.changes = 0
        self.next_change = CHANGED_STEPS

    def after(self, step: int, workers: list[Any]) -> bool:
        """Whether a rank was killed now."""
        if step >= self.next_change:
            self.next_change = step + CHANGED_STEPS
            self.cluster.set_bandwidth(self.chance.randrange(RANKS), self.chance.choice(BANDWIDTHS))
            self.changes += 1
        if not self.doomed or step < self.doomed[0]:
            return False
        self.doomed.pop(0)
        victim = self.chance.randrange(RANKS)
        workers[victim].send_signal(signal.SIGKILL)
        self.killed.append({"rank": victim, "step": step})
        return True


def live(cluster: Any, folder: Path, task: dict[str, Any], events: Events | None = None) -> bool:
    """Runs the job until it ends or loses a rank; whether it reached its last step."""
    folder.mkdir(exist_ok=True)
    (folder / "progress").write_text("0")
    task = {**task, "folder": str(folder)}
    port = cluster.new_port()
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(task)]
    workers = []
    for rank in range(RANKS):
        with (folder / f"log{rank}.{task['life']}").open("wb") as log:
            workers.append(cluster.popen(rank, command, stdout=log, stderr=log, master_port=port))
    deadline = None
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.05)
            failed = [worker.poll() for worker in workers if worker.poll() not in (None, 0)]
            if deadline is None and (failed or (events and events.after(_progress(folder), workers))):
                deadline = time.monotonic() + LOST_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    f"ranks were still running {LOST_SECONDS:.0f} s after one was lost\n{_tails(folder)}"
                )
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
    codes = [worker.poll() for worker in workers]
    if any(codes) and (events is None or not _was_killed(events, codes)):
        raise RuntimeError(f"the ranks ended with {codes}\n{_tails(folder)}")
    return not any(codes)


def _was_killed(events: Events, codes: list[int | None]) -> bool:
    return bool(events.killed) and codes[events.killed[-1]["rank"]] == -signal.SIGKILL


def _progress(folder: Path) -> int:
    text = (folder / "progress").read_text()
    return int(text) if text.isdigit() else 0


def _tails(folder: Path) -> str:
    newest = sorted(folder.glob("log*"), key=lambda path: path.stat().st_mtime)[-RANKS:]
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in newest)


# What it shows


def loss_difference(calm: Path, stressed: Path, steps: int) -> float:
    """The largest relative difference between the losses of the two jobs, over all ranks and steps."""
    largest = 0.0
    for rank in range(RANKS):
        pair = [json.loads((folder / f"losses{rank}.{steps}.json").read_text()) for folder in (calm, stressed)]
        assert [len(losses) for losses in pair] == [steps, steps]
        largest = max(largest, *(abs(b - a) / abs(a) for a, b in zip(*pair, strict=True)))
    return largest


def samples(folder: Path, rank: int, life: int) -> list[dict[str, int]]:
    path = folder / f"samples{rank}.{life}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def grown(folder: Path, rank: int, life: int) -> dict[str, Any]:
    """Growth after the warm-up: of memory from the first to the last quarter of the samples, and its slope; of files
    and threads among the samples of plans that need equally many, the largest, while no search has some of its own."""
    rows = samples(folder, rank, life)
    steady = [row for row in rows if row["step"] >= rows[0]["step"] + WARM_UP_STEPS]
    quarter = max(1, len(steady) // 4)
    growth: dict[str, Any] = {"rank": rank, "samples": len(steady)}
    first, last = (
        statistics.median(row["rss_bytes"] for row in part) for part in (steady[:quarter], steady[-quarter:])
    )
    growth["rss_bytes"] = round(last - first)
    alike: dict[tuple[int, int], list[dict[str, int]]] = {}
    for row in (row for row in steady if row["settled"]):
        alike.setdefault((row["groups"], row["in_flight"]), []).append(row)
    growth["plans"] = [list(plan) for plan in alike]
    for kind in ("files", "threads"):
        growth[kind] = max(part[-1][kind] - part[0][kind] for part in alike.values())
    slopes = [(b["rss_bytes"] - a["rss_bytes"]) / (b["step"] - a["step"]) for a, b in combinations(steady, 2)]
    growth["rss_bytes_per_step"] = round(statistics.median(slopes), 1) if slopes else 0.0
    growth["rss_at_end_bytes"] = rows[-1]["rss_bytes"]
    growth["files_at_end"], growth["threads_at_end"] = rows[-1]["files"], rows[-1]["threads"]
    return growth


if __name__ == "__main__":
    sys.exit(main())
