"""An operator and a device's peaks → seconds, for graphs that were never profiled."""

from offbeat.graph.model import Operator


def operator_seconds(operator: Operator, flops_per_second: float, bytes_per_second: float) -> float:
    """Its measured time; else the roofline, the slower of computing and moving memory, or 0 for a view."""
    if operator.seconds is not None:
        return operator.seconds
    if operator.kind == "view":
        return 0.0
    bytes_moved = operator.bytes_read + operator.bytes_written
    return max(operator.flops / flops_per_second, bytes_moved / bytes_per_second)
