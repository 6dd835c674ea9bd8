"""A few rows of a table on each rank → everybody's rows on every rank, or on one.

Ranks hold different numbers of rows and cannot know each other's. Each sends a block of an agreed size whose header
says how many rows it holds; where that is more than the block takes, all of them see it in the headers and exchange the
rest in a second round of the size that all can compute.
"""

from dataclasses import dataclass

import torch

from offbeat.runtime.channel import Channel, Work, wait

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

    def start(self, channel: Channel, rows: Rows, root: int | None) -> tuple[Work, list[torch.Tensor]]:
        """Sends the first block; the tensors receive every rank's block (none on a rank that is not the root)."""
        return self._send(channel, self._pack(rows, 0, self.block_rows, len(rows)), root)

    def finish(self, channel: Channel, rows: Rows, blocks: list[torch.Tensor], root: int | None) -> list[Rows]:
        """Every rank's rows, in ring order, after the blocks have arrived."""
        largest = max(_count(block) for block in blocks)
        work, rest = self.start_rest(channel, rows, largest, root)
        if work is not None:
            wait(work)
        received = self.join(blocks, rest)
        self.block_rows = max(self.block_rows, largest)
        return received

    def start_rest(
        self, channel: Channel, rows: Rows, largest: int, root: int | None
    ) -> tuple[Work | None, list[torch.Tensor]]:
        """Sends what the first block does not take; `largest` is the most rows that any rank holds."""
        if largest <= self.block_rows:
            return None, []
        return self._send(channel, self._pack(rows, self.block_rows, largest - self.block_rows, len(rows)), root)

    def join(self, blocks: list[torch.Tensor], rest: list[torch.Tensor]) -> list[Rows]:
        """The rows in each rank's block, and in the rest of it where there is one."""
        counts = [_count(block) for block in blocks]
        received = [
            self._unpack(block, min(count, self.block_rows)) for block, count in zip(blocks, counts, strict=True)
        ]
        if not rest:
            return received
        return [
            _joined(first, self._unpack(block, max(0, count - self.block_rows)))
            for first, block, count in zip(received, rest, counts, strict=True)
        ]

    def _send(self, channel: Channel, block: torch.Tensor, root: int | None) -> tuple[Work, list[torch.Tensor]]:
        if root is None:
            output = torch.empty(channel.size * block.numel(), dtype=torch.uint8, device=self.device)
            return channel.all_gather(output, block), list(output.view(channel.size, -1))
        here = channel.ranks[channel.index] == root
        outputs = [torch.empty_like(block) for _ in channel.ranks] if here else []
        return channel.gather(outputs, block, root), outputs

    def _pack(self, rows: Rows, start: int, capacity: int, count: int) -> torch.Tensor:
        block = torch.zeros(_HEADER + capacity * self.row_bytes, dtype=torch.uint8, device=self.device)
        block[:_HEADER].view(torch.int64)[0] = count
        held = max(0, min(count - start, capacity))
        if held:
            numbers, values = self._fields(block, capacity)
            numbers[:held] = rows.numbers[start : start + held]
            values[:held] = rows.values[start : start + held]
        return block

    def _unpack(self, block: torch.Tensor, count: int) -> Rows:
        numbers, values = self._fields(block, (block.numel() - _HEADER) // self.row_bytes)
        return Rows(numbers[:count], values[:count])

    def _fields(self, block: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = _HEADER + capacity * 8
        return block[_HEADER:end].view(torch.int64), block[end:].view(self.dtype).view(capacity, self.width)


def _count(block: torch.Tensor) -> int:
    return int(block[:_HEADER].view(torch.int64)[0])


def _joined(first: Rows, second: Rows) -> Rows:
    return Rows(torch.cat([first.numbers, second.numbers]), torch.cat([first.values, second.values]))
