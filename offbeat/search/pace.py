"""Ready times, durations and tails of the gradients → the order and the slices in which one link carries them (PACE).

A step runs from the start of backward to the end of the next forward. All-reduce i is ready when backward has made its
gradient (PACE's z_{u_i}), holds the link for g_i seconds (its equation 1), and once it is complete, `tail` seconds
of computation remain: the longest path L_i from its first reader to the end (its theorem 1). The step then takes

    makespan = max_i (completion_i + tail_i)                                             (PACE's equation 10)

PACE cuts time into slots and solves a linear programme (`pace_lp`, kept as the reference). The problem is the classic
one machine, preemption, release times and tails: 1 | pmtn, r_i | L_max with due dates -tail_i. Always running the ready
job with the longest tail (Jackson's preemptive rule) is optimal for it, in continuous time and in O(N log N), so that
is what `preemptive_schedule` does. Cuts fall where a more urgent gradient becomes ready, which makes PACE's uneven
slices.

With an overhead for each slice the problem contains the non-preemptive one, which is strongly NP-hard. There the
schedule is a heuristic: a search over which jobs may cut a running slice, never worse than cutting nothing.

Fusion (PACE's section V) is in `fusion`, the schedulers PACE is compared with in `pace_baselines`, and the way from
a ModelGraph to these arrays in `pace_jobs`; their public names are here too.
"""

from offbeat.search.fusion import balanced_fusion, balanced_search, search_fusion
from offbeat.search.pace_baselines import bytescheduler_schedule, fifo_schedule, horovod_fusion, tictac_schedule
from offbeat.search.pace_jobs import Jobs, jobs_of
from offbeat.search.pace_link import CUT_BUDGET, Schedule, Values, best_served, checked, checked_seconds, schedule_of

__all__ = [
    "Jobs",
    "Schedule",
    "balanced_fusion",
    "balanced_search",
    "bytescheduler_schedule",
    "fifo_schedule",
    "horovod_fusion",
    "jobs_of",
    "preemptive_schedule",
    "search_fusion",
    "tictac_schedule",
]


def preemptive_schedule(
    ready: Values,
    duration: Values,
    tail: Values,
    overhead: float = 0.0,
    *,
    minimum_slice: float | None = None,
) -> Schedule:
    """The schedule of least makespan for jobs that may be cut; all arguments in seconds.

    Exact, up to rounding, if `overhead` and `minimum_slice` are 0. Otherwise a heuristic: each slice first costs
    `overhead` and then carries at least `minimum_slice` seconds of its job, unless the whole job is shorter. None takes
    the overhead as the minimum, so that a slice that was cut is never mostly overhead. The makespan is at most that of
    the longest-tail-first and the first-in-first-out schedules without cuts. No single cut can be taken back without a
    longer step or another cut (up to some thousand jobs; beyond, the search is cut short). Ties go to the job that is
    ready first, then to the lower index.
    """
    readiness = checked("ready", ready)
    seconds = checked("duration", duration, len(readiness))
    tails = checked("tail", tail, len(readiness))
    cost = checked_seconds("overhead", overhead)
    minimum = cost if minimum_slice is None else checked_seconds("minimum_slice", minimum_slice)
    trials = CUT_BUDGET // max(1, len(readiness))
    return schedule_of(best_served(readiness, seconds, tails, cost, minimum, 0.0, True, trials), tails, None)
