"""The pass that allows several messages in flight, with a limit on their bytes: ByteScheduler's credit.

The more bytes are handed over, the better the cost of each message hides behind others, and the longer an urgent one
waits for them. Slices and credit depend on each other, so both are tried together, on the candidate's messages and on
one for each unit of gradients. Replay lets messages in flight follow each other; in a job they share the wire, which
delays the first of them by no more than what the credit holds.
"""

import math
from collections.abc import Iterator

import numpy as np

from offbeat.plan.messages import even_ranges
from offbeat.plan.schedule import priority_order
from offbeat.search.arrange import arrangement_of, explicit, rescheduled
from offbeat.search.passes.problem import Candidate, Problem, register_pass
from offbeat.simulate.fast.gradients import Gradients
from offbeat.strategy import Strategy

_CREDITS = tuple(2**power for power in range(20, 25))
"""Bytes in flight at once."""
_LEAST_SLICE_BYTES = 2**19
"""Smaller slices take processors' time, which replay does not know: on two cores, jobs cut into slices of 64 KiB ran
slower than DDP where replay had promised 1.5 times its speed."""
_IN_FLIGHT = 4


@register_pass("credit", order=35)
def credit(candidate: Candidate, problem: Problem) -> Iterator[Strategy]:
    """Messages in ByteScheduler's order, in slices of a half or a quarter of some credits."""
    gradients = problem.gradients(candidate)
    if gradients is None or problem.mode == "barrier":
        return
    present = arrangement_of(gradients, candidate.strategy)
    for borders in (present.borders, np.ones(len(gradients), np.bool_)):
        groups = gradients.groups(borders)
        for credit_bytes in _CREDITS:
            for slices in (count for count in (2, 4) if credit_bytes / count >= _LEAST_SLICE_BYTES):
                order = _handed_over(gradients, groups, credit_bytes / slices, credit_bytes)
                strategy = explicit(gradients, groups, order, candidate.strategy)
                yield rescheduled(strategy, in_flight=_IN_FLIGHT, credit_bytes=credit_bytes)


def _handed_over(
    gradients: Gradients, groups: list[tuple[int, ...]], slice_bytes: float, credit_bytes: int
) -> list[tuple[int, int, int]]:
    """(group, first element, end) of even slices, in the order in which a link with a credit takes them."""
    slices: list[tuple[int, int, int]] = []
    sizes: list[int] = []
    for number, units in enumerate(groups):
        total = float(gradients.wire[list(units)].sum())
        parts = max(1, math.ceil(total / slice_bytes)) if gradients.sliceable[units[0]] else 1
        elements = int(gradients.elements[list(units)].sum())
        ranges = even_ranges(elements, min(parts, elements))
        slices += [(number, start, stop) for start, stop in ranges]
        sizes += [round(total / parts)] * len(ranges)
    place = np.argsort(gradients.forward_order)
    ready = [float(gradients.ready[list(groups[number])].max()) for number, _, _ in slices]
    urgency = [float(place[list(groups[number])].min()) for number, _, _ in slices]
    seconds = [
        float(gradients.per_byte[groups[number][0]]) * size for (number, _, _), size in zip(slices, sizes, strict=True)
    ]
    order = priority_order(ready, seconds, urgency, [-1] * len(slices), sizes, credit_bytes)
    return [slices[job] for job in order]
