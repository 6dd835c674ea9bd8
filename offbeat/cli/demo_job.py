"""The training job of `offbeat demo`: the same steps with DDP and with Offbeat in turn → times and losses.

Runs once per rank in a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), like any script of a user.
"""

import time
from collections.abc import Callable
from datetime import timedelta
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
MOMENTUM = 0.9
TIMEOUT = timedelta(seconds=60)


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


def train(model: str, scale: float, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """What this rank measured: seconds of the timed steps and losses of all, for DDP and for Offbeat."""
    dist.init_process_group("gloo", timeout=TIMEOUT)

    def build(seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        return zoo.build(model, scale, batch)

    batches = [build(1 + dist.get_rank() * BATCHES + index)[1] for index in range(BATCHES)]
    jobs = {"ddp": _with_ddp(build(0)[0]), "offbeat": _with_offbeat(build(0)[0])}
    for job in jobs.values():
        job.train(batches, untimed=FIRST_STEPS, timed=0)
    for _ in range(rounds):
        for job in jobs.values():
            job.train(batches, untimed=FILLING_STEPS, timed=steps)
    distributed: Any = jobs["offbeat"].model
    result = {name: {"seconds": job.seconds, "losses": job.losses} for name, job in jobs.items()}
    dist.barrier()
    dist.destroy_process_group()
    return result | {"mode": distributed.offbeat_mode, "strategy": distributed._offbeat.plan.strategy.name}


def _with_ddp(model: torch.nn.Module) -> Job:
    return Job(DistributedDataParallel(model), _optimizer(model), flush=lambda: None)


def _with_offbeat(model: torch.nn.Module) -> Job:
    distributed: Any
    distributed, optimizer = offbeat.distribute(model, _optimizer(model), strategy="auto", timeout=TIMEOUT)
    return Job(distributed, optimizer, flush=distributed.flush)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
