"""Asynchronous parameter server: each replica's gradient is applied as it comes, and answered with fresh parameters.

An owner serves every other rank in a thread of its own. A replica's step sends its gradients and waits for its own
answers only; nobody waits for the others. Gradients are weighted with their replica's share, so that one round of all
replicas moves the parameters about as far as one synchronous step.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch

from offbeat.runtime.comm import Channel, CommunicationFailed
from offbeat.runtime.sync.dense import ServerSynchroniser, Synchroniser, piece_views

_GRADIENT, _FAREWELL = 1, 0
_UP, _DOWN = 1, 2
"""Tags of gradients and of parameters, which cross between the same two ranks."""


class AsyncMessage(ServerSynchroniser):
    """A server's message that takes part in no collective: it is exchanged with its owner alone."""

    relaxed = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The server's threads must not touch what autograd is writing, so they work on tensors of their own.
        self.inbox = torch.zeros_like(self.buffer)
        self.unit_views = list(piece_views(self.message, self.inbox))


class AsyncServer:
    """One rank's side of all asynchronous messages: it serves what it owns and exchanges the rest."""

    def __init__(self, channel: Channel, synchronisers: list[Synchroniser], update: Callable[[int], None]) -> None:
        messages = [cast(AsyncMessage, each) for each in synchronisers if each.message.asynchronous]
        self.channel = channel
        self.me = channel.ranks[channel.index]
        self.update = update
        self.owned = [each for each in messages if each.message.owner == self.me]
        self.remote = [each for each in messages if each.message.owner != self.me]
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        peers = [rank for rank in channel.ranks if rank != self.me] if self.owned else []
        self.threads = [threading.Thread(target=self._serve, args=(peer,), daemon=True) for peer in peers]
        for thread in self.threads:
            thread.start()

    def exchange(self) -> None:
        """Applies this rank's gradients to what it owns, and sends the others to their owners for new parameters."""
        if isinstance(self.failure, CommunicationFailed):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError(f"the parameter server thread failed: {self.failure}") from self.failure
        for each in self.owned:
            self._apply(each, each.buffer)
            each.unpack_values()
        for owner in dict.fromkeys(each.message.owner for each in self.remote):
            self._header(owner, _GRADIENT)
            for each in self.remote:
                if each.message.owner == owner:
                    self._send(each.buffer, owner)
        for each in self.remote:
            assert each.message.owner is not None
            self.channel.recv(each.values, each.message.owner, _DOWN)
            each.unpack_values()

    def close(self, deadline: float | None = None) -> None:
        """Says farewell to every owner, and waits until all others have, or until `deadline` (time.monotonic)."""
        # A send waits for its receiver, which may have stopped answering.
        self.threads.append(threading.Thread(target=self._leave, daemon=True))
        self.threads[-1].start()
        self.join(deadline)

    def join(self, deadline: float | None) -> None:
        """Waits for the threads."""
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _leave(self) -> None:
        for owner in dict.fromkeys(each.message.owner for each in self.remote):
            with suppress(RuntimeError):
                self._header(owner, _FAREWELL)

    def _header(self, owner: int | None, kind: int) -> None:
        self._send(torch.tensor([kind], dtype=torch.int64), owner)

    def _send(self, tensor: torch.Tensor, owner: int | None) -> None:
        assert owner is not None
        self.channel.send(tensor, owner, _UP)

    def _serve(self, peer: int) -> None:
        # Tensor code in a thread starts a team of its own otherwise, which slows the training thread down.
        torch.set_num_threads(1)
        header = torch.zeros(1, dtype=torch.int64)
        arrived = {each.message.index: torch.empty_like(each.buffer) for each in self.owned}
        try:
            while True:
                self.channel.recv(header, peer, _UP)
                if int(header) == _FAREWELL:
                    return
                for each in self.owned:
                    self.channel.recv(arrived[each.message.index], peer, _UP)
                for each in self.owned:
                    answer = self._apply(each, arrived[each.message.index])
                    self.channel.send(answer, peer, _DOWN)
        except RuntimeError as error:
            self.failure = error

    @torch.no_grad()
    def _apply(self, each: AsyncMessage, gradient: torch.Tensor) -> torch.Tensor:
        with self.lock:
            each.inbox.copy_(gradient)
            self.update(each.message.index)
            return each.values.clone()
