"""The tasks of some consecutive steps: walks the plan's StepProgram once per role and step.

Each role has one queue for compute and one for its link, or two where messages to and from servers take its directions
for different times. The program says what a step does and in which order; here it gets its seconds, and roles wait for
each other: a collective starts when all its participants have come to it and everything before it has been issued.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs, encoding_seconds, in_a_row, message_updates, update_seconds
from offbeat.cost.tables import Collectives
from offbeat.plan import Plan, Task
from offbeat.plan.program import Component
from offbeat.simulate.kernel import Replay
from offbeat.simulate.roles import Exchange, Roles
from offbeat.simulate.taskgraph import TaskGraph
from offbeat.timeline import Kind


class StepTask(NamedTuple):
    """A task of some role in some step."""

    role: int
    step: int
    kind: Kind | None
    """None for tasks that only join others."""
    name: str
    seconds: float = 0.0
    device: int = -1
    lag: float = 0.0
    priority: int = 0
    bytes: int = 0
    exchange: int = -1
    gate: int = -1
    """For a collective, the task at whose end it could start; -1 for others."""

    def of(self, role: int, gate: int, seconds: float = 0.0, device: int = -1, lag: float = 0.0) -> "StepTask":
        """The part of one role in a collective."""
        return self._replace(role=role, gate=gate, seconds=seconds, device=device, lag=lag)


def segment_seconds(plan: Plan, costs: Costs, roles: Roles) -> NDArray[np.float64]:
    """Compute seconds of each role (row) in each segment (column); a role without a replica computes nothing."""
    seconds = np.empty((len(roles.ranks), len(plan.segments)))
    for row, rank in zip(seconds, roles.representatives, strict=True):
        node, scale = plan.cluster.device_of(rank), costs.compute_scale.get(rank, 1.0)
        trains = rank in plan.replicas
        row[:] = [s.estimate(node.peak_flops, node.memory_bandwidth) * scale if trains else 0.0 for s in plan.segments]
    return seconds


def exchange_costs(plan: Plan, costs: Costs, exchanges: Sequence[Exchange]) -> list[tuple[float, float]]:
    """(seconds each exchange occupies the link, seconds until its result arrives after that).

    The slowest group of ranks decides. With several in flight, what an exchange costs beside its bytes passes while
    those before it on the same channel are on the wire (`in_a_row`).
    """
    links, schedule = Collectives(plan.cluster), plan.strategy.schedule
    in_flight = schedule.in_flight
    found: list[tuple[float, float]] = []
    overhead: list[float] = []
    rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, exchange in enumerate(exchanges):
        tasks = {task.ranks: task for task in exchange.same}.values()
        prices = [costs.collective(task, links, in_flight) for task in tasks]
        price = max(price[:2] for price in prices)
        found.append(price)
        overhead.append(min(price[0], prices[0][2]))
        if sum(price) > 0:
            rows[exchange.task.lane, exchange.roles, len(exchange.task.ranks)].append(position)
    for row in rows.values():
        sizes = [exchanges[p].task.wire_bytes for p in row]
        # One step follows another, so that before the first comes the last.
        beside = [schedule.beside(sizes[place:] + sizes[:place], size) for place, size in enumerate(sizes)]
        taken = in_a_row([found[p][0] for p in row], [overhead[p] for p in row], in_flight, beside)
        for place, (position, seconds) in enumerate(zip(row, taken, strict=True)):
            lag = found[position][1]
            # A result that must be there before the next may start keeps the link until then.
            alone = in_flight > 1 and not beside[(place + 1) % len(row)]
            found[position] = (seconds + lag, 0.0) if alone else (seconds, lag)
    return found


class Steps:
    """The tasks of some consecutive steps, and where each role's steps begin."""

    def __init__(self, plan: Plan, costs: Costs, roles: Roles, steps: int) -> None:
        self.plan = plan
        self.costs = costs
        self.roles = roles
        self.tasks: list[StepTask] = []
        self.edges: list[tuple[int, int]] = []
        self.host = [-1] * len(roles.ranks)
        """Last compute task of each role."""
        self.serves = [rank not in plan.replicas for rank in roles.representatives]
        """Roles that hold no replica."""
        self.lead = next((role for role, ranks in enumerate(roles.ranks) if plan.replicas[0] in ranks), 0)
        """The role of the first replica, which tells servers when a step ends."""
        self.program = plan.program
        self.seconds = segment_seconds(plan, costs, roles).tolist()
        self.updates = message_updates(plan)
        self._update_seconds = partial(update_seconds, plan, costs, self.updates)
        place = {exchange.task.index: number for number, exchange in enumerate(roles.exchanges)}
        self.sends = [(place[send.task.index], send) for send in self.program.sends if send.task.index in place]
        self.tail = [place[later.task.index] for later in self.program.tail if later.task.index in place]
        self.cost = exchange_costs(plan, costs, roles.exchanges)
        self.arrivals: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        """Per step, role and message: the tasks whose end delivers what the role waits for."""
        self.gates: dict[str, int] = {}
        self.flights: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        """Per queue and role, the ends and the bytes of its parts in collectives, where those are told apart."""
        self.schedule = plan.strategy.schedule
        self.collectives = Collectives(plan.cluster)
        self.two_ways = any(costs.goes_straight(exchange.task) for exchange in roles.exchanges)
        self.issued = 0
        self.placed = [(place[each.task.index], each) for each in self.program.placed if each.task.index in place]
        walk = self._sharded_step if self.placed else self._step
        self.first: NDArray[np.int64] = np.array([walk(step) for step in range(steps)]).T
        """First task of each role (row) in each step (column)."""

    def column(self, name: str, dtype: Any = None) -> NDArray[Any]:
        """One field of all tasks."""
        return np.array([getattr(task, name) for task in self.tasks], dtype)

    @property
    def device(self) -> NDArray[np.int64]:
        """Where each task of the graph runs: role r computes on 2 r and sends and receives on 2 r + 1."""
        device, roles = self.column("device", np.int64), len(self.roles.ranks)
        # Behind the roles' own pairs come the links away from them, where directions are told apart.
        return np.where(device >= 2 * roles, 2 * (device // 2 % roles) + 1, device)

    def graph(self, seconds: NDArray[np.float64] | None = None) -> TaskGraph:
        """All tasks, with other durations where `seconds` are given."""
        return TaskGraph.from_arrays(
            self.column("seconds") if seconds is None else seconds,
            self.column("device", np.int64),
            np.array(self.edges, np.int64).reshape(-1, 2),
            priority=self.column("priority", np.float64),
            lag_seconds=self.column("lag"),
        )

    def taken_from_compute(self) -> NDArray[np.float64]:
        """Seconds that each task on a link takes from computing; a collective's are shared out over its parts."""
        seconds, exchange = self.column("seconds", np.float64), self.column("exchange", np.int64)
        found = np.zeros(len(self.tasks))
        parts = np.flatnonzero((exchange >= 0) & (self.column("device", np.int64) >= 0))
        if not len(parts):
            return found
        place = np.column_stack((self.column("role", np.int64), self.column("step", np.int64), exchange))[parts]
        _, whole = np.unique(place, axis=0, return_inverse=True)
        whole = whole.ravel()
        under_way = np.bincount(whole, seconds[parts])
        first = np.unique(whole, return_index=True)[1]
        tasks = [self.roles.exchanges[each].task for each in exchange[parts[first]]]
        taken = np.array(list(map(self.costs.taken_from_compute, tasks, under_way)))
        # Of parts that take no time, each takes as much.
        share = np.maximum(seconds[parts], 1e-12)
        found[parts] = taken[whole] * share / np.bincount(whole, share)[whole]
        return found

    def started(self, result: Replay) -> NDArray[np.float64]:
        """When each of `tasks` started in a replay of the graph."""
        return result.start

    def _add(self, task: StepTask, after: Iterable[int] = ()) -> int:
        index = len(self.tasks)
        self.tasks.append(task)
        self.edges.extend((before, index) for before in after if before >= 0)
        return index

    def _join(self, role: int, step: int, name: str, after: Iterable[int], seconds: float = 0.0) -> int:
        return self._add(StepTask(role, step, None, name, seconds), after)

    def _step(self, step: int) -> list[int]:
        first = []
        settles = self.program.settles if step and not self.program.barrier else ()
        for role in range(len(self.roles.ranks)):
            first.append(len(self.tasks))
            if self.costs.gap_seconds:
                self._compute(role, step, "other", "between steps", self.costs.gap_seconds)
            waited = deque(self.program.components[number] for number in settles)
            for slot in range(self.program.ahead):
                while waited and waited[0].slot == slot:
                    self._settle(role, step - 1, waited.popleft(), step)
                self._slot(role, step, slot)
        behind = range(self.program.ahead, len(self.program.slots))
        ready = [[self._slot(role, step, slot) for slot in behind] for role in range(len(self.roles.ranks))]
        for position, send in self.sends:
            late = send.regime != "synchronous"
            roles = self.roles.exchanges[position].roles
            after = {role: self.host[role] if late else ready[role][send.slot - behind.start] for role in roles}
            self._send(step, position, after)
        self._end_step(step)
        return first

    def _sharded_step(self, step: int) -> list[int]:
        """A step whose variables are gathered before use, and whose gradients are reduced afterwards."""
        roles = range(len(self.roles.ranks))
        first = [self._compute(role, step, "other", "between steps", self.costs.gap_seconds) for role in roles]
        before, behind = defaultdict(list), defaultdict(list)
        for position, each in self.placed:
            if each.task.kind == "all_gather":
                before[each.slot].append((position, each))
            else:
                behind[each.slot].append(position)
        needed: dict[tuple[int, int], list[int]] = defaultdict(list)
        reduced: dict[int, list[int]] = defaultdict(list)
        for slot in range(len(self.program.slots)):
            for position, each in before[slot]:
                self._send(step, position, {role: self.host[role] for role in self.roles.exchanges[position].roles})
                for role in self.roles.exchanges[position].roles:
                    needed[role, each.needed] += self.arrivals.pop((step, role, each.task.message))
            for role in roles:
                self._compute(role, step, None, "wait", 0.0, needed.pop((role, slot), ()))
                self._slot(role, step, slot)
            for position in behind[slot]:
                self._reduce(step, position, reduced)
        self._end_step(step)
        return first

    def _reduce(self, step: int, position: int, reduced: dict[int, list[int]]) -> None:
        """A unit's gradients; a sum over replicas follows what was reduced, without the device taking part."""
        exchange, most = self.roles.exchanges[position], self.program.reductions
        if exchange.task.kind == "all_reduce":
            self._send(step, position, {role: reduced[role][-1] for role in exchange.roles})
            return
        for role in exchange.roles:
            waited = reduced[role][-most:][:1] if most else ()
            self._compute(role, step, None, "wait", 0.0, waited)
        self._send(step, position, {role: self.host[role] for role in exchange.roles})
        for role in exchange.roles:
            reduced[role].append(self.arrivals[step, role, exchange.task.message][-1])
            if not most:
                self._compute(role, step, None, "wait", 0.0, reduced[role][-1:])

    def _compute(
        self, role: int, step: int, kind: Kind | None, name: str, seconds: float, after: Iterable[int] = ()
    ) -> int:
        task = StepTask(role, step, kind, name, seconds, 2 * role if seconds > 0 else -1)
        self.host[role] = self._add(task, [self.host[role], *after])
        return self.host[role]

    def _slot(self, role: int, step: int, number: int) -> int:
        slot = self.program.slots[number]
        return self._compute(
            role, step, None if self.serves[role] else slot.phase, slot.name, self.seconds[role][slot.segment]
        )

    def _settle(self, role: int, sent: int, component: Component, step: int) -> None:
        """Waits for a component that was sent in step `sent`, and applies the update of every replica."""
        first = component.messages[0]
        arrived = self._arrived(role, sent - component.staleness, component.messages)
        if component.asynchronous or not arrived:
            return
        if self.serves[role]:
            self._compute(role, step, None, "wait", 0.0, arrived)
            return
        if component.slices and self.costs.portions:
            elements = self.plan.messages[first].elements
            for end, task in zip(arrived, component.slices, strict=True):
                seconds = self._update_seconds((first,), (task.stop - task.start) / elements)
                self._compute(role, step, "update", f"update m{first}", seconds, [end])
            return
        seconds = self._update_seconds(component.applied) if component.applied else 0.0
        self._compute(role, step, "update" if component.applied else None, f"update m{first}", seconds, arrived)

    def _arrived(self, role: int, sent: int, messages: Iterable[int]) -> list[int]:
        return [task for index in messages for task in self.arrivals.get((sent, role, index), ())]

    def _send(self, step: int, position: int, after: dict[int, int]) -> None:
        """One collective: it starts when all its roles are ready and all earlier ones have been issued."""
        exchange = self.roles.exchanges[position]
        queue = f"{exchange.task.lane}.{exchange.roles}.{len(exchange.task.ranks)}"
        ready = {role: self._join(role, step, "ready", [before]) for role, before in after.items()}
        gate = self._join(exchange.roles[0], step, "issue", [*ready.values(), self.gates.get(queue, -1)])
        self.gates[queue] = gate
        self.issued += 1
        part = self._part(step, position)._replace(priority=self.issued)
        if exchange.task.kind == "relay" and len(exchange.task.ranks) > 1:
            ends = self._send_through(part, exchange.task, ready, gate, queue)
        elif self.costs.goes_straight(exchange.task):
            ends = self._send_straight(part, exchange.task, ready, gate, queue)
        elif self.two_ways:
            ends = self._send_around(part, ready, gate, queue)
        else:
            seconds, lag = self.cost[position]
            ends = {
                role: self._add(part.of(role, queued, seconds, 2 * role + 1, lag), [gate])
                for role, queued in ready.items()
            }
        for role, end in ends.items():
            self.flights[queue, role].append((end, part.bytes))
            self.arrivals[step, role, exchange.task.message].append(end)

    def _part(self, step: int, position: int) -> StepTask:
        """A role's part in a collective."""
        task = self.roles.exchanges[position].task
        return StepTask(-1, step, "communication", task.name, bytes=task.wire_bytes, exchange=position)

    def _outgoing(self, role: int) -> int:
        """The device of a role's outgoing link, if the two directions are distinguished."""
        return 2 * (len(self.roles.ranks) + role) + 1

    def _begin(self, step: int, role: int, gate: int, queue: str, size: int, seconds: float = 0.0) -> int:
        """The task at whose end a role takes part: enough earlier ones have ended."""
        return self._join(role, step, "begin", [gate, self._ahead(self.flights[queue, role], size)], seconds)

    def _ahead(self, flights: list[tuple[int, int]], size: int) -> int:
        """The end of the last part that must be over before one of this many bytes may start; -1 if none."""
        latest = flights[-self.schedule.in_flight :]
        beside = self.schedule.beside([held for _, held in latest], size)
        return latest[-beside - 1][0] if len(latest) > beside else -1

    def _send_around(self, part: StepTask, ready: dict[int, int], gate: int, queue: str) -> dict[int, int]:
        """A collective that takes both directions of every link, beside others that go straight. It lasts as long as on
        the slowest link; a faster one it leaves to them for the rest of the time. Returns its end for each role."""
        cluster, (seconds, lag) = self.plan.cluster, self.cost[part.exchange]
        slowest = cluster.ring_bandwidth(self.roles.exchanges[part.exchange].task.ranks)
        begun = [self._begin(part.step, role, gate, queue, part.bytes) for role in ready]
        parts = []
        for role, queued in ready.items():
            node = cluster.node_of(self.roles.ranks[role][0])
            taken = seconds * min(1.0, slowest / cluster.node_bandwidth(node))
            parts.append(self._add(part.of(role, queued, taken, 2 * role + 1), begun))
            back = StepTask(role, part.step, None, "other way", taken, self._outgoing(role), priority=self.issued)
            parts.append(self._add(back, begun))
        return {role: self._join(role, part.step, "end", parts, lag) for role in ready}

    def _send_through(self, part: StepTask, task: Task, ready: dict[int, int], gate: int, queue: str) -> dict[int, int]:
        """A relay: gradients go straight to the root, which sends the sum straight back on its own channel."""
        up, back = task.halves
        sent = self._send_straight(part, up, ready, gate, f"{queue}.up")
        root = next(role for role in ready if task.root in self.roles.ranks[role])
        for role, end in sent.items():
            self.flights[f"{queue}.up", role].append((end, part.bytes))
        # Sums leave in the order in which they were started.
        gate = self._join(root, part.step, "issue", [sent[root], self.gates.get(f"{queue}.back", -1)])
        self.gates[f"{queue}.back"] = gate
        return self._send_straight(part, back, ready, gate, queue)

    def _send_straight(
        self, part: StepTask, task: Task, ready: dict[int, int], gate: int, queue: str
    ) -> dict[int, int]:
        """A collective to or from a root, which takes each role's link in one direction and for a time of its own.

        What a role sends may be on its way to one root while others' is still arriving at another.
        """
        root = next(role for role in ready if task.root in self.roles.ranks[role])
        price = {}
        for role in ready:
            # The root, or any member: all members of a role have equal links.
            members = set(self.roles.ranks[role])
            rank = next(rank for rank in (task.root, *task.ranks) if rank is not None and rank in members)
            price[role] = self.costs.straight_seconds(task, rank, self.collectives, self.schedule.in_flight)
        begun = {role: self._begin(part.step, role, gate, queue, part.bytes, price[role][0]) for role in ready}
        parts = {}
        for role, queued in ready.items():
            incoming = task.fills_incoming(task.root if role == root else None)
            device = 2 * role + 1 if incoming else self._outgoing(role)
            parts[role] = self._add(part.of(role, queued, price[role][1], device), [begun[role], begun[root]])
        # All share the root's link: whoever receives from it has everything when the last one has.
        shared = [] if task.kind == "reduce" else [parts[root]]
        needed = {role: list(parts.values()) if role == root else [parts[role], *shared] for role in ready}
        return {role: self._join(role, part.step, "end", needed[role]) for role in ready}

    def _end_step(self, step: int) -> None:
        """What `step()` does: owners' updates and returning parameters; in barrier mode everything."""
        roles, barrier = range(len(self.roles.ranks)), self.program.barrier
        mine = [self.plan.messages[index] for index in self.program.whole]
        for role in (role for role in roles if barrier and mine and not self.serves[role]):
            arrived = [task for m in mine for task in self._arrived(role, step - m.staleness, [m.index])]
            self._compute(role, step, None, "wait", 0.0, arrived)
            seconds = self._update_seconds(self.program.whole, 1 / self.plan.shards)
            self._compute(role, step, "optimizer", "optimizer", seconds)
        for role in (role for role in roles if self.serves[role]):
            self._compute(role, step, None, "wait", 0.0, [self.host[self.lead]])
        for position in self.tail:
            exchange = self.roles.exchanges[position]
            message = self.plan.messages[exchange.task.message]
            for role in exchange.roles:
                before = self.arrivals.pop((step, role, message.index), [])
                if exchange.task.kind == "update":
                    share = len(exchange.task.ranks) if message.synchronizer == "sharded" else 1
                    seconds = self.costs.update(message.bytes / share, self.updates[message.index] / share)
                    seconds += encoding_seconds(self.plan, self.costs, message.encoder, message.bytes) / share
                    self._compute(role, step, "update", f"update m{message.index}", seconds, before)
                else:
                    self._compute(role, step, None, "wait", 0.0, before)
            if exchange.task.kind != "update":
                self._send(step, position, {role: self.host[role] for role in exchange.roles})
        for role in roles if barrier else ():
            for component in self.program.components:
                if len(component.applied) < len(component.messages):
                    self._settle(role, step, component, step)
