"""Buffers of rank 0 → buffers of every rank, before each training forward.

As DDP's broadcast_buffers: running statistics are rank 0's everywhere. The broadcast leaves when backward ends and is
received before the next forward, so that nobody waits for it.
"""

import torch

from offbeat.runtime.channel import Channel, Work, wait


class BufferKeeper:
    """Broadcasts a model's buffers, one collective per element type."""

    def __init__(self, model: torch.nn.Module, channel: Channel, root: int) -> None:
        self.channel = channel
        self.root = root
        self.here = channel.ranks[channel.index] == root
        self.by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            if buffer.numel():
                self.by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self.flat = {
            dtype: torch.empty(sum(b.numel() for b in buffers), dtype=dtype, device=buffers[0].device)
            for dtype, buffers in self.by_dtype.items()
        }
        self.works: list[Work] = []

    @torch.no_grad()
    def send(self) -> None:
        """Starts the broadcast of rank 0's present values."""
        if self.channel.size == 1 or not self.flat:
            return
        self.receive()
        for dtype, flat in self.flat.items():
            if self.here:
                torch.cat([buffer.reshape(-1) for buffer in self.by_dtype[dtype]], out=flat)
            self.works.append(self.channel.broadcast(flat, self.root))

    @torch.no_grad()
    def receive(self) -> None:
        """Waits for a broadcast under way and takes its values over."""
        if not self.works:
            return
        for work in self.works:
            wait(work)
        self.works.clear()
        if self.here:
            return
        for dtype, flat in self.flat.items():
            offset = 0
            for buffer in self.by_dtype[dtype]:
                buffer.copy_(flat[offset : offset + buffer.numel()].view_as(buffer))
                offset += buffer.numel()
