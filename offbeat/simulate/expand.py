"""Plan + Costs → the tasks of some steps with every collective expanded into the messages that it consists of.

The global dataflow graph of dPRO section 4.1 in full: each rank computes on its own device and sends on its own link,
and a collective is the SENDs and RECVs of `offbeat.simulate.collectives`. A rank starts its part when its own gradients
are complete, it has started everything before it in the issue order, and no more than the schedule's `in_flight` are
under way; the others' lateness reaches it through the messages it waits for.

Links are as fast as the cluster says, hop by hop. Where a collective was measured, its links are as fast as it takes
for the collective alone to last as long as it did.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs
from offbeat.plan import Plan, Task
from offbeat.simulate.collectives import (
    PIECES,
    Columns,
    GraphBuilder,
    Links,
    Tasks,
    chain_broadcast,
    chain_reduce,
    pull,
    push,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from offbeat.simulate.kernel import Replay
from offbeat.simulate.roles import Roles
from offbeat.simulate.step import Moments, StepBuilder, Steps
from offbeat.simulate.taskgraph import TaskGraph

CHAIN_CHUNKS = 16
"""Into which a reduction or a broadcast along a chain is cut, so that its hops overlap."""
_MESSAGES = 2**40
"""Ids of expanded tasks begin here until both kinds are joined."""


@dataclass(frozen=True)
class Expanded:
    """The tasks of the steps, followed by the messages of their collectives."""

    steps: Steps
    messages: Columns
    released: NDArray[np.int64]
    """For each task of `steps` that stands for a rank's part in a collective, the one at whose end it began; or -1."""

    @property
    def device(self) -> NDArray[np.int64]:
        return np.concatenate([np.array(self.steps.tasks.device, np.int64), self.messages.device])

    def graph(self, seconds: NDArray[np.float64] | None = None) -> TaskGraph:
        """With other durations where `seconds` are given."""
        tasks, messages = self.steps.tasks, self.messages
        count = len(tasks.seconds)
        edges = np.concatenate([np.array(tasks.edges, np.int64).reshape(-1, 2), messages.edges])
        edges = np.where(edges >= _MESSAGES, edges - _MESSAGES + count, edges)
        return TaskGraph.from_arrays(
            np.concatenate([np.array(tasks.seconds), messages.duration]) if seconds is None else seconds,
            self.device,
            edges,
            priority=np.concatenate([np.array(tasks.priority, np.float64), messages.priority]),
            lag_seconds=np.concatenate([np.array(tasks.lag), messages.lag]),
            label=np.concatenate([np.arange(-count, 0), messages.label]),
        )

    def summary(self, result: Replay) -> Moments:
        """As the tasks of `steps` see it: a rank's part in a collective lasts from its release to its end."""
        count = len(self.steps.tasks.seconds)
        start, end = result.start[:count].copy(), result.end[:count]
        parts = np.flatnonzero(self.released >= 0)
        start[parts] = end[self.released[parts]]
        path = result.critical_path()
        return Moments(start, end, path[path < count])


def expand_steps(plan: Plan, costs: Costs, roles: Roles, steps: int) -> Expanded:
    """`roles` must not be folded: each is one rank."""
    builder = _ExpandingBuilder(plan, costs, roles)
    built = builder.build(steps)
    released = np.full(len(built.tasks.seconds), -1, np.int64)
    released[list(builder.released)] = list(builder.released.values())
    return Expanded(built, builder.messages.columns(), released)


class _ExpandingBuilder(StepBuilder):
    def __init__(self, plan: Plan, costs: Costs, roles: Roles) -> None:
        super().__init__(plan, costs, roles)
        self.messages = GraphBuilder(count=_MESSAGES)
        self.role_of = {rank: role for role, (rank,) in enumerate(roles.ranks)}
        self.flying: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Per channel and role, the ends of its parts in collectives, in the issue order."""
        self.released: dict[int, int] = {}
        self.links: dict[tuple[str, tuple[int, ...], int | None], Links] = {}

    def _send(self, step: int, position: int, after: dict[int, list[int]], channel: str) -> None:
        exchange = self.roles.exchanges[position]
        task = exchange.task
        roles = [self.role_of[rank] for rank in task.ranks]
        ready = {role: self.tasks.add(role, step, None, "ready", after=after[role]) for role in roles}
        gates = [self._release(step, role, ready[role], channel) for role in roles]
        self.issued += 1
        done = self._expand(task, np.array(gates, np.int64), float(self.issued))
        for role, gate, ends in zip(roles, gates, done.tolist(), strict=True):
            part = self.tasks.add(
                role,
                step,
                "communication",
                task.name,
                after=[ends],
                bytes=task.wire_bytes,
                exchange=position,
                gate=ready[role],
            )
            self.released[part] = gate
            self.flying[channel, role].append(part)
            self.arrivals.setdefault((step, role, task.message), []).append(part)

    def _release(self, step: int, role: int, ready: int, channel: str) -> int:
        """The task at whose end a rank starts its part."""
        in_flight = self.plan.strategy.schedule.in_flight
        flying = self.flying[channel, role]
        before = flying[-in_flight] if len(flying) >= in_flight else -1
        queue = f"{channel}.{role}"
        gate = self.tasks.add(role, step, None, "issue", after=[ready, self.gates.get(queue, -1), before])
        self.gates[queue] = gate
        return gate

    def _expand(self, task: Task, ready: Tasks, priority: float) -> Tasks:
        """Per participant, in the order of `task.ranks`, the task at whose end its part is done."""
        if len(task.ranks) < 2:
            return ready
        links, size = self._links_of(task), float(task.wire_bytes)
        root = task.ranks.index(task.root) if task.root is not None else 0
        match task.kind:
            case "all_reduce":
                return ring_all_reduce(self.messages, links, size, ready, priority)
            case "reduce_scatter":
                return ring_reduce_scatter(self.messages, links, size, ready, priority)
            case "all_gather":
                return ring_all_gather(self.messages, links, size, ready, priority)
            case "broadcast" if self.costs.straight:
                return pull(self.messages, links, size, root, ready, priority)
            case "broadcast":
                return chain_broadcast(self.messages, links, size, root, ready, CHAIN_CHUNKS, priority)
            case "reduce" if not self.costs.straight:
                return chain_reduce(self.messages, links, size, root, ready, CHAIN_CHUNKS, priority)
            case _:
                return push(self.messages, links, size, root, ready, priority)

    def _links_of(self, task: Task) -> Links:
        key = (task.kind, task.ranks, task.root)
        if key not in self.links:
            roles = np.array([self.role_of[rank] for rank in task.ranks])
            straight = self.costs.goes_straight(task)
            rooted = straight or task.kind == "gather"
            fit = self.costs.collectives.get((task.kind, len(task.ranks)))
            if fit is not None:
                # What goes straight fills the root's link with everybody's bytes.
                bytes_factor, steps = (len(task.ranks) - 1, 1) if straight else lone_cost(task.kind, len(task.ranks))
                per_byte: object = fit.seconds_per_byte / bytes_factor
                latency: object = (fit.overhead_seconds + fit.latency_seconds) / steps
            else:
                cluster, ring = self.plan.cluster, task.ranks
                goals = [task.root] * len(ring) if rooted else [*ring[1:], ring[0]]
                hops = [(a, b) for a, b in zip(ring, goals, strict=True)]
                # A root has no way to itself; its interface is what it receives and sends with.
                own = cluster.node_bandwidth(cluster.node_of(ring[0] if task.root is None else task.root))
                per_byte = [1.0 / (own if a == b else cluster.bandwidth(a, b)) for a, b in hops]  # type: ignore[arg-type]
                latency = [cluster.latency(a, b) for a, b in hops]  # type: ignore[arg-type] # roots are ranks
            # Odd numbers, as all links have, behind those of the outgoing ones.
            incoming = 2 * (len(self.roles.ranks) + roles) + 1 if rooted else None
            self.links[key] = Links.make(2 * roles + 1, per_byte, latency, incoming)  # type: ignore[arg-type]
        return self.links[key]


def lone_cost(kind: str, participants: int) -> tuple[float, int]:
    """(bytes on the longest way for each byte put in, latencies on it) of an expanded collective alone."""
    others = participants - 1
    match kind:
        case "all_reduce":
            return 2 * others / participants, 2 * others
        case "reduce_scatter":
            return others / participants, others
        case "all_gather":
            return float(others), others
        case "broadcast" | "reduce":
            return (participants + CHAIN_CHUNKS - 2) / CHAIN_CHUNKS, others
        case _:
            return others + 1 / PIECES, 1
