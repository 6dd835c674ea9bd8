"""The tasks of some steps, with every collective expanded into its messages.

The global dataflow graph of dPRO section 4.1 in full: each rank computes on its own device and sends on its own link,
and a collective is the SENDs and RECVs of `offbeat.simulate.collectives`. A rank starts its part when its own gradients
are complete, it has started everything before it in the issue order, and no more than the schedule's `in_flight` and
`credit_bytes` are in flight; the others' lateness reaches it through the messages it waits for.

Links are as fast as the cluster says, hop by hop. Where a collective was measured, its links are as fast as it takes
for the collective alone to last as long as it did.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.cost.measured import Costs
from offbeat.cost.tables import latency_steps
from offbeat.plan import Plan, Task
from offbeat.plan.model import sent_per_byte
from offbeat.simulate.collectives import PIECES, GraphBuilder, Links, add_collective
from offbeat.simulate.kernel import Replay
from offbeat.simulate.roles import Roles
from offbeat.simulate.step import Steps
from offbeat.simulate.taskgraph import TaskGraph

CHAIN_CHUNKS = 16
"""Chunks of a reduction or broadcast along a chain, so that its hops overlap."""
_MESSAGES = 2**40
"""Ids of expanded tasks begin here until both kinds are joined."""


class ExpandedSteps(Steps):
    """Steps whose graph has, behind their tasks, the messages of their collectives. Each role must be one rank."""

    def __init__(self, plan: Plan, costs: Costs, roles: Roles, steps: int) -> None:
        self.messages = GraphBuilder(count=_MESSAGES)
        self.role_of = {rank: role for role, (rank,) in enumerate(roles.ranks)}
        self.released: dict[int, int] = {}
        """For each task that represents a rank's part in a collective, the task at whose end it began."""
        self.links: dict[tuple[str, tuple[int, ...], int | None], Links] = {}
        super().__init__(plan, costs, roles, steps)

    @property
    def device(self) -> NDArray[np.int64]:
        return np.concatenate([self.column("device", np.int64), self.messages.columns()[1]])

    def graph(self, seconds: NDArray[np.float64] | None = None) -> TaskGraph:
        duration, _, lag, priority, label = self.messages.columns()
        count = len(self.tasks)
        edges = np.concatenate([np.array(self.edges, np.int64).reshape(-1, 2), self.messages.edges()])
        return TaskGraph.from_arrays(
            np.concatenate([self.column("seconds"), duration]) if seconds is None else seconds,
            self.device,
            np.where(edges >= _MESSAGES, edges - _MESSAGES + count, edges),
            priority=np.concatenate([self.column("priority", np.float64), priority]),
            lag_seconds=np.concatenate([self.column("lag"), lag]),
            label=np.concatenate([np.arange(-count, 0), label]),
        )

    def started(self, result: Replay) -> NDArray[np.float64]:
        """A rank's part in a collective lasts from its release to its end."""
        start = result.start[: len(self.tasks)].copy()
        start[list(self.released)] = result.end[list(self.released.values())]
        return start

    def _send(self, step: int, position: int, after: dict[int, int]) -> None:
        task = self.roles.exchanges[position].task
        roles = [self.role_of[rank] for rank in task.ranks]
        ready = {role: self._join(role, step, "ready", [after[role]]) for role in roles}
        gates = [self._release(step, role, ready[role], task) for role in roles]
        self.issued += 1
        straight = {"broadcast": "pull", "reduce": "push"} if self.costs.straight else {}
        kind = straight.get(task.kind, "push" if task.kind == "gather" else task.kind)
        root = task.ranks.index(task.root) if task.root is not None else 0
        ends = gates
        for half in (("push", "pull") if kind == "relay" else (kind,)) if len(roles) > 1 else ():
            what = half, self._links_of(task), float(task.wire_bytes), ends, root, CHAIN_CHUNKS, float(self.issued)
            ends = add_collective(self.messages, *what).tolist()
        for role, gate, end in zip(roles, gates, ends, strict=True):
            part = self._add(self._part(step, position).of(role, ready[role]), [end])
            self.released[part] = gate
            self.flights[task.lane, role].append((part, task.wire_bytes))
            self.arrivals[step, role, task.message].append(part)

    def _release(self, step: int, role: int, ready: int, task: Task) -> int:
        """The task at whose end a rank starts its part."""
        before, queue = self._ahead(self.flights[task.lane, role], task.wire_bytes), f"{task.lane}.{role}"
        self.gates[queue] = self._join(role, step, "issue", [ready, self.gates.get(queue, -1), before])
        return self.gates[queue]

    def _links_of(self, task: Task) -> Links:
        key = (task.kind, task.ranks, task.root)
        if key not in self.links:
            roles = np.array([self.role_of[rank] for rank in task.ranks])
            straight = self.costs.goes_straight(task)
            rooted = straight or task.kind == "gather"
            fit = self.costs.fit(task, self.plan.cluster)
            if fit is not None:
                # What goes straight fills the root's link with everybody's bytes.
                bytes_factor, steps = (len(task.ranks) - 1, 1) if straight else lone_cost(task.kind, len(task.ranks))
                per_byte: ArrayLike = fit.seconds_per_byte / bytes_factor
                latency: ArrayLike = (fit.overhead_seconds + fit.latency_seconds) / steps
            else:
                cluster, ring = self.plan.cluster, task.ranks
                goals = [task.root] * len(ring) if rooted else [*ring[1:], ring[0]]
                hops = list(zip(ring, goals, strict=True))
                # A root has no way to itself; its interface is what it receives and sends with.
                own = cluster.node_bandwidth(cluster.node_of(ring[0] if task.root is None else task.root))
                per_byte = [1.0 / (own if a == b else cluster.bandwidth(a, b)) for a, b in hops]  # type: ignore[arg-type]
                latency = [cluster.latency(a, b) for a, b in hops]  # type: ignore[arg-type] # roots are ranks
            # Odd numbers, as all links have, behind those of the outgoing ones.
            incoming = 2 * (len(self.roles.ranks) + roles) + 1 if rooted else None
            self.links[key] = Links(2 * roles + 1, np.asarray(per_byte), np.asarray(latency), incoming)
        return self.links[key]


def lone_cost(kind: str, participants: int) -> tuple[float, int]:
    """(bytes on the longest way for each byte put in, latencies on it) of an expanded collective alone."""
    match kind:
        case "broadcast" | "reduce":
            return (participants + CHAIN_CHUNKS - 2) / CHAIN_CHUNKS, participants - 1
        case "gather":
            return participants - 1 + 1 / PIECES, 1
        case _:
            return sent_per_byte(kind, participants), latency_steps(kind, participants)
