"""Channels on torch's process groups: gloo and NCCL.

Gloo's own ways of some collectives send more than needed; `TorchChannel` composes them of others.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from offbeat.cost.measured import Costs
from offbeat.runtime.comm.connections import OpenSocket, shut_down
from offbeat.runtime.comm.protocol import CommunicationFailed, Work
from offbeat.timeline.clock import DeviceMoment, Moment
from offbeat.torch_private import all_gather_flat, reduce_scatter_flat

GLOO_SEGMENT_BYTES = 2**20
"""Of gloo's ring reduce. With more than two segments for each rank it passes nearly the whole tensor around the ring
where all but a rank's share of it would do: at two ranks half as long again."""
STRAIGHT_RANKS = range(2, 9)
"""With so many ranks gloo's reduces and broadcasts go straight to and from the root: its own ring and tree lead through
everybody's links, slow ones too, in both directions. With more, the root would hold too many gradients until they are
summed."""
BREAK_OFF_SECONDS = 2.0
"""How long collectives may take to fail once their connections are closed."""
LONG_QUEUE = 16
"""Works on a GPU's stream that a channel keeps without asking which have ended."""
SIGNAL_SECONDS = timedelta(seconds=1)
"""How long a wait may keep Python from handling a signal, such as Ctrl-C."""


def goes_straight(backend: str, ranks: int) -> bool:
    """Whether reduces and broadcasts among this many ranks use only the links of the root and of each participant."""
    return backend == "gloo" and ranks in STRAIGHT_RANKS


def known_costs(backend: str, ranks: int) -> Costs:
    """Costs known before anything is measured: the paths of the job's messages and updates."""
    # Gloo's jobs compute on processors.
    return Costs(straight=goes_straight(backend, ranks), portions=backend == "gloo")


class TorchChannel:
    """One process group, whose members are numbered in ring order."""

    def __init__(
        self,
        group: Any,
        ranks: tuple[int, ...],
        me: int,
        lost_ranks: Callable[[], list[int]],
        connections: frozenset[OpenSocket] = frozenset(),
    ) -> None:
        """`connections` are the group's sockets, by which collectives in flight can be aborted."""
        self.group = group
        self.connections = connections
        self.under_way: deque[Any] = deque()
        """The backend's works, from the oldest unfinished one on; nothing else may refer to them."""
        self.lock = threading.Lock()
        self.ranks = ranks
        self.index = ranks.index(me)
        self.size = len(ranks)
        self.gloo = group.name() == "gloo"
        self.straight = goes_straight(group.name(), self.size)
        self.stream = torch.cuda.Stream(priority=-1) if group.name() == "nccl" else None
        """NCCL would use one that nobody else can put a mark on. A mark on a third stream that waits for it can hold up
        work on others: a GPU has few queues for all streams."""
        if self.stream is not None:
            self.ready = torch.cuda.Event()
        self.lost_ranks = lost_ranks
        self.errors = _Errors(lost_ranks)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        tensor = _real(tensor)
        return self._start(c10d.AllreduceOptions(), lambda options: self.group.allreduce([tensor], options), tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> Work:
        tensor = _real(tensor).view(-1)
        if self.straight:
            # Every rank sends its tensor to the root once, where a ring would pass sums through all links.
            parts = tensor.new_empty(self.size if self.ranks[self.index] == root else 0, tensor.numel())
            work = self.gather(list(parts), tensor, root)
            assert isinstance(work, TorchWork)
            if len(parts):
                work.finish = lambda: torch.sum(parts, dim=0, out=tensor)
            return work
        options = c10d.ReduceOptions()
        options.rootRank = self.ranks.index(root)
        if not self.gloo:
            return self._start(options, lambda options: self.group.reduce([tensor], options), tensor)
        most = 2 * self.size * GLOO_SEGMENT_BYTES // tensor.element_size()
        with self.errors:
            return TorchWork(self, [self.group.reduce([piece], options) for piece in tensor.split(most)])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        tensor = _real(tensor)
        if self.straight:
            return self.deliver(tensor, root)
        options = c10d.BroadcastOptions()
        options.rootRank = self.ranks.index(root)
        return self._start(options, lambda options: self.group.broadcast([tensor], options), tensor)

    def deliver(self, tensor: torch.Tensor, root: int) -> Work:
        options = c10d.ScatterOptions()
        options.rootRank = self.ranks.index(root)
        inputs = [[tensor] * self.size] if options.rootRank == self.index else []
        return self._start(options, lambda options: self.group.scatter([tensor], inputs, options), tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        output, tensor = _real(output), _real(tensor)
        start = partial(all_gather_flat, self.group, output, tensor)
        return self._start(c10d.AllgatherOptions(), start, output, tensor)

    def gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> Work:
        if not self.gloo:
            # NCCL has no gather of its own; its all-gather keeps the ring's timing and the result.
            received = outputs or [torch.empty_like(tensor) for _ in self.ranks]
            options = c10d.AllgatherOptions()
            return self._start(options, lambda o: self.group.allgather([received], [tensor], o), tensor, *received)
        options = c10d.GatherOptions()
        options.rootRank = self.ranks.index(root)
        return self._start(options, lambda o: self.group.gather([outputs] if outputs else [], [tensor], o))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        output, tensor = _real(output), _real(tensor)
        if not self.gloo:
            start = partial(reduce_scatter_flat, self.group, output, tensor)
            return self._start(c10d.ReduceScatterOptions(), start, output, tensor)
        # Gloo's own sends a full all-reduce, an all-to-all sends each part once.
        parts = torch.empty_like(tensor).view(self.size, -1)
        with self.errors:
            exchanged = self.group.alltoall_base(parts.view(-1), tensor, [], [])
        return TorchWork(self, [exchanged], lambda: torch.sum(parts, dim=0, out=output.view(-1)))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        output, tensor = _real(output), _real(tensor)
        options = c10d.AllToAllOptions()
        return self._start(options, lambda o: self.group.alltoall_base(output, tensor, [], [], o), output, tensor)

    def _start(self, options: Any, start: Callable[[Any], Any], *held: torch.Tensor) -> "TorchWork | StreamWork":
        """Starts a collective; on a GPU on the channel's own stream, behind what the current one has in it."""
        with self.errors:
            if self.stream is None:
                return TorchWork(self, [start(options)])
            options.asyncOp = False
            current = torch.cuda.current_stream()
            self.ready.record(current)
            self.stream.wait_event(self.ready)
            # A context manager takes several times as long, in a host that launches hundreds of kernels meanwhile.
            torch.cuda.set_stream(self.stream)
            try:
                start(options)
                return StreamWork(self, DeviceMoment(), held)
            finally:
                torch.cuda.set_stream(current)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self._exchange(lambda group: group.send([tensor], self.ranks.index(to), tag))

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        self._exchange(lambda group: group.recv([tensor], self.ranks.index(source), tag))

    def _exchange(self, start: Callable[[Any], Any]) -> None:
        group = self.group
        if group is None:
            raise CommunicationFailed("the channel is closed", self.lost_ranks)
        with self.errors:
            work = start(group)
            del group
            self.keep([work])
            work.wait()

    def keep(self, works: Sequence[Any]) -> None:
        """Keeps works until they have ended, and perhaps a little longer: to ask a GPU takes the host its time."""
        with self.lock:
            if self.stream is None or len(self.under_way) >= LONG_QUEUE:
                while self.under_way and self.under_way[0].is_completed():
                    self.under_way.popleft()
            self.under_way.extend(works)

    def close(self, deadline: float | None = None) -> None:
        """Ends the group's threads and connections, which takes the last reference to it, not only its shutdown."""
        group, self.group = self.group, None
        if group is None:
            return
        if deadline is not None and not self._ended(deadline):
            shut_down(self.connections)
            if not self.gloo:
                group.abort()
            if not self._ended(time.monotonic() + BREAK_OFF_SECONDS):
                # To delete it would wait for the other ranks, so it must outlive the interpreter.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                return
        self.under_way.clear()
        group.shutdown()

    def _ended(self, deadline: float) -> bool:
        """Whether everything in flight ends, or fails, before `deadline` (time.monotonic)."""
        while not all(work.is_completed() for work in list(self.under_way)):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True


class _Errors:
    """Turns a backend's errors into CommunicationFailed."""

    __slots__ = ("lost_ranks",)

    def __init__(self, lost_ranks: Callable[[], list[int]]) -> None:
        self.lost_ranks = lost_ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationFailed):
            raise CommunicationFailed(str(error), self.lost_ranks) from error


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers: not every collective takes complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class TorchWork:
    """One or several works of the backend that make one collective, and what is computed here when they have ended."""

    __slots__ = ("channel", "finish", "works")

    def __init__(self, channel: TorchChannel, works: Sequence[Any], finish: Callable[[], object] | None = None) -> None:
        self.channel = channel
        self.works = works
        self.finish = finish
        channel.keep(works)

    def wait(self) -> None:
        with self.channel.errors:
            for work in self.works:
                while not work.is_completed():
                    # Not for long, so that Python handles signals.
                    with suppress(RuntimeError):
                        work.wait(SIGNAL_SECONDS)
                # This says how it has ended.
                work.wait()
        if self.finish is not None:
            self.finish()
            self.finish = None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def report_end(self, report: Callable[[Moment], None]) -> None:
        self.works[-1].get_future().add_done_callback(lambda _: report(time.perf_counter()))


class StreamWork:
    """A collective on a channel's stream, with the tensors that must not be freed before it has ended."""

    __slots__ = ("end", "held")

    def __init__(self, channel: TorchChannel, end: DeviceMoment, held: Sequence[torch.Tensor]) -> None:
        self.end = end
        self.held = held
        channel.keep([self])

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end.event)

    def is_completed(self) -> bool:
        return self.end.event.query()

    def report_end(self, report: Callable[[Moment], None]) -> None:
        report(self.end)
