"""The steps of a job, between whose ends generators wait: each `yield` is one step of training."""

from collections.abc import Generator

from offbeat.timeline.clock import Clock, Moment


class Steps:
    """Times the steps of a job; `ended` is called at the end of each, and `resumed` before the next."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.begun = clock.now()
        self.last: tuple[Moment, Moment] = self.begun, self.begun
        """The last step: its beginning and its end."""

    def ended(self) -> None:
        self.last = self.begun, self.clock.now()

    def resumed(self) -> None:
        """What was done between two steps is not the next one's."""
        self.begun = self.clock.now()

    def pass_by(self, count: int) -> Generator[None, None, int]:
        """Waits for some steps; returns how many."""
        for _ in range(count):
            yield
        return count

    def timed(self, count: int) -> Generator[None, None, list[float]]:
        """Waits for some steps and returns the seconds of each."""
        steps = []
        for _ in range(count):
            yield
            steps.append(self.last)
        return self.seconds(steps)

    def seconds(self, steps: list[tuple[Moment, Moment]]) -> list[float]:
        self.clock.wait(steps[-1][1])
        return [self.clock.seconds(end) - self.clock.seconds(begin) for begin, end in steps]
