"""The training script of `offbeat demo`: the same steps with DDP and with Offbeat in turn → one JSON file per rank.

Runs once per rank in a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), like any script of a user.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat import zoo

BATCHES = 4
FIRST_STEPS = 6
"""Untimed steps before the first round: DDP rebuilds its buckets, Offbeat measures when gradients become ready."""
FILLING_STEPS = 1
"""Untimed steps of each round: what they leave on the wire, the first timed step waits for, as later ones do."""
LEARNING_RATE = 0.01


class Job:
    """One replica that is trained in one way, with what its steps took and gave."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, flush: Callable[[], None]) -> None:
        self.model, self.optimizer, self.flush = model, optimizer, flush
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def train(self, batches: list[Any], untimed: int, timed: int) -> None:
        """Begins and ends with an idle network, so that the jobs do not disturb each other."""
        dist.barrier()
        for step in range(untimed + timed):
            batch = batches[len(self.losses) % len(batches)]
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self.model(*batch)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            if step >= untimed:
                self.seconds.append(time.perf_counter() - begin)
        self.flush()


def main() -> None:
    options = _options()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # All emulated hosts share this machine's cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    batches = [_build(options, seed=1 + rank * BATCHES + index)[1] for index in range(BATCHES)]
    jobs = {"ddp": _with_ddp(options), "offbeat": _with_offbeat(options)}
    for job in jobs.values():
        job.train(batches, untimed=FIRST_STEPS, timed=0)
    for _ in range(options.rounds):
        for job in jobs.values():
            job.train(batches, untimed=FILLING_STEPS, timed=options.steps)
    result = {name: {"seconds": job.seconds, "losses": job.losses} for name, job in jobs.items()}
    Path(options.output, f"rank{rank}.json").write_text(json.dumps(result | _facts(jobs["offbeat"].model)))
    dist.barrier()
    dist.destroy_process_group()


def _with_ddp(options: argparse.Namespace) -> Job:
    model, _ = _build(options, seed=0)
    replica = DistributedDataParallel(model)
    return Job(replica, _optimizer(model), flush=lambda: None)


def _with_offbeat(options: argparse.Namespace) -> Job:
    model, _ = _build(options, seed=0)
    distributed: Any
    distributed, optimizer = offbeat.distribute(model, _optimizer(model), strategy="auto")
    return Job(distributed, optimizer, flush=distributed.flush)


def _build(options: argparse.Namespace, seed: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(seed)
    return zoo.build(options.model, options.scale, options.batch)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def _facts(distributed: Any) -> dict[str, Any]:
    plan = distributed._offbeat.plan
    return {
        "mode": distributed.offbeat_mode,
        "strategy": plan.strategy.name,
        "messages": len(plan.messages),
        "parameter_bytes": plan.graph.parameter_bytes,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--model", required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
