"""Broadcast rank 0's buffers before the same forwards as DDP.

As DDP's broadcast_buffers: running statistics are rank 0's everywhere at each forward, in training or evaluation,
unless the forward before it ran under no_grad() or no_sync(). The broadcast leaves when backward begins, while the link
has nothing else to do, and is taken over before the next forward, so that nobody waits for it. Where buffers have
changed in between, which happens at the same points of the training loop on every rank, they are sent once more.
"""

from collections import defaultdict

import torch

from offbeat.runtime.comm import Channel, Work
from offbeat.torch_private import registries, version_of


class BufferKeeper:
    """Broadcasts a model's buffers, one collective per dtype."""

    def __init__(self, model: torch.nn.Module, channel: Channel, root: int) -> None:
        self.channel = channel
        self.root = root
        """The rank whose buffers are broadcast."""
        held = [registries(module)[1] for module in model.modules()]
        self.registries = held if channel.size > 1 and any(held) else []
        """The dictionaries of all modules' buffers, because a module may replace its own."""
        self.under_way: list[tuple[Work, torch.Tensor, list[torch.Tensor]]] = []
        """Broadcasts in flight: the flat tensor and the buffers that it is for."""
        self.due = True
        """Whether the next forward shares them."""
        self.shared = self._present()
        """The buffers that were last sent, each with its version at that time."""

    def _present(self) -> list[tuple[torch.Tensor, int]]:
        """Each buffer, with its number of in-place changes."""
        found = {id(b): b for held in self.registries for b in held.values() if b is not None and b.numel()}
        return [(buffer, version_of(buffer)) for buffer in found.values()]

    def _changed(self) -> bool:
        present = self._present()
        return len(present) != len(self.shared) or any(
            buffer is not before or version != earlier
            for (buffer, version), (before, earlier) in zip(present, self.shared, strict=True)
        )

    @torch.no_grad()
    def send(self) -> None:
        """Starts the broadcast of rank 0's current values, unless they are under way or the next forward needs none."""
        if not self.due or (self.under_way and not self._changed()):
            return
        self.drop()
        self.shared = self._present()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for buffer, _ in self.shared:
            by_dtype[buffer.dtype].append(buffer)
        for held in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in held])
            self.under_way.append((self.channel.broadcast(flat, self.root), flat, held))

    @torch.no_grad()
    def share(self) -> None:
        """Before a forward that shares them: gives every rank rank 0's current values."""
        if self.due and self._changed():
            self.send()
        for work, flat, held in self.under_way:
            work.wait()
            for buffer, values in zip(held, flat.split([b.numel() for b in held]), strict=True):
                if self.channel.ranks[self.channel.index] != self.root:
                    # Not a change that torch counts: an earlier forward may have saved the buffer for its backward.
                    buffer.data.copy_(values.view_as(buffer))
        self.under_way.clear()

    def drop(self) -> None:
        """Waits for broadcasts in flight and drops them; they are sent again if the next forward needs them."""
        if self.under_way:
            self.shared = []
        for work, _, _ in self.under_way:
            work.wait()
        self.under_way.clear()

    def follow(self, root: int) -> None:
        """From now on this rank's buffers are broadcast."""
        if root != self.root:
            self.drop()
            self.root, self.shared = root, []

    def adopt(self, other: "BufferKeeper") -> None:
        """Takes over from another keeper of the same model."""
        self.root, self.due, self.shared = other.root, other.due, other.shared
