"""Gather a few rows of a table from each rank on every rank, or on one.

Ranks hold different numbers of rows and cannot know each other's. Each sends a block of an agreed size whose header
says how many rows it holds; where that is more than the block takes, all of them see it in the headers and exchange the
rest in a second round of the size that all can compute.
"""

from dataclasses import dataclass

import torch

from offbeat.runtime.comm import Channel, Work

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


def gather_blocks(channel: Channel, block: torch.Tensor, root: int | None) -> tuple[Work, torch.Tensor]:
    """Starts sending blocks of one size to everybody, or to the root. The tensor receives them, one row for each rank;
    it has none on a rank that is not the root."""
    here = root in (None, channel.ranks[channel.index])
    received = block.new_empty(channel.size if here else 0, block.numel())
    if root is None:
        return channel.all_gather(received.view(-1), block), received
    return channel.gather(list(received), block, root), received


def _count(block: torch.Tensor) -> int:
    return int(block[:_HEADER].view(torch.int64)[0])
