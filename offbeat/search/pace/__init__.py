"""Gradients with ready times and tails → PACE's preemptive schedule, fusion and strategy."""

from offbeat.search.pace.fusion import search_fusion
from offbeat.search.pace.schedule import LinkSchedule, preemptive_schedule

__all__ = ["LinkSchedule", "preemptive_schedule", "search_fusion"]
