"""Lower a model, a cluster and a strategy to a Plan."""

from offbeat.graph.coarsen import Segment
from offbeat.plan.lower import KERNELS, lower
from offbeat.plan.model import Message, Piece, Plan, Task
from offbeat.plan.program import StepProgram

__all__ = ["KERNELS", "Message", "Piece", "Plan", "Segment", "StepProgram", "Task", "lower"]
