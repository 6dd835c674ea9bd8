"""Improve an arrangement of gradients by simulated annealing over dPRO's moves.

Beyond the papers: the greedy passes look at one border or one message at a time and stop where no single change helps.
Here a move sets, removes or shifts a border, changes the number of parts of a message or its urgency, and a longer step
is accepted with Metropolis' probability, so that several changes can pay together. The walk is compiled; rounds of it
start from the best arrangement so far, and it ends when rounds bring nothing, at the bound, or when time is up.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from offbeat.compiled import compiled
from offbeat.search.arrange import MOST_PARTS
from offbeat.search.pace.schedule import lower_bound
from offbeat.simulate.fast.gradients import Arrangement, Gradients
from offbeat.simulate.fast.link import serve

_MOVES_PER_ROUND = 2_000
_IDLE_ROUNDS = 6
"""Rounds without gain after which the walk ends."""
_GAIN = 1e-5
"""Share of the step that counts as gain."""
_TEMPERATURE = 3e-3
"""Of the step; a change this much worse is accepted with probability 1/e at first, then less and less."""
SLICE_PENALTY = 1e-7
"""Share of the step by which one more slice must shorten it: fewer slices suffer less from timing errors."""


def anneal(
    gradients: Gradients, start: Arrangement, *, seed: int = 0, rounds: int | None = None, deadline: float | None = None
) -> Arrangement:
    """The best arrangement found. With `rounds` the walk ignores the clock, and so repeats exactly."""
    seconds, _, made, _ = gradients.run(start)
    best, shortest = start, float(seconds * (1 + SLICE_PENALTY * made))
    floor = bound(gradients, start.barrier) * (1 + _GAIN)
    idle = done = 0
    movable = bool((~gradients.forced).any() or gradients.sliceable.any())
    allowed = (gradients.forced, gradients.sliceable, start.barrier)
    while movable and idle < _IDLE_ROUNDS and shortest > floor:
        if done == rounds or (rounds is None and deadline is not None and time.monotonic() > deadline):
            break
        # Rounds differ in how far they stray: every third stays close to what is known.
        temperature = _TEMPERATURE * (1.0, 0.3, 0.03)[done % 3]
        present = (best.borders, best.parts, best.urgency)
        number = (seed * 1_000_003 + done) % 2**32
        cost, (borders, parts, urgency) = _walk(gradients.arrays, present, allowed, number, temperature)
        done += 1
        idle = 0 if cost < shortest * (1 - _GAIN) else idle + 1
        if cost < shortest:
            best, shortest = replace(best, borders=borders, parts=parts, urgency=urgency), cost
    return best


def bound(gradients: Gradients, barrier: bool) -> float:
    """A lower bound of the step of any arrangement: cuts are free, and one collective pays its overhead."""
    forward = float(gradients.before.sum() + gradients.update.sum()) + gradients.after
    compute = gradients.backward + gradients.gap + forward
    busy = gradients.wire * gradients.per_byte
    if not len(busy):
        return compute
    overhead = float(gradients.overhead.min() + gradients.lag.min())
    tail = np.zeros(len(busy)) if barrier else gradients.least_tail
    arrived = lower_bound(gradients.ready, busy, tail, 0.0) + overhead
    return max(compute, arrived + (compute - gradients.backward if barrier else 0.0)) + gradients.update_call


@compiled
def _walk(units: Any, start: Any, allowed: Any, seed: int, temperature: float) -> Any:
    """One round from `start` (borders, parts, urgency): the least cost met, and its arrangement.

    `allowed` says which borders are forced, which messages may be cut, and whether all updates wait for a barrier."""
    np.random.seed(seed)
    forced, sliceable, barrier = allowed
    present = chosen = start
    current = best = np.inf
    for move in range(_MOVES_PER_ROUND + 1):
        borders, parts, urgency = present[0].copy(), present[1].copy(), present[2].copy()
        if move:
            _change(borders, parts, urgency, forced, sliceable, start[2], barrier)
        seconds, _, made, _ = serve(units, borders, parts, urgency, barrier)
        cost = seconds * (1.0 + SLICE_PENALTY * made)
        heat = temperature * best * (1.0 - move / (_MOVES_PER_ROUND + 1.0)) if move else 1.0
        if cost <= current or np.random.random() < np.exp((current - cost) / heat):
            present, current = (borders, parts, urgency), cost
            if cost < best:
                best, chosen = cost, present
    return best, chosen


@compiled
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


@compiled
def _head(borders: Any, unit: int) -> int:
    while not borders[unit]:
        unit -= 1
    return unit


@compiled
def _shift(borders: Any, parts: Any, forced: Any, unit: int) -> None:
    """Moves the border before the unit to another place between its neighbours."""
    head = _head(borders, unit)
    if forced[head]:
        return
    low = _head(borders, head - 1)
    high = head + 1
    while high < len(borders) and not borders[high]:
        high += 1
    if high - low > 2:
        place = low + 1 + np.random.randint(high - low - 1)
        borders[head] = False
        borders[place] = True
        parts[place] = parts[head]
