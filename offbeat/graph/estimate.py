"""An operator and a device's peaks → seconds, for graphs that were never profiled."""

from offbeat.errors import OffbeatError
from offbeat.graph.model import Operator


def operator_seconds(
    operator: Operator, flops_per_second: float, bytes_per_second: float, overhead_seconds: float = 0.0
) -> float:
    """Its measured time; else the roofline, the slower of computing and moving memory, plus the launch overhead.

    Views move nothing and launch nothing: they take no time.
    """
    if operator.seconds is not None:
        return operator.seconds
    if not flops_per_second > 0:
        raise OffbeatError(f"flops_per_second must be more than 0, got {flops_per_second}")
    if not bytes_per_second > 0:
        raise OffbeatError(f"bytes_per_second must be more than 0, got {bytes_per_second}")
    if operator.kind == "view":
        return 0.0
    bytes_moved = operator.bytes_read + operator.bytes_written
    return max(operator.flops / flops_per_second, bytes_moved / bytes_per_second) + overhead_seconds
