"""The interface between the runtime and its job: ranks, a store, and channels among them.

`torch_world` and `torch_channel` implement it on torch's process groups. Unit tests have an implementation in memory,
with a thread per rank.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from offbeat.timeline.clock import Moment


class CommunicationFailed(RuntimeError):
    """A collective failed. `lost_ranks` finds the ranks that caused it; it may take seconds."""

    def __init__(self, cause: str, lost_ranks: Callable[[], list[int]]) -> None:
        super().__init__(cause)
        self.lost_ranks = lost_ranks


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Blocks the host (CPU) or the current stream (GPU) until it has ended; CommunicationFailed if it failed."""

    def is_completed(self) -> bool:
        """Whether waiting would return at once."""

    def report_end(self, report: Callable[[Moment], None]) -> None:
        """Calls `report` with the moment at which it ends: from any thread then, or at once with a mark on a GPU."""


class Channel(Protocol):
    """A queue of collectives among some ranks, whose members are numbered in ring order.

    Every member puts the same collectives in, in the same order, and must leave their tensors alone until it has waited
    for them. Roots, sources and destinations are ranks of the job.
    """

    ranks: tuple[int, ...]
    index: int
    """This rank's place among them."""
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """`tensor` becomes the sum of every rank's."""

    def reduce(self, tensor: torch.Tensor, root: int) -> Work:
        """The root's tensor becomes the sum of every rank's; what the others' become is undefined."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Every rank's tensor becomes the root's."""

    def deliver(self, tensor: torch.Tensor, root: int) -> Work:
        """The same, straight from the root to each of the others, however many they are."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """`output` receives every rank's tensor, in ring order."""

    def gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> Work:
        """The root receives every rank's tensor; `outputs` is empty elsewhere."""

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """`output` receives the sum of this rank's equal part of every rank's tensor."""

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """`output` receives this rank's equal part of every rank's tensor, in ring order."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Sends to one rank and returns once it has received; messages with the same tag arrive in order."""

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Waits for a message from one rank."""

    def close(self, deadline: float | None = None) -> None:
        """Leaves the channel once everything in flight has ended; the others' collectives on it fail from then on.

        Collectives still in flight at `deadline` (time.monotonic) are aborted, and so fail on all ranks.
        """


class World(Protocol):
    """The job as one of its ranks sees it."""

    rank: int
    size: int
    device: torch.device
    """Where this rank's tensors are."""
    staged: bool
    """They reach ranks without a GPU only through host memory."""
    backend: str
    """What carries them: 'gloo', 'nccl'."""

    def set(self, key: str, value: bytes) -> None:
        """Puts a value into the job's store."""

    def get(self, key: str) -> bytes:
        """A value of the job's store; waits until some rank has set it."""

    def wait_for(self, keys: Sequence[str], meanwhile: Callable[[], None]) -> None:
        """Waits until all of these keys are set; calls `meanwhile` at times, which may give up by an error."""

    def next_generation(self) -> int:
        """A number that this rank has not had before, for the keys and channels of one plan.

        Every rank of the job asks for it at the same points, and so gets the same.
        """

    def open_channel(
        self, name: str, ranks: tuple[int, ...], in_flight: int, timeout: timedelta, on_host: bool = False
    ) -> Channel:
        """A channel among `ranks`, all of which must open it; `name` differs from that of every other channel. One
        `on_host` takes tensors in host memory, wherever this rank's are."""

    def default_channel(self) -> Channel:
        """One among all ranks that the job has from the start; it stays open."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Every rank's tensor becomes the root's."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""

    def lost_ranks(self) -> list[int]:
        """The ranks that caused the failure seen here; none if that cannot be told."""

    def watch(self, ranks: Iterable[int]) -> None:
        """Prepares to find which of these ranks is lost when a collective fails; all of them must call it."""


def gather_blocks(channel: Channel, block: torch.Tensor, root: int | None) -> tuple[Work, torch.Tensor]:
    """Starts sending blocks of one size to everybody, or to the root. The tensor receives them, one row for each rank;
    it has none on a rank that is not the root."""
    here = root in (None, channel.ranks[channel.index])
    received = block.new_empty(channel.size if here else 0, block.numel())
    if root is None:
        return channel.all_gather(received.view(-1), block), received
    return channel.gather(list(received), block, root), received
