"""Channels do the same in memory and on gloo, whose ranks are threads of this process here."""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from in_memory import run_ranks, run_to_end
from memory_job import Collective, MemoryJob, MemoryWorld

from offbeat.runtime.comm import Channel, CommunicationFailed
from offbeat.runtime.comm.credit import CreditChannel
from offbeat.runtime.comm.staged import StagedChannel
from offbeat.runtime.comm.torch_channel import TorchChannel
from offbeat.runtime.sync.sparse import RowExchange, Rows
from offbeat.torch_private import open_group

RINGS = [(1, 0), (2, 0, 1), (2, 0, 3, 1)]
TIMEOUT = timedelta(seconds=10)
SHORT = timedelta(seconds=0.2)
ELEMENTS = 12


def on_channels(kind: str, ring: tuple[int, ...], function: Callable[[Channel, int], Any]) -> list[Any]:
    """Runs `function(channel, rank)` on every rank of a ring."""
    store = dist.HashStore()

    def body(world: MemoryWorld) -> Any:
        channel: Channel
        if kind == "gloo":
            group = open_group("gloo", store, ring.index(world.rank), len(ring), 2, TIMEOUT)
            channel = TorchChannel(group, ring, world.rank, list)
        else:
            channel = world.open_channel("test", ring, 2, TIMEOUT)
        if kind == "credit":
            channel = CreditChannel(channel, 4 * ELEMENTS)
        elif kind == "staged":
            channel = StagedChannel(channel, world.device)
        result = function(channel, world.rank)
        world.all_gather_object(None)  # gloo's sockets must not close while others read
        channel.close()
        return result

    return run_ranks(len(ring), body, MemoryJob(len(ring), seed=3 if kind in ("random", "credit", "staged") else None))


def given(rank: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(10 * rank + salt))


def in_ring_order(ring: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    first, *others = ring
    total = given(first, salt)
    for rank in others:
        total = total + given(rank, salt)
    return total


@pytest.fixture(params=["memory", "random", "credit", "staged", "gloo"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class ByHand:
    """A channel whose collectives end when the test says so."""

    ranks, index, size = (0, 1), 0, 2
    send = recv = None

    def __init__(self) -> None:
        self.started: list[int] = []
        self.reports: dict[int, list[Callable[[float], None]]] = {}

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel()
        self.started.append(size)
        self.reports[size] = []
        return SimpleNamespace(report_end=self.reports[size].append, wait=lambda: None)

    def end(self, size: int) -> None:
        for report in self.reports.pop(size):
            report(0.0)


def test_a_message_waits_until_it_fits_into_the_credit_and_nothing_overtakes_it() -> None:
    inner = ByHand()
    channel = CreditChannel(inner, 100)  # type: ignore[arg-type]
    ended: list[int] = []
    for size in (60, 41, 7, 300, 5):
        channel.all_reduce(torch.zeros(size, dtype=torch.uint8)).report_end(lambda _, size=size: ended.append(size))  # type: ignore[misc]
    assert inner.started == [60]  # 41 more would be too many, and 7 may not overtake them
    inner.end(60)
    assert inner.started == [60, 41, 7]
    inner.end(41)
    assert inner.started == [60, 41, 7]
    inner.end(7)
    assert inner.started == [60, 41, 7, 300]  # more than the credit goes alone
    inner.end(300)
    assert inner.started == [60, 41, 7, 300, 5]
    inner.end(5)
    assert ended == [60, 41, 7, 300, 5]


def test_what_a_held_back_message_fails_with_is_told_to_whoever_waits() -> None:
    inner = ByHand()
    channel = CreditChannel(inner, 100)  # type: ignore[arg-type]
    channel.all_reduce(torch.zeros(100))
    held = channel.all_reduce(torch.zeros(50))
    inner.all_reduce = Mock(side_effect=CommunicationFailed("gone", list))  # type: ignore[method-assign]
    assert not held.is_completed()
    inner.end(100)
    with pytest.raises(CommunicationFailed, match="gone"):
        held.wait()
    assert not channel.waiting
    assert not channel.under_way


class Watched:
    """A channel that notes how many bytes are under way at most."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.ranks, self.index, self.size, self.send, self.recv = inner.ranks, inner.index, inner.size, None, None
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        with self.lock:
            self.now += tensor.nbytes
            self.most = max(self.most, self.now)
        work = self.inner.all_reduce(tensor)
        work.report_end(partial(self._ended, tensor.nbytes))
        return work

    def _ended(self, size: int, _: float) -> None:
        with self.lock:
            self.now -= size


@pytest.mark.parametrize("kind", ["random", "gloo"])
def test_no_more_than_the_credit_is_under_way_and_the_sums_stay(kind: str) -> None:
    sizes = [1000, 50_000, 3000, 20_000, 20_000, 70_000, 10, 40_000] * 4

    def body(channel: Channel, rank: int) -> int:
        watched = Watched(channel)
        limited = CreditChannel(watched, 4 * 60_000)  # type: ignore[arg-type]
        tensors = [torch.full((size,), float(rank + 1)) for size in sizes]
        works = [limited.all_reduce(tensor) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        assert all((tensor == 3.0).all() for tensor in tensors)
        return watched.most

    # 70,000 elements are more than the credit and go alone.
    assert max(on_channels(kind, (1, 0), body)) == 4 * 70_000


@pytest.mark.parametrize("ring", RINGS, ids=len)
def test_sums(kind: str, ring: tuple[int, ...]) -> None:
    def body(channel: Channel, rank: int) -> list[torch.Tensor]:
        root, mine = ring[-1], given(rank)
        part = torch.empty(ELEMENTS // channel.size)
        reduced = given(rank)
        works = [channel.all_reduce(mine), channel.reduce(reduced, root), channel.reduce_scatter(part, given(rank))]
        for work in works:
            work.wait()
            assert work.is_completed()
        return [mine, reduced, part]

    total = in_ring_order(ring)
    found = dict(enumerate(on_channels(kind, ring, body)))
    for rank, (summed, _, part) in found.items():
        assert torch.equal(summed, found[ring[0]][0])
        torch.testing.assert_close(summed, total)
        torch.testing.assert_close(part, total.view(len(ring), -1)[ring.index(rank)])
    torch.testing.assert_close(found[ring[-1]][1], total)
    if kind != "gloo":
        assert torch.equal(found[0][0], total)


@pytest.mark.parametrize("ring", RINGS, ids=len)
def test_every_rank_gets_its_part_of_every_ranks_tensor(kind: str, ring: tuple[int, ...]) -> None:
    def body(channel: Channel, rank: int) -> torch.Tensor:
        received = torch.empty(ELEMENTS)
        channel.all_to_all(received, given(rank)).wait()
        return received

    for rank, received in enumerate(on_channels(kind, ring, body)):
        place = ring.index(rank)
        assert torch.equal(received, torch.cat([given(each).view(len(ring), -1)[place] for each in ring]))


@pytest.mark.parametrize("ring", RINGS, ids=len)
def test_copies(kind: str, ring: tuple[int, ...]) -> None:
    def body(channel: Channel, rank: int) -> list[torch.Tensor]:
        root = ring[-1]
        copied, everybodys = given(rank), torch.empty(ELEMENTS * channel.size)
        outputs = [torch.empty(ELEMENTS) for _ in ring] if rank == root else []
        works = [
            channel.broadcast(copied, root),
            channel.all_gather(everybodys, given(rank)),
            channel.gather(outputs, given(rank), root),
        ]
        for work in reversed(works):
            work.wait()
        return [copied, everybodys, torch.cat(outputs) if outputs else everybodys]

    gathered = torch.cat([given(rank) for rank in ring])
    for copied, everybodys, roots in on_channels(kind, ring, body):
        assert torch.equal(copied, given(ring[-1]))
        assert torch.equal(everybodys, gathered)
        assert torch.equal(roots, gathered)


@pytest.mark.parametrize("root", [None, 2])
def test_rows_of_an_odd_width_are_gathered(kind: str, root: int | None) -> None:
    """Their blocks are not made of whole words, and the last rank's rows do not fit into one."""

    def body(channel: Channel, rank: int) -> list[float]:
        exchange = RowExchange(3, torch.float32, torch.device("cpu"), 1)
        rows = Rows(torch.arange(rank + 1), torch.full((rank + 1, 3), float(rank)))
        work, blocks = exchange.start(channel, rows, root)
        work.wait()
        rest = exchange.start_rest(channel, rows, 3, root)
        assert rest is not None
        rest[0].wait()
        if root not in (None, rank):
            assert not len(blocks)
            return []
        received = exchange.join(blocks, rest)
        assert received.numbers.tolist() == [0, 0, 1, 0, 1, 2]
        return received.values.mean(1).tolist()

    for rank, means in enumerate(on_channels(kind, (0, 1, 2), body)):
        assert means == ([0.0, 1.0, 1.0, 2.0, 2.0, 2.0] if root in (None, rank) else [])


def test_messages_between_two_ranks_keep_their_order(kind: str) -> None:
    def body(channel: Channel, rank: int) -> list[float]:
        if rank == 0:
            for number in (1.0, 2.0):
                channel.send(torch.tensor([number]), 1, 5)
            answer = torch.zeros(1)
            channel.recv(answer, 1, 6)
            return [float(answer)]
        first, second = torch.zeros(1), torch.zeros(1)
        channel.recv(first, 0, 5)
        channel.recv(second, 0, 5)
        channel.send(first + second, 0, 6)
        return [float(first), float(second)]

    assert on_channels(kind, (0, 1), body) == [[3.0], [1.0, 2.0]]


def test_ends_are_reported(kind: str) -> None:
    def body(channel: Channel, rank: int) -> bool:
        ended = threading.Event()
        work = channel.all_reduce(given(rank))
        work.report_end(lambda _: ended.set())
        work.wait()
        return ended.wait(5)

    assert all(on_channels(kind, (0, 1), body))


def test_a_collective_starts_without_the_others() -> None:
    started = threading.Event()

    def body(channel: Channel, rank: int) -> bool:
        if rank:
            assert started.wait(5)
            channel.all_reduce(given(rank)).wait()
            return False
        work = channel.all_reduce(given(rank))
        early = work.is_completed()
        started.set()
        work.wait()
        return early or not work.is_completed()

    assert on_channels("memory", (0, 1), body) == [False, False]


def test_a_seed_varies_the_order_in_which_collectives_complete() -> None:
    def ends(seed: int | None) -> list[int]:
        order: list[int] = []
        job = MemoryJob(2, seed=seed, before=lambda collective: order.append(collective.number))

        def body(world: MemoryWorld) -> None:
            channel = world.open_channel("test", (0, 1), 2, TIMEOUT)
            works = [channel.all_reduce(given(world.rank)) for _ in range(6)]
            for work in works:
                work.wait()

        run_ranks(2, body, job)
        return order

    assert ends(None) == list(range(6))
    assert any(ends(seed) != list(range(6)) for seed in range(5))


def failures(job: MemoryJob, body: Callable[[MemoryWorld], Any]) -> list[BaseException]:
    outcomes, _ = run_to_end(job, body)
    assert all(isinstance(outcome, BaseException) for outcome in outcomes)
    return outcomes


def reduce_once(world: MemoryWorld, timeout: timedelta = TIMEOUT) -> None:
    everyone = tuple(range(world.size))
    world.open_channel("test", everyone, 1, timeout).all_reduce(given(world.rank)).wait()


def test_ranks_that_put_in_different_collectives_all_hear_of_it() -> None:
    def body(world: MemoryWorld) -> None:
        channel = world.open_channel("test", (0, 1), 1, TIMEOUT)
        channel.all_reduce(torch.zeros(3 + world.rank)).wait()

    for error in failures(MemoryJob(2), body):
        assert isinstance(error, CommunicationFailed)
        assert "rank 1 put Signature(kind='all_reduce', root=None, elements=4" in str(error)


def test_a_rank_that_stops_is_named_by_all_others() -> None:
    def body(world: MemoryWorld) -> None:
        if world.rank == 2:
            raise KeyError("stopped")
        reduce_once(world)

    outcomes = failures(MemoryJob(4), body)
    assert isinstance(outcomes.pop(2), KeyError)
    for error in outcomes:
        assert isinstance(error, CommunicationFailed)
        assert "has left test" in str(error)
        assert error.lost_ranks() == [2]


def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    over = threading.Event()

    def body(world: MemoryWorld) -> None:
        if world.rank == 1:
            assert over.wait(5)
            return
        try:
            reduce_once(world, SHORT)
        finally:
            over.set()

    outcomes, _ = run_to_end(MemoryJob(2), body)
    assert isinstance(outcomes[0], CommunicationFailed)
    assert outcomes[0].lost_ranks() == [1]


def test_an_error_in_a_collective_reaches_every_rank() -> None:
    def breaks(collective: Collective) -> None:
        raise OSError(f"no route to host in {collective.kind}")

    for error in failures(MemoryJob(3, before=breaks), reduce_once):
        assert isinstance(error, CommunicationFailed)
        assert str(error) == "no route to host in all_reduce"
        assert error.lost_ranks() == []


def test_a_world_shares_values_objects_and_tensors() -> None:
    def body(world: MemoryWorld) -> Any:
        if world.rank == 1:
            world.set("key", b"value")
        tensor = given(world.rank)
        world.broadcast(tensor, 2)
        return world.get("key"), world.all_gather_object({"rank": world.rank}), torch.equal(tensor, given(2))

    assert run_ranks(3, body) == [(b"value", [{"rank": rank} for rank in range(3)], True)] * 3
