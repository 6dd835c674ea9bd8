"""Dense messages: their buffers, their collectives, and who applies them.

`Synchroniser` is the protocol that the engine knows: a message is loaded when the gradients of all its pieces are
complete, its tasks start in the plan's order, `finish` waits for them, and `averaged` then gives the averaged gradient
of a piece. Here it is also the plainest kind, a dense all-reduce that every replica applies; other kinds override what
they do differently. A kind with owners updates its own part and sends parameters back.
"""

from collections.abc import Generator, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch

from offbeat.plan import Message, Piece, Task
from offbeat.runtime.comm import Channels, Work, gather_blocks
from offbeat.runtime.lazy import raw_gradient, without_grad
from offbeat.runtime.sync.encoders import MessageEncoder
from offbeat.runtime.unit_optimizer import Unit


class Synchroniser:
    """A dense message without an encoder, applied by every replica."""

    later_rounds = False
    """Finishing it may need further collectives, which all ranks must start in the same order."""
    elementwise = True
    """Slices of it can be applied as they arrive."""
    densify = False
    """Its averaged gradient is sparse, and the optimizer needs a dense one."""

    def __init__(
        self, message: Message, parameters: dict[str, torch.nn.Parameter], channels: Channels, me: int, share: float
    ) -> None:
        self.message = message
        self.replicated = message.replicated
        """Every replica applies the update, from `parameter.grad`."""
        self.relaxed = message.asynchronous or message.staleness > 0
        """It may be applied later than in its own step."""
        self.channels = channels
        self.me = me
        self.share = share
        self.parameters = [parameters[piece.variable] for piece in message.pieces]
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self.buffer = torch.zeros(message.elements, dtype=self.dtype, device=self.device)
        self.views = list(piece_views(message, self.buffer))
        self.whole = [piece.shape == tuple(p.shape) for piece, p in zip(message.pieces, self.parameters, strict=True)]
        self.works: dict[int, Work] = {}
        """Collectives in flight, by the task's place in the issue order."""
        self.loaded = False
        """A gradient has been taken over and is not finished yet."""
        self.handles: list[Any] = []
        """Hooks on the model's modules."""

    # Gradients

    @without_grad
    def load(self) -> None:
        """Takes over the gradients, each weighted with this replica's share in the average."""
        self.loaded = True
        if self.device.type == "cuda" and all(self.whole) and self._load_fused():
            return
        for gradient, view in self._gradients():
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() == view.data_ptr():
                view.mul_(self.share)
            else:
                torch.mul(gradient, self.share, out=view)

    def _gradients(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """For each piece its part of `parameter.grad`, made dense, and of the buffer."""
        for piece, parameter, view, whole in zip(
            self.message.pieces, self.parameters, self.views, self.whole, strict=True
        ):
            gradient = raw_gradient(parameter)
            if gradient is not None and gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            yield gradient if whole or gradient is None else gradient[box_slices(piece)], view

    def _load_fused(self) -> bool:
        """The same for new gradients of whole variables, with a kernel per message instead of one per piece."""
        gradients = [raw_gradient(parameter) for parameter in self.parameters]
        for gradient, view in zip(gradients, self.views, strict=True):
            if gradient is None or gradient.layout != torch.strided or gradient.data_ptr() == view.data_ptr():
                return False
        torch._foreach_copy_(self.views, gradients)
        if self.share != 1.0:
            self.buffer.mul_(self.share)
        return True

    def start(self, task: Task) -> None:
        """Starts a gradient task."""
        if len(task.ranks) > 1:
            self.works[task.index] = self._start(task, self.buffer[task.start : task.stop])

    def _start(self, task: Task, tensor: torch.Tensor) -> Work:
        if task.kind == "relay":
            return self.channels.relays[task.ranks].start(tensor)
        channel = self.channels.up(task.ranks)
        if task.kind == "all_reduce":
            return channel.all_reduce(tensor)
        assert task.root is not None
        return channel.reduce(tensor, task.root)

    def wait(self, task: int) -> None:
        """Waits for one task, if this rank takes part in it."""
        work = self.works.pop(task, None)
        if work is not None:
            work.wait()

    def finish(self) -> None:
        """Waits for every task in flight; `averaged` is then valid where the gradient is applied."""
        for task in list(self.works):
            self.wait(task)
        self.loaded = False

    def averaged(self, place: int) -> torch.Tensor:
        """The averaged gradient of one piece; a sparse one has the shape of the whole variable."""
        return self.views[place]

    def unit_gradients(self) -> dict[int, torch.Tensor]:
        """Averaged gradients that lie elsewhere than their units say, by the unit tensor's id."""
        return {}

    @torch.no_grad()
    def reload(self) -> None:
        """Takes the averaged gradients back from `parameter.grad`, where the training loop may have changed them."""
        for gradient, view in self._gradients():
            if gradient is not None and gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)

    def drop(self) -> None:
        """Waits for collectives in flight and drops their results."""
        Synchroniser.finish(self)

    # What owners do; nobody owns a message that every replica applies

    def hold_values(self, aliased: frozenset[int]) -> None:
        """Arranges the parameters so that their values can be sent; those in `aliased` (by id) must not be moved."""

    def pack_values(self) -> None:
        """Takes the parameters' current values, which the training loop may have changed."""

    def unpack_values(self) -> None:
        """Gives the parameters the values that have been updated or received."""

    def units(self) -> list[Unit]:
        """The units that this rank updates on behalf of all."""
        return []

    def unit_of_piece(self, place: int, parameter: torch.nn.Parameter) -> Unit:
        """A piece that every replica updates separately, because another piece of the variable has an owner."""
        box = box_slices(self.message.pieces[place])
        return Unit(parameter, torch.nn.Parameter(parameter.data[box]), self.views[place], box)

    def prepare(self) -> None:
        """Work of all ranks, one message after another, before owners can update."""

    def collect(self, published: bool) -> None:
        """Lays the averaged gradient out for the owner's update; `published` if it was taken back from the loop."""

    def start_return(self, task: Task) -> None:
        """Starts sending parameters back."""

    def receive(self) -> None:
        """Waits for the returning parameters."""

    def publish(self, tasks: list[Task]) -> None:
        """Sends the averaged gradient itself to every replica, for a training loop that reads it."""


class EncodedAllReduce(Synchroniser):
    """A dense message whose gradient is sent encoded."""

    elementwise = False

    def __init__(self, encoder: MessageEncoder, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.encoder = encoder
        self.later_rounds = self.message.encoder.name == "powersgd"
        self.step = 0
        self.exchange: Generator[torch.Tensor, torch.Tensor, None] | None = None
        self.payload = self.received = self.buffer

    def load(self) -> None:
        super().load()
        with torch.no_grad():
            self.exchange = self.encoder.exchange(self.buffer, self.step)
            self.payload = next(self.exchange).contiguous()
        self.step += 1

    def start(self, task: Task) -> None:
        self.task = task
        if len(task.ranks) == 1:
            self.received = self.payload if self.encoder.summed else self.payload.unsqueeze(0)
            return
        channel = self.channels.up(task.ranks)
        if self.encoder.summed:
            self.received = self.payload
            sliced = self.message.encoder.sliceable
            part = self.payload[task.start : task.stop] if sliced else self.payload
            self.works[task.index] = self._start(task, part)
        else:
            self.works[task.index], self.received = gather_blocks(channel, self.payload, task.root)

    @torch.no_grad()
    def decode(self) -> None:
        """Turns what arrived into the sum of all gradients, with as many further rounds as the encoder needs."""
        while self.exchange is not None:
            try:
                self.payload = self.exchange.send(self.received).contiguous()
            except StopIteration:
                self.exchange = None
            else:
                self.start(self.task)
                self.wait(self.task.index)

    def finish(self) -> None:
        super().finish()
        self.decode()


class OwnedSynchroniser(Synchroniser):
    """A message whose parameters are sent back, through a flat buffer of values that whole parameters are views of."""

    elementwise = False

    @torch.no_grad()
    def hold_values(self, aliased: frozenset[int]) -> None:
        self.values = torch.empty(self.message.elements, dtype=self.dtype, device=self.device)
        self.value_views = list(piece_views(self.message, self.values))
        self.pack_values()
        for parameter, view, whole in zip(self.parameters, self.value_views, self.whole, strict=True):
            if whole and id(parameter) not in aliased:
                parameter.data = view

    def _apart(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces that lie outside the flat buffer: each in its parameter, and its place in the buffer."""
        for piece, parameter, view in zip(self.message.pieces, self.parameters, self.value_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                yield parameter[box_slices(piece)], view

    @torch.no_grad()
    def pack_values(self) -> None:
        for part, view in self._apart():
            view.copy_(part)

    @torch.no_grad()
    def unpack_values(self) -> None:
        for part, view in self._apart():
            part.copy_(view)

    def start_return(self, task: Task) -> None:
        if len(task.ranks) > 1:
            assert task.root is not None
            channel = self.channels.back(task.ranks)
            self.works[task.index] = channel.broadcast(self.values[task.start : task.stop], task.root)

    def receive(self) -> None:
        self.finish()
        self.unpack_values()

    def publish(self, tasks: list[Task]) -> None:
        self.finish()
        for task in tasks:
            if len(task.ranks) > 1:
                assert task.root is not None
                self.channels.back(task.ranks).broadcast(self.buffer[task.start : task.stop], task.root).wait()


class ServerSynchroniser(OwnedSynchroniser):
    """Reduced to its owner, who updates it and broadcasts the parameters."""

    def units(self) -> list[Unit]:
        if self.me != self.message.owner:
            return []
        # A tensor of its own, because the training loop may give the parameter another memory.
        held = zip(self.message.pieces, self.parameters, self.value_views, self.views, strict=True)
        return [
            Unit(parameter, torch.nn.Parameter(value), view, box_slices(piece))
            for piece, parameter, value, view in held
        ]


class EncodedServer(EncodedAllReduce, ServerSynchroniser):
    """A server's message whose gradient is sent encoded."""

    def wait(self, task: int) -> None:
        super().wait(task)
        if self.exchange is not None and not self.works and self.me == self.message.owner:
            self.decode()

    def finish(self) -> None:
        Synchroniser.finish(self)


class ShardedSynchroniser(OwnedSynchroniser):
    """Reduce-scattered: each rank updates its part of every slice, then all gather the parameters."""

    def __init__(
        self, encoder_dtype: torch.dtype | None, slices: list[tuple[int, int]], ranks: tuple[int, ...], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self.wire_dtype = encoder_dtype or self.dtype
        self.parts: dict[int, torch.Tensor] = {}
        self.wire_parts: dict[int, torch.Tensor] = {}
        self.gathered: dict[int, torch.Tensor] = {}
        self.mine: dict[int, tuple[int, int]] = {}
        """By the slice's start: where this rank's part begins and ends."""
        size, index = len(ranks), ranks.index(self.me)
        for start, stop in slices:
            part = -(-(stop - start) // size)
            begin = min(stop, start + index * part)
            self.mine[start] = (begin, min(stop, begin + part))
            self.parts[start] = torch.zeros(part, dtype=self.dtype, device=self.device)
            self.wire_parts[start] = torch.zeros(part, dtype=self.wire_dtype, device=self.device)

    def start(self, task: Task) -> None:
        outgoing, part = self.buffer[task.start : task.stop], self.wire_parts[task.start]
        if len(task.ranks) == 1:
            part.copy_(outgoing)
            return
        length = len(part) * len(task.ranks)
        if len(outgoing) < length or self.wire_dtype != self.dtype:
            padded = torch.zeros(length, dtype=self.wire_dtype, device=self.device)
            padded[: len(outgoing)] = outgoing
            outgoing = padded
        self.works[task.index] = self.channels.up(task.ranks).reduce_scatter(part, outgoing)

    @torch.no_grad()
    def collect(self, published: bool) -> None:
        if not published:
            for start, part in self.wire_parts.items():
                self.parts[start].copy_(part)

    def units(self) -> list[Unit]:
        units = []
        held = list(zip(self.message.pieces, self.parameters, piece_edges(self.message), strict=True))
        for start, (begin, end) in self.mine.items():
            for piece, parameter, (left, right) in held:
                low, high = max(begin, left), min(end, right)
                if low < high:
                    gradient = self.parts[start][low - begin : high - begin]
                    tensor = torch.nn.Parameter(self.values[low:high])
                    units.append(Unit(parameter, tensor, gradient, box_slices(piece), slice(low - left, high - left)))
        return units

    def start_return(self, task: Task) -> None:
        if len(task.ranks) == 1:
            return
        begin, end = self.mine[task.start]
        outgoing = torch.zeros_like(self.parts[task.start])
        outgoing[: end - begin] = self.values[begin:end]
        self.works[task.index], gathered = gather_blocks(self.channels.back(task.ranks), outgoing, None)
        self.gathered[task.start] = gathered.view(-1)[: task.stop - task.start]

    @torch.no_grad()
    def receive(self) -> None:
        self.finish()
        for start, gathered in self.gathered.items():
            self.values[start : start + gathered.numel()] = gathered
        self.gathered.clear()
        self.unpack_values()

    @torch.no_grad()
    def publish(self, tasks: list[Task]) -> None:
        self.finish()
        self.collect(published=False)
        for task in tasks:
            if len(task.ranks) > 1:
                work, gathered = gather_blocks(self.channels.back(task.ranks), self.parts[task.start], None)
                work.wait()
                self.buffer[task.start : task.stop] = gathered.view(-1)[: task.stop - task.start]

    @torch.no_grad()
    def reload(self) -> None:
        super().reload()
        for start, (begin, end) in self.mine.items():
            self.parts[start][: end - begin] = self.buffer[begin:end]


def piece_edges(message: Message) -> list[tuple[int, int]]:
    """Where each piece lies in the message."""
    return list(pairwise(accumulate((piece.elements for piece in message.pieces), initial=0)))


def piece_views(message: Message, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each piece of a message as a tensor of its shape."""
    for piece, (start, stop) in zip(message.pieces, piece_edges(message), strict=True):
        yield flat[start:stop].view(piece.shape)


def box_slices(piece: Piece) -> tuple[slice, ...]:
    """The piece's box as an index of its variable."""
    return tuple(slice(start, stop) for start, stop in piece.box)
