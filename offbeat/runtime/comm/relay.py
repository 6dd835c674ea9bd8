"""Sum a tensor over all ranks through one of them: BytePS's summation service.

Each rank sends its gradient to the root once and receives the sum once, in opposite directions of its link, so that a
slow link carries less than in a ring. The root may hold a replica or be a server that holds none. Its two threads take
gradients in and send sums out while it computes; both go by the order in which all ranks start them.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from offbeat.runtime.comm.protocol import Channel, Work
from offbeat.timeline.clock import Moment


class Relay:
    """The sums made by one root, on one rank; the root is the last of the channels' ranks."""

    def __init__(self, up: Channel, back: Channel, adds: bool, window: int) -> None:
        """Nothing else uses `up` and `back`. A root that `adds` has a gradient of its own; it takes in no more than
        `window` sums at once, which bounds its memory."""
        self.up, self.back = up, back
        self.root = up.ranks[-1]
        self.adds = adds
        self.room = threading.Semaphore(window)
        self.asked: SimpleQueue[tuple[torch.Tensor, Future[Work]] | None] = SimpleQueue()
        self.arriving: SimpleQueue[tuple[torch.Tensor, Future[Work], torch.Tensor, Work] | None] = SimpleQueue()
        self.spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        """Buffers for arriving tensors, by length and dtype."""
        loops = (self._take_in, self._send_out) if up.index == up.size - 1 else ()
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self.threads:
            thread.start()

    def start(self, tensor: torch.Tensor) -> Work:
        """`tensor` becomes the sum of every rank's; every member starts the same ones in the same order."""
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        if not self.threads:
            # The sum comes when the root has all of this gradient, so that one memory holds both.
            return ClientWork(self.up.gather([], tensor, self.root), self.back.deliver(tensor, self.root))
        sent: Future[Work] = Future()
        self.asked.put((tensor, sent))
        return LaterWork(sent)

    def close(self, deadline: float | None = None) -> None:
        """Waits until everything started has ended, or until `deadline` (time.monotonic)."""
        self.asked.put(None)
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _take_in(self) -> None:
        while (asked := self.asked.get()) is not None:
            tensor, sent = asked
            self.room.acquire()
            try:
                spare = self.spare[tensor.numel(), tensor.dtype]
                parts = spare.pop() if spare else tensor.new_empty(self.up.size, tensor.numel())
                self.arriving.put((tensor, sent, parts, self.up.gather(list(parts), tensor, self.root)))
            except Exception as error:
                self.room.release()
                sent.set_exception(error)
        self.arriving.put(None)

    def _send_out(self) -> None:
        # Tensor code in a thread starts a team of its own otherwise, which slows the training thread down.
        torch.set_num_threads(1)
        while (arriving := self.arriving.get()) is not None:
            tensor, sent, parts, gathered = arriving
            try:
                gathered.wait()
                torch.sum(parts if self.adds else parts[:-1], dim=0, out=tensor)
                sent.set_result(self.back.deliver(tensor, self.root))
                self.spare[tensor.numel(), tensor.dtype].append(parts)
            except Exception as error:
                sent.set_exception(error)
            self.room.release()


@dataclass(eq=False, slots=True)
class ClientWork:
    """A gradient in flight to the root, and the sum in flight back."""

    sent: Work
    received: Work

    def wait(self) -> None:
        self.sent.wait()
        self.received.wait()

    def is_completed(self) -> bool:
        return self.received.is_completed()

    def report_end(self, report: Callable[[Moment], None]) -> None:
        self.received.report_end(report)


@dataclass(eq=False, slots=True)
class LaterWork:
    """A collective that another thread starts."""

    sent: Future[Work]

    def wait(self) -> None:
        self.sent.result().wait()

    def is_completed(self) -> bool:
        return self.sent.done() and (self.sent.exception() is not None or self.sent.result().is_completed())

    def report_end(self, report: Callable[[Moment], None]) -> None:
        def ended(sent: Future[Work]) -> None:
            if sent.exception() is None:
                sent.result().report_end(report)
            else:
                report(time.perf_counter())

        self.sent.add_done_callback(ended)
