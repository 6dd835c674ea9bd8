"""Ranks in ring order → a queue of collectives among them.

Gradients and returning parameters use channels of their own, so that neither can hold the other up. A channel starts
its collectives in the order in which they are put in; every rank puts them in in the plan's order.
"""

import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.cost.measured import Costs
from offbeat.plan import Plan

GLOO_SEGMENT_BYTES = 2**20
"""Of gloo's ring reduce. With more than two segments for each rank it passes nearly the whole tensor around the ring
where all but a rank's share of it would do: at two ranks half as long again."""


STRAIGHT_RANKS = range(2, 9)
"""With so many ranks gloo's reduces and broadcasts go straight to and from the root: its own ring and tree lead through
everybody's links, slow ones too, in both directions. With more, the root would hold too many gradients until they are
summed."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Blocks the host (CPU) or the current stream (GPU) until it has ended."""

    def is_completed(self) -> bool:
        """Whether waiting would return at once."""


class CommunicationFailed(RuntimeError):
    """The backend gave up on a collective."""


@contextmanager
def _backend_errors() -> Generator[None, None, None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationFailed(str(error)) from error


def wait(work: Work) -> None:
    """Waits for a collective, however the backend reports that it failed."""
    with _backend_errors():
        work.wait()


def report_end(work: Work, report: Callable[[float], None]) -> None:
    """Calls `report` with the time at which a collective ends, from a thread of the backend's."""
    inner: Any = getattr(work, "work", work)
    inner.get_future().add_done_callback(lambda _: report(time.perf_counter()))


def goes_straight(backend: str, ranks: int) -> bool:
    """Whether reduces and broadcasts among so many ranks use no link but the root's and each other's own."""
    return backend == "gloo" and ranks in STRAIGHT_RANKS


def known_costs(backend: str, ranks: int) -> Costs:
    """What is known of a job's costs before anything is measured: the ways that its messages and updates take."""
    # Gloo's jobs compute on processors.
    return Costs(straight=goes_straight(backend, ranks), portions=backend == "gloo")


class Channel:
    """One process group, whose members are numbered in ring order."""

    def __init__(self, group: Any, ranks: tuple[int, ...], me: int) -> None:
        self.group = group
        self.ranks = ranks
        self.index = ranks.index(me)
        self.size = len(ranks)
        self.gloo = group.name() == "gloo"

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        with _backend_errors():
            return self.group.allreduce([tensor])

    def reduce(self, tensor: torch.Tensor, root: int) -> Work:
        options = dist.ReduceOptions()
        options.rootRank = self.ranks.index(root)
        with _backend_errors():
            if not self.gloo:
                return self.group.reduce([tensor], options)
            if goes_straight(self.group.name(), self.size):
                return _GatherAndSum(self, tensor.view(-1), root)
            most = 2 * self.size * GLOO_SEGMENT_BYTES // tensor.element_size()
            return _InPieces([self.group.reduce([piece], options) for piece in tensor.view(-1).split(most)])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        with _backend_errors():
            if goes_straight(self.group.name(), self.size):
                scattered = dist.ScatterOptions()
                scattered.rootRank = self.ranks.index(root)
                inputs = [[tensor] * self.size] if scattered.rootRank == self.index else []
                return self.group.scatter([tensor], inputs, scattered)
            options = dist.BroadcastOptions()
            options.rootRank = self.ranks.index(root)
            options.rootTensor = 0
            return self.group.broadcast([tensor], options)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """`output` receives every rank's tensor, in ring order."""
        with _backend_errors():
            return self.group._allgather_base(output, tensor)

    def gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> Work:
        """The root receives every rank's tensor; `outputs` is empty elsewhere."""
        if not self.gloo:
            # NCCL has no gather of its own; its all-gather keeps the ring's timing and the result.
            received = outputs or [torch.empty_like(tensor) for _ in self.ranks]
            return self.group.allgather([received], [tensor])
        options = dist.GatherOptions()
        options.rootRank = self.ranks.index(root)
        with _backend_errors():
            return self.group.gather([outputs] if outputs else [], [tensor], options)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """`output` receives the sum of this rank's equal part of every rank's tensor."""
        with _backend_errors():
            if self.gloo:
                return _ExchangeAndSum(self.group, output, tensor, self.size)
            return self.group._reduce_scatter_base(output, tensor)

    def close(self) -> None:
        """Ends the group's threads and connections, which takes the last reference to it, not only its shutdown."""
        group, self.group = self.group, None
        if group is not None:
            group.shutdown()


class _InPieces:
    """One collective that goes out as several, in order."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works
        self.work = works[-1]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _GatherAndSum:
    """Reduce for gloo: every rank sends its tensor to the root once, where a ring passes sums through all links."""

    def __init__(self, channel: Channel, tensor: torch.Tensor, root: int) -> None:
        self.tensor = tensor
        mine = channel.ranks[channel.index] == root
        self.parts = tensor.new_empty(channel.size, tensor.numel()) if mine else None
        self.work: Any = channel.gather([] if self.parts is None else list(self.parts), tensor, root)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        if self.parts is not None:
            torch.sum(self.parts, dim=0, out=self.tensor)
            self.parts = None


class _ExchangeAndSum:
    """Reduce-scatter for gloo: its own sends a full all-reduce, an all-to-all sends each part once."""

    def __init__(self, group: Any, output: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
        self.output = output
        self.parts = torch.empty_like(tensor).view(size, -1)
        self.work = group.alltoall_base(self.parts.view(-1), tensor, [], [])
        self.summed = False

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        if not self.summed:
            torch.sum(self.parts, dim=0, out=self.output)
            self.summed = True


class Channels:
    """The channels one rank needs for its part of a plan."""

    def __init__(self, plan: Plan, backend: str, timeout: timedelta, generation: int) -> None:
        assert plan.rank is not None
        self.me = plan.rank
        schedule = plan.strategy.schedule
        wanted = {(back, ranks) for back, ranks in _wanted(plan) if len(ranks) > 1}
        everyone = tuple(plan.replicas)
        self.channels: dict[tuple[str, tuple[int, ...]], Channel] = {}
        # All ranks open theirs in one global order, so that no two wait for each other.
        for back, ranks in sorted(wanted | {("control", everyone)}):
            name = f"offbeat/{generation}/{back}/{'.'.join(map(str, ranks))}"
            group = open_group(backend, name, ranks, self.me, schedule.in_flight, timeout)
            self.channels[(back, ranks)] = Channel(group, ranks, self.me)
        self.control = self.channels[("control", everyone)]
        self.direct: Channel | None = None
        if any(message.asynchronous for message in plan.messages) and len(everyone) > 1:
            group = open_group(backend, f"offbeat/{generation}/direct", everyone, self.me, schedule.in_flight, timeout)
            self.direct = self.channels[("direct", everyone)] = Channel(group, everyone, self.me)

    def up(self, ranks: tuple[int, ...]) -> Channel:
        """For gradients on their way to who applies them."""
        return self.channels[("up", ranks)]

    def back(self, ranks: tuple[int, ...]) -> Channel:
        """For parameters on their way back."""
        return self.channels[("back", ranks)]

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


def _wanted(plan: Plan) -> Iterable[tuple[str, tuple[int, ...]]]:
    for task in plan.communication:
        message = plan.messages[task.message]
        returns = bool(task.delivers) and message.synchronizer in (
            "parameter_server",
            "sparse_parameter_server",
            "sharded",
        )
        yield "back" if returns else "up", task.ranks
        if returns and message.owner is not None:
            # Gradients that the training loop reads are published along the same way.
            yield "back", task.ranks


def open_group(backend: str, name: str, ranks: tuple[int, ...], me: int, in_flight: int, timeout: timedelta) -> Any:
    store = dist.PrefixStore(name, _get_default_store())
    index, size = ranks.index(me), len(ranks)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, index, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = in_flight
    interfaces = [part for part in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if part]
    gloo = dist.ProcessGroupGloo
    options._devices = [gloo.create_device(interface=part) for part in interfaces] or [gloo.create_default_device()]
    return gloo(store, index, size, options)
