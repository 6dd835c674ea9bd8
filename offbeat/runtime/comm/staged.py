"""Collectives of tensors on a GPU by way of host memory, for channels with ranks that have no GPU.

Servers on processors speak gloo, which takes tensors in host memory only. So what a rank gives is copied there once the
GPU has computed it, and what it receives is copied back, by two threads: neither the host nor the GPU waits meanwhile.
A tensor that is in host memory already takes the same way, which is how tests on processors run it.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from offbeat.runtime.comm.protocol import Channel, Work
from offbeat.runtime.comm.relay import Relay
from offbeat.timeline.clock import Moment

Begin = Callable[[list[torch.Tensor]], Work]
"""Starts a collective on host copies of its tensors."""


class StagedWork:
    """A collective in flight; it has ended once its result is on the GPU."""

    __slots__ = ("begin", "copies", "ended", "given", "ready", "received", "tensors")

    def __init__(
        self, begin: Begin, tensors: list[torch.Tensor], given: Collection[int], received: Collection[int]
    ) -> None:
        """`given` and `received` are the places of the tensors that this rank puts in and gets."""
        self.begin, self.tensors, self.given, self.received = begin, tensors, given, received
        self.copies: list[torch.Tensor] = []
        self.ended: Future[None] = Future()
        self.ready = torch.cuda.current_stream().record_event() if tensors[0].is_cuda else None
        """Nothing that was put on the stream before this uses the tensors any more."""

    def wait(self) -> None:
        self.ended.result()

    def is_completed(self) -> bool:
        return self.ended.done()

    def report_end(self, report: Callable[[Moment], None]) -> None:
        self.ended.add_done_callback(lambda _: report(time.perf_counter()))


class Stage:
    """Runs the collectives of one channel on copies in host memory, in the order in which they are started."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.leaving: SimpleQueue[StagedWork | None] = SimpleQueue()
        self.returning: SimpleQueue[tuple[StagedWork, Work] | None] = SimpleQueue()
        self.unused: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        """Host memory that no collective uses, by shape and dtype."""
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in (self._leave, self._return)]
        for thread in self.threads:
            thread.start()

    def start(
        self, begin: Begin, tensors: list[torch.Tensor], given: Collection[int], received: Collection[int]
    ) -> StagedWork:
        work = StagedWork(begin, tensors, given, received)
        self.leaving.put(work)
        return work

    def close(self, deadline: float | None = None) -> None:
        """Waits until everything started has ended, or until `deadline` (time.monotonic)."""
        self.leaving.put(None)
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    @torch.no_grad()
    def _leave(self) -> None:
        stream = self._own_stream()
        while (work := self.leaving.get()) is not None:
            try:
                if stream is not None:
                    stream.wait_event(work.ready)
                work.copies = [self._host_memory(tensor) for tensor in work.tensors]
                for place in work.given:
                    work.copies[place].copy_(work.tensors[place], non_blocking=True)
                if stream is not None:
                    stream.synchronize()
                self.returning.put((work, work.begin(work.copies)))
            except Exception as error:
                work.ended.set_exception(error)
        self.returning.put(None)

    @torch.no_grad()
    def _return(self) -> None:
        stream = self._own_stream()
        while (item := self.returning.get()) is not None:
            work, on_host = item
            try:
                on_host.wait()
                # Nothing uses the tensors any more: the other thread has waited for that.
                for place in work.received:
                    work.tensors[place].copy_(work.copies[place], non_blocking=True)
                if stream is not None:
                    stream.synchronize()
                for copy in work.copies:
                    self.unused[copy.shape, copy.dtype].append(copy)
                work.ended.set_result(None)
            except Exception as error:
                work.ended.set_exception(error)

    def _own_stream(self) -> Any:
        """The stream on which this thread copies; None where all memory is the host's."""
        # Tensor code in a thread starts a team of its own otherwise, which slows the training thread down.
        torch.set_num_threads(1)
        if self.device.type != "cuda":
            return None
        torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        return stream

    def _host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        unused = self.unused[tensor.shape, tensor.dtype]
        return unused.pop() if unused else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class StagedChannel:
    """A channel on host memory, for a rank whose tensors are on a GPU."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.channel = channel
        self.ranks, self.index, self.size = channel.ranks, channel.index, channel.size
        self.stage = Stage(device)
        self.close = self.stage.close

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self.stage.start(lambda hosts: self.channel.all_reduce(*hosts), [tensor], [0], [0])

    def reduce(self, tensor: torch.Tensor, root: int) -> Work:
        received = [0] if self._is(root) else []
        return self.stage.start(lambda hosts: self.channel.reduce(hosts[0], root), [tensor], [0], received)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        given, received = ([0], []) if self._is(root) else ([], [0])
        return self.stage.start(lambda hosts: self.channel.broadcast(hosts[0], root), [tensor], given, received)

    def deliver(self, tensor: torch.Tensor, root: int) -> Work:
        given, received = ([0], []) if self._is(root) else ([], [0])
        return self.stage.start(lambda hosts: self.channel.deliver(hosts[0], root), [tensor], given, received)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self.stage.start(lambda hosts: self.channel.all_gather(*hosts), [output, tensor], [1], [0])

    def gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> Work:
        def begin(hosts: list[torch.Tensor]) -> Work:
            return self.channel.gather(hosts[:-1], hosts[-1], root)

        return self.stage.start(begin, [*outputs, tensor], [len(outputs)], range(len(outputs)))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self.stage.start(lambda hosts: self.channel.reduce_scatter(*hosts), [output, tensor], [1], [0])

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self.stage.start(lambda hosts: self.channel.all_to_all(*hosts), [output, tensor], [1], [0])

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self.channel.send(tensor.cpu(), to, tag)

    @torch.no_grad()
    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.channel.recv(host, source, tag)
        tensor.copy_(host)

    def _is(self, rank: int) -> bool:
        return self.ranks[self.index] == rank


class StagedRelay:
    """A relay on host memory, for a rank whose gradients are on a GPU."""

    def __init__(self, relay: Relay, device: torch.device) -> None:
        self.relay = relay
        self.stage = Stage(device)

    def start(self, tensor: torch.Tensor) -> Work:
        return self.stage.start(lambda hosts: self.relay.start(*hosts), [tensor], [0], [0])

    def close(self, deadline: float | None = None) -> None:
        self.stage.close(deadline)
        self.relay.close(deadline)
