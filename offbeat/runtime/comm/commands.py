"""Commands from the first replica to ranks without a replica: the next part of a step and its inputs.

Every replica does the same in the same order, so that one of them can speak for all.
"""

import io
from datetime import timedelta
from typing import Any

import torch

from offbeat.runtime.comm.protocol import Channel

PATIENCE = timedelta(days=7)
"""How long a server waits for the next command: an evaluation may take hours. A lost replica is noticed at once."""
_TAG = 7


class Commands:
    """One end of the connection from the first replica to the ranks without a replica."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.lead, *self.servers = channel.ranks

    @property
    def leads(self) -> bool:
        """Whether this rank gives the commands."""
        return self.channel.index == 0

    def tell(self, command: str, **facts: Any) -> None:
        """Sends every server a command; does nothing on other replicas."""
        for server in self.servers:
            self.send(server, (command, facts))

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next command; waits for it."""
        command: tuple[str, dict[str, Any]] = self.receive(self.lead)
        return command

    def send(self, to: int, value: Any) -> None:
        """Sends a value to one rank: tensors, numbers and texts, in lists, tuples and dicts."""
        packed = io.BytesIO()
        torch.save(value, packed)
        content = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        self.channel.send(torch.tensor([len(content)]), to, _TAG)
        self.channel.send(content, to, _TAG)

    def receive(self, source: int) -> Any:
        """Waits for a value from one rank."""
        length = torch.zeros(1, dtype=torch.int64)
        self.channel.recv(length, source, _TAG)
        content = torch.empty(int(length), dtype=torch.uint8)
        self.channel.recv(content, source, _TAG)
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
