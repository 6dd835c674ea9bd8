"""Predict the steady state of training by replay, as a Timeline.

Some steps are replayed one after another, because updates may reach into the next step; the last is what training
settles into. Computing that is slowed down by concurrent communication is found by repetition: each round lengthens the
segments by what overlapped in the round before.
"""

from collections.abc import Callable

import numpy as np

from offbeat.cost.measured import Costs
from offbeat.cost.memory import peak_memory
from offbeat.errors import OffbeatError
from offbeat.plan import Plan
from offbeat.simulate.expand import ExpandedSteps
from offbeat.simulate.kernel import Replay, replay
from offbeat.simulate.roles import find_roles
from offbeat.simulate.step import Steps
from offbeat.simulate.taskgraph import Floats
from offbeat.timeline import COMPUTE, KINDS, NETWORK, Timeline

STEADY_STEPS = 5
BARRIER_STEPS, DEFERRED_STEPS = 2, 3
"""Steps that are expanded: with a barrier all are equal, otherwise the first one has nothing to wait for."""
SHOWN_STEPS = 2
"""The last steps, which the timeline shows."""
SHOWN_RANKS = 64
"""With more ranks, only one of each role is shown."""
INTERFERENCE_ROUNDS = 4
SHORTEST_SECONDS = 1e-9


def simulate(
    plan: Plan,
    costs: Costs | None = None,
    *,
    steps: int | None = None,
    fold: bool = True,
    expand: bool = False,
    memory: bool = True,
) -> Timeline:
    """Predicts how a plan would run. The plan of one rank represents a job in which all ranks do the same.

    `costs` are measured in a job; without them compute comes from the graph and the device specifications, and
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
        raise OffbeatError(f"the plan of rank {plan.rank} alone cannot be replayed: {why}; lower it for all ranks")
    costs = costs or Costs()
    roles = find_roles(plan, costs.compute_scale, fold and not expand)
    built = (ExpandedSteps if expand else Steps)(plan, costs, roles, steps)
    return _timeline(built, _replay_with_interference(built), steps, memory)


def _replay_with_interference(built: Steps) -> Replay:
    result = replay(built.graph())
    if not built.costs.slows_compute:
        return result
    base, device, taken = result.graph.duration_seconds, built.device, built.taken_from_compute()
    # Devices come in pairs: a role computes on an even one and sends on the odd one behind it.
    computing = (device >= 0) & (device % 2 == 0)
    for _ in range(INTERFERENCE_ROUNDS):
        overlap = np.zeros(len(base))
        for role in np.unique(device[computing] // 2):
            link = device == 2 * role + 1
            mine = device == 2 * role
            until = taken_until(result.start[link], result.end[link], taken[link])
            overlap[mine] = until(result.end[mine]) - until(result.start[mine])
        slower = base + np.where(computing, overlap, 0.0)
        result = replay(built.graph(slower))
    return result


def taken_until(start: Floats, end: Floats, taken: Floats) -> Callable[[Floats], Floats]:
    """A function of time: seconds that have been taken from computing up to it, `taken` evenly over each interval."""
    times = np.concatenate((start, end))
    if not len(times):
        return lambda at: np.zeros(np.shape(at))
    # An interval without a length is stretched, so that it takes what it takes.
    rate = taken / np.maximum(end - start, SHORTEST_SECONDS)
    times = np.concatenate((start, np.maximum(end, start + SHORTEST_SECONDS)))
    order = np.argsort(times, kind="stable")
    times, rates = times[order], np.cumsum(np.concatenate((rate, -rate))[order])
    total = np.append(0.0, np.cumsum(rates[:-1] * np.diff(times)))
    return lambda at: np.interp(at, times, total)


def _timeline(built: Steps, result: Replay, steps: int, memory: bool) -> Timeline:
    roles, count, shown = built.roles, len(built.tasks), steps - SHOWN_STEPS
    start, end = built.started(result), result.end[:count]
    begins = start[built.first]
    zero = float(begins[:, shown].min())
    kind = np.array([-1 if task.kind is None else KINDS.index(task.kind) for task in built.tasks], np.int8)
    step = built.column("step", np.int32)
    spans = np.flatnonzero((kind >= 0) & (step >= shown))
    names = {name: number for number, name in enumerate(dict.fromkeys(task.name for task in built.tasks))}
    gate = built.column("gate")[spans]
    role = built.column("role")[spans]
    columns = {
        "start": start[spans] - zero,
        "end": end[spans] - zero,
        "track": (kind[spans] == KINDS.index("communication")).astype(np.int32),
        "kind": kind[spans],
        "name": np.array([names[built.tasks[i].name] for i in spans], np.int32),
        "step": step[spans] - shown,
        "queued": np.where(gate >= 0, end[gate] - zero, np.nan),
        "bytes": built.column("bytes", np.int64)[spans],
        "task": built.column("exchange", np.int32)[spans],
    }
    marks = np.column_stack((begins[:, shown:], end[built.host])) - zero
    # The last step has no successor to overlap with, so its end says nothing: repeat the step before it.
    marks[:, -1] = 2 * marks[:, -2] - marks[:, -3]
    everyone = sum(map(len, roles.ranks))
    shown_of = (ranks if everyone <= SHOWN_RANKS else ranks[:1] for ranks in roles.ranks)
    shown_ranks = dict(sorted((rank, number) for number, ranks in enumerate(shown_of) for rank in ranks))
    # Each shown rank has a copy of its role's spans.
    order = np.argsort(role, kind="stable")
    edges = np.searchsorted(role[order], np.arange(len(roles.ranks) + 1))
    picked = [order[edges[number] : edges[number + 1]] for number in shown_ranks.values()]
    index, copies = np.concatenate(picked), np.repeat(np.array(list(shown_ranks), np.int32), list(map(len, picked)))
    # The path stays with the ranks that stand for their roles.
    place = np.full(len(result.start), -1)
    standing = np.flatnonzero(np.isin(copies, roles.representatives))
    place[spans[index[standing]]] = standing
    path = place[result.critical_path()]
    peaks = [peak_memory(built.plan, rank).total for rank in roles.representatives] if memory else []
    alike = f"{everyone} ranks in {len(roles.ranks)} roles: one rank of each is shown"
    return Timeline(
        names=tuple(names),
        tracks=(COMPUTE, NETWORK),
        rank=copies,
        marks=marks[list(shown_ranks.values())],
        peak_memory=tuple(peaks[number] for number in shown_ranks.values()) if memory else (),
        critical=path[path >= 0],
        source="predicted",
        notes=(alike,) if len(shown_ranks) < everyone else (),
        **{name: column[index] for name, column in columns.items()},
    )
