"""A function → the same function on every rank of a job in memory, a thread each."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import small_models
import torch
from memory_job import MemoryJob, MemoryWorld
from reference import flat_parameters

from offbeat.cluster import ClusterSpec
from offbeat.graph import ModelGraph
from offbeat.plan import lower
from offbeat.runtime.distribute import Runtime
from offbeat.strategy import Strategy

SECONDS = 60.0
"""After which a run counts as hung."""
TIMEOUT = timedelta(seconds=40)


def run_ranks(size: int, function: Callable[[MemoryWorld], Any], job: MemoryJob | None = None) -> list[Any]:
    """What each rank returned, in rank order; raises the first error of any rank."""
    outcomes, errors = run_to_end(job or MemoryJob(size), function)
    if errors:
        raise errors[0]
    return outcomes


def run_to_end(job: MemoryJob, function: Callable[[MemoryWorld], Any]) -> tuple[list[Any], list[BaseException]]:
    """What each rank returned or raised, in rank order, and the errors in the order in which they happened.

    A rank that raises has stopped, as far as the others can tell.
    """
    outcomes: list[Any] = [None] * job.size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            outcomes[rank] = function(job.world(rank))
        except BaseException as error:
            outcomes[rank] = error
            errors.append(error)
            job.stop(rank)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(job.size)]
    deadline = time.monotonic() + SECONDS
    # Timing a link takes longer than training.
    with mock.patch("offbeat.runtime.distribute.fit_link", return_value=(1e-4, 1e-9)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    hung = [thread for thread in threads if thread.is_alive()]
    if hung:
        frames = sys._current_frames()
        stacks = "".join(f"{t.name}:\n{''.join(traceback.format_stack(frames[t.ident]))}" for t in hung if t.ident)
        raise AssertionError(f"{[thread.name for thread in hung]} did not end within {SECONDS:.0f} s\n{stacks}")
    return outcomes, errors


@contextmanager
def distributed(
    world: MemoryWorld,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    job: tuple[ModelGraph, ClusterSpec, Strategy],
    timeout: timedelta = TIMEOUT,
) -> Generator[Runtime, None, None]:
    """The model and optimizer, trained by the real engine until the block ends."""
    graph, cluster, strategy = job
    runtime = Runtime(model, optimizer, lower(graph, cluster, strategy, rank=world.rank), timeout, world)
    yield runtime
    runtime.engine.detach()
    runtime.engine.channels.close()


def fresh(world: MemoryWorld, name: str, kind: str, seed: int = 0) -> tuple[Any, Any]:
    """A model of its own for each rank, and its optimizer."""
    model = small_models.make(name, seed=seed + world.rank, sparse=kind != "adamw")
    return model, small_models.make_optimizer(kind, model.parameters())


def train(
    world: MemoryWorld, name: str, model: Any, optimizer: Any, steps: range, sizes: tuple[int, ...] = (4,) * 4
) -> list[float]:
    """Trains on this rank's batches; the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*small_models.batch(name, step, world.rank, size=sizes[world.rank]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distance(model: torch.nn.Module, expected: torch.Tensor) -> float:
    return (flat_parameters(model) - expected).abs().max().item()
