"""Collectives of jobs that do not run on Offbeat's engine → the recorder: DDP's buckets, torch.distributed's calls."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_CALLS = {
    # name: (kind, position of the tensor that each rank puts in)
    "all_reduce": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
}


class Sink(Protocol):
    """Takes note of collectives."""

    def collective(
        self, task: int, kind: str, name: str, size: int, ranks: int, queued: float, issued: float, finished: float
    ) -> None: ...


def listen_to_buckets(model: DistributedDataParallel, sink: Sink) -> bool:
    """Times each bucket's all-reduce; False if the job has a communication hook of its own, which must stay."""
    if model._comm_hooks:
        return False
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    known: dict[int, str] = {}
    world = dist.get_world_size(model.process_group)

    def exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        queued = time.perf_counter()
        tensor = bucket.buffer().div_(world)
        first = known.get(tensor.data_ptr())
        if first is None:
            first = ",".join(names[id(parameter)] for parameter in bucket.parameters())
            known[tensor.data_ptr()] = first
        issued = time.perf_counter()
        future = dist.all_reduce(tensor, group=model.process_group, async_op=True).get_future()
        number, size = bucket.index(), tensor.numel() * tensor.element_size()
        future.add_done_callback(
            lambda _: sink.collective(number, "all_reduce", first, size, world, queued, issued, time.perf_counter())
        )
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, exchange)
    return True


class CollectiveListener:
    """Stands between the job and the functions of torch.distributed until it is removed."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.count = 0
        self.originals: dict[str, Callable[..., Any]] = {}
        for name in _CALLS:
            self.originals[name] = getattr(dist, name)
            setattr(dist, name, self._listening(name, self.originals[name]))

    def _listening(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kind, place = _CALLS[name]

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            queued = time.perf_counter()
            work = original(*args, **kwargs)
            tensor = args[place] if len(args) > place else None
            size = tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0
            group = kwargs.get("group")
            ranks = dist.get_world_size(group)
            number, self.count = self.count, self.count + 1

            def ended(*_: Any) -> None:
                self.sink.collective(number, kind, f"{name}.{number}", size, ranks, queued, queued, time.perf_counter())

            if work is None:
                ended()
            else:
                work.get_future().add_done_callback(ended)
            return work

        return call

    def remove(self) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)
