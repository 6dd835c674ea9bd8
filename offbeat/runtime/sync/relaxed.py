"""Messages that may be applied later than in their own step: stale ones, and asynchronous parameter servers.

Staleness K: a message may arrive up to K steps after it left. A replica continues while its last K gradients are still
in flight, and waits for the one before them: so when it begins step c, every other replica has finished the backward
pass of step c - K - 1, which is the bound of stale synchronous parallel training. What has arrived is applied at once,
in the order in which it left; every replica applies the same sums in the same order.

Asynchronous: each replica's gradient is applied on arrival and answered with fresh parameters. An owner serves every
other rank in a thread of its own. A replica's step sends its gradients and waits for its own answers only; nobody waits
for the others. Gradients are weighted with their replica's share, so that one round of all replicas moves the
parameters about as far as one synchronous step.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch

from offbeat.plan import Task
from offbeat.runtime.comm import Channel, CommunicationFailed, Work
from offbeat.runtime.sync.dense import ServerSynchroniser, Synchroniser, piece_views
from offbeat.runtime.unit_optimizer import Unit

_GRADIENT, _FAREWELL = 1, 0
_UP, _DOWN = 1, 2
"""Tags of gradients and parameters, which are exchanged between the same two ranks."""


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


class AsyncMessage(ServerSynchroniser):
    """A server's message without collectives: it is exchanged with its owner only."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The server's threads must not touch what autograd is writing, so they work on tensors of their own.
        self.inbox = torch.zeros_like(self.buffer)

    def units(self) -> list[Unit]:
        arriving = piece_views(self.message, self.inbox)
        return [replace(unit, gradient=next(arriving)) for unit in super().units()]


class AsyncServer:
    """One rank's side of all asynchronous messages: it serves those it owns and exchanges the rest."""

    def __init__(
        self,
        channel: Channel,
        synchronisers: list[Synchroniser],
        update: Callable[[int], None],
        replicas: Collection[int],
    ) -> None:
        """Gradients come from `replicas`."""
        self.channel = channel
        self.update = update
        me = channel.ranks[channel.index]
        held: dict[int, list[AsyncMessage]] = defaultdict(list)
        for each in synchronisers:
            if each.message.asynchronous and each.message.owner is not None:
                held[each.message.owner].append(cast(AsyncMessage, each))
        self.owned = held.pop(me, [])
        self.remote = held if me in replicas else {}
        """Messages that other ranks own, by their owner."""
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        peers = [rank for rank in replicas if rank != me] if self.owned else []
        self.threads = [threading.Thread(target=self._serve, args=(peer,), daemon=True) for peer in peers]
        for thread in self.threads:
            thread.start()

    def exchange(self) -> None:
        """Applies this rank's gradients to the messages it owns, and exchanges the others with their owners."""
        if isinstance(self.failure, CommunicationFailed):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError(f"the parameter server thread failed: {self.failure}") from self.failure
        for each in self.owned:
            self._apply(each, each.buffer)
            each.unpack_values()
        for owner, messages in self.remote.items():
            for tensor in (torch.tensor([_GRADIENT]), *(each.buffer for each in messages)):
                self.channel.send(tensor, owner, _UP)
        for owner, messages in self.remote.items():
            for each in messages:
                self.channel.recv(each.values, owner, _DOWN)
                each.unpack_values()

    def close(self, deadline: float | None = None) -> None:
        """Says goodbye to every owner, and waits until all others have, or until `deadline` (time.monotonic)."""
        # A send waits for its receiver, which may have stopped answering.
        self.threads.append(threading.Thread(target=self._leave, daemon=True))
        self.threads[-1].start()
        self.join(deadline)

    def join(self, deadline: float | None) -> None:
        """Waits for the threads."""
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _leave(self) -> None:
        for owner in self.remote:
            with suppress(RuntimeError):
                self.channel.send(torch.tensor([_FAREWELL]), owner, _UP)

    def _serve(self, peer: int) -> None:
        # Tensor code in a thread starts a team of its own otherwise, which slows the training thread down.
        torch.set_num_threads(1)
        header = torch.zeros(1, dtype=torch.int64)
        arrived = [torch.empty_like(each.buffer) for each in self.owned]
        try:
            while True:
                self.channel.recv(header, peer, _UP)
                if int(header) == _FAREWELL:
                    return
                for gradient in arrived:
                    self.channel.recv(gradient, peer, _UP)
                for each, gradient in zip(self.owned, arrived, strict=True):
                    self.channel.send(self._apply(each, gradient), peer, _DOWN)
        except RuntimeError as error:
            self.failure = error

    @torch.no_grad()
    def _apply(self, each: AsyncMessage, gradient: torch.Tensor) -> torch.Tensor:
        with self.lock:
            each.inbox.copy_(gradient)
            self.update(each.message.index)
            return each.values.clone()
