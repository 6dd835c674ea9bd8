"""The channels that one rank needs for its part of a plan.

Gradients and returning parameters use separate channels, so that neither can delay the other. A channel starts
its collectives in the order in which they are put in; every rank puts them in in the plan's order.
"""

import io
import time
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch

from offbeat.plan import Plan
from offbeat.runtime.comm.credit import CreditChannel
from offbeat.runtime.comm.protocol import Channel, World
from offbeat.runtime.comm.relay import Relay
from offbeat.runtime.comm.staged import StagedChannel, StagedRelay

Key = tuple[str, tuple[int, ...], int, int | None]
"""The purpose of a channel, its ranks, and its limits on collectives and bytes in flight."""
PATIENCE = timedelta(days=7)
"""How long a server waits for the next command: an evaluation may take hours. A lost replica is noticed at once."""
_TAG = 7


class Commands:
    """One end of the connection from the first replica to the ranks without a replica.

    A command says what part of a step is next, and its inputs. Every replica does the same in the same order, so that
    one of them can speak for all.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.lead, *self.servers = channel.ranks

    @property
    def leads(self) -> bool:
        """Whether this rank gives the commands."""
        return self.channel.index == 0

    def tell(self, command: str, **facts: Any) -> None:
        """Sends every server a command; does nothing on other replicas."""
        for server in self.servers:
            self.send(server, (command, facts))

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next command; waits for it."""
        command: tuple[str, dict[str, Any]] = self.receive(self.lead)
        return command

    def send(self, to: int, value: Any) -> None:
        """Sends a value to one rank: tensors, numbers and texts, in lists, tuples and dicts."""
        packed = io.BytesIO()
        torch.save(value, packed)
        content = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        self.channel.send(torch.tensor([len(content)]), to, _TAG)
        self.channel.send(content, to, _TAG)

    def receive(self, source: int) -> Any:
        """Waits for a value from one rank."""
        length = torch.zeros(1, dtype=torch.int64)
        self.channel.recv(length, source, _TAG)
        content = torch.empty(int(length), dtype=torch.uint8)
        self.channel.recv(content, source, _TAG)
        return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


class Channels:
    """The channels one rank needs for its part of a plan."""

    def __init__(self, plan: Plan, world: World, timeout: timedelta, opened: dict[Key, Channel]) -> None:
        """`opened` are those of earlier plans, which are used again, and gets those of this one. A process group that
        is closed leaves some of its memory behind, and opening one takes longer than a small step."""
        assert plan.rank is not None
        self.world = world
        self.opened = opened
        self.limits = plan.strategy.schedule.in_flight, plan.strategy.schedule.credit_bytes
        everyone = tuple(plan.replicas)
        self.generation = world.next_generation()
        """Tells keys and channels of this plan from those of others."""
        wanted, on_host = _wanted(plan), partial(_on_host, frozenset(plan.apart))
        # All ranks open theirs in one global order, so that no two wait for each other.
        for key in sorted(wanted - opened.keys()):
            way, ranks, in_flight, credit = key
            name = f"offbeat/{self.generation}/{way}/{'.'.join(map(str, ranks))}"
            patience = PATIENCE if way == "command" else timeout
            channel = world.open_channel(name, ranks, in_flight, patience, on_host(key))
            opened[key] = channel if credit is None else cast(Channel, CreditChannel(channel, credit))
        told = opened.get(("command", (everyone[0], *plan.apart), self.limits[0], None))
        self.commands = None if told is None else Commands(told)
        """The first replica's commands to ranks without a replica; None on other replicas."""
        control = opened["control", everyone, self.limits[0], None] if plan.rank in everyone else told
        assert control is not None
        self.control = control
        in_flight, adds = self.limits[0], plan.rank in everyone
        self.relays: dict[tuple[int, ...], Relay | StagedRelay] = {}
        """For gradients that one rank sums for all, by their participants, the summing one last."""
        summed = {task.ranks for task in plan.communication if task.kind == "relay" and len(task.ranks) > 1}
        for ranks in sorted(summed):
            sums, totals = (opened[way, ranks, in_flight, None] for way in ("sum", "total"))
            relay = Relay(sums, totals, adds, 2 * in_flight)
            self.relays[ranks] = StagedRelay(relay, world.device) if world.staged else relay
        self.staged = {
            key: StagedChannel(opened[key], world.device)
            for key in sorted(wanted)
            if world.staged and key[0] in ("up", "back", "direct") and on_host(key)
        }
        """Those of tensors that have to pass through host memory."""
        direct = ("direct", plan.participants, in_flight, None)
        self.direct = self._to_tensors(direct) if direct in wanted else None

    def up(self, ranks: tuple[int, ...]) -> Channel:
        """For gradients on the way to the rank that applies them."""
        return self._to_tensors(("up", ranks, *self.limits))

    def back(self, ranks: tuple[int, ...]) -> Channel:
        """For parameters on the way back."""
        return self._to_tensors(("back", ranks, *self.limits))

    def _to_tensors(self, key: Key) -> Channel:
        return self.staged.get(key) or self.opened[key]

    def leave(self) -> None:
        """Ends the use by this plan. Channels stay open for others, except the servers': their threads end."""
        for each in (*self.relays.values(), *self.staged.values()):
            each.close()
        for key in [key for key in self.opened if key[0] == "direct"]:
            self.opened.pop(key).close()

    def close(self, deadline: float | None = None) -> None:
        """Leaves every channel; see `Channel.close`."""
        staging = (*self.relays.values(), *self.staged.values())
        for each in staging:
            each.close(deadline)
        while self.opened:
            self.opened.popitem()[1].close(deadline)
        for each in staging:
            # Collectives still in flight have been aborted.
            each.close(time.monotonic() + 1.0)


def _wanted(plan: Plan) -> set[Key]:
    everyone, schedule = tuple(plan.replicas), plan.strategy.schedule
    apart, wanted = plan.apart, set[Key]()
    if plan.rank in everyone:
        wanted.add(("control", everyone, schedule.in_flight, None))
    if apart and plan.rank in (everyone[0], *apart):
        wanted.add(("command", (everyone[0], *apart), schedule.in_flight, None))
    for task in plan.communication:
        if task.kind == "relay" and len(task.ranks) > 1:
            wanted |= {(way, task.ranks, schedule.in_flight, None) for way in ("sum", "total")}
        elif len(task.ranks) > 1:
            returns = task.delivers and not plan.messages[task.message].replicated
            wanted.add(("back" if returns else "up", task.ranks, schedule.in_flight, schedule.credit_bytes))
    asynchronous = any(message.asynchronous for message in plan.messages)
    if asynchronous and len(plan.participants) > 1 and plan.rank in plan.participants:
        wanted.add(("direct", plan.participants, schedule.in_flight, None))
    return wanted


def _on_host(apart: frozenset[int], key: Key) -> bool:
    """Whether a channel takes tensors in host memory: those of servers, and those used by threads of its own."""
    way, ranks, *_ = key
    return way in ("sum", "total", "direct") or not apart.isdisjoint(ranks)
