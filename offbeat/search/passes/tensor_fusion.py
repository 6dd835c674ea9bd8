"""Tensor fusion: which neighbours share a message (dPRO's theorem 2, then any border that replay says is wrong).

Theorem 2: the tensors q_{n-1} and q_n are better fused if q_{n-1} ends later than p_n + t_sync(both) - t_sync(q_n), p_n
being the compute that completes q_n. The theorem looks at one pair; what it proposes is kept if the step does not
become longer.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from offbeat.search.chain import Chain, State
from offbeat.search.passes.problem import Candidate, Problem
from offbeat.search.passes.registry import register_pass
from offbeat.strategy import Strategy

_ROUNDING = 1e-12


@register_pass("tensor_fusion", order=20)
def propose(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """From the candidate's groups, and from none."""
    chain = problem.chain(candidate)
    if chain is None:
        return
    current = chain.state_of(candidate.strategy)
    alone = chain.state(barrier=current.barrier)
    for start in (current, alone):
        yield chain.strategy(fuse(chain, start, candidate, problem), candidate.strategy)


def fuse(chain: Chain, state: State, candidate: Candidate, problem: Problem) -> State:
    """Sweeps over the borders until none changes."""
    best = problem.state_seconds(chain, state, candidate)
    changed = True
    while changed and not problem.expired:
        changed = False
        for border in _order(chain, state):
            if problem.expired:
                break
            trial = flipped(state, border)
            seconds = problem.state_seconds(chain, trial, candidate)
            # A border that makes no difference goes: fewer collectives stand up better to what was not foreseen.
            margin = _ROUNDING if state.borders[border] else -_ROUNDING
            if seconds < best * (1 + margin):
                state, best, changed = trial, min(best, seconds), True
    return state


def flipped(state: State, border: int) -> State:
    """The state with one border more or less; a new group may be cut as often as the one it came from."""
    borders, parts = state.borders.copy(), state.parts.copy()
    if not borders[border]:
        head = int(np.flatnonzero(borders[:border])[-1])
        parts[border] = parts[head]
    borders[border] = not borders[border]
    return replace(state, borders=borders, parts=parts)


def better_fused(chain: Chain, state: State) -> list[int]:
    """Borders that theorem 2 takes away."""
    _, _, _, arrival = chain.run(state)
    starts = np.flatnonzero(state.borders)
    sizes = np.add.reduceat(chain.wire, starts)
    ready = np.maximum.reduceat(chain.ready, starts)
    found = []
    for number in range(1, len(starts)):
        head = starts[number]
        if not chain.forced[head]:
            longer = float(chain.per_byte[head]) * float(sizes[number - 1])
            if arrival[number - 1] - chain.lag[head] > ready[number] + longer:
                found.append(int(head))
    return found


def _order(chain: Chain, state: State) -> list[int]:
    """What the theorem would remove comes first."""
    first = better_fused(chain, state)
    named = set(first)
    return first + [i for i in range(1, len(chain)) if not chain.forced[i] and i not in named]
