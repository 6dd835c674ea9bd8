"""PACE's preemptive schedule, fusion and strategy, from ready times and tails of gradients."""

from offbeat.search.pace.fusion import search_fusion
from offbeat.search.pace.paths import Jobs, jobs_of
from offbeat.search.pace.schedule import LinkSchedule, preemptive_schedule

__all__ = ["Jobs", "LinkSchedule", "jobs_of", "preemptive_schedule", "search_fusion"]
