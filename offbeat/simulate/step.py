"""Plan + Costs → the tasks of some consecutive steps, as the runtime would run them.

Each role has one queue for compute and one for its link, or two where messages to and from servers take its directions
for different times. Compute is the plan's segments in order. A message goes out when the segment that completes its
last gradient has ended and everything before it in the issue order has been issued; all participants must have come
that far. In deferred mode the segment that first reads a variable waits for it and applies its update; in barrier mode
the end of the step waits for everything. Owners' updates and returning parameters run in `step()`, in the plan's order,
as in `offbeat.runtime.engine`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs, in_a_row
from offbeat.cost.tables import Collectives
from offbeat.cost.updates import message_updates, portions
from offbeat.plan import Plan, Task
from offbeat.simulate.roles import Exchange, Roles
from offbeat.simulate.taskgraph import TaskGraph
from offbeat.timeline import Kind


@dataclass
class Tasks:
    """Tasks being collected, as columns."""

    seconds: list[float] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    role: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    kind: list[Kind | None] = field(default_factory=list)
    """None for tasks that only join others."""
    name: list[str] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    exchange: list[int] = field(default_factory=list)
    gate: list[int] = field(default_factory=list)
    """For a collective, the task whose end is the moment it could go; -1 for others."""
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        role: int,
        step: int,
        kind: Kind | None,
        name: str,
        seconds: float = 0.0,
        device: int = -1,
        *,
        lag: float = 0.0,
        after: Sequence[int] = (),
        priority: int = 0,
        bytes: int = 0,
        exchange: int = -1,
        gate: int = -1,
    ) -> int:
        index = len(self.seconds)
        self.seconds.append(seconds)
        self.device.append(device)
        self.lag.append(lag)
        self.priority.append(priority)
        self.role.append(role)
        self.step.append(step)
        self.kind.append(kind)
        self.name.append(name)
        self.bytes.append(bytes)
        self.exchange.append(exchange)
        self.gate.append(gate)
        self.edges.extend((before, index) for before in after if before >= 0)
        return index

    def graph(self, seconds: NDArray[np.float64] | None = None) -> TaskGraph:
        return TaskGraph.from_arrays(
            np.array(self.seconds) if seconds is None else seconds,
            np.array(self.device, np.int64),
            np.array(self.edges, np.int64).reshape(-1, 2),
            priority=np.array(self.priority, np.float64),
            lag_seconds=np.array(self.lag),
        )


@dataclass(frozen=True)
class Steps:
    """The tasks of some steps, and where each role's steps begin."""

    tasks: Tasks
    first: NDArray[np.int64]
    """First task of each role (row) in each step (column)."""
    last: NDArray[np.int64]
    """Last compute task of each role in the last step."""


class Moments(NamedTuple):
    """When each task of `Steps` ran, and those on the critical path in time order."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    path: NDArray[np.integer]


def build_steps(plan: Plan, costs: Costs, roles: Roles, steps: int) -> Steps:
    """The tasks of `steps` consecutive steps."""
    return StepBuilder(plan, costs, roles).build(steps)


def segment_seconds(plan: Plan, costs: Costs, roles: Roles) -> NDArray[np.float64]:
    """Compute seconds of each role (row) in each segment (column)."""
    rows = []
    for rank in roles.representatives:
        node = plan.cluster.device_of(rank)
        scale = costs.compute_scale.get(rank, 1.0)
        rows.append([s.estimate(node.peak_flops, node.memory_bandwidth) * scale for s in plan.segments])
    return np.array(rows, np.float64).reshape(len(rows), len(plan.segments))


def exchange_costs(plan: Plan, costs: Costs, exchanges: Sequence[Exchange]) -> list[tuple[float, float]]:
    """(seconds for which each exchange takes the link, seconds until its result is there after that).

    The slowest group of ranks decides. With several in flight, what an exchange costs beside its bytes passes while
    those before it on the same channel are on the wire (`in_a_row`).
    """
    links, in_flight = Collectives(plan.cluster), plan.strategy.schedule.in_flight
    found: list[tuple[float, float]] = []
    overhead: list[float] = []
    rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, exchange in enumerate(exchanges):
        tasks = {task.ranks: task for task in exchange.same}.values()
        price = max(costs.collective(task, links, in_flight) for task in tasks)
        found.append(price)
        overhead.append(min(price[0], costs.overhead(exchange.task, links)))
        if sum(price) > 0:
            rows[channel_of(exchange), exchange.roles, len(exchange.task.ranks)].append(position)
    for row in rows.values():
        taken = in_a_row([found[p][0] for p in row], [overhead[p] for p in row], in_flight)
        for position, seconds in zip(row, taken, strict=True):
            found[position] = seconds, found[position][1]
    return found


def channel_of(exchange: Exchange) -> str:
    """Gradients go up; what an owner returns comes back on a channel of its own."""
    return "back" if exchange.task.stage > 0 and exchange.task.delivers else "up"


class StepBuilder:
    """Adds step after step to the tasks."""

    def __init__(self, plan: Plan, costs: Costs, roles: Roles) -> None:
        self.plan = plan
        self.costs = costs
        self.roles = roles
        self.tasks = Tasks()
        count = len(roles.ranks)
        self.host = [-1] * count
        """Last compute task of each role."""
        self.barrier = plan.mode == "barrier"
        self.seconds = segment_seconds(plan, costs, roles).tolist()
        self.components = plan.components
        self.readers = self._readers()
        self.updates = message_updates(plan)
        self.portions = portions(plan) if costs.portions else {}
        self.heads = [i for i, e in enumerate(roles.exchanges) if e.task.stage == 0 and e.task.kind != "update"]
        self.tails = [
            i
            for i, e in enumerate(roles.exchanges)
            if e.task.stage > 0 and not plan.messages[e.task.message].replicated
        ]
        self.cost = exchange_costs(plan, costs, roles.exchanges)
        self.arrivals: dict[tuple[int, int, int], list[int]] = {}
        """Per step, role and message: the tasks whose end brings what the role waits for."""
        self.gates: dict[str, int] = {}
        self.flights: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Per queue and role, the ends of its parts in collectives, where directions are told apart."""
        self.in_flight = plan.strategy.schedule.in_flight
        self.collectives = Collectives(plan.cluster)
        self.two_ways = any(costs.goes_straight(exchange.task) for exchange in roles.exchanges)
        self.issued = 0

    def build(self, steps: int) -> Steps:
        firsts = [self.add_step(step) for step in range(steps)]
        return Steps(self.tasks, np.array(firsts).T, np.array(self.host))

    # What does not change from step to step

    def _readers(self) -> dict[int, list[tuple[int, ...]]]:
        """For each segment, the components (messages by index) it is the first to wait for."""
        component_of = {m: number for number, component in enumerate(self.components) for m in component}
        components_of: dict[str, list[int]] = defaultdict(list)
        for message in self.plan.messages:
            for name in message.variables:
                components_of[name].append(component_of[message.index])
        readers: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        seen: set[int] = set()
        for position, segment in enumerate(self.plan.segments):
            for name in segment.reads:
                for number in components_of.get(name, ()):
                    if number not in seen:
                        seen.add(number)
                        readers[position].append(self.components[number])
        readers[0] += [component for number, component in enumerate(self.components) if number not in seen]
        return readers

    # One step

    def add_step(self, step: int) -> list[int]:
        first = []
        for role in range(len(self.roles.ranks)):
            begin = len(self.tasks.seconds)
            if self.costs.gap_seconds:
                self._compute(role, step, "other", "between steps", self.costs.gap_seconds)
            self._forward(role, step)
            first.append(begin)
        ready = [self._backward(role, step) for role in range(len(self.roles.ranks))]
        self._send_gradients(step, ready)
        self._end_step(step)
        return first

    def _compute(
        self, role: int, step: int, kind: Kind | None, name: str, seconds: float, after: Sequence[int] = (), **more: int
    ) -> int:
        device = 2 * role if seconds > 0 else -1
        index = self.tasks.add(role, step, kind, name, seconds, device, after=[self.host[role], *after], **more)
        self.host[role] = index
        return index

    def _forward(self, role: int, step: int) -> None:
        for position, segment in enumerate(self.plan.segments):
            if segment.phase != "forward" or segment.recomputed or segment.microbatch:
                continue
            if not self.barrier and step:
                for component in self.readers.get(position, ()):
                    self._settle(role, step - 1, component, step)
            self._compute(role, step, "forward", segment.name, self.seconds[role][position])

    def _settle(self, role: int, sent: int, component: tuple[int, ...], step: int) -> None:
        """Waits for the messages of a component, sent in step `sent`, and applies what every replica applies."""
        stale = max(self.plan.messages[index].staleness for index in component)
        if any(self.plan.messages[index].asynchronous for index in component):
            return
        arrived = [t for index in component for t in self.arrivals.get((sent - stale, role, index), ())]
        if not arrived:
            return
        if component[0] in self.portions:
            self._settle_portions(role, step, component[0], arrived)
            return
        mine = [index for index in component if self.plan.messages[index].replicated]
        size = sum(self.plan.messages[index].bytes for index in mine)
        seconds = self.costs.update(size, sum(self.updates[index] for index in mine)) if mine else 0.0
        self._compute(role, step, "update" if mine else None, f"update m{component[0]}", seconds, arrived)

    def _settle_portions(self, role: int, step: int, index: int, arrived: list[int]) -> None:
        """Applies a message's slices as they arrive, one after the other."""
        message = self.plan.messages[index]
        for part, task in zip(arrived, self.portions[index], strict=True):
            share = (task.stop - task.start) / message.elements
            seconds = self.costs.update(message.bytes * share, self.updates[index] * share)
            self._compute(role, step, "update", f"update m{index}", seconds, [part])

    def _backward(self, role: int, step: int) -> dict[str, int]:
        """The task that completes each variable's gradient."""
        ready: dict[str, int] = {}
        for position, segment in enumerate(self.plan.segments):
            if segment.phase == "optimizer" or not (
                segment.phase == "backward" or segment.recomputed or segment.microbatch
            ):
                continue
            kind: Kind = "backward" if segment.phase == "backward" else "forward"
            task = self._compute(role, step, kind, segment.name, self.seconds[role][position])
            for name in segment.completes:
                ready[name] = task
        return ready

    def _send_gradients(self, step: int, ready: list[dict[str, int]]) -> None:
        for position in self.heads:
            exchange = self.roles.exchanges[position]
            message = self.plan.messages[exchange.task.message]
            after = {role: [ready[role][name] for name in exchange.task.waits_for] for role in exchange.roles}
            if message.staleness or message.asynchronous:
                after = {role: [self.host[role]] for role in exchange.roles}
            self._send(step, position, after, "up")

    def _send(self, step: int, position: int, after: dict[int, list[int]], channel: str) -> None:
        """One collective: it starts when all its roles are ready and what was put in before it has been issued."""
        exchange = self.roles.exchanges[position]
        queue = f"{channel}.{exchange.roles}.{len(exchange.task.ranks)}"
        ready = {role: self.tasks.add(role, step, None, "ready", after=before) for role, before in after.items()}
        before = [*ready.values(), self.gates.get(queue, -1)]
        gate = self.gates[queue] = self.tasks.add(exchange.roles[0], step, None, "issue", after=before)
        self.issued += 1
        if self.costs.goes_straight(exchange.task):
            self._send_straight(step, position, ready, gate, queue)
            return
        if self.two_ways:
            self._send_around(step, position, ready, gate, queue)
            return
        seconds, lag = self.cost[position]
        for role, queued in ready.items():
            sent = self._part(step, position, role, queued, seconds, 2 * role + 1, [gate], lag)
            self.arrivals.setdefault((step, role, exchange.task.message), []).append(sent)

    def _part(
        self,
        step: int,
        position: int,
        role: int,
        queued: int,
        seconds: float,
        device: int,
        after: list[int],
        lag: float = 0.0,
    ) -> int:
        """What a role has to do with a collective."""
        task = self.roles.exchanges[position].task
        return self.tasks.add(
            role,
            step,
            "communication",
            task.name,
            seconds,
            device,
            lag=lag,
            after=after,
            priority=self.issued,
            bytes=task.wire_bytes,
            exchange=position,
            gate=queued,
        )

    def _outgoing(self, role: int) -> int:
        """The device of a role's link away from it, where the two directions are told apart."""
        return 2 * (len(self.roles.ranks) + role) + 1

    def _send_around(self, step: int, position: int, ready: dict[int, int], gate: int, queue: str) -> None:
        """A collective that takes both directions of every link, beside others that go straight. It lasts as long as on
        the slowest link; a faster one it leaves to them for the rest of the time."""
        task = self.roles.exchanges[position].task
        seconds, lag = self.cost[position]
        slowest = self.plan.cluster.ring_bandwidth(task.ranks)
        begun = [self._begin(step, role, gate, queue) for role in ready]
        parts = []
        for role, queued in ready.items():
            node = self.plan.cluster.node_of(self.roles.ranks[role][0])
            taken = seconds * min(1.0, slowest / self.plan.cluster.node_bandwidth(node))
            parts.append(self._part(step, position, role, queued, taken, 2 * role + 1, begun))
            back = self.tasks.add(
                role, step, None, "other way", taken, self._outgoing(role), after=begun, priority=self.issued
            )
            parts.append(back)
        for role in ready:
            end = self.tasks.add(role, step, None, "end", lag, after=parts)
            self.flights[queue, role].append(end)
            self.arrivals.setdefault((step, role, task.message), []).append(end)

    def _begin(self, step: int, role: int, gate: int, queue: str, seconds: float = 0.0) -> int:
        """The task at whose end a role takes part: one of the `in_flight` before has ended for it."""
        flights = self.flights[queue, role]
        before = flights[-self.in_flight] if len(flights) >= self.in_flight else -1
        return self.tasks.add(role, step, None, "begin", seconds, after=[gate, before])

    def _send_straight(self, step: int, position: int, ready: dict[int, int], gate: int, queue: str) -> None:
        """A collective to or from a root, which takes each role's link in one direction and for a time of its own.

        What a role sends may be on its way to one root while others' is still arriving at another.
        """
        task = self.roles.exchanges[position].task
        root = next(role for role in ready if task.root in self.roles.ranks[role])
        price = {role: self._straight_price(task, role) for role in ready}
        begun = {role: self._begin(step, role, gate, queue, price[role][0]) for role in ready}
        parts = {}
        for role, queued in ready.items():
            incoming = (role == root) == (task.kind == "reduce")
            device = 2 * role + 1 if incoming else self._outgoing(role)
            parts[role] = self._part(step, position, role, queued, price[role][1], device, [begun[role], begun[root]])
        for role in ready:
            if role == root:
                needed = list(parts.values())
            elif task.kind == "reduce":
                needed = [parts[role]]
            else:
                # All share the root's link: whoever receives from it has everything when the last one has.
                needed = [parts[role], parts[root]]
            end = self.tasks.add(role, step, None, "end", after=needed)
            self.flights[queue, role].append(end)
            self.arrivals.setdefault((step, role, task.message), []).append(end)

    def _straight_price(self, task: Task, role: int) -> tuple[float, float]:
        members = self.roles.ranks[role]
        rank = task.root if task.root in members else next(rank for rank in task.ranks if rank in members)
        assert rank is not None
        return self.costs.straight_seconds(task, rank, self.collectives, self.in_flight)

    def _end_step(self, step: int) -> None:
        """What `step()` does: owners' updates and returning parameters; in barrier mode everything."""
        if self.barrier:
            for role in range(len(self.roles.ranks)):
                self._wait_for_gradients(role, step)
        for position in self.tails:
            exchange = self.roles.exchanges[position]
            message = self.plan.messages[exchange.task.message]
            for role in exchange.roles:
                before = self.arrivals.pop((step, role, message.index), [])
                seconds, kind, name = 0.0, None, "wait"
                if exchange.task.kind == "update":
                    share = len(exchange.task.ranks) if message.synchronizer == "sharded" else 1
                    seconds = self.costs.update(message.bytes / share, self.updates[message.index] / share)
                    kind, name = "update", f"update m{message.index}"
                self._compute(role, step, kind, name, seconds, before)  # type: ignore[arg-type]
            if exchange.task.kind != "update":
                where = {role: [self.host[role]] for role in exchange.roles}
                self._send(step, position, where, channel_of(exchange))
        if self.barrier:
            for role in range(len(self.roles.ranks)):
                for component in self.components:
                    if not all(self.plan.messages[index].replicated for index in component):
                        self._settle(role, step, component, step)

    def _wait_for_gradients(self, role: int, step: int) -> None:
        """`step()` of barrier mode, as far as every replica applies the update: one optimizer call for all."""
        mine = [m for m in self.plan.messages if m.replicated and not m.asynchronous]
        arrived = [t for m in mine for t in self.arrivals.get((step - m.staleness, role, m.index), ())]
        if not mine:
            return
        self._compute(role, step, None, "wait", 0.0, arrived)
        seconds = self.costs.update(sum(m.bytes for m in mine), sum(self.updates[m.index] for m in mine))
        self._compute(role, step, "optimizer", "optimizer", seconds)
