"""StepProgram + Costs → the seconds of a step, in tens of microseconds: dPRO's partial replay.

Where every replica applies every update (all-reduce, gathered rows, broadcast factors), a program is a chain of compute
per role and one queue for the link, so that the clock can be advanced over flat arrays without building a task graph.
The result equals `simulate(plan, costs).iteration_time`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.compiled import compiled
from offbeat.cost.measured import Costs, message_updates, update_seconds
from offbeat.plan import Plan
from offbeat.simulate.predict import INTERFERENCE_ROUNDS, SHOWN_RANKS, STEADY_STEPS, busy_until
from offbeat.simulate.roles import find_roles
from offbeat.simulate.step import exchange_costs, segment_seconds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class StepArrays(NamedTuple):
    """A step program as arrays, which the kernel takes as they are. Roles are rows; times are seconds."""

    forward: Floats
    backward: Floats
    """Everything after the first micro-batch's forward: backward, recomputation, further micro-batches."""
    settle_position: Integers
    """Forward slot before which a part is waited for and updated, in order."""
    settle_part: Integers
    update: Floats
    """Of each part: a component, or a slice of one that is applied as it arrives."""
    ready: Integers
    """Of each task in issue order: the slot of `backward` that completes its last gradient."""
    part: Integers
    """Of each task: the part that it brings."""
    occupied: Floats
    lag: Floats
    gap: float
    optimizer: float
    """The one update of barrier mode."""
    barrier: bool
    interference: float
    weight: Floats
    """Ranks that each role stands for in the mean over ranks."""

    def seconds(self) -> float:
        """Seconds of a step that training settles into."""
        begins, _ = self.replay()
        return float((begins[:, -1] - begins[:, -2]) @ self.weight / self.weight.sum())

    def replay(self) -> tuple[Floats, Floats]:
        """Start of each role's steps; seconds that interference adds to each stretch of compute in them."""
        # The gap, forward, updates, backward, the optimizer.
        stretches = 1 + self.forward.shape[1] + len(self.update) + self.backward.shape[1] + 1
        extra = np.zeros((len(self.forward), STEADY_STEPS, stretches))
        begins, start, end, link_start, link_end = _replay(self, STEADY_STEPS, extra)
        computing = end > start
        for _ in range(INTERFERENCE_ROUNDS if self.interference > 0 else 0):
            busy = busy_until(link_start.ravel(), link_end.ravel())
            share = self.interference / (1 + self.interference)
            extra = np.where(computing, (busy(end) - busy(start)) * share, 0.0)
            begins, start, end, link_start, link_end = _replay(self, STEADY_STEPS, extra)
        return begins, extra


@compiled
def _replay(step: Any, steps: int, extra: Any) -> Any:
    """Starts of steps, starts and ends of compute, starts and ends of the link's tasks."""
    roles = len(step.forward)
    tasks = len(step.ready)
    begins = np.zeros((roles, steps))
    start, end = np.zeros(extra.shape), np.zeros(extra.shape)
    link_start, link_end = np.zeros((steps, tasks)), np.zeros((steps, tasks))
    arrival = np.zeros(len(step.update))
    clock = np.zeros(roles)
    issued = 0.0
    free = 0.0
    first_behind = 1 + step.forward.shape[1] + len(step.update)
    for turn in range(steps):
        for role in range(roles):
            row_start, row_end = start[role, turn], end[role, turn]
            waits = turn > 0 and not step.barrier
            begins[role, turn], now = _forward(
                step, role, clock[role], arrival, waits, extra[role, turn], row_start, row_end
            )
            for position in range(step.backward.shape[1]):
                slot = first_behind + position
                row_start[slot] = now
                now += step.backward[role, position] + extra[role, turn, slot]
                row_end[slot] = now
            clock[role] = now
        arrival[:] = 0.0
        for task in range(tasks):
            for role in range(roles):
                issued = max(issued, end[role, turn, first_behind + step.ready[task]])
            link_start[turn, task] = max(issued, free)
            free = link_start[turn, task] + step.occupied[task]
            link_end[turn, task] = free
            part = step.part[task]
            arrival[part] = max(arrival[part], free + step.lag[task])
        for role in range(roles if step.barrier else 0):
            now = clock[role]
            for part in range(len(arrival)):
                now = max(now, arrival[part])
            start[role, turn, -1] = now
            clock[role] = now + step.optimizer + extra[role, turn, -1]
            end[role, turn, -1] = clock[role]
    return begins, start, end, link_start, link_end


@compiled
def _forward(step: Any, role: int, now: float, arrival: Any, waits: bool, extra: Any, start: Any, end: Any) -> Any:
    """When the step begins and when forward ends; with `waits`, after the updates it must wait for."""
    length = step.forward.shape[1]
    begin = now
    begun = step.gap > 0.0
    if begun:
        start[0] = now
        now += step.gap + extra[0]
        end[0] = now
    settle = 0
    for position in range(length):
        while waits and settle < len(step.settle_position) and step.settle_position[settle] == position:
            part = step.settle_part[settle]
            now = max(now, arrival[part])
            if not begun:
                begin = now
                begun = True
            start[1 + length + part] = now
            now += step.update[part] + extra[1 + length + part]
            end[1 + length + part] = now
            settle += 1
        begun = True
        start[1 + position] = now
        now += step.forward[role, position] + extra[1 + position]
        end[1 + position] = now
    return begin, now


def arrays_of(plan: Plan, costs: Costs, *, fold: bool = True) -> StepArrays | None:
    """The plan's program as arrays; None where only a full replay can tell how it runs."""
    program = plan.program
    if not program.replicated or not program.ahead:
        return None
    roles = find_roles(plan, costs.compute_scale, fold)
    seconds = segment_seconds(plan, costs, roles)[:, [slot.segment for slot in program.slots]]
    first = {exchange.task.index: exchange for exchange in roles.exchanges}
    sends = [send for send in program.sends if send.task.index in first]
    price = exchange_costs(plan, costs, [first[send.task.index] for send in sends])
    estimates = message_updates(plan)
    # A part is waited for and updated at once: a component, or a slice of one that is applied as it arrives.
    update: list[float] = []
    parts: list[range] = []
    part_of_message: dict[int, int] = {}
    part_of_slice: dict[int, int] = {}
    for component in program.components:
        slices = component.slices if costs.portions else ()
        elements = plan.messages[component.messages[0]].elements
        shares = [(task.stop - task.start) / elements for task in slices] or [1.0]
        parts.append(range(len(update), len(update) + len(shares)))
        part_of_message |= dict.fromkeys(component.messages, len(update))
        part_of_slice |= {task.index: part for task, part in zip(slices, parts[-1], strict=False)}
        update += [update_seconds(plan, costs, estimates, component.applied, share) for share in shares]
    settles = [(program.components[number].slot, part) for number in program.settles for part in parts[number]]
    brought = [part_of_slice.get(send.task.index, part_of_message[send.task.message]) for send in sends]
    few = sum(map(len, roles.ranks)) <= SHOWN_RANKS
    return StepArrays(
        forward=np.ascontiguousarray(seconds[:, : program.ahead]),
        backward=np.ascontiguousarray(seconds[:, program.ahead :]),
        settle_position=np.array([slot for slot, _ in settles], np.int64),
        settle_part=np.array([part for _, part in settles], np.int64),
        update=np.array(update, np.float64),
        ready=np.array([send.slot - program.ahead for send in sends], np.int64),
        part=np.array(brought, np.int64),
        occupied=np.array([taken for taken, _ in price], np.float64),
        lag=np.array([lag for _, lag in price], np.float64),
        gap=max(0.0, costs.gap_seconds),
        optimizer=update_seconds(plan, costs, estimates, program.whole) if program.whole else 0.0,
        barrier=program.barrier,
        interference=costs.interference,
        weight=np.array([len(ranks) if few else 1 for ranks in roles.ranks], np.float64),
    )
