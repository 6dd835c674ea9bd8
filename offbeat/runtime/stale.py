"""Staleness K: a message may arrive up to K steps after it left.

A replica goes on while its last K gradients are still under way, and waits for the one before them: so when it begins
step c, every other replica has finished the backward pass of step c - K - 1, which is the bound of stale synchronous
parallel training. What has arrived is applied at once, in the order in which it left; every replica applies the same
sums in the same order.
"""

from collections import deque

import torch

from offbeat.plan import Task
from offbeat.runtime.channel import Work, wait
from offbeat.runtime.parcels import Parcel, ServerParcel


class StaleParcel(Parcel):
    """An all-reduced message of which several steps' copies may be under way."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.flying: deque[tuple[torch.Tensor, dict[int, Work]]] = deque()

    def load(self) -> None:
        super().load()
        self.leaving = self.buffer.clone()

    def start(self, task: Task) -> None:
        if len(task.ranks) > 1:
            self.works[task.index] = self._start(task, self.leaving[task.start : task.stop])

    def depart(self) -> None:
        """This step's message is on its way; the parcel is free for the next."""
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
        return bool(self.flying) and all(work.is_completed() for work in self.flying[0][1].values())

    def arrive(self) -> None:
        """Takes the oldest message, waiting for it if need be; `parameter.grad` then holds its average."""
        tensor, works = self.flying.popleft()
        for work in works.values():
            wait(work)
        self.buffer.copy_(tensor)
        self.unload()


class StaleServerParcel(StaleParcel, ServerParcel):
    """A server's message of which several steps' copies may be under way."""

    replicated = False

    @property
    def arrived(self) -> bool:
        # Parameters come back by a collective, so all ranks must take the message at the same point.
        return False

    def arrive(self) -> None:
        tensor, works = self.flying.popleft()
        for work in works.values():
            wait(work)
        self.buffer.copy_(tensor)
