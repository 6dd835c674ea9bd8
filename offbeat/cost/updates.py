"""Plan → its updates: what the optimizer spends on each variable and on each message, and which come in portions."""

from collections import defaultdict

from offbeat.graph.model import ELEMENTWISE
from offbeat.plan import Plan, Task


def variable_updates(plan: Plan) -> dict[str, float]:
    """Seconds for each variable, measured or by the bytes moved; with factors, also those of multiplying them."""
    node = plan.cluster.device_of(plan.replicas[0] if plan.rank is None else plan.rank)
    updates: dict[str, float] = {}
    for operator in plan.graph.phase("optimizer"):
        moved = (operator.bytes_read + operator.bytes_written) / node.memory_bandwidth
        for name in operator.variables:
            updates[name] = operator.seconds if operator.seconds is not None else moved
    for message in plan.messages:
        if message.synchronizer == "factor_broadcast":
            for variable in map(plan.graph.variable, message.variables):
                rows = variable.factor_rows * len(plan.replicas)
                updates[variable.name] += 2 * rows * variable.elements / node.peak_flops
    return updates


def message_updates(plan: Plan) -> dict[int, float]:
    """Seconds for each message: its pieces' shares of their variables."""
    per_variable = variable_updates(plan)
    elements = {variable.name: variable.elements for variable in plan.graph.variables}
    return {
        message.index: sum(
            per_variable.get(piece.variable, 0.0) * piece.elements / elements[piece.variable]
            for piece in message.pieces
        )
        for message in plan.messages
    }


def portions(plan: Plan) -> dict[int, tuple[Task, ...]]:
    """Messages whose update can be applied slice by slice, and their slices in issue order."""
    slices: dict[int, list[Task]] = defaultdict(list)
    if plan.mode == "barrier" or plan.graph.optimizer not in ELEMENTWISE:
        return {}
    for task in plan.tasks:
        if task.stage == 0 and plan.messages[task.message].synchronizer == "all_reduce":
            slices[task.message].append(task)
    many = {index: tuple(tasks) for index, tasks in slices.items() if len(tasks) > 1}
    return {index: tasks for index, tasks in many.items() if _applied_in_order(plan, index, tasks)}


def _applied_in_order(plan: Plan, index: int, tasks: tuple[Task, ...]) -> bool:
    """Whether a message carries whole variables as they are, and its slices begin where the last has ended."""
    message = plan.messages[index]
    if message.staleness or message.asynchronous or message.encoder.name != "none":
        return False
    if any(piece.shape != plan.graph.variable(piece.variable).shape for piece in message.pieces):
        return False
    return [task.start for task in tasks] == [0, *(task.stop for task in tasks[:-1])]
