"""Plan → seconds of the updates: what the optimizer spends on each variable and on each message."""

from offbeat.plan import Plan


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
