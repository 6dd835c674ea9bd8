"""Record point-to-point messages: dPRO's SENDs and RECVs, as each side saw them.

torch's `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv` all end in a process group's `send` and `recv`, which
are wrapped here; so are those of the channel on which Offbeat's asynchronous servers talk. Both sides count the
messages of each way and tag, which is how a SEND finds its RECV. A message is over when its work has been waited for:
the backends report no earlier moment. A receive from any rank (`src=None`) is not noted.
"""

import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from offbeat.profile.listen import patch
from offbeat.runtime.comm import Channel

if TYPE_CHECKING:
    from offbeat.profile.recorder import Recorder

_KINDS: tuple[Literal["send", "recv"], ...] = ("send", "recv")


class TransactionListener:
    """Notes messages between two ranks while there is a recorder."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder
        self.numbers: Counter[tuple[str, int, int]] = Counter()
        """Messages so far by kind, peer and tag."""
        self.open: dict[int, tuple[Any, list[tuple[Any, ...]]]] = {}
        """By its id, a work that nobody has waited for, and the messages that are over with it."""
        self.batch: list[tuple[Any, ...]] | None = None
        """The messages of the batch that is being issued."""
        self.lock = threading.Lock()
        for kind in _KINDS:
            patch(recorder.undo, dist.ProcessGroup, kind, self._issuing(kind, getattr(dist.ProcessGroup, kind)))
        patch(recorder.undo, dist, "batch_isend_irecv", self._batching(dist.batch_isend_irecv))
        patch(recorder.undo, dist.Work, "wait", self._waiting(dist.Work.wait))

    def listen_to_channel(self, channel: Channel) -> None:
        """Notes what this rank sends and receives on a channel of Offbeat's runtime."""
        for kind in _KINDS:
            patch(self.recorder.undo, channel, kind, self._exchanging(kind, getattr(channel, kind)))

    def _number(self, kind: str, peer: int, tag: int) -> int:
        with self.lock:
            self.numbers[kind, peer, tag] += 1
            return self.numbers[kind, peer, tag] - 1

    def _issuing(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def issue(group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
            queued = self.recorder.clock.now()
            work = original(group, tensors, peer, tag)
            there = dist.get_process_group_ranks(group)[peer]
            size = sum(tensor.nbytes for tensor in tensors)
            row = (kind, there, tag, self._number(kind, there, tag), size, queued)
            if self.batch is not None:
                self.batch.append(row)
            else:
                self.open[id(work)] = work, [row]
            return work

        return issue

    def _batching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def issue(*args: Any, **kwargs: Any) -> Any:
            self.batch = []
            try:
                works = original(*args, **kwargs)
            finally:
                rows, self.batch = self.batch, None
            # NCCL has one work for all of them.
            each = [[row] for row in rows] if len(works) == len(rows) else [rows]
            for work, part in zip(works, each, strict=False):
                self.open[id(work)] = work, part
            return works

        return issue

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(work, *args, **kwargs)
            _, rows = self.open.pop(id(work), (None, ()))
            for row in rows:
                self.recorder.messages.append((*row, self.recorder.clock.now()))
            return answer

        return wait

    def _exchanging(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def exchange(tensor: Any, peer: int, tag: int) -> None:
            queued = self.recorder.clock.now()
            original(tensor, peer, tag)
            number = self._number(kind, peer, tag)
            row = (kind, peer, tag, number, tensor.nbytes, queued, self.recorder.clock.now())
            self.recorder.messages.append(row)

        return exchange
