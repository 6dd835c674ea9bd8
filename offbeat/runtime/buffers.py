"""Buffers of rank 0 → buffers of every rank, before each training forward.

As DDP's broadcast_buffers: running statistics are rank 0's everywhere. The broadcast leaves when backward ends and is
received before the next forward, so that nobody waits for it. Where buffers have changed in between, which happens at
the same points of the training loop on every rank, they are sent once more.
"""

from collections import defaultdict

import torch

from offbeat.runtime.comm import Channel, Work
from offbeat.torch_private import version_of


class BufferKeeper:
    """Broadcasts a model's buffers, one collective per element type."""

    def __init__(self, model: torch.nn.Module, channel: Channel, root: int) -> None:
        self.channel = channel
        self.root = root
        self.here = channel.ranks[channel.index] == root
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for buffer in model.buffers():
            if buffer.numel():
                by_dtype[buffer.dtype].append(buffer)
        self.buffers = [(held[0].new_empty(sum(b.numel() for b in held)), held) for held in by_dtype.values()]
        """Those of one element type, behind the flat tensor that travels."""
        self.works: list[Work] = []
        self.due = True
        """Whether the next forward shares them."""
        self.versions = self._versions()
        """Of each buffer when it was last sent or received, as torch counts changes."""

    def _versions(self) -> list[int]:
        return [version_of(buffer) for _, held in self.buffers for buffer in held]

    @torch.no_grad()
    def send(self) -> None:
        """Starts the broadcast of rank 0's present values."""
        if self.channel.size == 1 or not self.buffers:
            return
        self.receive()
        for flat, held in self.buffers:
            if self.here:
                torch.cat([buffer.reshape(-1) for buffer in held], out=flat)
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
        for flat, held in self.buffers if not self.here else ():
            for buffer, values in zip(held, flat.split([b.numel() for b in held]), strict=True):
                buffer.copy_(values.view_as(buffer))
        self.versions = self._versions()
