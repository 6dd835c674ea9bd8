"""Message → parcel: its buffer, its collectives, and who applies it.

A parcel is loaded when the gradients of all its pieces are complete. Its gradient tasks then start in the plan's order.
`finish` waits for them and leaves the averaged gradient where it is applied. Parcels that everybody applies leave it in
`parameter.grad`; parcels with an owner, or whose elements are spread over the ranks, update their own part and send
parameters back.
"""

from collections.abc import Callable, Generator

import torch

from offbeat.graph.model import Variable
from offbeat.plan import Message, Piece, Task
from offbeat.runtime.channel import Channels, Work, wait
from offbeat.runtime.encoders import MessageEncoder
from offbeat.runtime.guard import raw_gradient, set_gradient
from offbeat.runtime.rows import RowExchange, Rows
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
            self.works[task.index] = self._start(task, self.payload)
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
        if self.exchange is not None and task == self.task.index and self.me == self.message.owner:
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


class SparseParcel(Parcel):
    """Rows of a sparse gradient, gathered by everybody."""

    later_rounds = True

    def __init__(self, variable: Variable, densify: bool, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        del self.buffer, self.views
        self.rows_range = self.message.pieces[0].box[0]
        self.densify = densify
        self.shape = tuple(self.parameters[0].shape)
        width = variable.elements // variable.shape[0]
        self.exchange = RowExchange(width, self.dtype, self.device, variable.sparse_rows)
        self.blocks: list[torch.Tensor] = []
        self.unit: torch.nn.Parameter | None = None
        """These rows as a parameter, where other rows of the table are updated elsewhere."""

    @torch.no_grad()
    def load(self) -> None:
        gradient = raw_gradient(self.parameters[0])
        low, high = self.rows_range
        if gradient is None:
            numbers = torch.zeros(0, dtype=torch.int64, device=self.device)
            values = torch.zeros(0, self.exchange.width, dtype=self.dtype, device=self.device)
        else:
            if gradient.layout == torch.strided:
                gradient = gradient.to_sparse(1)
            gradient = gradient.coalesce()
            numbers, values = gradient.indices()[0], gradient.values().reshape(-1, self.exchange.width)
            inside = (numbers >= low) & (numbers < high)
            numbers, values = numbers[inside], values[inside] * self.share
        self.rows = Rows(numbers, values)
        self.loaded = True

    def start(self, task: Task) -> None:
        self.task = task
        if len(task.ranks) > 1:
            channel = self.channels.up(task.ranks)
            self.works[task.index], self.blocks = self.exchange.start(channel, self.rows, task.root)

    def _everybodys_rows(self) -> Rows:
        if len(self.task.ranks) == 1:
            received = [self.rows]
        else:
            channel = self.channels.up(self.task.ranks)
            received = self.exchange.finish(channel, self.rows, self.blocks, self.task.root)
        return Rows(torch.cat([r.numbers for r in received]), torch.cat([r.values for r in received]))

    @torch.no_grad()
    def unload(self) -> None:
        rows = self._everybodys_rows()
        values = rows.values.reshape(-1, *self.shape[1:])
        gradient = torch.sparse_coo_tensor(rows.numbers.unsqueeze(0), values, self.shape, check_invariants=False)
        low, high = self.rows_range
        parameter = self.parameters[0]
        known = raw_gradient(parameter)
        if (high - low) < self.shape[0] and known is not None:
            # Other shards of the table have put their rows there already, or will: keep what lies outside this one.
            known = (known.to_sparse(1) if known.layout == torch.strided else known).coalesce()
            outside = (known.indices()[0] < low) | (known.indices()[0] >= high)
            kept = torch.sparse_coo_tensor(
                known.indices()[:, outside], known.values()[outside], self.shape, check_invariants=False
            )
            gradient = gradient + kept
        gradient = gradient.coalesce()
        set_gradient(parameter, gradient.to_dense() if self.densify else gradient)
        self.loaded = False

    @torch.no_grad()
    def unit_gradient(self) -> torch.Tensor:
        """This shard's rows of the averaged gradient."""
        low, high = self.rows_range
        gradient = raw_gradient(self.parameters[0])
        assert gradient is not None
        if gradient.layout == torch.strided:
            return gradient[low:high]
        gradient = gradient.coalesce()
        numbers = gradient.indices()[0]
        inside = (numbers >= low) & (numbers < high)
        rows = torch.sparse_coo_tensor(
            (numbers[inside] - low).unsqueeze(0),
            gradient.values()[inside],
            (high - low, *self.shape[1:]),
            check_invariants=False,
        ).coalesce()
        return rows.to_dense() if self.densify else rows

    def reload(self) -> None:
        """Rows are taken from `parameter.grad` in any case."""


class SparseServerParcel(SparseParcel):
    """Rows of a sparse gradient, gathered by their owner, who updates the table and sends changed rows back."""

    replicated = False

    def hold_values(self) -> None:
        low, high = self.rows_range
        self.table = self.parameters[0].data[low:high]
        self.unit = torch.nn.Parameter(self.table)
        self.back = RowExchange(self.exchange.width, self.dtype, self.device, self.exchange.block_rows)
        self.pending: tuple[Task, torch.Tensor] | None = None
        self.counting: tuple[Work, torch.Tensor] | None = None
        self.rest: tuple[Work | None, list[torch.Tensor]] = (None, [])
        self.most_rows = 0
        """Most rows that any rank has held so far."""

    def load(self) -> None:
        super().load()
        self.exchange.block_rows = max(self.exchange.block_rows, self.most_rows)

    def start(self, task: Task) -> None:
        if len(task.ranks) > 1:
            # Only the owner sees the blocks, but everybody must know whether there is more to send.
            channel = self.channels.up(task.ranks)
            counts = torch.empty(channel.size, dtype=torch.int64, device=self.device)
            mine = torch.tensor([len(self.rows)], device=self.device)
            self.counting = channel.all_gather(counts, mine), counts
        super().start(task)

    def prepare(self) -> None:
        """Sends the rows that the first block did not take."""
        self.rest = (None, [])
        if self.counting is not None:
            work, counts = self.counting
            self.counting = None
            wait(work)
            self.most_rows = int(counts.max())
            channel = self.channels.up(self.task.ranks)
            self.rest = self.exchange.start_rest(channel, self.rows, self.most_rows, self.task.root)

    def drop(self) -> None:
        super().drop()
        if self.rest[0] is not None:
            wait(self.rest[0])

    def _everybodys_rows(self) -> Rows:
        if len(self.task.ranks) == 1:
            return self.rows
        work, rest = self.rest
        if work is not None:
            wait(work)
        received = self.exchange.join(self.blocks, rest)
        return Rows(torch.cat([r.numbers for r in received]), torch.cat([r.values for r in received]))

    def update_units(self) -> list[Unit]:
        if self.me != self.message.owner:
            return []
        assert self.unit is not None
        return [Unit(self.parameters[0], self.unit, None, (slice(*self.rows_range),))]

    @torch.no_grad()
    def collect(self) -> torch.Tensor:
        """The gradient of the owner's rows; on the owner only."""
        rows = self._everybodys_rows()
        low, high = self.rows_range
        gradient = torch.sparse_coo_tensor(
            (rows.numbers - low).unsqueeze(0),
            rows.values.reshape(-1, *self.shape[1:]),
            (high - low, *self.shape[1:]),
            check_invariants=False,
        ).coalesce()
        self.before = self.table.clone()
        return gradient.to_dense() if self.densify else gradient

    @torch.no_grad()
    def start_return(self, task: Task) -> None:
        """Two broadcasts: how many rows changed, and the rows."""
        if len(task.ranks) == 1:
            return
        assert task.root is not None
        channel = self.channels.back(task.ranks)
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        block = None
        if self.me == task.root:
            changed = (self.table != self.before).reshape(len(self.table), -1).any(dim=1).nonzero()[:, 0]
            count.fill_(len(changed))
            rows = Rows(changed, self.table[changed].reshape(len(changed), self.back.width))
            block = self.back._pack(rows, 0, max(1, len(changed)), len(changed))
        wait(channel.broadcast(count, task.root))
        if block is None:
            size = 8 + max(1, int(count)) * self.back.row_bytes
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.works[task.index] = channel.broadcast(block, task.root)
        self.pending = (task, block)

    @torch.no_grad()
    def receive(self) -> None:
        for task in list(self.works):
            self.wait(task)
        if self.pending is not None and self.me != self.pending[0].root:
            block = self.pending[1]
            rows = self.back._unpack(block, int(block[:8].view(torch.int64)[0]))
            self.table[rows.numbers] = rows.values.reshape(-1, *self.shape[1:])
        self.pending = None
        self.loaded = False


class FactorParcel(Parcel):
    """A dense layer's weight gradient, sent as the two matrices whose product it is (sufficient factors).

    The layer's inputs and the gradients of its outputs are kept as backward passes; every rank gathers all of them and
    multiplies.
    """

    later_rounds = True

    def __init__(self, layer: torch.nn.Linear, rows: int, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.inputs: list[torch.Tensor] = []
        self.factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        height, width = layer.weight.shape
        self.split = width
        self.exchange = RowExchange(width + height, self.dtype, self.device, rows)
        self.hook = layer.register_forward_hook(self._keep)
        self.recording: Callable[[], bool] = lambda: True

    def _keep(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad and torch.is_grad_enabled() and self.recording():
            given = inputs[0].detach()
            output.register_hook(lambda gradient: self.factors.append((given, gradient.detach())))

    @torch.no_grad()
    def load(self) -> None:
        if self.factors:
            width = self.split
            height = self.exchange.width - width
            left = torch.cat([given.reshape(-1, width) for given, _ in self.factors]).to(self.dtype)
            right = torch.cat([slope.reshape(-1, height) for _, slope in self.factors]).to(self.dtype)
            values = torch.cat([left, right * self.share], dim=1)
        else:
            values = torch.zeros(0, self.exchange.width, dtype=self.dtype, device=self.device)
        self.factors.clear()
        self.rows = Rows(torch.zeros(len(values), dtype=torch.int64, device=self.device), values)
        self.loaded = True

    def start(self, task: Task) -> None:
        self.task = task
        if len(task.ranks) > 1:
            channel = self.channels.up(task.ranks)
            self.works[task.index], self.blocks = self.exchange.start(channel, self.rows, None)

    @torch.no_grad()
    def unload(self) -> None:
        received = [self.rows]
        if len(self.task.ranks) > 1:
            received = self.exchange.finish(self.channels.up(self.task.ranks), self.rows, self.blocks, None)
        values = torch.cat([rows.values for rows in received])
        torch.mm(values[:, self.split :].t(), values[:, : self.split], out=self.views[0])
        super().unload()


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
