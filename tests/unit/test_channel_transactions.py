"""What is sent and received on a channel of asynchronous servers is noted on both sides."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from in_memory import run_ranks
from memory_job import MemoryWorld

from offbeat.profile.listen import TransactionListener
from offbeat.timeline.clock import HostClock


def test_messages_on_a_channel_are_noted_and_counted_on_both_sides() -> None:
    noted: list[Any] = [SimpleNamespace(undo=ExitStack(), clock=HostClock(), messages=[]) for _ in range(2)]
    listeners = [TransactionListener(each) for each in noted]

    def rank(world: MemoryWorld) -> None:
        listeners[world.rank].listen_to_channel(world.channel)
        for _ in range(2):
            if world.rank == 0:
                world.channel.send(torch.ones(4), 1, 7)
            else:
                world.channel.recv(torch.empty(4), 0, 7)

    run_ranks(2, rank)
    for each in reversed(noted):
        each.undo.close()
    assert [row[:5] for row in noted[0].messages] == [("send", 1, 7, 0, 16), ("send", 1, 7, 1, 16)]
    assert [row[:5] for row in noted[1].messages] == [("recv", 0, 7, 0, 16), ("recv", 0, 7, 1, 16)]
    assert all(row[5] <= row[6] for each in noted for row in each.messages)
