"""Plan → roles: ranks that behave alike, and the collectives between them.

Two ranks have the same role if they compute and send at the same speed and take the same part in collectives whose
other participants have the same roles in turn (the coarsest equitable partition that starts from speed). One
representative of each role then stands for all its ranks, so that replaying 10,000 equal workers costs what one does.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from offbeat.plan import Plan, Task


@dataclass(frozen=True)
class Exchange:
    """A collective as the roles see it: one for all the groups of ranks that do the same at the same place."""

    task: Task
    """The first of them."""
    same: tuple[Task, ...]
    """All of them."""
    roles: tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """Which role each rank has, and what each role takes part in."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each role; the first stands for them."""
    exchanges: tuple[Exchange, ...]
    """In the plan's order, updates included."""

    @property
    def representatives(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.ranks)


def find_roles(plan: Plan, compute_scale: Mapping[int, float], fold: bool = True) -> Roles:
    """The roles of a plan; with `fold` off every rank is its own."""
    replicas = plan.replicas if plan.rank is None else (plan.rank,)
    if fold:
        role_of = _refine(plan, _start(plan, replicas, compute_scale))
    else:
        role_of = {rank: number for number, rank in enumerate(replicas)}
    members: dict[int, list[int]] = defaultdict(list)
    for rank, role in role_of.items():
        members[role].append(rank)
    return Roles(tuple(tuple(ranks) for ranks in members.values()), _exchanges(plan, role_of))


def _start(plan: Plan, replicas: tuple[int, ...], compute_scale: Mapping[int, float]) -> dict[int, int]:
    """By speed of computing and of the link, and by what makes a rank stand out in the collectives it takes part in."""
    marks: dict[int, list[Hashable]] = {rank: [] for rank in replicas}
    for task in plan.tasks:
        key = (task.message, task.stage, task.start, task.kind)
        if len(task.ranks) < len(plan.replicas):
            for rank in task.ranks:
                if rank in marks:
                    marks[rank].append((*key, len(task.ranks), rank == task.root))
        elif task.root is not None and task.root in marks:
            marks[task.root].append(key)
    speeds = [(node.peak_flops, node.memory_bandwidth, node.bandwidth) for node in plan.cluster.nodes]
    nodes = plan.cluster.node_of_rank
    return _number({r: (speeds[nodes[r]], compute_scale.get(r, 1.0), tuple(marks[r])) for r in replicas})


def _refine(plan: Plan, role_of: dict[int, int]) -> dict[int, int]:
    """Splits roles whose partners differ in role, until none does."""
    partial = [task for task in plan.tasks if 1 < len(task.ranks) < len(plan.replicas)]
    while partial:
        partners: dict[int, list[Hashable]] = {rank: [] for rank in role_of}
        for task in partial:
            roles = tuple(sorted(role_of.get(rank, -1) for rank in task.ranks))
            for rank in task.ranks:
                if rank in partners:
                    partners[rank].append(roles)
        finer = _number({rank: (role, tuple(partners[rank])) for rank, role in role_of.items()})
        if max(finer.values()) == max(role_of.values()):
            break
        role_of = finer
    return role_of


def _number(signatures: Mapping[int, Hashable]) -> dict[int, int]:
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(signature, len(numbers)) for rank, signature in signatures.items()}


def _exchanges(plan: Plan, role_of: Mapping[int, int]) -> tuple[Exchange, ...]:
    everyone = tuple(dict.fromkeys(role_of.values()))
    grouped: dict[tuple[tuple[int, ...], int, int, int, str, int], list[Task]] = defaultdict(list)
    for task in plan.tasks:
        if len(task.ranks) == len(plan.replicas):
            roles = everyone
        else:
            roles = tuple(sorted({role_of[rank] for rank in task.ranks if rank in role_of}))
        if roles:
            grouped[roles, task.message, task.stage, task.start, task.kind, len(task.ranks)].append(task)
    return tuple(Exchange(tasks[0], tuple(tasks), roles) for (roles, *_), tasks in grouped.items())
