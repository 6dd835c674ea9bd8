"""The training jobs of `offbeat demo` and `tour`: the same steps with DDP and with Offbeat, in turn → times and losses.

Runs once per rank in a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), like any script of a user.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat import zoo

BATCHES = 4
BUCKETS_MB = (1, 2, 4, 8)
"""Sizes that somebody who tunes DDP would try."""
TRIAL_STEPS = 5
WARM_UP_STEPS = 3
"""DDP rebuilds its buckets after the first step."""
MOST_SETTLING_STEPS = 250
FILLING_STEPS = 1
"""Untimed steps of each round, so that the first timed step waits for earlier traffic as the later ones do."""
PIECE_BYTES = 2**22
LEARNING_RATE = 0.01
MOMENTUM = 0.9
TIMEOUT = timedelta(seconds=60)


class Replica:
    """One replica, trained in one of several ways, with the times and losses of its steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.seconds: list[list[float]] = []
        """Of the timed steps, round by round."""
        self.losses: list[float] = []

    def train(self, batches: list[Any], untimed: int, timed: int) -> None:
        """Trains some steps; the network is idle before and after, so that the jobs do not disturb each other."""
        dist.barrier()
        seconds = []
        for _ in range(untimed + timed):
            begin = time.perf_counter()
            self.step(batches)
            seconds.append(time.perf_counter() - begin)
        if timed:
            self.seconds.append(seconds[untimed:])
        flush: Callable[[], None] = getattr(self.model, "flush", lambda: None)
        flush()

    def step(self, batches: list[Any]) -> None:
        batch = batches[len(self.losses) % len(batches)]
        self.optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def train(model: str, scale: float, batch: int, options: dict[str, Any], steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of the timed steps and losses of all steps on this rank, for every way of training."""
    dist.init_process_group("gloo", timeout=TIMEOUT)

    def build(seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        return zoo.build(model, scale, batch, **options)

    batches = [build(1 + dist.get_rank() * BATCHES + index)[1] for index in range(BATCHES)]
    jobs = {"offbeat": Replica(build(0)[0])}
    offbeat.distribute(jobs["offbeat"].model, jobs["offbeat"].optimizer, strategy="auto", timeout=TIMEOUT)
    settled = _settle(jobs["offbeat"], batches)
    bucket, jobs["best_ddp"] = _best_ddp(lambda: build(0)[0], batches)
    jobs |= {"ddp": _with_ddp(build(0)[0], None), "compute": Replica(build(0)[0])}
    for name in ("ddp", "compute"):
        jobs[name].train(batches, untimed=WARM_UP_STEPS, timed=0)
    network = []
    for _ in range(rounds):
        network.append(_all_reduce_seconds(jobs["compute"].model))
        for job in jobs.values():
            job.train(batches, untimed=FILLING_STEPS, timed=steps)
    handle: Any = jobs["offbeat"].model
    result = {name: {"seconds": job.seconds, "losses": job.losses} for name, job in jobs.items()}
    described = {"mode": handle.offbeat.mode, "strategy": handle.offbeat.plan.strategy.name}
    dist.barrier()
    dist.destroy_process_group()
    return {**result, **described, "network_seconds": network, "best_bucket_mb": bucket, "settling_steps": settled}


def record(model: str, scale: float, batch: int, options: dict[str, Any], steps: int, folder: str) -> None:
    """Records steps of DDP into a folder."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(dist.get_rank())
    module, inputs = zoo.build(model, scale, batch, **options)
    job = _with_ddp(module, None)
    job.train([inputs], untimed=2 * WARM_UP_STEPS, timed=0)
    with offbeat.Recorder(folder) as recorder:
        for _ in range(steps):
            job.step([inputs])
            recorder.step()
    dist.destroy_process_group()


def compare(
    model: str, scale: float, batch: int, options: dict[str, Any], steps: int, rounds: int, strategy: str
) -> dict[str, list[float]]:
    """Median seconds of each round of steps on this rank, with DDP and with a strategy in turn."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(dist.get_rank())
    module, inputs = zoo.build(model, scale, batch, **options)
    jobs = {"ddp": _with_ddp(module, None), "offbeat": Replica(zoo.build(model, scale, batch, **options)[0])}
    tuned = jobs["offbeat"]
    offbeat.distribute(tuned.model, tuned.optimizer, strategy=strategy, timeout=TIMEOUT)
    for job in jobs.values():
        # The engine measures its order under load in its first ten steps.
        job.train([inputs], untimed=12, timed=0)
    for _ in range(rounds):
        for job in jobs.values():
            job.train([inputs], untimed=FILLING_STEPS, timed=steps)
    dist.barrier()
    dist.destroy_process_group()
    return {name: [median(each) for each in job.seconds] for name, job in jobs.items()}


def _settle(job: Replica, batches: list[Any]) -> int:
    """Trains until Offbeat has found its plan; the steps that took."""
    while not job.model.offbeat.settled and len(job.losses) < MOST_SETTLING_STEPS:
        job.train(batches, untimed=10, timed=0)
    return len(job.losses)


def _best_ddp(build: Callable[[], torch.nn.Module], batches: list[Any]) -> tuple[int, Replica]:
    """DDP with the bucket size that is fastest in a short race, the same on every rank."""
    found = []
    for size in BUCKETS_MB:
        job = _with_ddp(build(), size)
        job.train(batches, untimed=WARM_UP_STEPS, timed=TRIAL_STEPS)
        slowest = torch.tensor(median(job.seconds.pop()))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append((slowest.item(), size, job))
    _, size, job = min(found, key=lambda each: each[:2])
    return size, job


def _all_reduce_seconds(model: torch.nn.Module) -> float:
    """Seconds for as many bytes as the gradients have, all-reduced back to back while nothing computes."""
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    dist.barrier()
    begin = time.perf_counter()
    for work in [dist.all_reduce(piece, async_op=True) for piece in flat.split(PIECE_BYTES // 4)]:
        work.wait()
    return time.perf_counter() - begin


def _with_ddp(model: torch.nn.Module, bucket_mb: int | None) -> Replica:
    """None is DDP's default: a first bucket of 1 MiB, then 25 MiB. An explicit 25 makes the first one as large."""
    return Replica(DistributedDataParallel(model, bucket_cap_mb=bucket_mb))
