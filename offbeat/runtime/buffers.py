"""Buffers of rank 0 → buffers of every rank, before each training forward.

As DDP's broadcast_buffers: running statistics are rank 0's everywhere. The broadcast leaves when backward ends and is
received before the next forward, so that nobody waits for it. Where buffers have changed in between, which happens at
the same points of the training loop on every rank, they are sent once more.
"""

import torch

from offbeat.runtime.comm import Channel, Work
from offbeat.torch_private import version_of


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
        self.due = True
        """Whether the next forward shares them."""
        self.versions = self._versions()
        """Of each buffer when it was last sent or received, as torch counts changes."""

    def _versions(self) -> list[int]:
        return [version_of(buffer) for buffers in self.by_dtype.values() for buffer in buffers]

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
        self.versions = self._versions()

    def share(self) -> None:
        """Sends rank 0's present values, unless those that are under way or have arrived are the same."""
        if self._versions() != self.versions:
            self.send()

    @torch.no_grad()
    def receive(self) -> None:
        """Waits for a broadcast under way and takes its values over."""
        if not self.works:
            return
        for work in self.works:
            work.wait()
        self.works.clear()
        for dtype, flat in self.flat.items() if not self.here else ():
            buffers = self.by_dtype[dtype]
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
        self.versions = self._versions()
