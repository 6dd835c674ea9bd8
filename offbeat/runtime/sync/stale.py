"""Staleness K: a message may arrive up to K steps after it left.

A replica continues while its last K gradients are still in flight, and waits for the one before them: so when it begins
step c, every other replica has finished the backward pass of step c - K - 1, which is the bound of stale synchronous
parallel training. What has arrived is applied at once, in the order in which it left; every replica applies the same
sums in the same order.
"""

from collections import deque
from typing import Any

import torch

from offbeat.plan import Task
from offbeat.runtime.comm import Work
from offbeat.runtime.sync.dense import ServerSynchroniser, Synchroniser


class StaleAllReduce(Synchroniser):
    """An all-reduced message with copies of several steps in flight."""

    elementwise = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.flying: deque[tuple[torch.Tensor, dict[int, Work]]] = deque()
        """Messages of this and earlier steps that have not been applied, with their collectives."""

    def load(self) -> None:
        super().load()
        self.leaving = self.buffer.clone()

    def start(self, task: Task) -> None:
        if len(task.ranks) > 1:
            self.works[task.index] = self._start(task, self.leaving[task.start : task.stop])

    def depart(self) -> None:
        """This step's message is in flight; the buffer is free for the next."""
        self.flying.append((self.leaving, self.works))
        self.works = {}
        self.loaded = False

    @property
    def due(self) -> bool:
        """The oldest message must be waited for."""
        return len(self.flying) > self.message.staleness

    @property
    def arrived(self) -> bool:
        """The oldest message can be applied without waiting."""
        # A server's parameters come back by a collective, so all ranks must take its message at the same point.
        return self.replicated and bool(self.flying) and all(work.is_completed() for work in self.flying[0][1].values())

    def arrive(self) -> None:
        """Takes the oldest message, waiting for it if necessary."""
        tensor, works = self.flying.popleft()
        for work in works.values():
            work.wait()
        self.buffer.copy_(tensor)


class StaleServer(StaleAllReduce, ServerSynchroniser):
    """A server's message with copies of several steps in flight."""
