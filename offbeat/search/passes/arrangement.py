"""Passes that rearrange gradients: the order of messages, which neighbours share one, and where they are cut.

Tensor fusion is dPRO's theorem 2: the tensors q_{n-1} and q_n are better fused if q_{n-1} ends later than
p_n + t_sync(both, k*) - t_sync(q_n, k*), p_n being the compute that completes q_n (`better_fused`). Parts that follow
each other on the link are one slice and cost the same as one, so that t_sync is the same for every number of parts; k*
is what the step gains from, and a fused tensor is given its own. The theorem looks at one pair, so what it proposes is
tried first and kept if the step does not become longer; then every other border is tried.

Tensor partition is dPRO's k*, the number of parts into which a message may be cut, by grid search with replay. Cutting
costs overhead and gains what an urgent message no longer waits for, so k* is found on the whole step.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from offbeat.search.arrange import arranged, arrangement_of, explicit
from offbeat.search.pace.strategy import pace_schedule
from offbeat.search.passes.problem import Candidate, Problem, register_pass
from offbeat.simulate.fast.gradients import Arrangement, Gradients
from offbeat.strategy import Strategy

_PART_BYTES = (512 * 2**10, 2 * 2**20, 8 * 2**20)
"""Sizes at which a slice may end, in addition to PACE's cuts."""
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ROUNDING = 1e-12
_Change = Callable[[Arrangement], Arrangement]


@register_pass("schedule", order=10)
def schedule(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """PACE's fusion and schedule, its schedule of the candidate's groups, even parts of some sizes, the other mode."""
    gradients = problem.gradients(candidate)
    if gradients is None:
        return
    strategy = candidate.strategy
    present = arrangement_of(gradients, strategy)
    if problem.mode != "barrier":
        for groups in (None, gradients.groups(present.borders)):
            yield explicit(gradients, *pace_schedule(gradients, groups), strategy)
        for size in _PART_BYTES:
            cut = replace(present, parts=gradients.even_parts(present.borders, size), barrier=False)
            yield arranged(gradients, cut, strategy)
    if problem.mode == "auto":
        yield arranged(gradients, replace(present, barrier=not present.barrier), strategy)


@register_pass("tensor_fusion", order=20)
def tensor_fusion(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """From the candidate's groups, and from none: sets or removes borders while that shortens the step."""
    gradients = problem.gradients(candidate)
    if gradients is None:
        return

    def fused(arrangement: Arrangement, border: int) -> Arrangement:
        joined = flipped(arrangement, border)
        head = int(np.flatnonzero(joined.borders[:border])[-1])
        return best_parts(joined, head, gradients, partial(problem.arrangement_seconds, gradients, base=candidate))

    def borders(arrangement: Arrangement) -> list[_Change]:
        first = better_fused(gradients, arrangement)
        others = [i for i in range(1, len(gradients)) if not gradients.forced[i] and i not in first]
        return [*(partial(fused, border=border) for border in first), *(partial(flipped, border=b) for b in others)]

    present = arrangement_of(gradients, candidate.strategy)
    for start in (present, gradients.arrangement(barrier=present.barrier)):
        yield _improved(start, borders, candidate, problem)


@register_pass("tensor_partition", order=30)
def tensor_partition(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """The candidate's groups with the best number of parts each, the largest group first."""
    gradients = problem.gradients(candidate)
    if gradients is None:
        return
    present = arrangement_of(gradients, candidate.strategy)
    starts = np.flatnonzero(present.borders)
    largest = np.argsort(-np.add.reduceat(gradients.wire, starts), kind="stable")
    heads = [int(head) for head in starts[largest] if gradients.sliceable[head]]
    cuts: list[_Change] = [partial(_cut, head=head, count=count) for head in heads for count in _PARTS]
    yield _improved(present, lambda _: cuts, candidate, problem)


def _improved(
    arrangement: Arrangement, changes: Callable[[Arrangement], list[_Change]], candidate: Candidate, problem: Problem
) -> Strategy:
    """Applies all changes that shorten the step, one after another, until none does."""
    gradients = problem.gradients(candidate)
    assert gradients is not None
    best = problem.arrangement_seconds(gradients, arrangement, candidate)
    settled = False
    while not settled:
        settled = True
        for change in changes(arrangement):
            if problem.expired:
                return arranged(gradients, arrangement, candidate.strategy)
            trial = change(arrangement)
            seconds = problem.arrangement_seconds(gradients, trial, candidate)
            # A border that makes no difference goes: fewer collectives suffer less from timing errors.
            fewer = trial.borders.sum() < arrangement.borders.sum()
            if seconds < best * (1 + (_ROUNDING if fewer else -_ROUNDING)):
                arrangement, best, settled = trial, min(best, seconds), False
    return arranged(gradients, arrangement, candidate.strategy)


def flipped(arrangement: Arrangement, border: int) -> Arrangement:
    """The arrangement with one border more or less; a new group may be cut as often as the one it came from."""
    borders, parts = arrangement.borders.copy(), arrangement.parts.copy()
    if not borders[border]:
        parts[border] = parts[np.flatnonzero(borders[:border])[-1]]
    borders[border] = not borders[border]
    return replace(arrangement, borders=borders, parts=parts)


def _cut(arrangement: Arrangement, head: int, count: int) -> Arrangement:
    """The arrangement with the group that begins at `head` cut into `count` parts."""
    parts = arrangement.parts.copy()
    parts[head] = count
    return replace(arrangement, parts=parts)


def best_parts(
    arrangement: Arrangement, head: int, gradients: Gradients, seconds: Callable[[Arrangement], float]
) -> Arrangement:
    """The arrangement with the group at a head in k* parts: the fewest of a grid with which the step is shortest."""
    counts = _PARTS if gradients.sliceable[head] else (1,)
    cuts = [_cut(arrangement, head, count) for count in counts]
    taken = [seconds(cut) for cut in cuts]
    return next(cut for cut, each in zip(cuts, taken, strict=True) if each <= min(taken) * (1 + _ROUNDING))


def better_fused(gradients: Gradients, arrangement: Arrangement) -> list[int]:
    """Borders that theorem 2 removes."""
    _, _, _, arrival = gradients.run(arrangement)
    starts = np.flatnonzero(arrangement.borders)
    later = starts[1:]
    longer = gradients.per_byte[later] * np.add.reduceat(gradients.wire, starts)[:-1]
    ready = np.maximum.reduceat(gradients.ready, starts)[1:]
    waits = arrival[:-1] - gradients.lag[later] > ready + longer
    return later[waits & ~gradients.forced[later]].tolist()
