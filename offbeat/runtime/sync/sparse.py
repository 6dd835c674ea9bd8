"""Messages sent as rows: sparse gradients, and the factors of dense layers' gradients.

Ranks hold different numbers of rows, which change from step to step, and cannot know each other's. Each sends a block
of an agreed size whose header says how many rows it holds; where that is more than the block takes, all of them see it
in the headers and exchange the rest in a second round of the size that all can compute.
"""

from dataclasses import dataclass
from typing import Any

import torch

from offbeat.graph.model import Variable
from offbeat.plan import Task
from offbeat.runtime.comm import Channel, Work, gather_blocks
from offbeat.runtime.lazy import raw_gradient
from offbeat.runtime.sync.dense import Synchroniser, box_slices
from offbeat.runtime.unit_optimizer import Unit
from offbeat.torch_private import backward_pass

_HEADER = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with their numbers."""

    numbers: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return self.numbers.shape[0]


class RowExchange:
    """Exchanges rows of one width and element type; the block grows to what was needed, the same on all ranks."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, block_rows: int) -> None:
        self.width = width
        self.dtype = dtype
        self.device = device
        self.block_rows = max(1, block_rows)
        self.row_bytes = 8 + width * dtype.itemsize

    def start(self, channel: Channel, rows: Rows, root: int | None) -> tuple[Work, torch.Tensor]:
        """Sends the first block; see `gather_blocks`."""
        return gather_blocks(channel, self.pack(rows, 0, self.block_rows), root)

    def finish(self, channel: Channel, rows: Rows, blocks: torch.Tensor) -> Rows:
        """Every rank's rows, in ring order, on every rank after the blocks have arrived."""
        largest = max(_count(block) for block in blocks)
        rest = self.start_rest(channel, rows, largest, None)
        if rest is not None:
            rest[0].wait()
        received = self.join(blocks, rest)
        self.block_rows = max(self.block_rows, largest)
        return received

    def start_rest(
        self, channel: Channel, rows: Rows, largest: int, root: int | None
    ) -> tuple[Work, torch.Tensor] | None:
        """Sends the rows that did not fit into the first block; `largest` is the most rows that any rank holds."""
        if largest <= self.block_rows:
            return None
        return gather_blocks(channel, self.pack(rows, self.block_rows, largest - self.block_rows), root)

    def join(self, blocks: torch.Tensor, rest: tuple[Work, torch.Tensor] | None) -> Rows:
        """The rows in all ranks' blocks, and in the rest of each where there is one; everything has arrived."""
        parts = []
        for index, block in enumerate(blocks):
            parts.append(self.unpack(block, min(_count(block), self.block_rows)))
            if rest is not None:
                parts.append(self.unpack(rest[1][index], max(0, _count(block) - self.block_rows)))
        return Rows(torch.cat([part.numbers for part in parts]), torch.cat([part.values for part in parts]))

    def pack(self, rows: Rows, start: int, capacity: int) -> torch.Tensor:
        """A block with the rows from `start` on, as many as fit, and the total number in its header."""
        block = self.empty(capacity).zero_()
        block[:_HEADER].view(torch.int64)[0] = len(rows)
        held = max(0, min(len(rows) - start, capacity))
        into = self.unpack(block, held)
        into.numbers[:] = rows.numbers[start : start + held]
        into.values[:] = rows.values[start : start + held]
        return block

    def empty(self, capacity: int) -> torch.Tensor:
        """A block for `capacity` rows, to be received. Blocks are adjacent, so each ends with a whole word."""
        words = -(-capacity * self.row_bytes // 8)
        return torch.empty(_HEADER + words * 8, dtype=torch.uint8, device=self.device)

    def unpack(self, block: torch.Tensor, count: int | None = None) -> Rows:
        """The first `count` rows of a block, by default as many as its header says; they share its memory."""
        count = _count(block) if count is None else count
        capacity = (block.numel() - _HEADER) // self.row_bytes
        end = _HEADER + capacity * 8
        values = block[end : _HEADER + capacity * self.row_bytes].view(self.dtype).view(capacity, self.width)
        return Rows(block[_HEADER:end].view(torch.int64)[:count], values[:count])


def _count(block: torch.Tensor) -> int:
    return int(block[:_HEADER].view(torch.int64)[0])


class _RowMessage(Synchroniser):
    """A message whose gradient is sent as rows."""

    later_rounds = True
    elementwise = False
    exchange: RowExchange
    rows: Rows
    """This rank's, and from `finish` on everybody's."""

    def start(self, task: Task) -> None:
        self.task = task
        if len(task.ranks) > 1:
            channel = self.channels.up(task.ranks)
            self.works[task.index], self.blocks = self.exchange.start(channel, self.rows, task.root)

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        if len(self.task.ranks) > 1:
            self.rows = self.exchange.finish(self.channels.up(self.task.ranks), self.rows, self.blocks)


class SparseGather(_RowMessage):
    """Rows of a sparse gradient, gathered by everybody."""

    def __init__(self, variable: Variable, densify: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        del self.buffer, self.views
        self.rows_range = self.message.pieces[0].box[0]
        self.densify = densify
        self.shape = tuple(self.parameters[0].shape)
        width = variable.elements // variable.shape[0]
        self.exchange = RowExchange(width, self.dtype, self.device, variable.sparse_rows)
        self.unit: torch.nn.Parameter | None = None
        """These rows as a parameter, where other rows of the table are updated elsewhere."""

    @torch.no_grad()
    def load(self) -> None:
        self.rows = self._own_rows(self.share)
        self.loaded = True

    def _own_rows(self, share: float) -> Rows:
        """This shard's rows of `parameter.grad`, weighted."""
        gradient = raw_gradient(self.parameters[0])
        low, high = self.rows_range
        if gradient is None:
            numbers = torch.zeros(0, dtype=torch.int64, device=self.device)
            return Rows(numbers, torch.zeros(0, self.exchange.width, dtype=self.dtype, device=self.device))
        if gradient.layout == torch.strided:
            gradient = gradient.to_sparse(1)
        gradient = gradient.coalesce()
        numbers, values = gradient.indices()[0], gradient.values().reshape(-1, self.exchange.width)
        inside = (numbers >= low) & (numbers < high)
        return Rows(numbers[inside], values[inside] * share)

    @torch.no_grad()
    def averaged(self, place: int) -> torch.Tensor:
        return self._sparse(self.rows.numbers, self.shape)

    def unit_gradients(self) -> dict[int, torch.Tensor]:
        if self.unit is None:
            return {}
        low, high = self.rows_range
        rows = self._sparse(self.rows.numbers - low, (high - low, *self.shape[1:]))
        return {id(self.unit): rows.to_dense() if self.densify else rows}

    def _sparse(self, numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        values = self.rows.values.reshape(-1, *self.shape[1:])
        # The argument `check_invariants` does not keep torch 2.11 from warning that they are not checked.
        with torch.sparse.check_sparse_tensor_invariants(False):
            return torch.sparse_coo_tensor(numbers.unsqueeze(0), values, shape).coalesce()

    def unit_of_piece(self, place: int, parameter: torch.nn.Parameter) -> Unit:
        box = box_slices(self.message.pieces[place])
        self.unit = torch.nn.Parameter(parameter.data[box])
        return Unit(parameter, self.unit, None, box)

    @torch.no_grad()
    def reload(self) -> None:
        self.rows = self._own_rows(1.0)


class SparseServer(SparseGather):
    """Rows of a sparse gradient, gathered by their owner, who updates the table and sends changed rows back."""

    def hold_values(self, aliased: frozenset[int]) -> None:
        self.unit = torch.nn.Parameter(self.table)
        self.back = RowExchange(self.exchange.width, self.dtype, self.device, self.exchange.block_rows)
        self.returned: torch.Tensor | None = None
        """Receives rows that the owner has changed; None on the owner."""
        self.counting: tuple[Work, torch.Tensor] | None = None
        self.rest: tuple[Work, torch.Tensor] | None = None
        self.gathered = False
        """The owner holds everybody's rows."""
        self.most_rows = 0
        """Most rows that any rank has held so far."""

    @property
    def table(self) -> torch.Tensor:
        """These rows where they lie now: the training loop may have given the parameter another memory."""
        return self.parameters[0].data[slice(*self.rows_range)]

    def pack_values(self) -> None:
        assert self.unit is not None
        self.unit.data = self.table

    def finish(self) -> None:
        Synchroniser.finish(self)

    def load(self) -> None:
        super().load()
        self.gathered = False
        self.exchange.block_rows = max(self.exchange.block_rows, self.most_rows)

    def start(self, task: Task) -> None:
        if len(task.ranks) > 1:
            # Only the owner sees the blocks, but everybody must know whether there is more to send.
            count = torch.tensor([len(self.rows)], device=self.device)
            self.counting = gather_blocks(self.channels.up(task.ranks), count, None)
        super().start(task)

    def prepare(self) -> None:
        """Sends the rows that the first block did not take."""
        self.rest = None
        if self.counting is not None:
            work, counts = self.counting
            self.counting = None
            work.wait()
            self.most_rows = int(counts.max())
            channel = self.channels.up(self.task.ranks)
            self.rest = self.exchange.start_rest(channel, self.rows, self.most_rows, self.task.root)

    def drop(self) -> None:
        super().drop()
        if self.rest is not None:
            self.rest[0].wait()

    def units(self) -> list[Unit]:
        if self.me != self.message.owner:
            return []
        assert self.unit is not None
        return [Unit(self.parameters[0], self.unit, None, (slice(*self.rows_range),))]

    @torch.no_grad()
    def collect(self, published: bool) -> None:
        if self.me == self.message.owner:
            if not published:
                self._gather()
            self.before = self.table.clone()

    def _gather(self) -> None:
        """The owner's rows become everybody's, once."""
        if self.me == self.message.owner and not self.gathered:
            self.gathered = True
            if len(self.task.ranks) > 1:
                if self.rest is not None:
                    self.rest[0].wait()
                self.rows = self.exchange.join(self.blocks, self.rest)

    @torch.no_grad()
    def publish(self, tasks: list[Task]) -> None:
        self.finish()
        self._gather()
        for task in tasks:
            if len(task.ranks) > 1:
                work, block = self._broadcast(task, self.rows if self.me == task.root else None)
                work.wait()
                self.rows = self.back.unpack(block)

    @torch.no_grad()
    def start_return(self, task: Task) -> None:
        if len(task.ranks) == 1:
            return
        changed = None
        if self.me == task.root:
            table = self.table
            numbers = (table != self.before).reshape(len(table), -1).any(dim=1).nonzero()[:, 0]
            changed = Rows(numbers, table[numbers].reshape(len(numbers), self.back.width))
        self.works[task.index], block = self._broadcast(task, changed)
        self.returned = None if self.me == task.root else block

    def _broadcast(self, task: Task, rows: Rows | None) -> tuple[Work, torch.Tensor]:
        """Broadcasts the number of the root's rows, then the rows, which the block receives; others have no `rows`."""
        assert task.root is not None
        channel = self.channels.back(task.ranks)
        count = torch.tensor([len(rows) if rows is not None else 0], device=self.device)
        channel.broadcast(count, task.root).wait()
        if rows is None:
            block = self.back.empty(max(1, int(count)))
        else:
            block = self.back.pack(rows, 0, max(1, len(rows)))
        return channel.broadcast(block, task.root), block

    @torch.no_grad()
    def receive(self) -> None:
        self.finish()
        if self.returned is not None:
            rows = self.back.unpack(self.returned)
            self.table[rows.numbers] = rows.values.reshape(-1, *self.shape[1:])
        self.returned = None


class FactorBroadcast(_RowMessage):
    """A dense layer's weight gradient, sent as the two matrices whose product it is (sufficient factors).

    The layer's inputs and the gradients of its outputs are kept as backward passes; every rank gathers all of them and
    multiplies. Where the pass has added to an earlier gradient, the sum is sent instead: its rows, and the identity's.
    """

    def __init__(self, layer: torch.nn.Linear, rows: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of one backward pass."""
        self.backward_pass = -1
        self.added_to = False
        """That pass found a gradient from before it."""
        height, width = layer.weight.shape
        self.split = width
        self.exchange = RowExchange(width + height, self.dtype, self.device, rows)
        self.handles.append(layer.register_forward_hook(self._keep))

    def _keep(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad and torch.is_grad_enabled():
            given = inputs[0].detach()

            def add(slope: torch.Tensor) -> None:
                self._enter_pass()
                self.factors.append((given, slope.detach()))

            output.register_hook(add)

    def _enter_pass(self) -> None:
        """What earlier passes left is in the gradient."""
        number = backward_pass()
        if number != self.backward_pass:
            self.backward_pass = number
            self.factors.clear()
            self.added_to = raw_gradient(self.parameters[0]) is not None

    @torch.no_grad()
    def load(self) -> None:
        self._enter_pass()
        gradient = raw_gradient(self.parameters[0])
        # An average that was shown after the pass had begun lies in the buffer.
        if gradient is not None and (self.added_to or gradient.data_ptr() == self.buffer.data_ptr()):
            self.factors = [(gradient, torch.eye(len(gradient), dtype=self.dtype, device=self.device))]
        if self.factors:
            width = self.split
            height = self.exchange.width - width
            left = torch.cat([given.reshape(-1, width) for given, _ in self.factors]).to(self.dtype)
            right = torch.cat([slope.reshape(-1, height) for _, slope in self.factors]).to(self.dtype)
            values = torch.cat([left, right * self.share], dim=1)
        else:
            values = torch.zeros(0, self.exchange.width, dtype=self.dtype, device=self.device)
        self.factors = []
        self.rows = Rows(torch.zeros(len(values), dtype=torch.int64, device=self.device), values)
        self.loaded = True

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        values = self.rows.values
        torch.mm(values[:, self.split :].t(), values[:, : self.split], out=self.views[0])
