"""Check the invariants of a plan; a PlanError names the one that is violated.

A plan is right when: tasks depend only on earlier ones; every gradient element is in one message and in one slice of
each of its stages; the updater of a message has every replica's gradient exactly once and every replica gets the
result; no two tasks have the same index; and no rank lies outside the cluster.
"""

from collections import defaultdict

import numpy as np

from offbeat.errors import PlanError
from offbeat.plan.model import Message, Piece, Plan, Task


def check(plan: Plan) -> None:
    """Raises PlanError unless the plan keeps every invariant. A rank's part is checked as far as that rank can see."""
    _check_tasks(plan)
    _check_pieces(plan)
    tasks_of: dict[int, list[Task]] = defaultdict(list)
    for task in plan.tasks:
        tasks_of[task.message].append(task)
    for message in plan.messages:
        if plan.rank not in message.roots or plan.rank in plan.replicas:
            _check_slices(message, tasks_of[message.index])
        if plan.rank is None:
            _check_exchange(plan, message, tasks_of[message.index])
        elif plan.rank in plan.replicas and not any(
            message.variables == task.delivers for task in tasks_of[message.index]
        ):
            raise PlanError(f"message {message.index} never reaches rank {plan.rank}")


def _check_tasks(plan: Plan) -> None:
    """Each task comes after what it waits for, and its ranks hold replicas or own messages."""
    seen: set[int] = set()
    ready = {name for segment in plan.segments for name in segment.completes}
    world, known = plan.cluster.world_size, frozenset(plan.participants)
    fits = {
        ranks: known.issuperset(ranks) and len(set(ranks)) == len(ranks) and max(ranks) < world
        for ranks in {task.ranks for task in plan.tasks}
    }
    for task in plan.tasks:
        if task.index in seen:
            raise PlanError(f"task {task.name} has the index {task.index} of a task before it")
        for index in task.after:
            if index not in seen:
                raise PlanError(f"task {task.name} waits for task {index}, which is not issued before it")
        for name in task.waits_for:
            if name not in ready:
                raise PlanError(f"task {task.name} waits for the gradient of {name!r}, which no segment completes")
        seen.add(task.index)
        if not fits[task.ranks]:
            raise PlanError(f"task {task.name} names ranks {task.ranks} that hold no replica and own no message")
        if task.root is not None and task.root not in task.ranks:
            raise PlanError(f"task {task.name} has root {task.root} outside its ranks {task.ranks}")


def _check_pieces(plan: Plan) -> None:
    boxes: dict[str, list[Piece]] = defaultdict(list)
    for message in plan.messages:
        for piece in message.pieces:
            boxes[piece.variable].append(piece)
    for variable in plan.graph.gradient_order:
        pieces = boxes.pop(variable.name, [])
        if sum(piece.elements for piece in pieces) != variable.elements or _overlap(pieces):
            raise PlanError(f"the shards of {variable.name!r} do not cover its {variable.elements} elements once")
        for piece in pieces:
            if any(stop > length for (_, stop), length in zip(piece.box, variable.shape, strict=True)):
                raise PlanError(f"a shard of {variable.name!r} lies outside its shape {variable.shape}")
    if boxes:
        raise PlanError(f"messages carry {sorted(boxes)}, which get no gradient")


def _overlap(pieces: list[Piece]) -> bool:
    if len(pieces) < 2 or not pieces[0].box:
        return len(pieces) > 1
    start, stop = np.moveaxis(np.array([piece.box for piece in pieces]), 2, 0)
    return any(
        (np.minimum(stop[row], stop[row + 1 :]) > np.maximum(start[row], start[row + 1 :])).all(axis=1).any()
        for row in range(len(pieces) - 1)
    )


def _check_slices(message: Message, tasks: list[Task]) -> None:
    """Every stage covers the message once; groups of ranks within a stage cover it side by side."""
    ranges: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for task in tasks:
        # Each slice of a relayed message has a root of its own choice.
        ranges[(task.stage, () if task.kind == "relay" else task.ranks)].append((task.start, task.stop))
    for (stage, _), spans in ranges.items():
        reached = 0
        for start, stop in sorted(spans):
            if start != reached or stop <= start:
                raise PlanError(f"stage {stage} of message {message.index} does not cover it once: {sorted(spans)}")
            reached = stop
        if reached != message.elements:
            raise PlanError(f"stage {stage} of message {message.index} covers {reached} of {message.elements} elements")


def _check_exchange(plan: Plan, message: Message, tasks: list[Task]) -> None:
    """Follows each replica's gradient through the stages to the updaters, and the result back to the replicas."""
    everyone = frozenset(plan.replicas)
    holds = {rank: everyone & {rank} for rank in plan.participants}
    updated: frozenset[int] = frozenset()
    for task in sorted((task for task in tasks if task.start == 0), key=lambda task: task.stage):
        if not updated and task.kind != "update":
            parts = [holds[rank] for rank in task.ranks]
            merged = frozenset().union(*parts)
            if sum(map(len, parts)) != len(merged):
                raise PlanError(f"task {task.name} adds a replica's gradient of message {message.index} twice")
            for rank in task.ranks:
                holds[rank] = merged if task.kind == "relay" or task.root in (None, rank) else frozenset()
            continue
        for rank in task.ranks if task.kind == "update" else ():
            if holds[rank] != everyone:
                senders = sorted(holds[rank])
                raise PlanError(f"rank {rank} updates message {message.index} with gradients of {senders} only")
        if task.kind == "broadcast" and task.root not in updated:
            raise PlanError(f"task {task.name} sends parameters from rank {task.root}, which has none yet")
        updated |= frozenset(task.ranks)
    if not updated >= everyone:
        raise PlanError(f"message {message.index} never reaches ranks {sorted(everyone - updated)}")
