"""Observer: the interface through which the runtime reports its work to a recorder or monitor."""

from collections.abc import Iterable
from typing import Protocol

from offbeat.plan import Task
from offbeat.timeline.clock import Moment
from offbeat.timeline.model import Kind


class Observer(Protocol):
    """Receives spans, in moments of the clock of the device that trains (`offbeat.timeline.clock`).

    Calls come from the training thread and from threads of the communication backend; they must be cheap and must not
    raise.
    """

    def communication(self, step: int, task: Task, queued: Moment, issued: Moment, finished: Moment) -> None:
        """A collective of the plan: when it was ready, when it was issued, when it had ended."""

    def local(self, kind: Kind, messages: tuple[int, ...], start: Moment, end: Moment) -> None:
        """This rank waited for messages, or updated what they brought; no messages means all of them."""


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans (start, end) was open."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
