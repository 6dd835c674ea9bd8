"""Asynchronous parameter server: each replica's gradient is applied as it comes, and answered with fresh parameters.

An owner serves every other rank in a thread of its own. A replica's step sends its gradients and waits for its own
answers only; nobody waits for the others. Gradients are weighted with their replica's share, so that one round of all
replicas moves the parameters about as far as one synchronous step.
"""

import threading
from collections.abc import Callable

import torch

from offbeat.runtime.channel import Channel
from offbeat.runtime.parcels import ServerParcel, box_slices, piece_views
from offbeat.runtime.updates import Unit

_GRADIENT, _FAREWELL = 1, 0
_UP, _DOWN = 1, 2
"""Tags of gradients and of parameters, which cross between the same two ranks."""


class AsyncParcel(ServerParcel):
    """A server's message that takes part in no collective: it is exchanged with its owner alone."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        # The server's threads must not touch what autograd is writing, so they work on tensors of their own.
        self.inbox = torch.zeros_like(self.buffer)
        self.inbox_views = list(piece_views(self.message, self.inbox))

    def update_units(self) -> list[Unit]:
        if self.me != self.message.owner:
            return []
        held = zip(self.message.pieces, self.parameters, self.value_views, self.inbox_views, strict=True)
        return [
            Unit(parameter, torch.nn.Parameter(value), view, box_slices(piece))
            for piece, parameter, value, view in held
        ]


class AsyncServer:
    """One rank's side of all asynchronous messages: it serves what it owns and exchanges the rest."""

    def __init__(self, channel: Channel, parcels: list[AsyncParcel], update: Callable[[AsyncParcel], None]) -> None:
        self.channel = channel
        self.me = channel.ranks[channel.index]
        self.update = update
        self.owned = [parcel for parcel in parcels if parcel.message.owner == self.me]
        self.remote = [parcel for parcel in parcels if parcel.message.owner != self.me]
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        peers = [index for index in range(channel.size) if index != channel.index] if self.owned else []
        self.threads = [threading.Thread(target=self._serve, args=(peer,), daemon=True) for peer in peers]
        for thread in self.threads:
            thread.start()

    def exchange(self) -> None:
        """Applies this rank's gradients to what it owns, and sends the others to their owners for new parameters."""
        if self.failure is not None:
            raise RuntimeError(f"the parameter server thread failed: {self.failure}") from self.failure
        for parcel in self.owned:
            self._apply(parcel, parcel.buffer)
            parcel.unpack_values()
        for owner in dict.fromkeys(parcel.message.owner for parcel in self.remote):
            self._header(owner, _GRADIENT)
            for parcel in self.remote:
                if parcel.message.owner == owner:
                    self._send(parcel.buffer, owner)
        for parcel in self.remote:
            assert parcel.message.owner is not None
            source = self.channel.ranks.index(parcel.message.owner)
            self.channel.group.recv([parcel.values], source, _DOWN).wait()
            parcel.unpack_values()

    def close(self) -> None:
        """Says farewell to every owner, and waits until all others have."""
        for owner in dict.fromkeys(parcel.message.owner for parcel in self.remote):
            self._header(owner, _FAREWELL)
        for thread in self.threads:
            thread.join()

    def _header(self, owner: int | None, kind: int) -> None:
        self._send(torch.tensor([kind], dtype=torch.int64), owner)

    def _send(self, tensor: torch.Tensor, owner: int | None) -> None:
        assert owner is not None
        self.channel.group.send([tensor], self.channel.ranks.index(owner), _UP).wait()

    def _serve(self, peer: int) -> None:
        # Tensor code in a thread starts a team of its own otherwise, which slows the training thread down.
        torch.set_num_threads(1)
        header = torch.zeros(1, dtype=torch.int64)
        arrived = {parcel.message.index: torch.empty_like(parcel.buffer) for parcel in self.owned}
        try:
            while True:
                self.channel.group.recv([header], peer, _UP).wait()
                if int(header) == _FAREWELL:
                    return
                for parcel in self.owned:
                    self.channel.group.recv([arrived[parcel.message.index]], peer, _UP).wait()
                for parcel in self.owned:
                    answer = self._apply(parcel, arrived[parcel.message.index])
                    self.channel.group.send([answer], peer, _DOWN).wait()
        except RuntimeError as error:
            self.failure = error

    @torch.no_grad()
    def _apply(self, parcel: AsyncParcel, gradient: torch.Tensor) -> torch.Tensor:
        with self.lock:
            parcel.inbox.copy_(gradient)
            self.update(parcel)
            return parcel.values.clone()
