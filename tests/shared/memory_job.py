"""Channels in memory: the ranks of a job are threads of one process.

The n-th collective that each member puts into a channel is one and the same; a difference in kind, root or size fails
it on every rank. It is carried out when the last member has joined, or, with a seed, at a random later moment, at the
latest when a member waits for it or soon where somebody wants to hear of its end, so that completion orders vary. Sums
are added up in ring order: every rank gets the same bits, and a plain loop over the ranks' tensors reproduces them.
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import torch

from offbeat.runtime.comm.protocol import CommunicationFailed


@dataclass(frozen=True)
class Signature:
    """What all members of a collective must agree on."""

    kind: str
    root: int | None
    elements: int
    dtype: torch.dtype


@dataclass(eq=False)
class Collective:
    """A collective that some members of a channel have joined."""

    channel: str
    number: int
    """Its place among the collectives of its channel, from 0."""
    ranks: tuple[int, ...]
    joined: dict[int, tuple[Signature, torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    """By the member's place in the ring: what it expects, its tensor, and the tensors that receive the result."""
    done: bool = False
    error: str = ""
    blamed: list[int] | None = None
    """The ranks that caused the error, where the collective itself shows it."""
    reports: list[Callable[[float], None]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return next(iter(self.joined.values()))[0].kind

    @property
    def full(self) -> bool:
        return len(self.joined) == len(self.ranks)

    @property
    def missing(self) -> list[int]:
        return [rank for index, rank in enumerate(self.ranks) if index not in self.joined]

    @torch.no_grad()
    def carry_out(self) -> None:
        """Writes every member's result; `error` says it if they disagree."""
        first = self.joined[0][0]
        for index, rank in enumerate(self.ranks):
            mine = self.joined[index][0]
            if mine != first:
                self.error = f"rank {rank} put {mine} into {self.channel} where rank {self.ranks[0]} put {first}"
                return
        # Most tensors both give and receive: nothing is written before all is read.
        given = [self.joined[index][1].clone() for index in range(len(self.ranks))]
        total = _sum(given) if "reduce" in first.kind else None
        for index, rank in enumerate(self.ranks):
            outputs = self.joined[index][2]
            if outputs:
                for output, value in zip(outputs, self._received(first, given, total, rank), strict=True):
                    output.copy_(value.view_as(output))

    def _received(
        self, what: Signature, given: list[torch.Tensor], total: torch.Tensor | None, rank: int
    ) -> list[torch.Tensor]:
        """What one member receives."""
        if what.kind == "all_to_all":
            return [torch.cat([tensor.view(len(given), -1)[self.ranks.index(rank)] for tensor in given])]
        if total is None:
            return given if what.root is None or what.kind == "gather" else [given[self.ranks.index(what.root)]]
        if what.kind == "reduce_scatter":
            return [total.view(len(given), -1)[self.ranks.index(rank)]]
        if what.kind == "reduce" and rank != what.root:
            # Nobody may rely on it; real backends leave partial sums there.
            return [torch.full_like(total, torch.nan if total.is_floating_point() else -1)]
        return [total]


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


class MemoryJob:
    """What the ranks of one job share. `world(rank)` is a rank's own view of it.

    `seed` makes collectives complete at random moments; without it they do as soon as all have joined. `before` is
    called with each collective that is about to be carried out: an error that it raises fails the collective.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int | None = None,
        before: Callable[[Collective], None] | None = None,
        timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        self.size = size
        self.draw = None if seed is None else Random(seed)
        self.before = before
        self.timeout = timeout
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.collectives: dict[tuple[str, int], Collective] = {}
        self.held_back: list[Collective] = []
        """Complete, but not carried out yet."""
        self.letters: dict[tuple[str, int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        """Sent and not yet received, by channel, sender, receiver and tag."""
        self.closed: dict[str, list[int]] = defaultdict(list)
        """The ranks that have left each channel."""
        self.stopped: list[int] = []
        self.affected: set[int] = set()
        """Ranks that have met a fault: if they stop, it is not theirs."""

    def world(self, rank: int) -> "MemoryWorld":
        return MemoryWorld(self, rank)

    def stop(self, rank: int) -> None:
        """The rank takes part in nothing from now on; what it has not joined fails."""
        with self.changed:
            self.stopped.append(rank)
            self.changed.notify_all()

    def lost_ranks(self) -> list[int]:
        return sorted(rank for rank in self.stopped if rank not in self.affected)

    def join(
        self, channel: "MemoryChannel", signature: Signature, tensor: torch.Tensor, outputs: list[torch.Tensor]
    ) -> Collective:
        """Puts this member's next collective into a channel."""
        with self.changed:
            key = (channel.name, channel.started)
            channel.started += 1
            collective = self.collectives.setdefault(key, Collective(*key, channel.ranks))
            collective.joined[channel.index] = (signature, tensor, outputs)
            if collective.full:
                del self.collectives[key]
                if not collective.done:
                    self.held_back.append(collective)
                    self._carry_out_some()
                    if collective.reports:
                        self.carry_out_soon(collective)
                    self.changed.notify_all()
            return collective

    def carry_out_soon(self, collective: Collective) -> None:
        """Like a real backend, which tells of an end that nobody waits for."""
        timer = threading.Timer(1e-3, self._carry_out, [collective])
        timer.daemon = True
        timer.start()

    def _carry_out_some(self) -> None:
        chosen = list(self.held_back)
        if self.draw is not None:
            chosen = self.draw.sample(chosen, self.draw.randint(0, len(chosen)))
        for collective in chosen:
            self._carry_out(collective)

    def _carry_out(self, collective: Collective) -> None:
        with self.changed:
            # Another one's end may have led to this one's.
            if collective not in self.held_back:
                return
            self.held_back.remove(collective)
            try:
                if self.before is not None:
                    self.before(collective)
                collective.carry_out()
            except Exception as error:
                collective.error = str(error)
            self._end(collective)

    def _end(self, collective: Collective) -> None:
        collective.done = True
        for report in collective.reports:
            report(time.perf_counter())
        self.changed.notify_all()

    def wait(self, collective: Collective, rank: int, timeout: timedelta) -> None:
        with self.changed:
            self.changed.wait_for(
                lambda: collective.done or collective.full or self._gone(collective), timeout.total_seconds()
            )
            if not collective.done:
                if collective.full:
                    self._carry_out(collective)
                else:
                    self._give_up(collective, timeout)
            if collective.error:
                self._affect(rank)
                blamed = collective.blamed
                raise CommunicationFailed(collective.error, self.lost_ranks if blamed is None else lambda: blamed)

    def _give_up(self, collective: Collective, timeout: timedelta) -> None:
        gone = self._gone(collective)
        if gone:
            collective.error = f"rank {gone[0]} has left {collective.channel}"
        else:
            collective.blamed = collective.missing
            collective.error = f"timed out after {timeout.total_seconds():g} s in {collective.channel}"
        self._end(collective)

    def _affect(self, rank: int) -> None:
        if rank not in self.stopped:
            self.affected.add(rank)

    def _gone(self, collective: Collective) -> list[int]:
        left = (*self.stopped, *self.closed[collective.channel])
        return [rank for rank in collective.missing if rank in left]

    def poll(self, collective: Collective) -> bool:
        """Whether it has ended; with a seed, one that could may or may not do so now."""
        with self.changed:
            if self.draw is not None and collective in self.held_back and self.draw.random() < 0.5:
                self._carry_out(collective)
            return collective.done

    def wait_until(
        self, ready: Callable[[], bool], rank: int, other: int | None, what: str, timeout: timedelta
    ) -> None:
        """Waits for something that `other` must do, or any rank if None."""

        def hopeless() -> bool:
            # A rank that has stopped may have left threads behind.
            return bool(self.stopped) if other is None else other in self.stopped or rank in self.stopped

        with self.changed:
            self.changed.wait_for(lambda: ready() or hopeless(), timeout.total_seconds())
            if not ready() or rank in self.stopped:
                self._affect(rank)
                raise CommunicationFailed(f"waited in vain for {what}", self.lost_ranks)


class MemoryChannel:
    """One rank's end of a channel."""

    def __init__(self, job: MemoryJob, name: str, ranks: tuple[int, ...], me: int, timeout: timedelta) -> None:
        self.job = job
        self.name = name
        self.ranks = ranks
        self.index = ranks.index(me)
        self.size = len(ranks)
        self.me = me
        self.timeout = timeout
        self.started = 0

    def all_reduce(self, tensor: torch.Tensor) -> "MemoryWork":
        return self._start("all_reduce", tensor, [tensor])

    def reduce(self, tensor: torch.Tensor, root: int) -> "MemoryWork":
        return self._start("reduce", tensor, [tensor], root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> "MemoryWork":
        return self._start("broadcast", tensor, [] if self.me == root else [tensor], root)

    deliver = broadcast

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> "MemoryWork":
        return self._start("all_gather", tensor, list(output.view(self.size, -1)))

    def gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> "MemoryWork":
        return self._start("gather", tensor, outputs, root)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> "MemoryWork":
        return self._start("reduce_scatter", tensor, [output])

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> "MemoryWork":
        return self._start("all_to_all", tensor, [output])

    def _start(
        self, kind: str, tensor: torch.Tensor, outputs: list[torch.Tensor], root: int | None = None
    ) -> "MemoryWork":
        signature = Signature(kind, root, tensor.numel(), tensor.dtype)
        return MemoryWork(self, self.job.join(self, signature, tensor, outputs))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        with self.job.changed:
            letters = self.job.letters[self.name, self.me, to, tag]
            letters.append(tensor)
            self.job.changed.notify_all()
            what = f"rank {to} to receive a message in {self.name}"
            self.job.wait_until(lambda: not any(tensor is each for each in letters), self.me, to, what, self.timeout)

    @torch.no_grad()
    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        with self.job.changed:
            letters = self.job.letters[self.name, source, self.me, tag]
            what = f"a message from rank {source} in {self.name}"
            self.job.wait_until(lambda: bool(letters), self.me, source, what, self.timeout)
            tensor.copy_(letters.popleft())
            self.job.changed.notify_all()

    def close(self, deadline: float | None = None) -> None:
        with self.job.changed:
            self.job.closed[self.name].append(self.me)
            self.job.changed.notify_all()


class MemoryWork:
    """One rank's view of a collective."""

    def __init__(self, channel: MemoryChannel, collective: Collective) -> None:
        self.channel = channel
        self.collective = collective

    def wait(self) -> None:
        self.channel.job.wait(self.collective, self.channel.me, self.channel.timeout)

    def is_completed(self) -> bool:
        return self.channel.job.poll(self.collective)

    def report_end(self, report: Callable[[float], None]) -> None:
        with self.channel.job.changed:
            if not self.collective.done:
                self.collective.reports.append(report)
                if self.collective in self.channel.job.held_back:
                    self.channel.job.carry_out_soon(self.collective)
                return
        report(time.perf_counter())


class MemoryWorld:
    """The job as one of its ranks sees it."""

    def __init__(self, job: MemoryJob, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.size = job.size
        self.generation = 0
        everyone = tuple(range(job.size))
        self.channel = MemoryChannel(job, "world", everyone, rank, job.timeout)
        self.lost_ranks = job.lost_ranks
        self.device = torch.device("cpu")
        self.staged = False
        self.backend = ""

    def set(self, key: str, value: bytes) -> None:
        with self.job.changed:
            self.job.values[key] = value
            self.job.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.job.wait_until(lambda: key in self.job.values, self.rank, None, f"key {key!r}", self.job.timeout)
        return self.job.values[key]

    def wait_for(self, keys: Sequence[str], meanwhile: Callable[[], None]) -> None:
        def all_set() -> bool:
            meanwhile()
            return all(key in self.job.values for key in keys)

        self.job.wait_until(all_set, self.rank, None, f"keys {list(keys)}", self.job.timeout)

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def open_channel(
        self, name: str, ranks: tuple[int, ...], in_flight: int, timeout: timedelta, on_host: bool = False
    ) -> MemoryChannel:
        return MemoryChannel(self.job, name, ranks, self.rank, timeout)

    def default_channel(self) -> MemoryChannel:
        return self.channel

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.channel.broadcast(tensor, root).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        key = f"objects/{self.next_generation()}"
        self.set(f"{key}/{self.rank}", json.dumps(value).encode())
        return [json.loads(self.get(f"{key}/{rank}")) for rank in range(self.size)]

    def watch(self, ranks: Iterable[int]) -> None:
        """A thread that stops is known at once."""
