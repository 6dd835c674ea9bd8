"""Plan + Costs → the seconds of a training step, in tens of microseconds: dPRO's partial replay for searches.

Where every replica applies every update (all-reduce, gathered rows, broadcast factors), a step is a chain of compute
per role and one queue for the link, so the clock can be advanced over flat arrays without building a task graph. The
result equals `simulate(plan, costs).iteration_time`. Plans with servers, sharded updates or staleness are replayed in
full.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.cost.updates import message_updates, portions
from offbeat.graph import ModelGraph
from offbeat.plan import Plan, lower
from offbeat.search.pace_link import Floats
from offbeat.simulate import simulate
from offbeat.simulate.predict import SHOWN_RANKS, STEADY_STEPS, busy_until
from offbeat.simulate.roles import Roles, find_roles
from offbeat.simulate.step import exchange_costs, segment_seconds
from offbeat.strategy import Strategy

_INTERFERENCE_ROUNDS = 4


@dataclass(frozen=True)
class StepArrays:
    """One step of a plan as arrays. Roles are rows; times are seconds."""

    forward: Floats
    backward: Floats
    """Everything after the first micro-batch's forward: backward, recomputation, further micro-batches."""
    settle_position: NDArray[np.int64]
    """Forward segment before which a part is waited for and updated, in order."""
    settle_part: NDArray[np.int64]
    update: Floats
    """Of each part: messages that hold pieces of the same variables, or a slice of one that is applied in portions."""
    ready: NDArray[np.int64]
    """Of each task in issue order: the segment of `backward` that completes its last gradient."""
    part: NDArray[np.int64]
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

    @cached_property
    def slots(self) -> int:
        """Compute tasks of one step: the gap, forward, updates, backward, the optimizer."""
        return 2 + self.forward.shape[1] + len(self.update) + self.backward.shape[1]

    def seconds(self, steps: int = STEADY_STEPS) -> float:
        """Seconds of a step that training settles into."""
        begins = self.replay(steps)[0]
        return float((begins[:, -1] - begins[:, -2]) @ self.weight / self.weight.sum())

    def replay(self, steps: int = STEADY_STEPS) -> tuple[Floats, Floats, Floats]:
        """Start of each role's steps; end of each task in each step; seconds that interference adds to each slot."""
        roles = len(self.forward)
        extra = np.zeros((roles, steps, self.slots))
        if self.interference <= 0:
            begins, _, _, _, ends = self._run(steps, extra)
            return begins, ends, extra
        begins, start, end, link_start, ends = self._run(steps, extra)
        computing = end > start
        share = self.interference / (1 + self.interference)
        for _ in range(_INTERFERENCE_ROUNDS):
            busy = busy_until(link_start.ravel(), ends.ravel())
            extra = np.where(computing, (busy(end) - busy(start)) * share, 0.0)
            begins, start, end, link_start, ends = self._run(steps, extra)
        return begins, ends, extra

    def _run(self, steps: int, extra: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        return _replay(_Step(*(getattr(self, name) for name in _Step._fields)), steps, extra)


class _Step(NamedTuple):
    """What the kernel reads of StepArrays."""

    forward: Any
    backward: Any
    settle_position: Any
    settle_part: Any
    update: Any
    ready: Any
    part: Any
    occupied: Any
    lag: Any
    gap: float
    optimizer: float
    barrier: bool


@njit(cache=True)
def _replay(step: Any, steps: int, extra: Any) -> Any:
    """Starts of steps, starts and ends of compute slots, starts and ends of the link's tasks."""
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


@njit(cache=True)
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
    """The plan's step as arrays; None where only a full replay can tell how it runs."""
    if any(not m.replicated or m.staleness or m.asynchronous for m in plan.messages):
        return None
    ahead = [i for i, s in enumerate(plan.segments) if s.phase == "forward" and not (s.recomputed or s.microbatch)]
    behind = [i for i in range(len(plan.segments)) if i not in set(ahead)]
    if not ahead or ahead[0] != 0:
        return None
    roles = find_roles(plan, costs.compute_scale, fold)
    seconds = segment_seconds(plan, costs, roles)
    done_at = {name: place for place, i in enumerate(behind) for name in plan.segments[i].completes}
    components = plan.components
    component_of = {index: number for number, part in enumerate(components) for index in part}
    estimates = message_updates(plan)
    heads = [e for e in roles.exchanges if e.task.stage == 0 and e.task.kind != "update"]
    price = exchange_costs(plan, costs, heads)
    message_ready = [max((done_at[name] for name in m.variables), default=0) for m in plan.messages]
    settles = _settles(plan, ahead, component_of)
    parts = _Parts(plan, costs)
    size = sum(m.bytes for m in plan.messages)
    return StepArrays(
        forward=np.ascontiguousarray(seconds[:, ahead]),
        backward=np.ascontiguousarray(seconds[:, behind]),
        settle_position=np.array([at for at, number in settles for _ in parts.places[number]], np.int64),
        settle_part=np.array([part for _, number in settles for part in parts.places[number]], np.int64),
        update=np.array([_update_seconds(plan, costs, estimates, *part) for part in parts.shares], np.float64),
        ready=np.array([message_ready[e.task.message] for e in heads], np.int64),
        part=np.array(parts.brought_by([component_of[e.task.message] for e in heads]), np.int64),
        occupied=np.array([cost[0] for cost in price], np.float64),
        lag=np.array([cost[1] for cost in price], np.float64),
        gap=max(0.0, costs.gap_seconds),
        optimizer=costs.update(size, sum(estimates.values())) if plan.messages else 0.0,
        barrier=plan.mode == "barrier",
        interference=costs.interference,
        weight=_weights(roles),
    )


class _Parts:
    """What is waited for and updated at once: components, or the slices of those that are applied in portions."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        cut = portions(plan) if costs.portions else {}
        self.shares: list[tuple[tuple[int, ...], float]] = []
        """Of each part: the messages of its component, and how much of them it is."""
        self.places: list[range] = []
        """Of each component: its parts, in issue order."""
        for component in plan.components:
            elements = plan.messages[component[0]].elements
            mine = [(task.stop - task.start) / elements for task in cut.get(component[0], ())] or [1.0]
            self.places.append(range(len(self.shares), len(self.shares) + len(mine)))
            self.shares += [(component, share) for share in mine]

    def brought_by(self, components: list[int]) -> list[int]:
        """The part that each task brings, of tasks in issue order given by their components."""
        left = [list(reversed(places)) for places in self.places]
        return [left[number].pop() if len(left[number]) > 1 else left[number][0] for number in components]


def _update_seconds(
    plan: Plan, costs: Costs, estimates: dict[int, float], component: tuple[int, ...], share: float
) -> float:
    size = sum(plan.messages[index].bytes for index in component)
    return costs.update(size * share, sum(estimates[index] for index in component) * share)


def _settles(plan: Plan, ahead: list[int], component_of: dict[int, int]) -> list[tuple[int, int]]:
    """(forward position, component) in the order in which forward waits; the first segment takes what none reads."""
    holding: dict[str, list[int]] = defaultdict(list)
    for message in plan.messages:
        for name in message.variables:
            holding[name].append(component_of[message.index])
    seen: dict[int, int] = {}
    place = {segment: position for position, segment in enumerate(ahead)}
    never = len(ahead)
    for index, segment in enumerate(plan.segments):
        for name in segment.reads:
            for number in holding.get(name, ()):
                seen.setdefault(number, place.get(index, never))
    for number in dict.fromkeys(component_of.values()):
        seen.setdefault(number, 0)
    return sorted(((position, number) for number, position in seen.items() if position < never), key=lambda s: s[0])


def _weights(roles: Roles) -> Floats:
    everyone = sum(len(ranks) for ranks in roles.ranks)
    shown = everyone <= SHOWN_RANKS
    return np.array([len(ranks) if shown else 1 for ranks in roles.ranks], np.float64)


def step_seconds(plan: Plan, costs: Costs, *, fold: bool = True, partial: bool = True) -> float:
    """Seconds of a step in the steady state: by arrays where that is exact, else (or if not `partial`) by replay."""
    arrays = arrays_of(plan, costs, fold=fold) if partial else None
    if arrays is not None:
        return arrays.seconds()
    return simulate(plan, costs, fold=fold, memory=False).iteration_time


@dataclass(frozen=True)
class Oracle:
    """Strategies of one model on one cluster → seconds."""

    graph: ModelGraph
    cluster: ClusterSpec
    costs: Costs
    symmetry: bool = True
    """Ranks that behave alike are replayed once."""
    partial_replay: bool = True
    """Where it is exact, a step is evaluated on arrays instead of a task graph."""

    def plan(self, strategy: Strategy) -> Plan:
        return lower(self.graph, self.cluster, strategy)

    def seconds(self, strategy: Strategy) -> float:
        """Step time of a strategy."""
        return self.plan_seconds(self.plan(strategy))

    def plan_seconds(self, plan: Plan) -> float:
        return step_seconds(plan, self.costs, fold=self.symmetry, partial=self.partial_replay)
