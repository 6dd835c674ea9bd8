"""Chain + State → a better State: simulated annealing over dPRO's moves, with the chain's kernel as the oracle.

Beyond the papers: the greedy passes look at one border or one message at a time and stop where no single change helps.
Here a move sets, removes or shifts a border, changes the number of parts of a message or its urgency, and a longer step
is accepted with Metropolis' probability, so that several changes can pay together. The walk is compiled; rounds of it
start from the best state so far, and it ends when rounds bring nothing, at the bound, or when time is up.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import njit

from offbeat.search.chain import MOST_PARTS, Chain, State
from offbeat.search.chain_kernel import serve_chain
from offbeat.search.pace_link import lower_bound

_MOVES_PER_ROUND = 2_000
_IDLE_ROUNDS = 6
"""Rounds without gain after which the walk ends."""
_GAIN = 1e-5
"""Share of the step that counts as gain."""
_TEMPERATURE = 3e-3
"""Of the step; a change this much worse is accepted with probability 1/e at first, then less and less."""
SLICE_PENALTY = 1e-7
"""Share of the step by which one more slice must shorten it: fewer stand up better to what was not foreseen."""


@dataclass(frozen=True, slots=True)
class Annealed:
    """What the walk found."""

    state: State
    seconds: float
    rounds: int
    evaluations: int


def anneal(
    chain: Chain, start: State, *, seed: int = 0, rounds: int | None = None, deadline: float | None = None
) -> Annealed:
    """The best state met. With `rounds` the walk does not look at the clock, and so repeats exactly."""
    best = start
    shortest = _cost(chain, start)
    floor = bound(chain, start.barrier) * (1 + _GAIN)
    idle = done = evaluations = 0
    movable = bool((~chain.forced).any() or chain.sliceable.any())
    while movable and idle < _IDLE_ROUNDS and shortest > floor:
        if rounds is not None and done >= rounds:
            break
        if rounds is None and deadline is not None and time.monotonic() > deadline:
            break
        # Rounds differ in how far they stray: every third stays close to what is known.
        temperature = _TEMPERATURE * (1.0, 0.3, 0.03)[done % 3]
        cost, borders, parts, urgency = _walk(
            chain.arrays,
            (best.borders, best.parts, best.urgency),
            best.barrier,
            chain.forced,
            chain.sliceable,
            (seed * 1_000_003 + done) % 2**32,
            _MOVES_PER_ROUND,
            temperature,
        )
        done += 1
        evaluations += _MOVES_PER_ROUND
        idle = 0 if cost < shortest * (1 - _GAIN) else idle + 1
        if cost < shortest:
            best, shortest = replace(best, borders=borders, parts=parts, urgency=urgency), cost
    return Annealed(best, chain.seconds(best), done, evaluations)


def bound(chain: Chain, barrier: bool) -> float:
    """No state of the chain makes a shorter step: cuts are free, and one collective pays its overhead."""
    compute = chain.backward + chain.gap + float(chain.before.sum() + chain.update.sum()) + chain.after
    busy = chain.wire * chain.per_byte
    if not len(busy):
        return compute
    still = np.zeros(len(busy))
    overhead = float(chain.overhead.min() + chain.lag.min())
    if barrier:
        arrived = lower_bound(chain.ready, busy, still, 0.0) + overhead
        return max(compute, arrived + compute - chain.backward) + chain.update_call
    return max(compute, lower_bound(chain.ready, busy, chain.least_tail, 0.0) + overhead) + chain.update_call


def _cost(chain: Chain, state: State) -> float:
    seconds, _, made, _ = chain.run(state)
    return float(seconds * (1 + SLICE_PENALTY * made))


@njit(cache=True)
def _walk(
    units: Any, start: Any, barrier: bool, forced: Any, sliceable: Any, seed: int, moves: int, temperature: float
) -> Any:
    """One round from `start` (borders, parts, urgency): the least cost met, and its state."""
    np.random.seed(seed)
    borders, parts, urgency = start[0].copy(), start[1].copy(), start[2].copy()
    best_borders, best_parts, best_urgency = borders.copy(), parts.copy(), urgency.copy()
    current = np.inf
    best = np.inf
    for move in range(moves + 1):
        trial_borders, trial_parts, trial_urgency = borders.copy(), parts.copy(), urgency.copy()
        if move:
            _change(trial_borders, trial_parts, trial_urgency, forced, sliceable, start[2], barrier)
        seconds, _, made, _ = serve_chain(units, trial_borders, trial_parts, trial_urgency, barrier)
        cost = seconds * (1.0 + SLICE_PENALTY * made)
        heat = temperature * best * (1.0 - move / (moves + 1.0)) if move else 1.0
        if cost <= current or np.random.random() < np.exp((current - cost) / heat):
            borders, parts, urgency = trial_borders, trial_parts, trial_urgency
            current = cost
            if cost < best:
                best = cost
                best_borders, best_parts, best_urgency = borders.copy(), parts.copy(), urgency.copy()
    return best, best_borders, best_parts, best_urgency


@njit(cache=True)
def _change(borders: Any, parts: Any, urgency: Any, forced: Any, sliceable: Any, usual: Any, barrier: bool) -> None:
    """One random move, in place."""
    count = len(borders)
    unit = np.random.randint(count)
    kind = np.random.random()
    if kind < 0.35:
        if not forced[unit]:
            if not borders[unit]:
                parts[unit] = parts[_head(borders, unit)]
            borders[unit] = not borders[unit]
    elif kind < 0.6:
        _shift(borders, parts, forced, unit)
    elif kind < 0.9 or barrier:
        head = _head(borders, unit)
        if sliceable[head]:
            draw = np.random.random()
            if draw < 0.3:
                parts[head] = min(MOST_PARTS, parts[head] * 2)
            elif draw < 0.6:
                parts[head] = max(1, parts[head] // 2)
            elif draw < 0.7:
                parts[head] = 1
            else:
                parts[head] = 1 + np.random.randint(MOST_PARTS)
    elif kind < 0.97:
        # Just ahead of, or just behind, another unit.
        other = np.random.randint(count)
        urgency[unit] = urgency[other] + (0.5 if np.random.random() < 0.5 else -0.5)
    else:
        urgency[unit] = usual[unit]


@njit(cache=True)
def _head(borders: Any, unit: int) -> int:
    while not borders[unit]:
        unit -= 1
    return unit


@njit(cache=True)
def _shift(borders: Any, parts: Any, forced: Any, unit: int) -> None:
    """Moves the border before the unit to another place between its neighbours."""
    head = _head(borders, unit)
    if forced[head]:
        return
    low = head - 1
    while not borders[low]:
        low -= 1
    high = head + 1
    while high < len(borders) and not borders[high]:
        high += 1
    if high - low > 2:
        place = low + 1 + np.random.randint(high - low - 1)
        borders[head] = False
        borders[place] = True
        parts[place] = parts[head]
