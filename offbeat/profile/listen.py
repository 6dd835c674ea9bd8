"""Record the collectives of jobs without Offbeat's engine: DDP's buckets and torch.distributed's calls."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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


def patch(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute until `undo` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


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
                patch(recorder.undo, dist, name, self._listening(name, *what))
        patch(recorder.undo, dist.Work, "wait", self._waiting(dist.Work.wait))

    def _listening(self, name: str, kind: str, place: int, keyword: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
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
            number = self.recorder.issued
            self.recorder.issued += 1
            what = (number, kind, f"{name}.{number}", size, dist.get_world_size(kwargs.get("group")))

            if work is None:
                end = self.recorder.clock.now()
                self.recorder.collective(*what, queued, queued, end)
                self.recorder.local("wait", (), queued, end)
            else:
                callbacks.add(work)
                group = kwargs.get("group")
                if id(group) not in self.marks:
                    self.marks[id(group)] = _marks(group)
                _report_end(work, partial(self.recorder.collective, *what, queued, queued), self.marks[id(group)])
            return work

        return call

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
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

        return wait
