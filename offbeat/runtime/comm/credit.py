"""Limit the bytes in flight on a channel: ByteScheduler's credit.

A collective starts when it fits in with those in flight, or when there are none. Whoever ends one starts the next
ones, on whatever thread the backend tells of it, so that nobody has to look. All ranks put the same collectives in, in
the same order, and each starts them in that order; the first that has not ended always may start, so that no rank waits
for another for ever. NCCL runs the collectives of a channel one by one, so that a credit changes nothing there.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from offbeat.runtime.comm.protocol import Channel, Work
from offbeat.runtime.comm.relay import LaterWork
from offbeat.timeline.clock import Moment

_GIVEN = {"all_reduce": 0, "reduce": 0, "broadcast": 0, "deliver": 0}
_GIVEN |= {"all_gather": 1, "gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Of each collective, which argument is the tensor that this rank puts in."""


class CreditChannel:
    """A channel that holds collectives back."""

    def __init__(self, channel: Channel, credit: int) -> None:
        self.channel = channel
        self.credit = credit
        self.ranks, self.index, self.size = channel.ranks, channel.index, channel.size
        self.send, self.recv = channel.send, channel.recv
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Callable[[], Work], int, Future[Work]]] = deque()
        """How to start each collective, and its bytes."""
        self.under_way = self.bytes_under_way = 0
        self.starting = False
        """A thread is starting collectives; it holds no lock, because the backend may wait for another thread."""

    def __getattr__(self, kind: str) -> Callable[..., LaterWork]:
        """Each collective of the channel, held back until it fits."""
        if kind not in _GIVEN:
            raise AttributeError(kind)
        return partial(self._put, kind)

    def _put(self, kind: str, *arguments: Any) -> LaterWork:
        sent: Future[Work] = Future()
        with self.lock:
            self.waiting.append((lambda: getattr(self.channel, kind)(*arguments), arguments[_GIVEN[kind]].nbytes, sent))
        self._start_some()
        return LaterWork(sent)

    def _start_some(self) -> None:
        while True:
            with self.lock:
                if self.starting or not self.waiting:
                    return
                start, size, sent = self.waiting[0]
                if self.under_way and self.bytes_under_way + size > self.credit:
                    return
                self.waiting.popleft()
                self.under_way += 1
                self.bytes_under_way += size
                self.starting = True
            try:
                sent.set_result(start())
            except Exception as error:
                # Whoever waits for it is told.
                sent.set_exception(error)
            LaterWork(sent).report_end(partial(self._ended, size))
            with self.lock:
                self.starting = False

    def _ended(self, size: int, _: Moment) -> None:
        with self.lock:
            self.under_way -= 1
            self.bytes_under_way -= size
        self._start_some()

    def close(self, deadline: float | None = None) -> None:
        while self.waiting and (deadline is None or time.monotonic() < deadline):
            time.sleep(1e-3)
        self.channel.close(deadline)
