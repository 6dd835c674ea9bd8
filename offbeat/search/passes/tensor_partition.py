"""Tensor partition: into how many parts each message may be cut (dPRO's k*, by grid search with replay).

Cutting costs overhead and gains what an urgent message no longer waits for, so k* is found on the whole step.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from offbeat.search.chain import Chain, State
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Strategy

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ROUNDING = 1e-12


@register_pass("tensor_partition", order=30)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """The candidate's groups with the best number of parts each, from uncut ones."""
    chain = problem.chain(candidate)
    if chain is not None:
        state = chain.state_of(candidate.strategy)
        yield chain.strategy(partition(chain, state, candidate, problem), candidate.strategy)


def partition(chain: Chain, state: State, candidate: Candidate, problem: Problem) -> State:
    """One group after the other, the largest first, until no number changes."""
    starts = np.flatnonzero(state.borders)
    sizes = np.add.reduceat(chain.wire, starts)
    heads = [int(starts[i]) for i in np.argsort(-sizes, kind="stable") if chain.sliceable[starts[i]]]
    best = problem.state_seconds(chain, state, candidate)
    changed = True
    while changed and not problem.expired:
        changed = False
        for head in heads:
            for count in GRID:
                if count == state.parts[head] or problem.expired:
                    continue
                parts = state.parts.copy()
                parts[head] = count
                trial = replace(state, parts=parts)
                seconds = problem.state_seconds(chain, trial, candidate)
                if seconds < best * (1 - _ROUNDING):
                    state, best, changed = trial, seconds, True
    return state
