"""Plan + Costs → Timeline: the steady state of training, by replay.

Some steps are replayed one after another, because updates may reach into the next step; the last is what training
settles into. Computing that is slowed down by concurrent communication is found by repetition: each round lengthens the
segments by what overlapped in the round before.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from offbeat.cost.measured import Costs
from offbeat.errors import OffbeatError
from offbeat.plan import Plan
from offbeat.simulate.kernel import Replay, replay
from offbeat.simulate.roles import Roles, find_roles
from offbeat.simulate.step import Moments, Steps, build_steps
from offbeat.simulate.taskgraph import TaskGraph
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Timeline

STEADY_STEPS = 5
BARRIER_STEPS, DEFERRED_STEPS = 2, 3
"""Steps that are expanded: with a barrier all are alike, else the first one has nothing to wait for."""
SHOWN_STEPS = 2
"""The last steps, which the timeline shows."""
SHOWN_RANKS = 64
"""With more ranks only one of each role is shown."""
_ROUNDS = 4


def simulate(
    plan: Plan,
    costs: Costs | None = None,
    *,
    steps: int | None = None,
    fold: bool = True,
    expand: bool = False,
    memory: bool = True,
) -> Timeline:
    """How a plan would run. The plan of one rank stands for a job in which all ranks do the same.

    `costs` hold what was measured of a job; without them compute comes from the graph and the devices' figures, and
    communication from the cluster's links. `expand` replays every message that collectives are made of, between all
    ranks, which takes longer; else a collective is one task on each rank's link. `fold` replays ranks that do the same
    once.
    """
    if steps is None:
        steps = STEADY_STEPS if not expand else BARRIER_STEPS if plan.mode == "barrier" else DEFERRED_STEPS
    if steps < SHOWN_STEPS:
        raise OffbeatError(f"steps: {steps} is less than {SHOWN_STEPS}, which a steady state needs")
    if plan.rank is not None and (expand or any(task.root is not None for task in plan.tasks)):
        why = "all ranks are expanded" if expand else "its tasks have roots"
        raise OffbeatError(f"the plan of rank {plan.rank} alone cannot be replayed: {why}; lower it for all")
    costs = costs or Costs()
    if expand:
        from offbeat.simulate.expand import expand_steps

        roles = find_roles(plan, costs.compute_scale, fold=False)
        expanded = expand_steps(plan, costs, roles, steps)
        result = _replay_with_interference(expanded.graph, expanded.device, costs.interference)
        return _timeline(plan, roles, expanded.steps, expanded.summary(result), steps, memory)
    roles = find_roles(plan, costs.compute_scale, fold)
    built = build_steps(plan, costs, roles, steps)
    device, count = np.array(built.tasks.device), len(roles.ranks)
    # Behind the roles' own pairs come the links away from them, where directions are told apart.
    device = np.where(device >= 2 * count, 2 * (device // 2 % count) + 1, device)
    result = _replay_with_interference(built.tasks.graph, device, costs.interference)
    return _timeline(plan, roles, built, Moments(result.start, result.end, result.critical_path()), steps, memory)


def _replay_with_interference(
    graph: Callable[[NDArray[np.float64] | None], TaskGraph], device: NDArray[np.integer], interference: float
) -> Replay:
    result = replay(graph(None))
    if interference <= 0:
        return result
    base = result.graph.duration_seconds
    # Devices come in pairs: a role computes on an even one and sends on the odd one behind it.
    computing = (device >= 0) & (device % 2 == 0)
    for _ in range(_ROUNDS):
        overlap = np.zeros(len(base))
        for role in np.unique(device[computing] // 2):
            link = device == 2 * role + 1
            mine = device == 2 * role
            busy = busy_until(result.start[link], result.end[link])
            overlap[mine] = busy(result.end[mine]) - busy(result.start[mine])
        slower = base + np.where(computing, overlap * interference / (1 + interference), 0.0)
        result = replay(graph(slower))
    return result


def busy_until(
    start: NDArray[np.float64], end: NDArray[np.float64]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A function of time: seconds up to it in which at least one of the intervals was open."""
    if not len(start):
        return lambda at: np.zeros(np.shape(at))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    begins = start[opens]
    ends = reach[np.concatenate((np.flatnonzero(opens)[1:] - 1, [len(start) - 1]))]
    times = np.column_stack((begins, ends)).ravel()
    filled = np.concatenate(([0.0], np.cumsum(ends - begins)))
    values = np.column_stack((filled[:-1], filled[1:])).ravel()
    return lambda at: np.interp(at, times, values)


def _timeline(plan: Plan, roles: Roles, built: Steps, result: Moments, steps: int, memory: bool) -> Timeline:
    tasks = built.tasks
    begins = result.start[built.first]
    finishes = result.end[built.last]
    shown = steps - SHOWN_STEPS
    zero = float(begins[:, shown].min())
    kind = np.array([-1 if kind is None else KINDS.index(kind) for kind in tasks.kind], np.int8)
    step = np.array(tasks.step, np.int32)
    spans = np.flatnonzero((kind >= 0) & (step >= shown))
    position_of = np.full(len(kind), -1)
    position_of[spans] = np.arange(len(spans))
    path = position_of[result.path]
    names = {name: number for number, name in enumerate(dict.fromkeys(tasks.name))}
    gate = np.array(tasks.gate)[spans]
    queued = np.where(gate >= 0, result.end[gate] - zero, np.nan)
    role = np.array(tasks.role)[spans]
    columns = {
        "start": result.start[spans] - zero,
        "end": result.end[spans] - zero,
        "track": (kind[spans] == KINDS.index("communication")).astype(np.int32),
        "kind": kind[spans],
        "name": np.array([names[tasks.name[i]] for i in spans], np.int32),
        "step": step[spans] - shown,
        "queued": queued,
        "bytes": np.array(tasks.bytes, np.int64)[spans],
        "task": np.array(tasks.exchange, np.int32)[spans],
    }
    marks = np.column_stack((begins[:, shown:], finishes)) - zero
    # The last step has no successor to overlap with, so its end says nothing: repeat the step before it.
    marks[:, -1] = 2 * marks[:, -2] - marks[:, -3]
    rank_of_role = np.array([ranks[0] for ranks in roles.ranks])
    notes: tuple[str, ...] = ()
    everyone = sum(len(ranks) for ranks in roles.ranks)
    if everyone > len(roles.ranks):
        if everyone <= SHOWN_RANKS:
            return _unfolded(plan, roles, columns, role, marks, tuple(names), path[path >= 0], memory)
        notes = (f"{everyone} ranks in {len(roles.ranks)} roles: one rank of each is shown",)
    return Timeline(
        names=tuple(names),
        tracks=(COMPUTE, NETWORK),
        rank=rank_of_role[role].astype(np.int32),
        marks=marks,
        peak_memory=_peaks(plan, rank_of_role.tolist()) if memory else (),
        critical=path[path >= 0],
        source="predicted",
        notes=notes,
        **columns,
    )


def _unfolded(
    plan: Plan,
    roles: Roles,
    columns: dict[str, NDArray],
    role: NDArray[np.int64],
    marks: NDArray[np.float64],
    names: tuple[str, ...],
    critical: NDArray[np.int64],
    memory: bool,
) -> Timeline:
    """Every rank with the spans of its role."""
    ranks = np.array([rank for members in roles.ranks for rank in members])
    role_of = np.array([number for number, members in enumerate(roles.ranks) for _ in members])
    order = np.argsort(ranks)
    ranks, role_of = ranks[order], role_of[order]
    picked = [np.flatnonzero(role == number) for number in role_of]
    index = np.concatenate(picked)
    copies = np.repeat(ranks, [len(part) for part in picked])
    # The path stays with the ranks that stand for their roles.
    place = np.full(len(role), -1)
    firsts = {members[0] for members in roles.ranks}
    standing = np.flatnonzero(np.isin(copies, list(firsts)))
    place[index[standing]] = standing
    peaks = (
        dict(zip((m[0] for m in roles.ranks), _peaks(plan, [m[0] for m in roles.ranks]), strict=True)) if memory else {}
    )
    return Timeline(
        names=names,
        tracks=(COMPUTE, NETWORK),
        rank=copies.astype(np.int32),
        marks=marks[role_of],
        peak_memory=tuple(peaks[roles.ranks[number][0]] for number in role_of) if memory else (),
        critical=place[critical],
        source="predicted",
        **{name: column[index] for name, column in columns.items()},  # type: ignore[arg-type]
    )


def _peaks(plan: Plan, ranks: list[int]) -> tuple[int, ...]:
    from offbeat.cost.memory import peak_memory

    return tuple(peak_memory(plan, rank).total for rank in ranks)
