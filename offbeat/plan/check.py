"""Plan → nothing, or a PlanError that names the invariant it breaks.

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
    _check_order(plan)
    _check_ranks(plan)
    _check_pieces(plan)
    tasks_of: dict[int, list[Task]] = defaultdict(list)
    for task in plan.tasks:
        tasks_of[task.message].append(task)
    for message in plan.messages:
        _check_slices(message, tasks_of[message.index])
        if plan.rank is None:
            _check_exchange(plan, message, tasks_of[message.index])
        elif not any(message.variables == task.delivers for task in tasks_of[message.index]):
            raise PlanError(f"message {message.index} never reaches rank {plan.rank}")


def _check_order(plan: Plan) -> None:
    seen: set[int] = set()
    ready = {name for segment in plan.segments for name in segment.completes}
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


def _check_ranks(plan: Plan) -> None:
    world = plan.cluster.world_size
    replicas = frozenset(plan.replicas)
    known: dict[tuple[int, ...], bool] = {}
    for task in plan.tasks:
        inside = known.get(task.ranks)
        if inside is None:
            inside = known[task.ranks] = replicas.issuperset(task.ranks) and len(set(task.ranks)) == len(task.ranks)
        if not inside or max(task.ranks) >= world:
            raise PlanError(f"task {task.name} names ranks {task.ranks} that hold no replica of the {world} ranks")
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
    edges = np.array([piece.box for piece in pieces])
    start, stop = edges[:, :, 0], edges[:, :, 1]
    for row in range(len(pieces) - 1):
        common = np.minimum(stop[row], stop[row + 1 :]) - np.maximum(start[row], start[row + 1 :])
        if bool((common > 0).all(axis=1).any()):
            return True
    return False


def _check_slices(message: Message, tasks: list[Task]) -> None:
    """Every stage covers the message once; groups of ranks within a stage cover it side by side."""
    ranges: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for task in tasks:
        ranges[(task.stage, task.ranks)].append((task.start, task.stop))
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
    stages: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.start == 0:
            stages[task.stage].append(task)
    everyone = frozenset(plan.replicas)
    holds = {rank: frozenset((rank,)) for rank in plan.replicas}
    updated: frozenset[int] = frozenset()
    for _, group in sorted(stages.items()):
        for task in group:
            if task.kind == "update":
                for rank in task.ranks:
                    if holds[rank] != everyone:
                        raise PlanError(
                            f"rank {rank} updates message {message.index} with gradients of {sorted(holds[rank])} only"
                        )
                updated |= frozenset(task.ranks)
            elif updated:
                if task.kind == "broadcast" and task.root not in updated:
                    raise PlanError(f"task {task.name} sends parameters from rank {task.root}, which has none yet")
                updated |= frozenset(task.ranks)
            else:
                _merge_gradients(task, message, holds)
    if updated != everyone:
        raise PlanError(f"message {message.index} never reaches ranks {sorted(everyone - updated)}")


def _merge_gradients(task: Task, message: Message, holds: dict[int, frozenset[int]]) -> None:
    parts = [holds[rank] for rank in task.ranks]
    merged = frozenset().union(*parts)
    if sum(map(len, parts)) != len(merged):
        raise PlanError(f"task {task.name} adds a replica's gradient of message {message.index} twice")
    for rank in task.ranks:
        if task.root is None or rank == task.root:
            holds[rank] = merged
        else:
            holds[rank] = frozenset()
