"""Report the engine's work to observers."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from offbeat.plan import Task
from offbeat.runtime.sync import Synchroniser
from offbeat.timeline import Kind
from offbeat.timeline.clock import Clock, Moment
from offbeat.timeline.observer import Observer


class Reports:
    """Reports everything to a recorder, and only collectives to a timekeeper."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.observer: Observer | None = None
        self.timekeeper: Observer | None = None
        self.step = 0

    def now(self) -> Moment:
        """The current moment, if anyone observes."""
        return self.clock.about_now() if self.observer is not None or self.timekeeper is not None else 0.0

    def collective(self, synchroniser: Synchroniser, task: Task, queued: Moment) -> None:
        """A collective has just been issued; its end is reported once the backend says so."""
        work, issued = synchroniser.works.get(task.index), self.now()
        for observer in (self.observer, self.timekeeper):
            if observer is not None and work is not None:
                work.report_end(partial(observer.communication, self.step, task, queued, issued))

    @contextmanager
    def local(self, kind: Kind, messages: tuple[int, ...] = ()) -> Generator[None, None, None]:
        """Reports how long something took on this rank."""
        if self.observer is None:
            yield
            return
        # An update begins where a wait has just ended; a wait on a GPU takes the host no time.
        begin = self.clock.now() if kind == "wait" else self.clock.about_now()
        yield
        self.observer.local(kind, messages, begin, self.clock.now())
