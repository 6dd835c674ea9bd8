"""Fold ranks that behave alike into roles, with the collectives between them.

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
    """A collective between roles: one for all groups of ranks that do the same at the same place."""

    task: Task
    """The first of them."""
    same: tuple[Task, ...]
    """All of them."""
    roles: tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """The role of each rank, and the exchanges of each role."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each role; the first represents them."""
    exchanges: tuple[Exchange, ...]
    """In the plan's order, updates included."""

    @property
    def representatives(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.ranks)


def find_roles(plan: Plan, compute_scale: Mapping[int, float], fold: bool = True) -> Roles:
    """The roles of a plan; with `fold` off every rank is its own."""
    ranks = plan.participants if plan.rank is None else (plan.rank,)
    role_of = _fold(plan, ranks, compute_scale) if fold else _number({rank: rank for rank in ranks})
    members: dict[int, list[int]] = defaultdict(list)
    for rank, role in role_of.items():
        members[role].append(rank)
    grouped: dict[tuple[tuple[int, ...], int, int, int, str, int], list[Task]] = defaultdict(list)
    for task in plan.tasks:
        if len(task.ranks) == len(plan.participants):
            taking_part = tuple(members)
        else:
            taking_part = tuple(sorted({role_of[rank] for rank in task.ranks if rank in role_of}))
        if taking_part:
            grouped[taking_part, task.message, task.stage, task.start, task.kind, len(task.ranks)].append(task)
    exchanges = tuple(Exchange(tasks[0], tuple(tasks), roles) for (roles, *_), tasks in grouped.items())
    return Roles(tuple(tuple(ranks) for ranks in members.values()), exchanges)


def _fold(plan: Plan, ranks: tuple[int, ...], compute_scale: Mapping[int, float]) -> dict[int, int]:
    """Roles by speed of computing and of the link, split by their parts in collectives and by their partners' roles
    until no role splits any more."""
    speeds = [(node.peak_flops, node.memory_bandwidth, node.bandwidth) for node in plan.cluster.nodes]
    nodes = plan.cluster.node_of_rank
    role_of: dict[int, int] = {}
    training = frozenset(plan.replicas)
    finer = _number({rank: (speeds[nodes[rank]], compute_scale.get(rank, 1.0), rank in training) for rank in ranks})
    while finer != role_of:
        role_of = finer
        parts: dict[int, list[Hashable]] = {rank: [role] for rank, role in role_of.items()}
        for task in plan.tasks:
            key = (task.message, task.stage, task.start, task.kind)
            if len(task.ranks) < len(plan.participants):
                roles = tuple(sorted(role_of.get(rank, -1) for rank in task.ranks))
                for rank in task.ranks:
                    if rank in parts:
                        parts[rank].append((*key, roles, rank == task.root))
            elif task.root is not None and task.root in parts:
                parts[task.root].append(key)
        finer = _number({rank: tuple(part) for rank, part in parts.items()})
    return role_of


def _number(signatures: Mapping[int, Hashable]) -> dict[int, int]:
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(signature, len(numbers)) for rank, signature in signatures.items()}
