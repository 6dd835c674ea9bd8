"""Cases with several NCCL ranks on one GPU: starts them, runs them, times steps, and keeps what each one gave.

A case is a dictionary with at least `name`, `ranks`, `gbit`, `case_seconds`, `output` (the JSON file) and `shown`: the
fields that its row begins with, by which it replaces an earlier one like it.
"""

import gc
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step_time import machine

START_SECONDS = 60.0
FILLED = 2
"""Steps before the clock starts: a plan that defers updates then has a step's outstanding at both ends."""

Step = Callable[[], None]
Case = dict[str, Any]


def run_cases(script: str, chosen: list[Case], seconds: float | None) -> int:
    """Runs cases, of which none starts later than after so many seconds; how many of them failed."""
    ends_at = None if seconds is None else time.time() + seconds
    groups = itertools.groupby(chosen, key=lambda case: (case["ranks"], case["gbit"]))
    return sum(run_group(script, *of, list(group), ends_at) for of, group in groups)


def run_group(script: str, ranks: int, gbit: int, cases: list[Case], ends_at: float | None) -> int:
    """Runs cases with the same cluster, in as many starts as it takes; how many of them failed."""
    import torch

    from offbeat.emulate import Emulation

    failed = 0
    with Emulation(ranks, f"{gbit}Gbit/s", gpu=torch.cuda.is_available()) as cluster:
        while cases and (ends_at is None or time.time() < ends_at):
            limit = START_SECONDS + sum(2 * case["case_seconds"] for case in cases)
            if ends_at is not None:
                limit = min(limit, max(30.0, ends_at - time.time() + cases[0]["case_seconds"]))
            task = {"cases": cases, "ends_at": ends_at, "emulation": cluster.kind}
            command = [sys.executable, str(Path(script).resolve()), "--worker", json.dumps(task)]
            ends = cluster.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=limit, check=False)
            sys.stderr.write(ends[0].stderr)
            found = ends[0].stdout.splitlines()
            cases = [case for case in cases if case["name"] not in found]
            if all(end.returncode == 0 for end in ends):
                break
            words = [f"rank {end.rank} {end.outcome} with {end.returncode}: {end.stderr[-1500:]}" for end in ends]
            stuck, cases = cases[:1], cases[1:]
            for case in stuck:
                failed += 1
                add_row(case, {**shown(case), "error": "\n".join(words)})
                print(f"{case['name']}: failed\n" + "\n".join(words), file=sys.stderr, flush=True)
    return failed


def shown(case: Case) -> dict[str, Any]:
    return {name: case[name] for name in case["shown"]}


def read(output: str) -> dict[str, Any]:
    path = Path(output)
    if path.exists():
        return json.loads(path.read_text())
    return {"benchmark": path.stem, "machine": machine(), "rows": []}


def add_row(case: Case, row: dict[str, Any]) -> None:
    """Adds a case to the output, in place of an earlier one like it."""
    result = read(case["output"])
    result["rows"] = [each for each in result["rows"] if any(each[k] != row[k] for k in case["shown"])] + [row]
    writing = Path(f"{case['output']}.writing")
    writing.write_text(json.dumps(result, indent=1))
    writing.replace(case["output"])


# What one rank does


def run_rank(task: dict[str, Any], run: Callable[[Case], dict[str, Any]], describe: Callable[[Any], str]) -> None:
    """Runs every case on this rank, and on the first keeps and tells what it gave."""
    import logging

    import torch
    import torch.distributed as dist

    logging.getLogger("torch").setLevel(logging.ERROR)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo")
    for case in task["cases"]:
        # All ranks must see the same time.
        if task["ends_at"] is not None and agreed(time.time()) > task["ends_at"]:
            break
        row = run(case)
        if dist.get_rank() == 0:
            row = {**shown(case), "emulation": task["emulation"], **row}
            if cuda:
                row["device"] = torch.cuda.get_device_name()
            add_row(case, row)
            print(describe(row), file=sys.stderr, flush=True)
            print(case["name"], flush=True)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def agreed(value: float) -> float:
    """The largest of all ranks' values."""
    return agreed_all([value])[0]


def agreed_all(values: list[float]) -> list[float]:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


class Clock:
    """Seconds between two points of this rank's work: on the GPU, where there is one."""

    def __init__(self) -> None:
        import torch

        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if torch.cuda.is_available() else []
        self.began = 0.0

    def __enter__(self) -> "Clock":
        if self.events:
            self.events[0].record()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.began
        if self.events:
            self.events[1].record()
            self.events[1].synchronize()
            self.seconds = self.events[0].elapsed_time(self.events[1]) / 1e3


def timed(step: Step, count: int, filled: int = FILLED) -> float:
    """Seconds of a step, after some that fill the pipeline."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    for _ in range(filled):
        step()
    with Clock() as clock:
        for _ in range(count):
            step()
    if clock.events:
        # What is still on the wire must not disturb what comes next.
        torch.cuda.synchronize()
    return clock.seconds / count
