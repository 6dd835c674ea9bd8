"""Compute the seconds of a step in tens of microseconds: dPRO's partial replay.

Where every replica applies every update (all-reduce, gathered rows, broadcast factors), a program is a chain of compute
per role and one queue for the link, so that the clock can be advanced over flat arrays without building a task graph.
The result equals `simulate(plan, costs).iteration_time`.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.compiled import compiled
from offbeat.cost.measured import Costs, message_updates, update_seconds
from offbeat.plan import Plan
from offbeat.simulate.predict import INTERFERENCE_ROUNDS, SHOWN_RANKS, STEADY_STEPS, taken_until
from offbeat.simulate.roles import find_roles
from offbeat.simulate.step import exchange_costs, segment_seconds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class StepArrays(NamedTuple):
    """A step program as arrays, which the kernel takes as they are. Roles are rows; times are seconds."""

    durations: Floats
    """Of each stretch of compute in the order in which it runs: the gap, forward and the updates before its slots, and
    everything behind: backward, recomputation, further micro-batches."""
    waits: Integers
    """Of each stretch: the part that it waits for and updates, from the second step on; -1 for other stretches."""
    slots: Integers
    """The stretch of each of the program's slots."""
    parts: int
    """Number of parts: a part is a component, or a slice of one that is applied on arrival."""
    ready: Integers
    """Of each task in issue order: the stretch that completes its last gradient."""
    part: Integers
    """Of each task: the part that it delivers."""
    occupied: Floats
    lag: Floats
    gap: float
    optimizer: float
    """The one update of barrier mode."""
    barrier: bool
    taken: Floats
    """Seconds that each task takes from computing while it is under way."""
    weight: Floats
    """Number of ranks that each role represents in the mean over ranks."""

    @property
    def slowed(self) -> bool:
        """Whether communication takes anything from computing."""
        return bool(self.taken.any())

    def seconds(self) -> float:
        """Seconds of a step in the steady state."""
        begins, _ = self.replay()
        return float((begins[:, -1] - begins[:, -2]) @ self.weight / self.weight.sum())

    def replay(self) -> tuple[Floats, Floats]:
        """Start of each role's steps; seconds that communication adds to each stretch of compute in them."""
        # The last stretch is the optimizer.
        extra = np.zeros((len(self.durations), STEADY_STEPS, len(self.waits) + 1))
        begins, start, end, link_start, link_end = _replay(self, STEADY_STEPS, extra)
        computing = end > start
        for _ in range(INTERFERENCE_ROUNDS if self.slowed else 0):
            until = taken_until(link_start.ravel(), link_end.ravel(), np.tile(self.taken, STEADY_STEPS))
            extra = np.where(computing, until(end) - until(start), 0.0)
            begins, start, end, link_start, link_end = _replay(self, STEADY_STEPS, extra)
        return begins, extra


@compiled
def _replay(step: Any, steps: int, extra: Any) -> Any:
    """Starts of steps, starts and ends of compute, starts and ends of the link's tasks."""
    roles = len(step.durations)
    tasks = len(step.ready)
    begins = np.zeros((roles, steps))
    start, end = np.zeros(extra.shape), np.zeros(extra.shape)
    link_start, link_end = np.zeros((steps, tasks)), np.zeros((steps, tasks))
    arrival = np.zeros(step.parts)
    clock = np.zeros(roles)
    issued = 0.0
    free = 0.0
    for turn in range(steps):
        for role in range(roles):
            now = clock[role]
            begun = False
            for stretch in range(len(step.waits)):
                if step.waits[stretch] >= 0:
                    if turn == 0:
                        continue
                    now = max(now, arrival[step.waits[stretch]])
                if not begun:
                    begins[role, turn] = now
                    begun = True
                start[role, turn, stretch] = now
                now += step.durations[role, stretch] + extra[role, turn, stretch]
                end[role, turn, stretch] = now
            clock[role] = now
        arrival[:] = 0.0
        for task in range(tasks):
            for role in range(roles):
                issued = max(issued, end[role, turn, step.ready[task]])
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


def arrays_of(plan: Plan, costs: Costs, *, fold: bool = True) -> StepArrays | None:
    """The plan's program as arrays; None if it needs a full replay."""
    program = plan.program
    if not program.replicated or not program.ahead or any(message.roots for message in plan.messages):
        return None
    roles = find_roles(plan, costs.compute_scale, fold)
    seconds, gap = segment_seconds(plan, costs, roles), max(0.0, costs.gap_seconds)
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
    waits, slots = [-1] if gap else [], list[int]()
    waited = deque(() if program.barrier else program.settles)
    for number in range(len(program.slots)):
        while waited and program.components[waited[0]].slot == number < program.ahead:
            waits += parts[waited.popleft()]
        slots.append(len(waits))
        waits.append(-1)
    # Where nothing is waited for, the gap, and then the slots.
    durations = np.tile(np.append(update, gap)[waits], (len(seconds), 1))
    durations[:, slots] = seconds[:, [slot.segment for slot in program.slots]]
    brought = [part_of_slice.get(send.task.index, part_of_message[send.task.message]) for send in sends]
    few = sum(map(len, roles.ranks)) <= SHOWN_RANKS
    return StepArrays(
        durations=durations,
        waits=np.array(waits, np.int64),
        slots=np.array(slots, np.int64),
        parts=len(update),
        ready=np.array([slots[send.slot] for send in sends], np.int64),
        part=np.array(brought, np.int64),
        occupied=np.array([taken for taken, _ in price], np.float64),
        lag=np.array([lag for _, lag in price], np.float64),
        gap=gap,
        optimizer=update_seconds(plan, costs, estimates, program.whole) if program.whole else 0.0,
        barrier=program.barrier,
        taken=np.array(
            [costs.taken_from_compute(s.task, t) for s, (t, _) in zip(sends, price, strict=True)], np.float64
        ),
        weight=np.array([len(ranks) if few else 1 for ranks in roles.ranks], np.float64),
    )
