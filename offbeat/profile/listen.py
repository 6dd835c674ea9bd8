"""Record communication outside Offbeat's engine: DDP's buckets, torch.distributed's calls, messages to one rank."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offbeat.runtime.comm import Channel
from offbeat.runtime.lifetime import callbacks
from offbeat.timeline.clock import DeviceMoment, Moment
from offbeat.torch_private import has_communication_hook

if TYPE_CHECKING:
    from offbeat.profile.recorder import Recorder

_CALLS = {
    # name: (kind, position and name of the tensor that each rank puts in)
    "all_reduce": ("all_reduce", 0, "tensor"),
    "reduce": ("reduce", 0, "tensor"),
    "broadcast": ("broadcast", 0, "tensor"),
    "all_gather_into_tensor": ("all_gather", 1, "input_tensor"),
    "all_gather_single": ("all_gather", 1, "input_tensor"),
    "all_gather": ("all_gather", 1, "tensor"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "all_to_all_single": ("all_to_all", 1, "input"),
}
"""FSDP2 calls the `_single` ones, which older releases of torch do not have."""
_KINDS: tuple[Literal["send", "recv"], ...] = ("send", "recv")
LEAST_WAIT_SECONDS = 2e-5
"""Shorter waits are not noted."""
_LISTENER = "_offbeat_listener"
"""Attribute of a DDP model that is listened to."""


class BucketListener:
    """Times each all-reduce of a DDP model's buckets for `recorder`, while there is one.

    DDP cannot remove a communication hook, so the listener stays with the model and serves later recorders too.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.recorder: Recorder | None = None
        self.group = model.process_group
        self.world = dist.get_world_size(self.group)
        self.stream = _marks(self.group)
        """Where a GPU's buckets travel, so that their ends can be marked."""
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.known: dict[int, str] = {}
        """By the place of a bucket's tensor, the names of its variables."""
        model.register_comm_hook(self, _exchange)


def listen_to_buckets(model: DistributedDataParallel, recorder: "Recorder") -> bool:
    """Starts to time each bucket's all-reduce; False if the job has a communication hook, which must stay."""
    listener = vars(model).get(_LISTENER)
    if listener is None:
        if has_communication_hook(model):
            return False
        listener = vars(model)[_LISTENER] = BucketListener(model)
    listener.recorder = recorder
    recorder.undo.callback(setattr, listener, "recorder", None)
    return True


def _exchange(listener: BucketListener, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    recorder = listener.recorder
    queued = recorder.clock.about_now() if recorder is not None else 0.0
    tensor = bucket.buffer().div_(listener.world)
    issued = recorder.clock.about_now() if recorder is not None else 0.0
    place = tensor.data_ptr()
    if place not in listener.known:
        listener.known[place] = ",".join(listener.names[id(parameter)] for parameter in bucket.parameters())
    what = (bucket.index(), "all_reduce", listener.known[place], tensor.nbytes, listener.world, queued, issued)
    future: torch.futures.Future[torch.Tensor]
    if listener.stream is not None:
        listener.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(listener.stream):
            dist.all_reduce(tensor, group=listener.group)
            if recorder is not None:
                recorder.collective(*what, DeviceMoment())
            future = torch.futures.Future(devices=[tensor.device])
            future.set_result(tensor)
        return future
    work = dist.all_reduce(tensor, group=listener.group, async_op=True)
    if recorder is not None:
        callbacks.add(work)
        _report_end(work, partial(recorder.collective, *what), None)
    return work.get_future().then(lambda done: done.value()[0])


def _report_end(work: Any, report: Callable[[Moment], None], marks: torch.cuda.Stream | None) -> None:
    """Calls `report` with the moment at which a collective ends.

    One of NCCL's is only put on its stream when torch calls it done; so a stream of `marks` waits for it.
    """
    if marks is None:
        work.get_future().add_done_callback(lambda _: report(time.perf_counter()))
        return
    with torch.cuda.stream(marks):
        work.wait()
        report(DeviceMoment())


def _marks(group: dist.ProcessGroup | None) -> torch.cuda.Stream | None:
    """A stream for the ends of a group's collectives; None where the backend's threads report them."""
    return torch.cuda.Stream() if dist.get_backend(group) == "nccl" else None


def wrap(undo: ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Until `undo` is closed, `call` stands for a function of `owner`: it is given the original, then the arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    undo.callback(setattr, owner, name, original)
    setattr(owner, name, wrapped)


class CollectiveListener:
    """Wraps torch.distributed's functions while there is a recorder, for which it notes collectives and waits."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder
        self.inside = False
        """Inside one of the functions, which may call another."""
        self.marks: dict[int, torch.cuda.Stream | None] = {}
        """By the process group's id."""
        for name, what in _CALLS.items():
            if hasattr(dist, name):
                wrap(recorder.undo, dist, name, partial(self._call, name, *what))
        wrap(recorder.undo, dist.Work, "wait", self._wait)

    def _call(
        self, name: str, kind: str, place: int, keyword: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.inside:
            return original(*args, **kwargs)
        queued = self.recorder.clock.now()
        self.inside = True
        try:
            work = original(*args, **kwargs)
        finally:
            self.inside = False
        tensor = args[place] if len(args) > place else kwargs.get(keyword)
        size = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        number, group = self.recorder.issued, kwargs.get("group")
        self.recorder.issued += 1
        what = (number, kind, f"{name}.{number}", size, dist.get_world_size(group))
        if work is None:
            end = self.recorder.clock.now()
            self.recorder.collective(*what, queued, queued, end)
            self.recorder.local("wait", (), queued, end)
        else:
            callbacks.add(work)
            if id(group) not in self.marks:
                self.marks[id(group)] = _marks(group)
            _report_end(work, partial(self.recorder.collective, *what, queued, queued), self.marks[id(group)])
        return work

    def _wait(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            return original(*args, **kwargs)
        begin = self.recorder.clock.now()
        try:
            return original(*args, **kwargs)
        finally:
            end = self.recorder.clock.now()
            short = isinstance(begin, float) and isinstance(end, float) and end - begin <= LEAST_WAIT_SECONDS
            if not short:
                self.recorder.local("wait", (), begin, end)


class TransactionListener:
    """Notes messages between two ranks while there is a recorder: dPRO's SENDs and RECVs, as each side saw them.

    torch's `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv` all end in a process group's `send` and `recv`,
    which are wrapped here; so are those of the channel on which Offbeat's asynchronous servers talk. Both sides count
    the messages of each way and tag, which is how a SEND finds its RECV. A message is over when its work has been
    waited for: the backends report no earlier moment. A receive from any rank (`src=None`) is not noted.
    """

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
            wrap(recorder.undo, dist.ProcessGroup, kind, partial(self._issue, kind))
        wrap(recorder.undo, dist, "batch_isend_irecv", self._batch)
        wrap(recorder.undo, dist.Work, "wait", self._wait)

    def listen_to_channel(self, channel: Channel) -> None:
        """Notes what this rank sends and receives on a channel of Offbeat's runtime."""
        for kind in _KINDS:
            wrap(self.recorder.undo, channel, kind, partial(self._exchange, kind))

    def _number(self, kind: str, peer: int, tag: int) -> int:
        with self.lock:
            self.numbers[kind, peer, tag] += 1
            return self.numbers[kind, peer, tag] - 1

    def _issue(self, kind: str, original: Callable[..., Any], group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
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

    def _batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    def _wait(self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(work, *args, **kwargs)
        _, rows = self.open.pop(id(work), (None, ()))
        for row in rows:
            self.recorder.messages.append((*row, self.recorder.clock.now()))
        return answer

    def _exchange(self, kind: str, original: Callable[..., Any], tensor: Any, peer: int, tag: int) -> None:
        queued = self.recorder.clock.now()
        original(tensor, peer, tag)
        number = self._number(kind, peer, tag)
        self.recorder.messages.append((kind, peer, tag, number, tensor.nbytes, queued, self.recorder.clock.now()))
