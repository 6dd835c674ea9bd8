"""Schedule: the order of messages and where they are cut (PACE), and whether the next forward waits per module."""

from collections.abc import Iterator
from dataclasses import replace

from offbeat.search.pace_strategy import pace_schedule
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Strategy

_PART_BYTES = (512 * 2**10, 2 * 2**20, 8 * 2**20)
"""Sizes at which a slice may end, beside PACE's own cuts."""


@register_pass("schedule", order=10)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """PACE's fusion and schedule, its schedule of the candidate's groups, even parts of some sizes, the other mode."""
    chain = problem.chain(candidate)
    if chain is None:
        return
    strategy = candidate.strategy
    state = chain.state_of(strategy)
    if problem.mode != "barrier":
        for groups in (None, chain.groups(state.borders)):
            yield chain.explicit(*pace_schedule(chain, groups), strategy)
        for size in _PART_BYTES:
            cut = replace(state, parts=chain.even_parts(state.borders, size), barrier=False)
            yield chain.strategy(cut, strategy)
    if problem.mode == "auto":
        yield chain.strategy(replace(state, barrier=not state.barrier), strategy)
