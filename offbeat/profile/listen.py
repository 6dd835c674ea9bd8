"""Collectives of jobs that do not run on Offbeat's engine → the recorder: DDP's buckets, torch.distributed's calls."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offbeat.timeline import Kind

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
"""Shorter waits are not worth a note."""


_LISTENER = "_offbeat_listener"
"""Attribute of a DDP model that is listened to."""


class Sink(Protocol):
    """Takes note of collectives."""

    def collective(
        self, task: int, kind: str, name: str, size: int, ranks: int, queued: float, issued: float, finished: float
    ) -> None: ...

    def local(self, kind: Kind, messages: tuple[int, ...], start: float, end: float) -> None: ...


class BucketListener:
    """Times each all-reduce of a DDP model's buckets for `sink`, while there is one.

    DDP keeps its communication hook for good, so the listener stays with the model and serves later recorders too.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.sink: Sink | None = None
        self.group = model.process_group
        self.world = dist.get_world_size(self.group)
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.known: dict[int, str] = {}
        model.register_comm_hook(self, _exchange)

    def remove(self) -> None:
        self.sink = None

    def named(self, bucket: dist.GradBucket, tensor: torch.Tensor) -> str:
        """The bucket's variables."""
        known = self.known.get(tensor.data_ptr())
        if known is None:
            known = ",".join(self.names[id(parameter)] for parameter in bucket.parameters())
            self.known[tensor.data_ptr()] = known
        return known


def listen_to_buckets(model: DistributedDataParallel, sink: Sink) -> BucketListener | None:
    """Starts to time each bucket's all-reduce; None if the job has a communication hook of its own, which must stay."""
    listener = vars(model).get(_LISTENER)
    if listener is None:
        if model._comm_hooks:
            return None
        listener = vars(model)[_LISTENER] = BucketListener(model)
    listener.sink = sink
    return listener


def _exchange(listener: BucketListener, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    queued = time.perf_counter()
    tensor = bucket.buffer().div_(listener.world)
    issued = time.perf_counter()
    future = dist.all_reduce(tensor, group=listener.group, async_op=True).get_future()
    sink = listener.sink
    if sink is not None:
        number, size, first = bucket.index(), tensor.numel() * tensor.element_size(), listener.named(bucket, tensor)
        future.add_done_callback(
            lambda _: sink.collective(
                number, "all_reduce", first, size, listener.world, queued, issued, time.perf_counter()
            )
        )
    return future.then(lambda done: done.value()[0])


class CollectiveListener:
    """Stands between the job and torch.distributed until it is removed: notes collectives, and waits for them."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.count = 0
        """Of collectives since the step began, which numbers them alike in every step."""
        self.inside = False
        """One function may call another; the outermost counts."""
        self.originals: dict[str, Callable[..., Any]] = {}
        for name in _CALLS:
            if hasattr(dist, name):
                self.originals[name] = getattr(dist, name)
                setattr(dist, name, self._listening(name, self.originals[name]))
        self.wait = dist.Work.wait
        dist.Work.wait = self._waiting(self.wait)

    def _listening(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kind, place, keyword = _CALLS[name]

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return original(*args, **kwargs)
            queued = time.perf_counter()
            self.inside = True
            try:
                work = original(*args, **kwargs)
            finally:
                self.inside = False
            tensor = args[place] if len(args) > place else kwargs.get(keyword)
            size = tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0
            ranks = dist.get_world_size(kwargs.get("group"))
            number, self.count = self.count, self.count + 1

            def ended(*_: Any) -> None:
                self.sink.collective(number, kind, f"{name}.{number}", size, ranks, queued, queued, time.perf_counter())

            if work is None:
                ended()
                self.sink.local("wait", (), queued, time.perf_counter())
            else:
                work.get_future().add_done_callback(ended)
            return work

        return call

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                end = time.perf_counter()
                if not self.inside and end - begin > LEAST_WAIT_SECONDS:
                    self.sink.local("wait", (), begin, end)

        return wait

    def remove(self) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)
        dist.Work.wait = self.wait
