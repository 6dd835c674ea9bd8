"""The World of a job on a torch.distributed process group."""

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from offbeat.runtime.comm.connections import open_sockets
from offbeat.runtime.comm.liveness import DeathWatch, Liveness
from offbeat.runtime.comm.protocol import CommunicationFailed
from offbeat.runtime.comm.torch_channel import TorchChannel
from offbeat.torch_private import backend_of, default_group, default_store, open_group

_generations: dict[str, Iterator[int]] = defaultdict(lambda: count(1))
"""Per process, not per World: a recreated process group may use the same store. By the group's name."""

FIRST_LOOK_SECONDS = 2.0
"""Seconds after which a rank that waits for a key checks whether all others are alive."""
LONGEST_POLL_SECONDS = 0.05
"""Seconds between two checks whether a key has been set."""


class TorchWorld:
    """The ranks of a process group, numbered as the group numbers them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """`device` is the one for tensors of this job's collectives."""
        self.group = group
        self.device = device
        self.job = default_store()
        whole = group is default_group()
        self.name = "" if whole else f"offbeat/{group.group_name}/{'.'.join(map(str, self.global_ranks()))}"
        self.store = self.job if whole else dist.PrefixStore(self.name, self.job)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = backend_of(group, device).name()
        self.staged = device.type == "cuda"
        self.takes_host_memory = "cpu:" in dist.get_backend_config(group)
        self.liveness: Liveness | None = None

    def global_ranks(self) -> list[int]:
        """The numbers of these ranks in the default process group."""
        return dist.get_process_group_ranks(self.group)

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait_for([key])
        with self._errors():
            return self.store.get(key)

    def wait_for(self, keys: Sequence[str], meanwhile: Callable[[], None] = lambda: None) -> None:
        began = time.monotonic()
        patience = self.store.timeout.total_seconds()
        with self._errors():
            look_at = FIRST_LOOK_SECONDS
            # The store's own waiting does not hear Ctrl-C.
            while not self.store.check(list(keys)):
                waited = time.monotonic() - began
                if waited > patience:
                    raise dist.DistStoreError(f"nobody has set {self._missing(keys)} for {patience:.0f} s")
                if waited > look_at:
                    # Seldom, because each look for the dead leaves a connection at every port.
                    look_at *= 2
                    meanwhile()
                    dead = self.liveness is not None and self.liveness.dead()
                    if dead and (missing := self._missing(keys)):
                        raise dist.DistStoreError(f"nobody is left to set {missing}")
                time.sleep(min(LONGEST_POLL_SECONDS, 5e-4 + waited / 10))

    def _missing(self, keys: Sequence[str]) -> str:
        """The first of the keys that nobody has set, if there is one."""
        return next((key for key in keys if not self.store.check([key])), "")

    @contextmanager
    def _errors(self) -> Generator[None, None, None]:
        """Turns the store's errors into CommunicationFailed."""
        try:
            yield
        except dist.DistError as error:
            raise CommunicationFailed(str(error), self.lost_ranks) from error

    def next_generation(self) -> int:
        return next(_generations[self.name])

    def open_channel(
        self, name: str, ranks: tuple[int, ...], in_flight: int, timeout: timedelta, on_host: bool = False
    ) -> TorchChannel:
        backend = "gloo" if on_host and self.staged else self.backend
        store = dist.PrefixStore(name, self.store)
        before = open_sockets()
        group = open_group(backend, store, ranks.index(self.rank), len(ranks), in_flight, timeout)
        return TorchChannel(group, ranks, self.rank, self.lost_ranks, open_sockets() - before)

    def default_channel(self) -> TorchChannel:
        """The process group itself, which stays open."""
        everyone = tuple(range(self.size))
        return TorchChannel(backend_of(self.group, self.device), everyone, self.rank, self.lost_ranks)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, root), group=self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def watch(self, ranks: Iterable[int]) -> None:
        if self.liveness is None:
            self.liveness = Liveness(self)
            if self.backend == "nccl":
                DeathWatch(self.liveness).start()
        self.liveness.find(ranks)

    def lost_ranks(self) -> list[int]:
        """The ranks that caused the failure seen here; none if that cannot be told."""
        return self.liveness.blame() if self.liveness is not None and self.liveness.addresses else []


_worlds: dict[tuple[dist.ProcessGroup, torch.device], TorchWorld] = {}
"""One port serves every distribute() of a group."""


def torch_world(group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> TorchWorld:
    """The World of a process group, by default of the whole job, the same for every plan.

    `device` is the model's: a group may have another backend for GPUs than for CPUs.
    """
    group = group or default_group()
    key = group, _device(group, device)
    if key not in _worlds or _worlds[key].job is not default_store():
        # Of process groups that have been destroyed nothing is kept: they have threads.
        for other in [other for other, world in _worlds.items() if world.job is not default_store()]:
            del _worlds[other]
        _worlds[key] = TorchWorld(*key)
    return _worlds[key]


def _device(group: dist.ProcessGroup, model_device: torch.device | None) -> torch.device:
    """The GPU where NCCL serves it, unless the model is on the CPU and another backend serves that."""
    backends = dist.get_backend_config(group)
    on_cpu = model_device is not None and model_device.type == "cpu" and "cpu:" in backends
    if "cuda:nccl" not in backends or on_cpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
