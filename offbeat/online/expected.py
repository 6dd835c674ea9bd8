"""A job that runs a saved strategy → what became of its prediction, for later ones to learn from.

`offbeat optimize -o` notes what it expects of the strategy (`offbeat.cost.outcomes.Expectation`). Rank 0 of a job that
runs it times some steps once the engine's order has settled, and keeps both numbers.
"""

from contextlib import suppress
from itertools import pairwise
from statistics import median

from offbeat.cost.outcomes import Expectation, remember
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.retime import REBUILD_AT

SETTLING_STEPS = REBUILD_AT[-1] + 5
TIMED_STEPS = 20


class Watch:
    """Notes the ends of some steps and then takes itself off."""

    def __init__(self, runtime: Runtime, expected: Expectation) -> None:
        self.runtime, self.expected = runtime, expected
        self.clock = runtime.engine.reports.clock
        self.ends = [self.clock.now()]
        self.settling = SETTLING_STEPS
        runtime.step_hooks.append(self.after_step)
        # Of another model nothing was expected.
        runtime.refit_hooks.append(lambda _: self.end())

    def after_step(self) -> None:
        now = self.clock.now()
        if self.settling:
            self.settling -= 1
            self.ends = [now]
            return
        self.ends.append(now)
        if len(self.ends) > TIMED_STEPS:
            self.end()
            self.clock.wait(now)
            moments = [self.clock.seconds(end) for end in self.ends]
            with suppress(ValueError):
                remember(self.expected.outcome(median(after - before for before, after in pairwise(moments))))

    def end(self) -> None:
        if self.after_step in self.runtime.step_hooks:
            self.runtime.step_hooks.remove(self.after_step)
