"""Message → parcel: its buffer, its collectives, and who applies it.

A parcel is loaded when the gradients of all its pieces are complete. Its gradient tasks then start in the plan's order.
`finish` waits for them and leaves the averaged gradient where it is applied. Parcels that everybody applies leave it in
`parameter.grad`; parcels with an owner, or whose elements are spread over the ranks, update their own part and send
parameters back.
"""

from collections.abc import Generator

import torch

from offbeat.plan import Message, Piece, Task
from offbeat.runtime.channel import Channels, Work, wait
from offbeat.runtime.encoders import MessageEncoder
from offbeat.runtime.guard import raw_gradient, set_gradient
from offbeat.runtime.updates import Unit


class Parcel:
    """A dense message without an encoder; the other kinds override how it is loaded, started and finished."""

    replicated = True
    """Every replica applies the update, from `parameter.grad`."""
    later_rounds = False
    """Finishing it may take further collectives, which all ranks must make in one order."""

    def __init__(
        self, message: Message, parameters: dict[str, torch.nn.Parameter], channels: Channels, me: int, share: float
    ) -> None:
        self.message = message
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
        """Collectives under way, by the task's place in the issue order."""
        self.loaded = False

    @torch.no_grad()
    def load(self) -> None:
        """Takes over the gradients, each weighted with this replica's share in the average."""
        if self.device.type == "cuda" and all(self.whole) and self._load_fused():
            return
        for piece, parameter, view, whole in zip(
            self.message.pieces, self.parameters, self.views, self.whole, strict=True
        ):
            gradient = raw_gradient(parameter)
            if gradient is None:
                view.zero_()
            elif gradient.layout == torch.strided and gradient.data_ptr() == view.data_ptr():
                view.mul_(self.share)
            else:
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                torch.mul(dense if whole else dense[box_slices(piece)], self.share, out=view)
            if whole:
                set_gradient(parameter, view)
        self.loaded = True

    def _load_fused(self) -> bool:
        """The same for new gradients of whole variables, with a kernel per parcel instead of one per piece."""
        gradients = [raw_gradient(parameter) for parameter in self.parameters]
        for gradient, view in zip(gradients, self.views, strict=True):
            if gradient is None or gradient.layout != torch.strided or gradient.data_ptr() == view.data_ptr():
                return False
        torch._foreach_copy_(self.views, gradients)
        if self.share != 1.0:
            self.buffer.mul_(self.share)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            set_gradient(parameter, view)
        self.loaded = True
        return True

    def start(self, task: Task) -> None:
        """Starts a gradient task."""
        if len(task.ranks) > 1:
            self.works[task.index] = self._start(task, self.buffer[task.start : task.stop])

    def _start(self, task: Task, tensor: torch.Tensor) -> Work:
        channel = self.channels.up(task.ranks)
        if task.kind == "all_reduce":
            return channel.all_reduce(tensor)
        assert task.root is not None
        return channel.reduce(tensor, task.root)

    def wait(self, task: int) -> None:
        """Waits for one task, if this rank takes part in it."""
        work = self.works.pop(task, None)
        if work is not None:
            wait(work)

    def finish(self) -> None:
        """Waits for every task under way and puts the averaged gradient into `parameter.grad`."""
        for task in list(self.works):
            self.wait(task)
        self.unload()

    @torch.no_grad()
    def unload(self) -> None:
        for piece, parameter, view, whole in zip(
            self.message.pieces, self.parameters, self.views, self.whole, strict=True
        ):
            if whole:
                set_gradient(parameter, view)
            else:
                gradient = raw_gradient(parameter)
                if gradient is None or gradient.layout != torch.strided:
                    gradient = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                    set_gradient(parameter, gradient)
                gradient[box_slices(piece)] = view
        self.loaded = False

    @torch.no_grad()
    def reload(self) -> None:
        """Takes the averaged gradients back from `parameter.grad`, where the training loop may have changed them."""
        for piece, parameter, view, whole in zip(
            self.message.pieces, self.parameters, self.views, self.whole, strict=True
        ):
            gradient = raw_gradient(parameter)
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                if dense.data_ptr() != view.data_ptr():
                    view.copy_(dense if whole else dense[box_slices(piece)])

    def drop(self) -> None:
        """Waits for what is under way and forgets it."""
        for task in list(self.works):
            self.wait(task)
        self.loaded = False

    def release(self) -> None:
        """Takes its hooks off the model."""

    def update_units(self) -> list[Unit]:
        """What this rank updates on behalf of all."""
        return []


class EncodedParcel(Parcel):
    """A dense message whose gradient travels encoded."""

    def __init__(self, encoder: MessageEncoder, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
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
        elif task.kind == "all_gather":
            output = self.payload.new_empty(channel.size * self.payload.numel())
            self.received = output.view(channel.size, -1)
            self.works[task.index] = channel.all_gather(output, self.payload)
        else:
            assert task.root is not None
            self.received = self.payload.new_empty(channel.size, self.payload.numel())
            outputs = list(self.received) if task.root == self.me else []
            self.works[task.index] = channel.gather(outputs, self.payload, task.root)

    @torch.no_grad()
    def decode(self) -> None:
        """Turns what arrived into the sum of all gradients, with as many further rounds as the encoder asks for."""
        while self.exchange is not None:
            try:
                self.payload = self.exchange.send(self.received).contiguous()
            except StopIteration:
                self.exchange = None
            else:
                self.start(self.task)
                self.wait(self.task.index)

    def unload(self) -> None:
        self.decode()
        super().unload()


class ValueParcel(Parcel):
    """A parcel whose parameters travel back, through a flat buffer of values that whole parameters are views of."""

    replicated = False

    @torch.no_grad()
    def hold_values(self) -> None:
        """Moves the parameters' values into one buffer; whole parameters become views of it."""
        self.values = torch.empty(self.message.elements, dtype=self.dtype, device=self.device)
        self.value_views = list(piece_views(self.message, self.values))
        self.pack_values()
        for parameter, view, whole in zip(self.parameters, self.value_views, self.whole, strict=True):
            if whole:
                parameter.data = view

    @torch.no_grad()
    def pack_values(self) -> None:
        for piece, parameter, view in zip(self.message.pieces, self.parameters, self.value_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter[box_slices(piece)])

    @torch.no_grad()
    def unpack_values(self) -> None:
        for piece, parameter, view in zip(self.message.pieces, self.parameters, self.value_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                parameter[box_slices(piece)] = view

    def start_return(self, task: Task) -> None:
        """Starts sending parameters back."""
        if len(task.ranks) > 1:
            assert task.root is not None
            channel = self.channels.back(task.ranks)
            self.works[task.index] = channel.broadcast(self.values[task.start : task.stop], task.root)

    def receive(self) -> None:
        """Waits for the returning parameters."""
        for task in list(self.works):
            self.wait(task)
        self.unpack_values()

    def prepare(self) -> None:
        """What all ranks must do, one parcel after another, before owners can update."""

    def publish(self, tasks: list[Task]) -> None:
        """Sends the averaged gradient itself to every replica, for a training loop that reads it."""
        for under_way in list(self.works):
            self.wait(under_way)
        for task in tasks:
            if len(task.ranks) > 1:
                assert task.root is not None
                wait(self.channels.back(task.ranks).broadcast(self.buffer[task.start : task.stop], task.root))
        super().unload()


class ServerParcel(ValueParcel):
    """Reduced to its owner, who updates it and broadcasts the parameters."""

    def update_units(self) -> list[Unit]:
        if self.me != self.message.owner:
            return []
        held = zip(self.message.pieces, self.parameters, self.value_views, self.views, self.whole, strict=True)
        return [
            Unit(parameter, parameter, view)
            if whole
            else Unit(parameter, torch.nn.Parameter(value), view, box_slices(piece))
            for piece, parameter, value, view, whole in held
        ]


class EncodedServerParcel(EncodedParcel, ServerParcel):
    """A server's message whose gradient travels encoded."""

    def wait(self, task: int) -> None:
        super().wait(task)
        if self.exchange is not None and not self.works and self.me == self.message.owner:
            self.decode()


class ShardedParcel(ValueParcel):
    """Reduce-scattered: each rank updates its part of every slice, then all gather the parameters."""

    def __init__(self, encoder_dtype: torch.dtype | None, slices: list[tuple[int, int]], *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.wire_dtype = encoder_dtype or self.dtype
        channel = self.channels.up
        self.parts: dict[int, torch.Tensor] = {}
        self.wire_parts: dict[int, torch.Tensor] = {}
        self.slices = slices
        self._channel_of = channel

    def bind(self, ranks: tuple[int, ...]) -> None:
        """Lays out this rank's part of each slice."""
        self.ranks = ranks
        size, index = len(ranks), ranks.index(self.me)
        self.mine: dict[int, tuple[int, int, int]] = {}
        for start, stop in self.slices:
            part = -(-(stop - start) // size)
            begin = min(stop, start + index * part)
            self.mine[start] = (begin, min(stop, begin + part), part)
            self.parts[start] = torch.zeros(part, dtype=self.dtype, device=self.device)
            self.wire_parts[start] = torch.zeros(part, dtype=self.wire_dtype, device=self.device)

    def _padded(self, tensor: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        length = self.mine[start][2] * len(self.ranks)
        if stop - start == length and dtype == tensor.dtype:
            return tensor[start:stop]
        padded = torch.zeros(length, dtype=dtype, device=self.device)
        padded[: stop - start] = tensor[start:stop]
        return padded

    def start(self, task: Task) -> None:
        if len(task.ranks) > 1:
            outgoing = self._padded(self.buffer, task.start, task.stop, self.wire_dtype)
            channel = self.channels.up(task.ranks)
            self.works[task.index] = channel.reduce_scatter(self.wire_parts[task.start], outgoing)
        else:
            self.wire_parts[task.start].copy_(self.buffer[task.start : task.stop])

    @torch.no_grad()
    def settle_parts(self) -> None:
        for start, part in self.wire_parts.items():
            self.parts[start].copy_(part)

    def update_units(self) -> list[Unit]:
        units = []
        held = list(zip(self.message.pieces, self.parameters, piece_edges(self.message), strict=True))
        for start, (begin, end, _) in self.mine.items():
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
        begin, end, part = self.mine[task.start]
        outgoing = torch.zeros(part, dtype=self.dtype, device=self.device)
        outgoing[: end - begin] = self.values[begin:end]
        gathered = torch.empty(part * len(task.ranks), dtype=self.dtype, device=self.device)
        self.gathered[task.start] = gathered[: task.stop - task.start]
        self.works[task.index] = self.channels.back(task.ranks).all_gather(gathered, outgoing)

    def hold_values(self) -> None:
        super().hold_values()
        self.gathered: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def receive(self) -> None:
        for task in list(self.works):
            self.wait(task)
        for start, gathered in self.gathered.items():
            self.values[start : start + gathered.numel()] = gathered
        self.gathered.clear()
        self.unpack_values()

    @torch.no_grad()
    def publish(self, tasks: list[Task]) -> None:
        for under_way in list(self.works):
            self.wait(under_way)
        self.settle_parts()
        for task in tasks:
            if len(task.ranks) > 1:
                gathered = torch.empty(self.mine[task.start][2] * len(task.ranks), dtype=self.dtype, device=self.device)
                wait(self.channels.back(task.ranks).all_gather(gathered, self.parts[task.start]))
                self.buffer[task.start : task.stop] = gathered[: task.stop - task.start]
        Parcel.unload(self)

    @torch.no_grad()
    def reload(self) -> None:
        super().reload()
        for start, (begin, end, _) in self.mine.items():
            self.parts[start][: end - begin] = self.buffer[begin:end]


def piece_edges(message: Message) -> list[tuple[int, int]]:
    """Where each piece lies in the message."""
    edges, offset = [], 0
    for piece in message.pieces:
        edges.append((offset, offset + piece.elements))
        offset += piece.elements
    return edges


def piece_views(message: Message, flat: torch.Tensor) -> Generator[torch.Tensor, None, None]:
    for piece, (start, stop) in zip(message.pieces, piece_edges(message), strict=True):
        yield flat[start:stop].view(piece.shape)


def box_slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in piece.box)
