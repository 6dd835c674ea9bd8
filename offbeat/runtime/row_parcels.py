"""Message → parcel, for gradients that travel as rows: sparse ones, and the factors of dense layers.

The number of rows differs from rank to rank and from step to step; `rows.py` exchanges them.
"""

from collections.abc import Callable

import torch

from offbeat.graph.model import Variable
from offbeat.plan import Task
from offbeat.runtime.channel import Work, wait
from offbeat.runtime.guard import raw_gradient, set_gradient
from offbeat.runtime.parcels import Parcel
from offbeat.runtime.rows import RowExchange, Rows
from offbeat.runtime.updates import Unit


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

    def release(self) -> None:
        self.hook.remove()

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
