"""ModelGraph + ClusterSpec + Strategy → Plan."""

from offbeat.plan.lower import KERNELS, lower
from offbeat.plan.model import Message, Piece, Plan, Segment, Task
from offbeat.plan.program import StepProgram

__all__ = ["KERNELS", "Message", "Piece", "Plan", "Segment", "StepProgram", "Task", "lower"]
